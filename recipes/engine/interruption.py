"""SIGTERM, SIGINT and SIGHUP end a run after the current step, with a checkpoint of it."""

import signal
import threading
from types import FrameType


HANGUP = getattr(signal, "SIGHUP", None)  # the terminal is closed; Windows has no such signal
SIGNALS = {signal.SIGTERM, signal.SIGINT} | ({HANGUP} - {None})


def unheard(number: int) -> bool:
    """Return whether this is the SIGHUP that nohup lets its command ignore."""
    return number == HANGUP and signal.getsignal(number) is signal.SIG_IGN


class Interruption:
    """Context manager: the first signal is stored; a second Ctrl-C ends the run at once, without a checkpoint."""

    def __init__(self):
        self.number = 0  # number of the signal that was received
        self.before = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # other threads may not set handlers
            self.before = {number: signal.signal(number, self.remember) for number in SIGNALS if not unheard(number)}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def remember(self, number: int, frame: FrameType | None):
        if number == signal.SIGINT == self.number:
            raise KeyboardInterrupt
        self.number = self.number or number


class Interrupted(SystemExit):
    """Ends the process with the exit status of the signal, so that shells and schedulers see that the run is not
    finished."""

    def __init__(self, number: int):
        super().__init__(128 + number)
