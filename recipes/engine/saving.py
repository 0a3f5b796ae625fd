"""What a run writes: one process writes, the others learn of its errors, and no two runs share a folder."""

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from recipes.common.config import RecipeError
from recipes.common.folder_lock import exclusive


class CheckpointError(RecipeError):
    """A checkpoint that could not be written, or does not belong to this run."""


def error_of_saving(folder: Path, error: BaseException) -> CheckpointError:
    space = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "there is no space left on the disk" if space else f"{type(error).__name__}: {error}"
    return CheckpointError(f"could not save a checkpoint in {folder}: {advice}. The checkpoints before it are intact.")


def sync(folder: Path):
    """Force the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def root_cause(error: BaseException) -> BaseException:
    """The first error of a process, inside what torch.distributed.checkpoint makes of it."""
    if isinstance(error, CheckpointException) and error.failures:
        return root_cause(next(iter(error.failures.values()))[0])
    return error


def is_main_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def on_main_process(function: Callable, folder: Path):
    """What `function` returns on the main process, or its error, on every process."""
    result, error = None, None
    if is_main_process():
        try:
            result = function()
        except Exception as failure:  # whatever it is, the others must not wait for it
            error = error_of_saving(folder, failure) if isinstance(failure, OSError) else failure
    if dist.is_initialized():
        shared = [(result, error)]
        dist.broadcast_object_list(shared, src=0)
        result, error = shared[0]
    if error is not None:
        raise error
    return result


@contextmanager
def only_run(folder: Path):
    """No other run writes to `folder` meanwhile."""

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
            nothing_began = folder.is_dir() and [path.name for path in folder.iterdir()] == [".lock"]
            if nothing_began and is_main_process():
                (folder / ".lock").unlink()
                folder.rmdir()
