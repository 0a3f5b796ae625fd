"""SIGTERM and SIGINT end a run after the step it is at, with a checkpoint of it."""

import signal
import threading
from types import FrameType


class Interruption:
    """While it is entered, a first signal is remembered; a second Ctrl-C ends the run as it stands."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self.number = 0  # of the signal that came
        self.before = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self.before = {number: signal.signal(number, self.remember) for number in self.SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def remember(self, number: int, frame: FrameType | None):
        if number == signal.SIGINT == self.number:
            raise KeyboardInterrupt
        self.number = self.number or number


class Interrupted(SystemExit):
    """Ends the process as the signal would have: shells and schedulers see that the run is not done."""

    def __init__(self, number: int):
        super().__init__(128 + number)
