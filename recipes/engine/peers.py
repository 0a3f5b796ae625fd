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
# parts of messages of errors that a process meets because another one is gone
LOST = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL", "ProcessGroup", "TCPStore")


GONE = (
    "another process of this launch has ended without a word: the others end, too, and the same launch again goes on "
    "from the newest checkpoint"
)


class PeerLost(CommandError):
    """Another process of the launch is gone."""


def main_process_first(function: Callable):
    """`function(is_main)` on the main process, and on the others when it is done there.

    They wait at the store, not in a collective, whose time limit ends a launch: preparing data may take days.
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
    """Of all processes, the first that fails says why; the others, which fail because of it, end without a word."""
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
    except Exception:  # the store went with the process that kept it
        return True


def is_lost_peer(error: Exception) -> bool:
    said = str(error)
    return isinstance(error, dist.DistError) or type(error) is RuntimeError and any(part in said for part in LOST)
