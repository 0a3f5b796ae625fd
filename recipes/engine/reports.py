"""Reports of steps: read, logged, and the end of a run whose loss or gradients are no longer numbers."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tqdm import tqdm

from looped_recipes.common.hardware import reference_rate
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
    signals: float = 0  # sum of the signals that came to the processes; above 0, the run is to end
    held: Report | None = None  # the last one, which is not read yet
    # since the clock started
    clock: float = field(init=False)
    timed_steps: int = field(init=False)
    timed_flops: float = field(init=False)  # of one token, added up over these steps
    has_warned_of_long_steps: bool = field(default=False, init=False)

    def __post_init__(self):
        self.recipe, self.accelerator = self.steps.recipe, self.steps.accelerator
        self.peak = reference_rate(self.accelerator) * self.accelerator.num_processes
        self.start_clock()

    def hold(self, report: Report):
        """Keep a report for later, and read the one before, whose numbers are there by now, or soon."""
        self.read_held()
        self.held = report

    def read_held(self):
        if self.held is not None:
            held, self.held = self.held, None
            self.read(held)

    def read(self, report: Report) -> bool:
        """Log a report. Whether loss and gradients of the step are numbers."""
        loss, self.signals, norm = report.read()
        metrics = {"loss": loss / self.accelerator.num_processes, **report.known}
        if self.recipe.optimizer.clip is not None:
            metrics["gradient_norm"] = norm
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if not is_finite:
            # under fp16 gradients overflow whenever the scale has grown too high: that shrinks it, and is no fault
            if not math.isfinite(loss) or self.steps.scaler is None:
                self.count_skipped(report.step, metrics["loss"], norm)
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.say(report.step, metrics)
        return is_finite

    def count_skipped(self, step: int, loss: float, gradient_norm: float):
        """Count a step whose loss or gradients are no numbers; an error if these are more than the recipe allows."""
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
        done, logging = step + 1, self.recipe.logging
        is_timed = step == 0 or done % logging.every == 0 or done == self.steps.total_steps
        if is_timed:  # not at each monitored step too: the one between two of these is no measure of speed
            seconds = time.perf_counter() - self.clock
            speed = self.timed_steps * self.operations.tokens_per_step / seconds
            metrics.update(tokens_per_second=speed, mfu=speed * self.timed_flops / self.timed_steps / self.peak)
            if step > 0:  # the first one compiles
                self.warn_of_long_steps(seconds / self.timed_steps)
            self.start_clock()
            self.bar.set_postfix_str(
                f"loss {metrics.get('loss', math.nan):.3f}, {speed:.0f} tok/s, MFU {metrics['mfu']:.0%}, "
                f"{metrics['loops']:.1f} loops",
                refresh=False,
            )
        if is_timed or step % logging.monitor_every == 0:
            self.log(step, metrics)
        self.bar.update(1)

    def warn_of_long_steps(self, seconds: float):
        """A launcher kills its processes some time after SIGTERM, whether they have saved the step or not."""
        limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        if "TORCHELASTIC_RUN_ID" in os.environ and seconds > limit / 2 and not self.has_warned_of_long_steps:
            self.has_warned_of_long_steps = True
            self.accelerator.print(
                f"a step takes {seconds:.0f} s, but the launcher kills its processes {limit:.0f} s after SIGTERM, "
                "perhaps before the step is saved: launch with TORCH_ELASTIC_SHUTDOWN_TIMEOUT set to more seconds"
            )

    def start_clock(self):
        self.clock, self.timed_steps, self.timed_flops = time.perf_counter(), 0, 0.0
