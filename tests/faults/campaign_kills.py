"""A run that is killed, or told to end, at any change to the disk, again and again: it ends bit for bit the same."""

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from tests.faults.campaign import Trial
from tests.faults.campaign_disk import CHANGES
from tests.faults.tiny_run import Runs


SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CHANGES_OF_A_RUN = 150  # about; at a moment that a run does not reach it is not killed
ENDED_BY_ITSELF = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def trials(seed: int, folder: Path) -> Iterator[Trial]:
    draw = random.Random(seed)
    runs = Runs(folder)
    while True:
        yield killed(draw, runs)


def killed(draw: random.Random, runs: Runs) -> Trial:
    """One to three kills, some of them of the run that goes on, then it may end."""
    place = runs.copy(runs.nothing, "trial")
    kills = []
    for _ in range(draw.randint(1, 3)):
        number, moment = draw.choice(SIGNALS), draw.randrange(CHANGES_OF_A_RUN)
        status = in_a_process(lambda number=number, moment=moment: work(runs, place, number, moment))
        kills.append(f"{signal.Signals(number).name} at change {moment}")
        if status not in (*ENDED_BY_ITSELF, -signal.SIGKILL, -signal.SIGTERM, 130):
            return Trial(", ".join(kills), "traceback", f"the process ended with {status}")
        if status in (128 + signal.SIGTERM, 130) and status != -number and not has_checkpoint(place, status):
            return Trial(", ".join(kills), "lost", f"ended with {status} and saved nothing")
    outcome, detail = runs.outcome_of_training(place)
    return Trial(", ".join(kills), "lost" if outcome == "refused" else outcome, detail)


def has_checkpoint(place: Path, status: int) -> bool:
    """Ctrl-C before the first step ends a process with the status of a saved run, and there is nothing to save."""
    steps = [path.name for path in (place / "run" / "checkpoints").glob("step-*")]
    logged = place / "run" / "metrics.jsonl"
    return bool(steps) or not logged.is_file() or not logged.read_text()


def work(runs: Runs, place: Path, number: int, moment: int):
    sent = []

    def send(event: str):
        if not sent:
            sent.append(event)
            os.kill(os.getpid(), number)

    with CHANGES.act(send, moment, place):
        runs.train(place)


def in_a_process(work) -> int:
    """Exit status of a forked process, negative for a signal that killed it."""
    child = os.fork()
    if child == 0:
        tqdm.set_lock(threading.RLock())  # its own is shared with this process, where it would stay taken after a kill
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = 1
        try:
            work()
            status = 0
        except KeyboardInterrupt:
            status = 130
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
