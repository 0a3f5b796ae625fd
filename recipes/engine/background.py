"""Background work during training: one task at a time, in one thread of every process.

The threads of all processes communicate in a separate process group, apart from the collectives of the training.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist


class Background:
    def __init__(self, timeout_minutes: float | None = None):
        """timeout_minutes: how long processes wait for each other; None is torch's default."""
        timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
        self.group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self.thread = ThreadPoolExecutor(1, "looped-background")
        self.work: Future | None = None

    def start(self, work: Callable[[], object]):
        """Wait for the previous work, raise its error if it failed, and run `work` in a thread."""
        self.wait()
        self.work = self.thread.submit(work)

    def wait(self):
        """Wait until the work is done, and raise its error if it failed."""
        if self.work is None:
            return
        error = self.work.exception()
        self.work = None  # not before: a wait that Ctrl-C breaks off is made again
        if error is not None:
            raise error
