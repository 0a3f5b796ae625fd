"""Work while the training goes on: one piece at a time, in a thread of every process.

The threads of all processes communicate in a group of their own, apart from the training's collectives.
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
        """Run `work` in a thread, after the work that was started before is done; an error of that is raised here."""
        self.wait()
        self.thread = threading.Thread(target=self.attempt, args=(work,), name="looped-background")
        self.thread.start()

    def attempt(self, work: Callable[[], object]):
        try:
            work()
        except BaseException as error:
            self.error = error

    def wait(self):
        """Until the work is done; its error is raised here."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error
