"""One step: forward, backward and update on all its rows.

Except for the measurements of the monitor, a step never waits for a GPU: its logged numbers (`Report`) are read after
the next step has been launched. They are read before the update in two cases: if a step may have to be skipped (with
training.skip_nonfinite_steps, and under fp16, whose loss scale may be too high), and on a CPU, which computes
synchronously.
"""

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
from accelerate.utils import set_seed

from looped_recipes.settings.recipe import Recipe
from modeling_looped import generator_of

from .batches import Batches
from .behind import Behind
from .compiling import begin_step
from .distributed import bare, fill_missing_gradients, rebuilds_buckets, without_sync
from .interruption import Interruption
from .monitor import Monitor, StateNorms
from .optimizers import apply_step_settings, learning_rates, set_learning_rates
from .tensor_parallel import add_up_gradients, clip_gradients
from .validation import depths_in_one_pass


class Report(NamedTuple):
    """The logged numbers of a step: those known when it is launched, and those that a GPU still computes."""

    step: int
    known: dict[str, float]
    numbers: Behind  # loss and signal number, summed over processes; the gradient norm

    def read(self) -> tuple[float, float, float]:
        """Wait for and return (loss, signals, gradient norm)."""
        loss, signals, norm = self.numbers.read()
        return loss, signals, norm


class Steps:
    """Computes the steps of a run. `optimizers` and `model` come from `distribute`."""

    def __init__(self, recipe: Recipe, accelerator, model, optimizers, batches: Batches, total_steps: int):
        self.recipe, self.accelerator, self.model, self.batches = recipe, accelerator, model, batches
        self.optimizers, self.total_steps = optimizers, total_steps
        self.labels: tuple[int, torch.Tensor | None] = (-1, None)  # (step, number of its labels on all processes)

    @property
    def reads_behind(self) -> bool:
        """Whether the update of a step comes before its report is read."""
        may_be_left_out = self.recipe.training.skip_nonfinite_steps or self.scaler is not None
        return self.accelerator.device.type != "cpu" and not may_be_left_out

    @property
    def draws_in_passes(self) -> bool:
        """Whether a pass may draw random numbers without a generator: dropout does, and a class of the user's own."""
        return self.batches.has_dropout or self.recipe.training.model_file is not None

    def is_timed(self, step: int) -> bool:
        """Whether a step is logged with the speed since the last such step."""
        done = step + 1
        return step == 0 or done % self.recipe.logging.every == 0 or done == self.total_steps

    def begin(self):
        """Run and discard one pass if DDP would sum gradients in the first step of a launch in another order than in
        later steps: so a resumed run sums in the same order as an uninterrupted one."""
        if rebuilds_buckets(self.model):
            begin_step(self.recipe.training.compile == "cuda_graphs")
            self.backward(0, None)
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def compute(self, step: int, monitor: Monitor | None, interruption: Interruption) -> Report:
        """Compute the loss and gradients of a step. monitor: if set, states and gradients are measured too."""
        accelerator, config = self.accelerator, bare(self.model).config
        begin_step(self.recipe.training.compile == "cuda_graphs")
        depths = self.batches.read(step).depths
        watch_states = monitor is not None and depths_in_one_pass(config)
        norms = StateNorms(max(depths), accelerator.device) if watch_states else None
        total = self.backward(step, norms)
        # the reduction includes signals, so that all processes end after the same step, and the next step's labels
        is_last = step + 1 == self.total_steps
        following = 0 if is_last else self.batches.read(step + 1).num_labels
        told = [
            total.double(),
            *(torch.full_like(total, n, dtype=torch.float64) for n in (interruption.number, following)),
        ]
        told = accelerator.reduce(torch.stack(told), reduction="sum")
        self.labels = (step + 1, told[2].long())
        accelerator.unscale_gradients()  # under fp16
        known = {"loops": sum(depths) / len(depths)}
        if norms is not None:
            known.update(norms.metrics(lambda sums: accelerator.reduce(sums, reduction="sum")))
        if monitor is not None:
            known.update(monitor.measure_weights(bare(self.model)))
        if monitor is not None or self.is_timed(step):
            known.update(own_metrics(bare(self.model)))
        norm = self.clip()
        apply_step_settings(self.optimizers, step, self.recipe.optimizer, self.total_steps)
        set_learning_rates(self.optimizers, self.recipe.schedule, self.total_steps, step)
        known |= learning_rates(self.optimizers)
        return Report(step, known, Behind(torch.cat([told[:2], norm.to(told)[None]])))

    def backward(self, step: int, norms: StateNorms | None) -> torch.Tensor:
        """Run all passes of a step, and return this process's share of the loss."""
        accelerator, count = self.accelerator, len(self.batches.read(step).groups)
        _, window = self.recipe.depths_at(self.batches.model.config, step)
        labelled = self.labels_of(step)
        total = torch.zeros((), device=accelerator.device)
        for i, (number, batch, loss_positions, depths, noise) in enumerate(self.batches.of_step(step)):
            if self.draws_in_passes:
                set_seed(generator_of("dropout", self.recipe.training.seed, step, number).initial_seed() % 2**32)
            with without_sync(accelerator, self.model) if i < count - 1 else nullcontext():
                outputs = self.model(
                    **batch,
                    num_loops=depths if len(set(depths)) > 1 else depths[0],
                    backprop_loops=window,
                    initial_state=noise,
                    # gradients are averaged over processes, so each divides by its share of the labels
                    num_items_in_batch=labelled / accelerator.num_processes,
                    loss_positions=loss_positions,
                    output_logits=False,
                    output_loop_hidden_states=norms is not None,
                    use_cache=False,
                )
                accelerator.backward(outputs.loss)
            total += outputs.loss.detach()
            if norms is not None:
                states = [state.detach() for state in outputs.loop_hidden_states]
                norms.add(states, outputs.initial_state.detach(), depths)
            del outputs
        add_up_gradients(bare(self.model))
        return total

    def labels_of(self, step: int) -> torch.Tensor:
        """Return the number of labels of a step on all processes. The step before, if any, has already summed it."""
        known, labels = self.labels
        if known != step or labels is None:
            mine = torch.tensor(self.batches.read(step).num_labels, device=self.accelerator.device)
            labels = self.accelerator.reduce(mine, reduction="sum")
        return labels

    def clip(self) -> torch.Tensor:
        """Clip the gradients, and return the norm of all of them before clipping."""
        fill_missing_gradients(self.optimizers)
        limit = self.recipe.optimizer.clip
        limit = math.inf if limit is None else limit  # infinity changes no gradient
        return clip_gradients(self.model, limit)

    def update(self):
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:  # accelerate's step would update the scale after each optimizer, and unscale the next one twice
                self.scaler.step(optimizer.optimizer)
        self.end()

    def end(self):
        """Prepare the next step. Called without `update`, it skips the current step."""
        if self.scaler is not None:
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @property
    def scaler(self):
        """Accelerate's scaler of the loss; None except under fp16."""
        return getattr(self.accelerator, "scaler", None)


def own_metrics(model) -> dict[str, float]:
    """Return what a class of the user's own measures, under names that are none of ours; only finite numbers."""
    numbers = {
        f"own/{name}": float(value.detach() if torch.is_tensor(value) else value)
        for name, value in model.training_metrics().items()
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
