"""Processes that end with the process that started them, so that they do not go on writing after it was killed."""

import os
import signal
import threading
import time
from functools import cache


INTERVAL = 0.5  # seconds between looks


@cache
def end_with(parent: int):
    """From now on, send this process SIGTERM once `parent`, which started it, is gone. Cached: called again for the
    same parent, it starts no second thread."""

    def watch():
        while os.getppid() == parent:
            time.sleep(INTERVAL)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
