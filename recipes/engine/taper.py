"""A readout norm that is gradually removed during a run (model.readout_norm: taper).

The gate of the norm depends on the step only: 1 up to `training.taper_start`, from there a half cosine down to 0 at
`training.taper_end`, both fractions of the whole run. At the start step, the linear map that remains at the end is
fitted to the norm, on the rows of that step; so it depends on the step too, not on processes or micro batches.
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
        """Return the step at which the removal of the norm begins in a run of this length."""
        return round(self.training.taper_start * total_steps)

    def check_length(self, step: int, total_steps: int):
        """Refuse to change the length of a run after the removal of the norm has begun: the gate would jump.

        step, total_steps: completed steps of the run, and its length so far.
        """
        began = self.start_of(total_steps)
        if total_steps != self.total_steps and step > min(began, self.start):
            raise CheckpointError(
                f"this run of {total_steps} steps takes its readout norm away from step {began} on, a run of "
                f"{self.total_steps} from step {self.start} on, and {step} are done: go on with {total_steps} steps"
            )

    def gate(self, step: int) -> float:
        """Return the remaining fraction of the norm, from 1 to 0."""
        if step < self.start:
            return 1.0
        if step >= self.end:
            return 0.0
        return 0.5 * (1 + math.cos(math.pi * (step - self.start) / (self.end - self.start)))

    def move_to(self, step: int, terms: Callable[[], torch.Tensor]):
        """Set the gate before the computation of `step`, and fit the linear map at the step where the removal begins.

        terms: returns the sum of `fit_terms` over the rows of the step.
        """
        if step == self.start:
            above, below = terms().tolist()
            self.norm.linearise(min(max(above / below, LEAST), MOST) if below > 0 else 1.0)
        self.norm.gate.fill_(self.gate(step))

    def fit_terms(self, readouts: Iterable[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Sum the fit terms of the norm's inputs after every loop, [rows, length, hidden], at positions with a label
        to predict."""
        labelled = torch.nn.functional.pad(labels[:, 1:] != IGNORE_INDEX, (0, 1))
        return sum(self.norm.fit_terms(state[labelled]).double() for state in readouts)
