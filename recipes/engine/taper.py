"""A readout norm that a run takes away (model.readout_norm: taper).

The gate of the norm is a function of the step alone: 1 up to `training.taper_start`, from there a half cosine down to
0 at `training.taper_end`, both parts of the whole run. At the first, the linear map that is left in the end is fitted
to the norm, on the rows of that step: a function of the step too, whatever the processes and micro batches.
"""

import math
from collections.abc import Callable, Iterable

import torch

from looped_recipes.settings.recipe import Recipe
from modeling_looped.cross_entropy import IGNORE_INDEX

from .saving import CheckpointError


LEAST, MOST = 1e-6, 1e6  # limits of the fitted constant


class Taper:
    def __init__(self, norm, recipe: Recipe, total_steps: int):
        self.norm, self.training, self.total_steps = norm, recipe.training, total_steps
        self.start = self.start_of(total_steps)
        self.end = round(recipe.training.taper_end * total_steps)

    def start_of(self, total_steps: int) -> int:
        """The step at which the norm begins to go away in a run of this length."""
        return round(self.training.taper_start * total_steps)

    def check_length(self, step: int, total_steps: int):
        """An error if a run of another length goes on after the norm has begun to go away: its gate would jump.

        step, total_steps: how far the run has come, and its length until now.
        """
        began = self.start_of(total_steps)
        if total_steps != self.total_steps and step > min(began, self.start):
            raise CheckpointError(
                f"this run of {total_steps} steps takes its readout norm away from step {began} on, a run of "
                f"{self.total_steps} from step {self.start} on, and {step} are done: go on with {total_steps} steps"
            )

    def gate(self, step: int) -> float:
        """How much of the norm is left, from 1 to 0."""
        if step < self.start:
            return 1.0
        if step >= self.end:
            return 0.0
        return 0.5 * (1 + math.cos(math.pi * (step - self.start) / (self.end - self.start)))

    def move_to(self, step: int, terms: Callable[[], torch.Tensor]):
        """Set the gate before anything is computed at `step`, and fit the linear map when the norm begins to go away.

        terms: returns the sum of `fit_terms` over the rows of the step.
        """
        if step == self.start:
            above, below = terms().tolist()
            self.norm.linearise(min(max(above / below, LEAST), MOST) if below > 0 else 1.0)
        self.norm.gate.fill_(self.gate(step))

    def fit_terms(self, readouts: Iterable[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Sums over what the norm reads after every loop, [rows, length, hidden], where a label is to be predicted."""
        labelled = torch.nn.functional.pad(labels[:, 1:] != IGNORE_INDEX, (0, 1))
        return sum(self.norm.fit_terms(state[labelled]).double() for state in readouts)
