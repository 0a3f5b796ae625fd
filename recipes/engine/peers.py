"""The other processes of a launch: waiting for the main one without a time limit, and one error message for all."""

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from looped_recipes.common.errors import CommandError


FOREVER = timedelta(days=365)
PREPARED, SAID = "looped/prepared", "looped/said"  # keys in the store that all processes share
CALLS = count()  # numbers the calls of main_process_first, in the same order on every process
# parts of the error messages that a process gets because another one has ended
LOST = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL", "ProcessGroup", "TCPStore")


GONE = (
    "another process of this launch has ended without a word, or hangs: the others end, too, and the same launch "
    "again goes on from the newest checkpoint"
)


class PeerLost(CommandError):
    """Another process of the launch has ended."""


def main_process_first(function: Callable):
    """Call `function(is_main)` on the main process, and after that on the others.

    The others wait at the store, because preparing data may take days and a collective would time out.
    """
    if not dist.is_initialized():
        return function(True)
    store, key = _get_default_store(), f"{PREPARED}/{next(CALLS)}"
    if dist.get_rank() == 0:
        try:
            result = function(True)
        except BaseException as error:
            store.set(key, f"{type(error).__name__}: {error}")
            raise
        store.set(key, "")
        return result
    store.wait([key], FOREVER)
    failure = store.get(key).decode()
    if failure:
        raise CommandError(f"the main process could not prepare the data: {failure}")
    return function(False)


@contextmanager
def one_message():
    """Let only the first process that fails raise its error; the others, which fail as a result, exit silently."""
    try:
        yield
    except Exception as error:
        if not dist.is_initialized():
            raise
        if is_first_to_fail():
            if is_lost_peer(error):
                raise PeerLost(GONE) from error
            raise
        raise SystemExit(1) from None


def is_first_to_fail() -> bool:
    try:
        return _get_default_store().add(SAID, 1) == 1
    except Exception:  # the process that hosted the store has ended
        return True


def is_lost_peer(error: Exception) -> bool:
    said = str(error)
    return isinstance(error, dist.DistError) or type(error) is RuntimeError and any(part in said for part in LOST)
