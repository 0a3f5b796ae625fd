"""The number of steps of a run, and its floating-point operations, by the papers' formulas (common/flops.py) at the
depths that the recipe draws."""

import math
from fractions import Fraction
from functools import cache
from statistics import fmean

from looped_recipes.common.flops import sizes, training_flops_per_token
from modeling_looped import SAMPLERS, LoopedConfig, depths_of_step

from .recipe import Recipe, RecipeError


DRAWS = 4096  # depths whose mean is used where no formula gives the mean depth


class UnknownEpoch(RecipeError):
    """The length of a run is given in epochs, and nothing says how many rows an epoch has."""


class Operations:
    def __init__(self, recipe: Recipe, config: LoopedConfig):
        self.recipe, self.config = recipe, config
        self.tokens_per_step = recipe.training.rows_per_step * recipe.data.sequence_length
        self.ramp = recipe.depth.curriculum_steps or 0  # steps in which depths grow
        self.at_depth = cache(self.at_depth)  # few depths are needed, each many times

    def num_steps(self, num_rows: int | None) -> int:
        """Return the steps of the run, from the setting of its length. num_rows: rows of an epoch, if known."""
        training = self.recipe.training
        if training.steps is not None:
            return training.steps
        if training.tokens is not None:
            return max(1, math.ceil(training.tokens / self.tokens_per_step))
        if training.flops is not None:
            return self.steps_within(training.flops)
        if training.tokens_per_parameter is not None:
            n = sizes(self.config)
            parameters = n.total if training.count_embedding else n.without_embedding
            # whole steps within the budget, as the public code of the Fully Looped Transformer counts
            return max(1, int(training.tokens_per_parameter * parameters // self.tokens_per_step))
        if training.epochs is not None:
            if num_rows is None:
                raise UnknownEpoch("how long an epoch is, prepared data or data.expected_tokens must tell")
            rows = Fraction(str(training.epochs)) * num_rows  # exact: 0.07 * 10000 is more than 700
            return max(1, math.ceil(rows / training.rows_per_step))
        raise RecipeError("say how long to train: training.steps, tokens, flops, tokens_per_parameter or epochs")

    def per_token(self, step: int | None = None, value_tables: bool = False) -> float:
        """Return the training operations for one token at a step; by default after the steps in which depths grow."""
        mean, window = self.recipe.depths_at(self.config, self.ramp if step is None else min(step, self.ramp))
        return self.at_depth(mean, window, value_tables)

    def at_depth(self, mean: float, window: int | None, value_tables: bool) -> float:
        return training_flops_per_token(
            self.config,
            self.recipe.data.sequence_length,
            drawn_depth(self.recipe, mean, window),
            window,
            value_tables,
            self.recipe.training.freeze_all_but_gate,
        )

    @property
    def mean_depth(self) -> float:
        """The mean depth that is drawn after the steps in which depths grow."""
        recipe, config = self.recipe, self.config
        return drawn_depth(recipe, recipe.mean_depth(config), recipe.backprop_loops(config))

    def of_run(self, steps: int, value_tables: bool = False) -> float:
        """Return the training operations of a run of `steps` steps."""
        growing = min(steps, self.ramp)
        sum_per_token = sum(self.per_token(step, value_tables) for step in range(growing))
        return self.tokens_per_step * (sum_per_token + (steps - growing) * self.per_token(value_tables=value_tables))

    def steps_within(self, flops: float) -> int:
        """Return the number of steps that take `flops` training operations, rounded to the nearest."""
        steps, left = 0, flops / self.tokens_per_step
        while steps < self.ramp and left > 0:
            left -= self.per_token(steps)
            steps += 1
        return max(1, steps + round(left / self.per_token()) if left > 0 else steps)


def drawn_depth(recipe: Recipe, mean: float, window: int | None) -> float:
    """Return the mean depth for counting operations: the papers' `mean`, plus one loop for Huginn's sampler; with a
    maximum, the mean of draws. Poisson zeros run as one loop, which adds exp(-mean); the papers do not count it, nor
    that a row of fewer loops than the window has fewer with gradients: of a window as large as the mean, somewhat more
    operations are counted than its rows take. To read the results of a run, the file that adds a sampler of its own is
    not imported."""
    depth = recipe.depth
    if depth.maximum is None or depth.sampler not in SAMPLERS:
        return mean + (depth.sampler == "poisson_lognormal")
    return mean_of_draws(depth.sampler, mean, window, depth.split, depth.maximum)


@cache
def mean_of_draws(sampler: str, mean: float, window: int | None, split: str, maximum: int) -> float:
    rows = range(DRAWS)
    return fmean(depths_of_step(sampler, mean, 0, 0, rows, backprop_loops=window, split=split, maximum=maximum))
