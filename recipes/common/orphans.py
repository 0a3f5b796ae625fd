"""A process that another one started does not go on writing when that one was killed."""

import os
import signal
import threading
import time
from functools import cache


INTERVAL = 0.5  # seconds between looks


@cache
def end_with(parent: int):
    """From now on, SIGTERM to this process once `parent`, which started it, is gone."""

    def watch():
        while os.getppid() == parent:
            time.sleep(INTERVAL)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
