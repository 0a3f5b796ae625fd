"""metrics.jsonl: one JSON object per line, with its step; trackers get the same values."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from .checksums import LIST, change_of
from .errors import first_line
from .files import append_line, write_whole


DIVERGED = "diverged.txt"  # in the folder of a run that diverged: why
OF_A_LOOP = re.compile(r"(.+/loop_)\d+$")  # e.g. residual_norm/loop_3


class MetricsLog:
    def __init__(self, path: Path, accelerator):
        self.path, self.accelerator = Path(path), accelerator

    def start(self, step: int, saved: Path | None):
        """Continue at `step`, on one process: drop records that an interrupted run wrote after its checkpoint.

        saved: the metrics up to this step, stored in the checkpoint.
        """
        kept = [] if saved is None else read_metrics(saved)
        kept = [record for record in kept if record["step"] < step]
        for name in (LIST, DIVERGED):  # of a run that had ended
            (self.path.parent / name).unlink(missing_ok=True)
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, step: int, metrics: dict):
        if self.accelerator.is_main_process:
            append_line(self.path, json.dumps({"step": step, **metrics}))
        self.ask_trackers(lambda tracker: tracker.log(metrics, step=step), f"at step {step}")

    def flush(self, step: int):
        """Let trackers write what they hold back, as TensorBoard's does."""

        def flush(tracker):
            if hasattr(tracker.tracker, "flush"):
                tracker.tracker.flush()

        self.ask_trackers(flush, f"at step {step}")

    def finish(self):
        """End the trackers. accelerate's `end_training` would end the process group, too, which saving needs."""
        self.ask_trackers(lambda tracker: tracker.finish(), "at the end")

    def ask_trackers(self, function: Callable, when: str):
        for tracker in list(self.accelerator.trackers):
            try:
                function(tracker)
            except Exception as error:  # of many kinds; none is a reason to end a training
                self.accelerator.trackers.remove(tracker)
                print(
                    f"{tracker.name} failed {when} ({first_line(error)}) and gets no more of this launch; all "
                    f"of it is in {self.path}",
                    file=sys.stderr,
                )


def read_metrics(path: str | Path) -> list[dict]:
    """Return the records of a metrics.jsonl."""
    return read_lines(path)[0]


def read_lines(path: str | Path) -> tuple[list[dict], list[int]]:
    """Return the records, and the numbers of the lines that are no records. Such lines are reported on standard error,
    except for a last line that was cut off."""
    if not Path(path).exists():
        return [], []
    changed = change_of(Path(path))
    if changed is not None:
        print(f"{path} is not what the run wrote: {changed}", file=sys.stderr)
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    records, damaged = [], []
    for number, line in enumerate(lines, start=1):
        record = record_of(line)
        if record is not None:
            records.append(record)
        elif line.strip():
            damaged.append(number)
    said = [number for number in damaged if number < len(lines)]
    if said:
        listed = ", ".join(map(str, said[:8])) + (", ..." if len(said) > 8 else "")
        print(f"{path}: left out what is no record: line {listed}", file=sys.stderr)
    return records, damaged


def last_values(records: list[dict]) -> dict:
    """Return the last value of each metric, from any record. Those of the single loops are of one record: an earlier
    step may have run more loops."""
    last: dict = {}
    for record in records:
        if replaced := {match[1] for key in record if (match := OF_A_LOOP.match(key))}:
            last = {key: value for key, value in last.items() if key.rstrip("0123456789") not in replaced}
        last.update(record)
    return last


def series(records: list[dict], name: str) -> list[float]:
    """Return all values of one metric; missing and null values are left out."""
    return [value for record in records if (value := record.get(name)) is not None]


def last_validation(records: list[dict], measure: str) -> dict[int, float]:
    """Return {depth: value} of the last logged validation; measure: loss or bits_per_byte."""
    return last_by_number(records, f"validation/{measure}_at_")


def last_by_number(records: list[dict], prefix: str) -> dict[int, float]:
    """Return {k: value} of the last record with fields named `prefix`k, e.g. the loss at every depth."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)$")
    for record in reversed(records):
        found = {int(match[1]): value for key, value in record.items() if (match := pattern.match(key))}
        if found:
            return dict(sorted(found.items()))
    return {}


def depth_of_loss(depths: Iterable[int], num_loops: int) -> int:
    """Return the validated depth whose loss counts as the loss of the run: the deepest one up to `num_loops`, else the
    shallowest."""
    depths = sorted(depths)
    return max((depth for depth in depths if depth <= num_loops), default=depths[0])


def record_of(line: str) -> dict | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    has_step = isinstance(record, dict) and type(record.get("step")) is int
    return record if has_step else None


def divergence_of(folder: Path, loss: float | None = None, most: float | None = None) -> str | None:
    """Return why the run in a folder diverged: as its training wrote, or by its last validation loss; None if it did
    not. loss: None if no validation was logged; most: training.max_loss."""
    if (folder / DIVERGED).is_file():
        return (folder / DIVERGED).read_text(encoding="utf-8").strip()
    return None if loss is None else why_diverged(loss, most)


def why_diverged(loss: float, most: float | None) -> str | None:
    """Return why a run that ended at this validation loss counts as diverged; None if it does not.

    most: training.max_loss of the run.
    """
    if not math.isfinite(loss):
        return f"the run ended at a validation loss of {loss}"
    return f"the run ended at {loss:.4f}, above training.max_loss={most}" if most is not None and loss > most else None
