"""Ranks for the mixins of tensor parallelism and FSDP. What starts them is not in the source distribution.

They are forks of a server that has imported all, as new processes would for seconds, and has one thread. A fork of the
process of the tests may wait for ever, for a lock that another of its threads, such as a store's, held just then.
"""

import faulthandler
import multiprocessing
import os
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


LONGEST = 300  # seconds for one test, of which the longest takes ten

multiprocessing.set_forkserver_preload(["prepared", "suite"])


def start(function, args: tuple = (), nprocs: int = 1, join: bool = True):
    processes.start_processes(run, (function, args), nprocs=nprocs, join=join, start_method="forkserver")


def run(rank: int, function, args: tuple):
    """A rank that waits for ever says where and ends, and so do the others. None outlives the process of the tests."""
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    threading.Thread(target=end_after, args=(multiprocessing.parent_process(),), daemon=True).start()
    function(rank, *args)


def end_after(parent):
    parent.join()
    os._exit(1)


def run_distributed(world_size: int):
    """Return what calls a function with the rank and the arguments on each of so many ranks."""

    def on_ranks(function):
        def run_on_each(*args):
            with tempfile.TemporaryDirectory() as folder:
                start(run_rank, (world_size, f"{folder}/store", function, args), nprocs=world_size)

        return run_on_each

    return on_ranks


def run_rank(rank: int, world_size: int, store: str, function, args: tuple):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    function(rank, *args)
    dist.destroy_process_group()


UTILITIES = {
    "run_distributed": run_distributed,
    "_start_rank_processes": start,
    "_get_distributed_backend": lambda: "gloo",
    "_get_distributed_device_type": lambda: "cpu",
    "_get_rank_device": lambda rank: torch.device("cpu"),
    "_set_rank_device": lambda rank: None,
}
