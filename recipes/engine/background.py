"""Background work during training: one task at a time, in one thread of every process.

The threads of all processes communicate in a separate process group, apart from the collectives of the training.
"""

import threading
from collections.abc import Callable

import torch.distributed as dist


class Background:
    def __init__(self):
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self, work: Callable[[], object]):
        """Wait for the previous work, raise its error if it failed, and run `work` in a thread."""
        self.wait()
        self.thread = threading.Thread(target=self.attempt, args=(work,), name="looped-background")
        self.thread.start()

    def attempt(self, work: Callable[[], object]):
        try:
            work()
        except BaseException as error:
            self.error = error

    def wait(self):
        """Wait until the work is done, and raise its error if it failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error
