"""A short training run on one or several processes, for test_checkpoint.py.

`train` is the recipe's loop with nothing around it. As a script, `python -m tests.distributed_worker tasks.json` is
one of the processes that `launch` starts; it runs the tasks one after another and writes what `train` returned beside
them.
"""

import errno
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, gather_object
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from looped_recipes.engine.background import Background
from looped_recipes.engine.balance import balanced_ranks
from looped_recipes.engine.checkpoint import load_checkpoint, save_checkpoint
from looped_recipes.engine.distributed import (
    bare,
    distribute,
    fill_missing_gradients,
    gradients_may_be_missing,
    make_accelerator,
    to_shards,
    without_sync,
)
from looped_recipes.engine.export import export_model
from looped_recipes.engine.optimizers import (
    apply_step_settings,
    build_optimizers,
    set_learning_rates,
)
from looped_recipes.engine.saving import CheckpointError
from looped_recipes.engine.tensor_parallel import add_up_gradients, clip_gradients, data_rank
from looped_recipes.settings.recipe import OptimizerConfig, ScheduleConfig
from modeling_looped.samplers import depths_of_step, initial_state_of_step

from .helpers import random_ids, tiny_model


ROOT = Path(__file__).resolve().parent.parent
ROWS, LENGTH, TOTAL_STEPS = 8, 12, 12


def train(
    steps: list[int],  # first, last + 1
    model: dict | None = None,
    optimizer: dict | None = None,
    sampler: str = "fixed",
    backprop_loops: int | None = None,
    fsdp: bool | None = False,  # None: as the launcher says
    units_of_accelerate: bool = False,
    blocks_as_units: bool = False,
    mesh: tuple[int, ...] | None = None,  # replicas, shards of each, and parts of their matrices
    micro_batches: int = 1,
    load: str | None = None,
    save: str | None = None,
    in_background: bool = False,  # saving
    export: str | None = None,
    disk_full_on: int | None = None,  # the process whose disk is full when it saves
) -> dict:
    """Losses of the steps, how often FSDP2 gathered weights in them, the weights after them, and what every process
    said if it could not save."""
    if fsdp is not None:
        os.environ.update(ACCELERATE_USE_FSDP=str(fsdp).lower(), **FSDP_SETTINGS)
        has_units = units_of_accelerate or blocks_as_units
        os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP" if has_units else "NO_WRAP"
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = str(mesh is not None).lower()
        if mesh is not None:
            for name, size in zip(("DP_REPLICATE", "DP_SHARD", "TP"), (*mesh, 1)):
                os.environ[f"PARALLELISM_CONFIG_{name}_SIZE"] = str(size)
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    if torch.distributed.is_initialized():
        PartialState().distributed_type = DistributedType.MULTI_CPU  # as before FSDP2
    looped = tiny_model(**(model or {})).train()
    settings = OptimizerConfig(**(optimizer or {}))
    missing = gradients_may_be_missing(looped.config, sampler != "fixed", backprop_loops)
    accelerator = make_accelerator(missing, cpu=True)
    if units_of_accelerate:
        wrapped, *optimizers = accelerator.prepare(looped, *build_optimizers(looped, settings, TOTAL_STEPS))
    else:
        wrapped, optimizers = distribute(accelerator, looped, lambda m: build_optimizers(m, settings, TOTAL_STEPS))
    is_sharded = all(isinstance(parameter, DTensor) for parameter in wrapped.parameters())
    assert fsdp is None or is_sharded == (fsdp and accelerator.num_processes > 1)
    assert accelerator.is_fsdp2 == is_sharded
    schedule = ScheduleConfig("wsd", warmup_steps=1, decay_fraction=0.5)
    if load is not None:
        evaluate(wrapped)
        assert load_checkpoint(load, wrapped, optimizers)["step"] == steps[0]

    losses, gathers = [], Gathers()
    for step in range(*steps):
        ids = random_ids(ROWS, LENGTH, seed=step)
        depths = depths_of_step(sampler, looped.config.num_loops, 0, step, range(ROWS))
        index, world = data_rank(accelerator)
        rows = balanced_ranks(depths, world)[index]
        total = torch.zeros(())
        for part in range(micro_batches):
            mine = rows[part::micro_batches]
            noise = None
            if looped.config.state_init == "normal":
                noise = initial_state_of_step(looped, 0, step, mine, LENGTH)
            apart = nullcontext() if part == micro_batches - 1 else without_sync(accelerator, wrapped)
            with apart, gathers:
                loss = wrapped(
                    ids[mine],
                    labels=ids[mine],
                    num_loops=[depths[row] for row in mine],
                    backprop_loops=backprop_loops,
                    initial_state=noise,
                    num_items_in_batch=ROWS * (LENGTH - 1) // world,
                    output_logits=False,
                ).loss
                accelerator.backward(loss)
            total += loss.detach()
        losses.append(accelerator.reduce(total, reduction="mean").item())
        fill_missing_gradients(optimizers)
        add_up_gradients(bare(wrapped))
        clip_gradients(wrapped, 1.0)
        apply_step_settings(optimizers, step, settings, TOTAL_STEPS)
        set_learning_rates(optimizers, schedule, TOTAL_STEPS, step)
        for each in optimizers:
            each.step()
            each.zero_grad()
    error = None
    if save is not None:
        evaluate(wrapped)
        with full_disk(0) if disk_full_on == accelerator.process_index else nullcontext():
            try:
                background = Background() if in_background else None
                save_checkpoint(save, steps[1], wrapped, optimizers, extra={}, background=background)
                if background is not None:
                    background.wait()
            except CheckpointError as failure:
                error = str(failure)
    if export is not None:
        export_model(export, wrapped)
    to_shards(wrapped)
    weights = {name: whole(parameter) for name, parameter in bare(wrapped).named_parameters()}
    said = {"errors": gather_object([error]), "is_sharded": is_sharded}
    return {"losses": losses, "gathers": gathers.count, "weights": weights, **said}


class Gathers(TorchDispatchMode):
    """Counts how often the weights of a unit of FSDP2 are gathered."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator.overloadpacket is torch.ops.c10d._allgather_base_
        return operator(*args, **(kwargs or {}))


@torch.no_grad()
def evaluate(model):
    """Which under FSDP2 leaves the weights gathered: a checkpoint must not mind."""
    model(random_ids(1, LENGTH))


# as recipes/accelerate/fsdp2.yaml has them, but that units are freed after they ran
FSDP_SETTINGS = {
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LoopedBlock",
}


@contextmanager
def full_disk(room: int):
    """A disk that takes `room` more bytes of a checkpoint's tensors."""
    create_stream = FileSystem.create_stream

    class Stream:
        def __init__(self, stream):
            self.stream = stream

        def write(self, data):
            nonlocal room
            room -= len(data)
            if room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.stream.write(data)

        def __getattr__(self, name):
            return getattr(self.stream, name)

    @contextmanager
    def create(self, path, mode):
        with create_stream(self, path, mode) as stream:
            yield Stream(stream) if "w" in mode else stream

    with mock.patch.object(FileSystem, "create_stream", create):
        yield


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def launch(folder: Path, tasks: list[dict], num_processes: int = 2, timeout: int = 240) -> list[dict]:
    """What `train` returns for each of `tasks` on `num_processes` new processes."""
    (folder / "tasks.json").write_text(json.dumps(tasks))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(num_processes):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{key: str(value) for key, value in {**ranks, **where}.items()}}
        command = [sys.executable, "-m", "tests.distributed_worker", str(folder / "tasks.json")]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=timeout)[0])
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return torch.load(folder / "tasks.pt")


def main(path: str):
    torch.set_num_threads(1)
    results = [train(**task) for task in json.loads(Path(path).read_text())]
    if torch.distributed.get_rank() == 0:
        torch.save(results, Path(path).with_suffix(".pt"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
