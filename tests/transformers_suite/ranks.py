"""Ranks for the mixins of tensor parallelism and FSDP: forks, as new processes would import all for seconds.

What starts them is not in the source distribution. A fork of a process that has run a backward pass can run none.
"""

import functools
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


start = functools.partial(processes.start_processes, start_method="fork")


def run_distributed(world_size: int):
    """Return what calls a function with the rank and the arguments on each of so many ranks."""

    def on_ranks(function):
        def run(*args):
            with tempfile.TemporaryDirectory() as folder:
                start(run_rank, (world_size, f"{folder}/store", function, args), nprocs=world_size)

        return run

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
