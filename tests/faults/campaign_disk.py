"""Files of a run, finished or half done, that a disk has changed: the run goes on bit for bit, or refuses in words."""

import contextlib
import errno
import io
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from looped_recipes import export
from looped_recipes.common.checksums import check_folder
from looped_recipes.common.errors import CommandError
from looped_recipes.engine.checkpoint import step_of
from looped_recipes.engine.sweep_runs import Run
from looped_recipes.engine.sweeps import outcome
from looped_recipes.settings.recipe import load_recipe
from tests.faults.campaign import Trial
from tests.faults.tiny_run import REFUSALS, Runs, files_of


Fault = Callable[[random.Random, Path], str]  # does something to a folder; what, in words


def flip(draw: random.Random, place: Path) -> str:
    path = draw.choice([path for path in files_of(place) if path.stat().st_size])
    content = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit} of {path.relative_to(place)}"


def cut(draw: random.Random, place: Path) -> str:
    path = draw.choice([path for path in files_of(place) if path.stat().st_size])
    size = draw.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.relative_to(place)} cut to {size} bytes"


def empty(draw: random.Random, place: Path) -> str:
    path = draw.choice(files_of(place))
    path.write_bytes(b"")
    return f"{path.relative_to(place)} emptied"


def fill(draw: random.Random, place: Path) -> str:
    """As some file systems leave a file after a power cut: its size is right, its end is zeros."""
    path = draw.choice([path for path in files_of(place) if path.stat().st_size])
    content = path.read_bytes()
    size = draw.randrange(len(content))
    path.write_bytes(content[:size] + bytes(len(content) - size))
    return f"{path.relative_to(place)} zeros from byte {size} on"


def delete(draw: random.Random, place: Path) -> str:
    path = draw.choice(files_of(place))
    path.unlink()
    return f"{path.relative_to(place)} deleted"


def delete_folder(draw: random.Random, place: Path) -> str:
    path = draw.choice(sorted(path for path in place.rglob("*") if path.is_dir() and path.name not in ("run",)))
    shutil.rmtree(path)
    return f"folder {path.relative_to(place)} deleted"


def swap(draw: random.Random, place: Path) -> str:
    """Two files of one kind."""
    files = files_of(place)
    first = draw.choice(files)
    second = draw.choice([path for path in files if path.suffix == first.suffix and path != first] or [first])
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    return f"{first.relative_to(place)} and {second.relative_to(place)} swapped"


def swap_checkpoints(draw: random.Random, place: Path) -> str:
    folder = place / "run" / "checkpoints"
    first, second = sorted(folder.glob("step-*"))[-2:]
    os.rename(first, folder / "other")
    os.rename(second, first)
    os.rename(folder / "other", second)
    return f"{first.name} and {second.name} swapped"


def several(draw: random.Random, place: Path) -> str:
    """As from a disk that goes bad: in several files at once."""
    return "; ".join(draw.choice((flip, cut, fill))(draw, place) for _ in range(draw.randint(2, 6)))


def leave(draw: random.Random, place: Path) -> str:
    """What a killed process may leave, and what people do."""
    folders = [path for path in place.rglob("*") if path.is_dir() and path.parent != place]
    folder = draw.choice(sorted({*folders, place / "run"}))
    name = draw.choice((".saving-step-00000006", ".deleting-step-00000002", "x.tmp", "step-00000004.bak", "step-1"))
    if draw.random() < 0.5:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "checkpoint.json").write_text("{}")
    else:
        (folder / name).write_bytes(draw.randbytes(20))
    return f"{(folder / name).relative_to(place)} left behind"


def link(draw: random.Random, place: Path) -> str:
    """A file or a folder is moved elsewhere, as to a larger disk, and linked."""
    path = draw.choice(sorted(path for path in place.rglob("*") if path.name != ".lock"))
    elsewhere = place / "elsewhere"
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere, target_is_directory=elsewhere.is_dir())
    return f"{path.relative_to(place)} moved and linked"


def other_times(draw: random.Random, place: Path) -> str:
    """As after a copy, or where a clock was wrong."""
    now = time.time()
    for path in place.rglob("*"):
        os.utime(path, (draw.choice((0, now - 3600, now + 10**8)),) * 2)
    return "other times of all files"


FAULTS: tuple[Fault, ...] = (
    flip, cut, empty, fill, delete, delete_folder, swap, swap_checkpoints, several, leave, link, other_times
)  # fmt: skip


def trials(seed: int, folder: Path) -> Iterator[Trial]:
    draw = random.Random(seed)
    runs = Runs(folder)
    while True:
        yield full_disk(draw, runs) if draw.random() < 0.15 else changed_files(draw, runs)


def changed_files(draw: random.Random, runs: Runs) -> Trial:
    """A fault, then the run goes on. Where it refuses, no checkpoint and no line of metrics may be gone."""
    is_finished = draw.random() < 0.4
    place = runs.copy(runs.whole if is_finished else runs.half, "trial")
    fault = draw.choice(FAULTS if is_finished else [fault for fault in FAULTS if fault is not swap_checkpoints])
    what = f"{'finished' if is_finished else 'half done'}: {fault(draw, place)}"
    wrong = is_finished and (evaluated_unheard(runs, place) or swept_unheard(runs, place))
    if wrong := wrong or exported_unheard(runs, place):
        return Trial(what, "silent", wrong)
    before = kept(place)
    outcome, detail = runs.outcome_of_training(place)
    if outcome == "refused" and not before <= kept(place):
        return Trial(what, "lost", f"{before - kept(place)} gone after: {detail}")
    return Trial(what, outcome, detail)


def kept(place: Path) -> set[str]:
    """Names of files of checkpoints, wherever they were set aside, and the lines of metrics."""
    checkpoints = place / "run" / "checkpoints"
    metrics = place / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
    names = [str(path.relative_to(checkpoints)).removeprefix("damaged-") for path in files_of(checkpoints)]
    return {name for name in names if not name.startswith((".saving", ".deleting"))} | {repr(line) for line in lines}


def evaluated_unheard(runs: Runs, place: Path) -> str | None:
    """A saved model that is not the one that was saved, and that the check of our commands takes."""
    final = place / "run" / "final"
    weights = final / "model.safetensors"
    expected = (runs.whole / "run" / "final" / "model.safetensors").read_bytes()
    if not weights.is_file() or weights.read_bytes() == expected or not (final / "checksums.json").is_file():
        return None
    try:
        check_folder(final)
    except ValueError:
        return None
    return f"{weights.name} was changed and is evaluated unheard"


def swept_unheard(runs: Runs, place: Path) -> str | None:
    """A sweep that takes a changed loss for that of the run."""
    try:
        expected, found = (swept(runs, each) for each in (runs.whole, place))
    except REFUSALS:
        return None
    return f"a sweep takes {found} for {expected}" if found not in (None, expected) else None


def swept(runs: Runs, place: Path) -> float | None:
    recipe = load_recipe(runs.recipe, [f"training.output_dir={place / 'run'}"])
    with contextlib.redirect_stderr(io.StringIO()):
        result = outcome(Run("run", {}, runs.recipe, recipe))
    return result and result["loss"]


def exported_unheard(runs: Runs, place: Path) -> str | None:
    """A model of a checkpoint that is not what the checkpoint was."""
    try:
        found = exported(place, place / "exported")
    except (ValueError, CommandError):
        return None
    for whole in (runs.half, runs.whole):
        for checkpoint in (whole / "run" / "checkpoints").glob(f"{found.name}*"):
            expected = runs.folder / "exported" / checkpoint.name
            if not expected.is_dir():
                exported(whole, expected.parent, "--step", str(step_of(checkpoint)))
            before, after = (load_file(each / "model.safetensors") for each in (expected, found))
            if any(not torch.equal(after[name], tensor) for name, tensor in before.items()):
                return f"the export of {checkpoint.name} is another model"
    return None


def exported(place: Path, folder: Path, *options: str) -> Path:
    """In a folder that has the name of the checkpoint."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        out = export.main([str(place / "run"), str(folder / "new"), *options])
    step = int(re.search(r"after (\d+) step", said.getvalue())[1])
    return out.rename(folder / f"step-{step:08d}")


def full_disk(draw: random.Random, runs: Runs) -> Trial:
    """The disk is full at the n-th change to it, or takes no file beyond a size; then there is space again."""
    place = runs.copy(draw.choice((runs.half, runs.whole, runs.nothing)), "trial")
    if draw.random() < 0.5:
        moment = draw.randrange(60)
        what, broken = f"no space at change {moment}", no_space(moment, place)
    else:
        size = draw.randrange(1, 150_000)
        what, broken = f"no file above {size} bytes", small_files(size)
    with broken:
        outcome, detail = runs.outcome_of_training(place)
    if outcome not in ("right", "refused"):
        return Trial(what, outcome, detail)
    again, detail_of_again = runs.outcome_of_training(place)
    if again != "right":
        return Trial(what, "lost", f"it said {detail!r}, and with space again {again}: {detail_of_again}")
    return Trial(what, outcome, detail)


@contextmanager
def small_files(size: int):
    """No file grows beyond a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


class Changes:
    """Counts changes to the disk below a folder, and does something at one of them."""

    NAMES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")

    def __init__(self):
        self.folder, self.left, self.action = "", None, None
        self.seen, self.is_hooked = 0, False

    def __call__(self, event: str, arguments: tuple):
        if self.action is None:
            return
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in self.NAMES or is_write) and self.folder in str(arguments[0]) and ".lock" not in str(arguments[0]):
            self.seen += 1
            if self.seen > self.left:
                self.action(event)

    @contextmanager
    def act(self, action: Callable[[str], None], moment: int, folder: Path):
        """Hooks can not be taken off: one for all trials."""
        if not self.is_hooked:
            sys.addaudithook(self)
            self.is_hooked = True
        self.folder, self.left, self.seen, self.action = str(folder), moment, 0, action
        try:
            yield self
        finally:
            self.action = None


CHANGES = Changes()


def no_space(moment: int, folder: Path):
    """From change number `moment` on nothing can be written, only removed."""

    def refuse(event: str):
        if event in ("open", "os.mkdir", "os.rename"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return CHANGES.act(refuse, moment, folder)
