"""A run that is killed, or told to end, at any change to the disk, again and again: it ends bit for bit the same."""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from modeling_looped import LoopedForCausalLM
from modeling_looped.formats.writing import save_public
from tests.faults.campaign import GOOD, Trial
from tests.faults.campaign_disk import CHANGES
from tests.faults.tiny_run import Runs, files_of


SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CHANGES_OF_A_RUN = 150  # about; at a moment that a run does not reach it is not killed
ENDED_BY_ITSELF = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def trials(seed: int, folder: Path) -> Iterator[Trial]:
    draw = random.Random(seed)
    runs = Runs(folder)
    while True:
        yield draw.choices((killed, together, converted), (6, 1, 1))[0](draw, runs)


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


def together(draw: random.Random, runs: Runs) -> Trial:
    """Several processes at once in one run's folder: one trains, the others refuse."""
    start, delays = draw.choice((runs.half, runs.nothing)), [draw.random() / 3 for _ in range(draw.randint(2, 3))]
    place = runs.copy(start, "trial")
    fault = f"{len(delays)} processes on one folder ({start.name}), {', '.join(f'{delay:.2f} s' for delay in delays)}"

    def one(number: int):
        time.sleep(delays[number])
        (place / f"outcome {number}").write_text(json.dumps(runs.outcome_of_training(place)))

    for child in [started(lambda number=number: one(number)) for number in range(len(delays))]:
        os.waitpid(child, 0)
    outcomes = [json.loads((place / f"outcome {number}").read_text()) for number in range(len(delays))]
    for outcome, detail in outcomes:
        if outcome not in GOOD:
            return Trial(fault, outcome, detail)
    wrong = runs.why_other(place)
    return Trial(fault, "silent" if wrong else "right", wrong or "")


def converted(draw: random.Random, runs: Runs) -> Trial:
    """A conversion is killed and made again: the folder is that of one that was not, and nothing is left beside it."""
    place, moment = runs.copy(runs.nothing, "converted"), draw.randrange(12)
    fault = f"a conversion, killed at change {moment}"

    def convert(name: str):
        model = LoopedForCausalLM.from_pretrained(runs.whole / "run" / "final")
        save_public(model, place / name, "llama", unroll=True)

    in_a_process(lambda: interrupted(lambda: convert("out"), place, signal.SIGKILL, moment))
    if not (place / "out").exists() and (status := in_a_process(lambda: convert("out"))):
        return Trial(fault, "traceback", f"the process ended with {status}")
    if left := [path.name for path in place.iterdir() if path.name != "out"]:
        return Trial(fault, "silent", f"{left} are left")
    in_a_process(lambda: convert("expected"))
    found, expected = ([path.read_bytes() for path in files_of(place / name)] for name in ("out", "expected"))
    return Trial(fault, "right") if found == expected else Trial(fault, "silent", "another model")


def has_checkpoint(place: Path, status: int) -> bool:
    """Ctrl-C before the first step ends a process with the status of a saved run, and there is nothing to save."""
    steps = [path.name for path in (place / "run" / "checkpoints").glob("step-*")]
    logged = place / "run" / "metrics.jsonl"
    return bool(steps) or not logged.is_file() or not logged.read_text()


def work(runs: Runs, place: Path, number: int, moment: int):
    interrupted(lambda: runs.train(place), place, number, moment)


def interrupted(action: Callable[[], object], place: Path, number: int, moment: int):
    sent = []

    def send(event: str):
        if not sent:
            sent.append(event)
            os.kill(os.getpid(), number)

    with CHANGES.act(send, moment, place):
        action()


def in_a_process(work) -> int:
    """Exit status of a forked process, negative for a signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(started(work), 0)[1])


def started(work) -> int:
    """The number of a forked process."""
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
    return child
