"""A lock, so that one process at a time writes to a folder."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def exclusive(folder: Path, when_taken: Callable[[FileLock], None]):
    """Lock a folder inside this context. when_taken: called if another process has the lock; it must wait for the lock
    or raise. The operating system frees the lock of a process that was killed."""
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
