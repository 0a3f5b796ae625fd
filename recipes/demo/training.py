"""A training run of the demo, and what is said of it."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from looped_recipes.engine.training import Pretraining
from looped_recipes.settings.recipe import Recipe


class Trained(NamedTuple):
    final: Path
    metrics: Path
    parameters: int
    loops: int
    steps: int
    flops: float  # of training, by the papers' formula


def choose_precision():
    """bf16 where this processor multiplies it in hardware; accelerate reads this."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"):
        os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "bf16")


def train(recipe: Recipe) -> Trained:
    run = Pretraining(recipe)
    loops, parameters = run.config.num_loops, run.bare.num_parameters()
    print(f"{parameters:,} parameters, {loops} loop{'s' * (loops > 1)}, {run.total_steps} steps")
    tokens = run.total_steps * recipe.training.rows_per_step * recipe.data.sequence_length
    return Trained(run.train(), run.metrics.path, parameters, loops, run.total_steps, run.flops_per_token * tokens)
