"""Profile CPU and GPU for a few steps, as a trace for chrome://tracing or ui.perfetto.dev."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .saving import process_index


class Profile:
    """Profiles `num_steps` steps from `first` on, and writes one file for each process."""

    def __init__(self, folder: Path, first: int, num_steps: int):
        self.folder, self.steps = folder, range(first, first + num_steps)
        self.running = None

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        if step not in self.steps:
            yield
            return
        if self.running is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self.running = profile(activities=activities)
            self.running.start()
        with torch.profiler.record_function(f"step {step}"):
            yield
        if step == self.steps[-1]:
            self.write()

    def write(self):
        """Stop the profiler, and write the trace of the steps so far."""
        if self.running is not None:
            running, self.running = self.running, None
            running.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self.folder / f"process-{process_index()}.json"))
