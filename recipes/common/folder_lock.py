"""A lock, so that one process at a time writes to a folder."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def exclusive(folder: Path, when_taken: Callable[[FileLock], None]):
    """Hold the lock of a folder. when_taken: called if another process has it; waits for the lock, or raises. The
    operating system frees the lock of a process that was killed."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        when_taken(lock)
    except NotImplementedError:  # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()
