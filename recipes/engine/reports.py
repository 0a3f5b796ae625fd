"""Read and log the reports of steps, and end a run whose loss or gradients are no longer finite."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tqdm import tqdm

from looped_recipes.common.hardware import makers_rate
from looped_recipes.settings.operations import Operations

from .finite import ADVICE, Divergence
from .monitor import Monitor
from .run_checkpoints import Progress
from .step import Report, Steps


@dataclass
class StepReports:
    steps: Steps
    monitor: Monitor
    progress: Progress
    log: Callable[[int, dict], None]
    bar: tqdm
    operations: Operations
    signals: float = 0  # sum of the signal numbers over all processes; above 0, the run must end
    held: Report | None = None  # the last report, not read yet
    # counted since the clock started
    clock: float = field(init=False)
    timed_steps: int = field(init=False)
    timed_flops: float = field(init=False)  # operations per token, summed over these steps
    has_warned_of_long_steps: bool = field(default=False, init=False)

    def __post_init__(self):
        self.recipe, self.accelerator = self.steps.recipe, self.steps.accelerator
        rate = makers_rate(self.accelerator.device)
        self.peak = None if rate is None else rate * self.accelerator.num_processes
        self.start_clock()

    def hold(self, report: Report):
        """Keep a report for later, and read the one before, whose numbers are ready now or soon."""
        self.read_held()
        self.held = report

    def read_held(self):
        if self.held is not None:
            held, self.held = self.held, None
            self.read(held)

    def read(self, report: Report) -> bool:
        """Log a report. Return whether the loss and gradients of the step are finite."""
        loss, self.signals, norm = report.read()
        metrics = {"loss": loss / self.accelerator.num_processes, **report.known}
        if self.recipe.optimizer.clip is not None:
            metrics["gradient_norm"] = norm
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if not is_finite:
            # under fp16 gradients overflow when the loss scale is too high: this lowers the scale and is no failure
            scaler = self.steps.scaler
            if not math.isfinite(loss) or scaler is None or scaler.get_scale() < 1:  # which makes gradients smaller
                self.count_skipped(report.step, metrics["loss"], norm)
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.say(report.step, metrics)
        return is_finite

    def count_skipped(self, step: int, loss: float, gradient_norm: float):
        """Count a step whose loss or gradients are not finite. Raise an error if there are more than the recipe
        allows."""
        limit, skipped = self.recipe.training.skip_nonfinite_steps, self.progress.num_skipped
        what = f"the gradient norm of step {step} is {gradient_norm}"
        if not math.isfinite(loss):
            what = f"the loss of step {step} is {loss}"
        if skipped >= limit:
            rows = self.steps.batches.data_rows(step)
            left_out = f" after {skipped} steps that were left out" if skipped else ""
            raise Divergence(f"{what} on training rows {rows}{left_out}; checkpoints before it are good. {ADVICE}")
        self.progress.num_skipped += 1
        self.accelerator.print(f"{what}: left out, {skipped + 1} of {limit} at most")

    def say(self, step: int, metrics: dict):
        for message in self.monitor.warnings(metrics) if "loss" in metrics else ():
            if self.accelerator.is_main_process:
                self.bar.write(f"step {step}: {message}")
        if self.recipe.training.skip_nonfinite_steps:
            metrics["skipped_steps"] = self.progress.num_skipped
        self.timed_steps += 1
        self.timed_flops += self.operations.per_token(step)
        is_timed = self.steps.is_timed(step)
        if is_timed:  # not at monitored steps too: the single step between both would be no measure of speed
            seconds = time.perf_counter() - self.clock
            speed = self.timed_steps * self.operations.tokens_per_step / seconds
            metrics["tokens_per_second"], utilisation = speed, ""
            if self.peak is not None:
                metrics["mfu"] = speed * self.timed_flops / self.timed_steps / self.peak
                utilisation = f"MFU {metrics['mfu']:.0%}, "
            if step > 0:  # the first one compiles
                self.warn_of_long_steps(seconds / self.timed_steps)
            self.start_clock()
            self.bar.set_postfix_str(
                f"loss {metrics.get('loss', math.nan):.3f}, {speed:.0f} tok/s, {utilisation}"
                f"{metrics['loops']:.1f} loops",
                refresh=False,
            )
        if is_timed or step % self.recipe.logging.monitor_every == 0:
            self.log(step, metrics)
        self.bar.update(1)

    def warn_of_long_steps(self, seconds: float):
        """Warn if steps are long: a launcher kills its processes some time after SIGTERM, saved or not."""
        limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        if "TORCHELASTIC_RUN_ID" in os.environ and seconds > limit / 2 and not self.has_warned_of_long_steps:
            self.has_warned_of_long_steps = True
            self.accelerator.print(
                f"a step takes {seconds:.0f} s, but the launcher kills its processes {limit:.0f} s after SIGTERM, "
                "perhaps before the step is saved: launch with TORCH_ELASTIC_SHUTDOWN_TIMEOUT set to more seconds"
            )

    def start_clock(self):
        self.clock, self.timed_steps, self.timed_flops = time.perf_counter(), 0, 0.0
