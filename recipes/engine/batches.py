"""The inputs of each step of a run: rows, depths and noise.

They are a function of (seed, step, row of the global batch). The rows of the next step are read while the device
still computes the current one.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator

from looped_recipes.common.words import counted
from looped_recipes.data.packing import PackedRows
from looped_recipes.data.shuffle import rows_of_step
from looped_recipes.settings.recipe import Recipe, RecipeError
from modeling_looped import LoopedForCausalLM, depths_of_step, initial_state_of_step
from modeling_looped.cross_entropy import IGNORE_INDEX, shift

from .balance import balanced_ranks
from .tensor_parallel import data_rank


class MicroBatch(NamedTuple):
    """Rows of one forward pass, on the device."""

    number: int  # seeds dropout; no two micro batches of a step have the same
    batch: dict[str, torch.Tensor]
    loss_positions: np.ndarray  # positions whose next token has a label
    depths: list[int]
    noise: torch.Tensor | None


class ReadAhead(NamedTuple):
    """The data of this process for a step, read before the step begins."""

    step: int
    depths: list[int]  # for all rows of the global batch
    groups: list[tuple[int, list[int]]]  # number and rows of each micro batch of this process
    batches: list[dict[str, torch.Tensor]]  # on the CPU; pinned for CUDA, so that copies are asynchronous
    loss_positions: list[np.ndarray]

    @property
    def num_labels(self) -> int:
        """Number of labels in the rows of this process."""
        return sum(map(len, self.loss_positions))


class Batches:
    """Makes the micro batches of this process for any step. `model` is not wrapped in DDP."""

    def __init__(self, recipe: Recipe, model: LoopedForCausalLM, rows: PackedRows, accelerator: Accelerator):
        self.recipe, self.model, self.rows, self.accelerator = recipe, model, rows, accelerator
        self.read_ahead = ReadAhead(-1, [], [], [], [])
        self.check_groups()

    def check_groups(self):
        training, world = self.recipe.training, data_rank(self.accelerator).world
        if self.has_dropout and training.rows_per_step % (training.micro_batch_size * world):
            raise RecipeError(
                "with dropout a process takes whole micro batches, but training.rows_per_step="
                f"{training.rows_per_step} is not a multiple of training.micro_batch_size="
                f"{training.micro_batch_size} times {counted(world, 'reader')}: change one"
            )

    @property
    def has_dropout(self) -> bool:
        return any(getattr(self.model.config, f"{place}_dropout") for place in ("attention", "residual", "embedding"))

    def of_step(self, step: int) -> Iterator[MicroBatch]:
        """Yield the micro batches of this process for a step; every process has the same number of them."""
        _, depths, groups, batches, loss_positions = self.read(step)
        for (number, rows), batch, positions in zip(groups, batches, loss_positions):
            batch = {key: value.to(self.accelerator.device, non_blocking=True) for key, value in batch.items()}
            yield MicroBatch(number, batch, positions, [depths[row] for row in rows], self.noise(step, rows))

    def read(self, step: int) -> ReadAhead:
        """Read the rows of this process for a step. The result is cached until another step is read."""
        if self.read_ahead.step != step:
            pin = self.accelerator.device.type == "cuda"
            data_rows, depths, batches, loss_positions = self.data_rows(step), self.depths(step), [], []
            groups = self.groups(depths)
            for _, rows in groups:
                batch = self.rows.batch([data_rows[row] for row in rows])
                loss_positions.append(np.flatnonzero(shift(batch["labels"]).numpy() != IGNORE_INDEX))
                batches.append({key: value.pin_memory() if pin else value for key, value in batch.items()})
            self.read_ahead = ReadAhead(step, depths, groups, batches, loss_positions)
        return self.read_ahead

    def data_rows(self, step: int) -> list[int]:
        """Return the indices of the training rows in the global batch of a step."""
        training = self.recipe.training
        return rows_of_step(training.seed, step, training.rows_per_step, len(self.rows))

    def depths(self, step: int) -> list[int]:
        """Return the number of loops of every row of the global batch."""
        depth, training = self.recipe.depth, self.recipe.training
        mean, window = self.recipe.depths_at(self.model.config, step)
        return depths_of_step(
            depth.sampler,
            mean,
            training.seed,
            step,
            range(training.rows_per_step),
            per=depth.per,
            backprop_loops=window,
            split=depth.split,
            maximum=depth.maximum,
            rows_per_draw=depth.rows_per_draw,
        )

    def groups(self, depths: list[int]) -> list[tuple[int, list[int]]]:
        """Return (number, rows of the global batch) for each micro batch of this process.

        Dropout draws one random stream per micro batch. So with dropout the micro batches of a step, over all
        processes, are the same for any number of processes.
        """
        size = self.recipe.training.micro_batch_size
        index, world = data_rank(self.accelerator)
        if not self.has_dropout:
            mine = balanced_ranks(depths, world)[index]
            return [(mine[start], mine[start : start + size]) for start in range(0, len(mine), size)]
        groups = [list(range(start, start + size)) for start in range(0, len(depths), size)]
        mine = balanced_ranks([sum(depths[row] for row in rows) for rows in groups], world)[index]
        return [(number, groups[number]) for number in mine]

    def noise(self, step: int, rows: list[int]) -> torch.Tensor | None:
        if self.model.config.state_init != "normal":
            return None
        length = self.recipe.data.sequence_length
        return initial_state_of_step(
            self.model, self.recipe.training.seed, step, rows, length, self.accelerator.device
        )
