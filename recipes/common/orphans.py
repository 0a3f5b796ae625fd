"""Let a process end with its parent process, so that it does not go on writing after the parent was killed."""

import os
import signal
import threading
import time
from functools import cache


INTERVAL = 0.5  # seconds between checks


@cache
def end_with(parent: int):
    """Start a thread that sends this process SIGTERM when `parent`, its parent process, has ended. Cached: a second
    call with the same parent starts no second thread."""

    def watch():
        while os.getppid() == parent:
            time.sleep(INTERVAL)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
