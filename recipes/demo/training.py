"""A training run of the demo, and the facts that are reported about it."""

from pathlib import Path
from typing import NamedTuple

from looped_recipes.common.words import counted
from looped_recipes.engine.training import Pretraining
from looped_recipes.settings.recipe import Recipe


class Trained(NamedTuple):
    final: Path
    metrics: Path
    parameters: int
    loops: int
    steps: int
    flops: float  # of training, by the papers' formula


def train(recipe: Recipe) -> Trained:
    run = Pretraining(recipe)
    loops, parameters = run.config.num_loops, run.bare.num_parameters()
    print(f"{parameters:,} parameters, {counted(loops, 'loop')}, {run.total_steps} steps")
    flops = run.operations.of_run(run.total_steps)
    return Trained(run.train(), run.metrics.path, parameters, loops, run.total_steps, flops)
