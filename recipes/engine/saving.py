"""Writing of a run: one process writes, the others get its errors, and no two runs share a folder."""

import errno
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from glob import glob
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from looped_recipes.common.errors import CommandError
from looped_recipes.common.folder_lock import exclusive


class CheckpointError(CommandError):
    """A checkpoint could not be written, or does not belong to this run."""


def error_of_saving(folder: Path, error: BaseException) -> CheckpointError:
    space = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "there is no space left on the disk" if space else f"{type(error).__name__}: {error}"
    places = (folder, folder / "checkpoints", folder.parent / "checkpoints")  # `folder` may be any path of a run
    has_checkpoint = any(glob("step-*/checkpoint.json", root_dir=place) for place in places)  # errors are no matches
    intact = ". The checkpoints before it are intact." if has_checkpoint else ""
    return CheckpointError(f"could not write to {folder}: {advice}{intact}")


def root_cause(error: BaseException) -> BaseException:
    """Return the first process's error inside the exception of torch.distributed.checkpoint."""
    if isinstance(error, CheckpointException) and error.failures:
        return root_cause(next(iter(error.failures.values()))[0])
    return error


def is_main_process() -> bool:
    return process_index() == 0


def process_index() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def from_all_processes(function: Callable, folder: Path, group: dist.ProcessGroup | None = None) -> list:
    """Call `function` on each process. Every process returns all results, or raises the first error."""
    result, error = attempt(function, folder)
    shared = [(result, error)]
    if dist.is_initialized():
        shared = [None] * dist.get_world_size()
        dist.all_gather_object(shared, (result, error), group=group)
    for _, error in shared:
        if error is not None:
            raise error
    return [result for result, _ in shared]


def attempt(function: Callable, folder: Path) -> tuple:
    """Return (result, None) or (None, error) of `function`. Every error is caught, as other processes would wait."""
    try:
        return function(), None
    except Exception as failure:
        return None, error_of_saving(folder, failure) if isinstance(failure, OSError) else failure


def on_main_process(function: Callable, folder: Path, group: dist.ProcessGroup | None = None):
    """Call `function` on the main process. Every process returns its result, or raises its error."""
    result, error = attempt(function, folder) if is_main_process() else (None, None)
    if dist.is_initialized():
        shared = [(result, error)]
        dist.broadcast_object_list(shared, src=0, group=group)
        result, error = shared[0]
    if error is not None:
        raise error
    return result


@contextmanager
def only_run(folder: Path):
    """Keep other runs from writing to `folder` inside this context."""

    def refuse(lock):
        raise CheckpointError(
            f"another process is training in {folder}: wait for it, or choose another training.output_dir"
        )

    def acquire():
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(exclusive(folder, refuse))

    with ExitStack() as held:
        on_main_process(acquire, folder)
        try:
            yield
        finally:
            # no other process looks into a folder that this one may be removing
            if is_main_process() and folder.is_dir() and [path.name for path in folder.iterdir()] == [".lock"]:
                with suppress(OSError):  # of a link or a mounted disk; it would hide the error of the run
                    (folder / ".lock").unlink()
                    folder.rmdir()
