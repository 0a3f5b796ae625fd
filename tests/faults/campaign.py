"""What one trial of a fault is called, and how trials are counted.

A campaign is a module `campaign_*.py` of this folder with a docstring and a generator
`trials(seed: int, folder: Path) -> Iterator[Trial]`, endless or not: it makes a fault, lets Looped meet it, and says
what came of it. Each is a test too, of a few trials in `make test` and of many in `make test-all`; and
`python -m tests.faults` counts as many as the time allows.
"""

import importlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple


Outcome = Literal["right", "refused", "silent", "traceback", "lost"]
GOOD = ("right", "refused")


class Trial(NamedTuple):
    """One fault and its outcome.

    right: the result is bit for bit that of a run without the fault.
    refused: an error in plain words that quotes what is wrong and says what to do.
    silent: a wrong result without a word. traceback: an error that advises nothing. lost: work that cannot be resumed.
    """

    fault: str  # what was done, with its values, so that it can be done again
    outcome: Outcome
    detail: str = ""  # what was seen where the outcome is not good


def tally(trials: Iterable[Trial]) -> Counter[str]:
    return Counter(trial.outcome for trial in trials)


def assert_good(trials: Iterator[Trial], at_most: int, *, least_right: int):
    """The first trials are right or refused.

    least_right: so many are right, else what refuses everything would pass; 0 only where no result can be right.
    """
    seen = list(islice(trials, at_most))
    assert seen, "the campaign made no trial"
    bad = [f"{trial.outcome}: {trial.fault}: {trial.detail}" for trial in seen if trial.outcome not in GOOD]
    assert not bad, "\n".join([f"{len(bad)} of {len(seen)} faults:", *bad])
    assert tally(seen)["right"] >= least_right, f"fewer than {least_right} right ones in {dict(tally(seen))}"


def campaigns() -> dict[str, Path]:
    """Name and file of every campaign of this folder."""
    files = sorted(Path(__file__).parent.glob("campaign_*.py"))
    return {file.stem.removeprefix("campaign_"): file for file in files}


def run_campaign(name: str, seed: int, minutes: float, at_most: int | None) -> dict:
    """Trials until the time is over, counted."""
    campaign = importlib.import_module(f"tests.faults.campaign_{name}")
    end, seen = time.monotonic() + 60 * minutes, []
    with tempfile.TemporaryDirectory(prefix="looped-faults-") as folder:
        for trial in campaign.trials(seed, Path(folder)):
            seen.append(trial)
            if trial.outcome not in GOOD:
                print(f"{name}: {trial.outcome}: {trial.fault}: {trial.detail}", flush=True)
            if time.monotonic() > end or len(seen) == at_most:
                break
    outcomes = dict(tally(seen))
    print(f"{name}: {len(seen)} trials, {outcomes}", flush=True)
    bad = [trial._asdict() for trial in seen if trial.outcome not in GOOD]
    return {"about": campaign.__doc__.splitlines()[0], "trials": len(seen), "outcomes": outcomes, "bad": bad}
