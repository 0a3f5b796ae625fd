"""Set up accelerate for looped models, for one process or many.

Under FSDP2 the whole model is one unit: its weights are gathered once per step, not once per layer and loop, and kept
until the last backward pass has used them. Gradients, optimizer states and the weights between steps are sharded.
Looped models have few weights for their compute, and with one unit processes whose rows run to different depths never
wait for each other inside a loop, where they would gather different layers. If the weights do not fit into one GPU,
fsdp_auto_wrap_policy makes every block a unit, which is gathered and reduced in every loop.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import transformers
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    get_int_from_env,
    patch_environment,
)
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from looped_recipes.settings.paths import INSTALLED
from looped_recipes.settings.recipe import Recipe, RecipeError

from .tensor_parallel import can_split, split, split_over


LAUNCHES = INSTALLED / "accelerate"  # files of settings for accelerate launch
MESH = ("dp_replicate", "dp_shard", "tp")  # the mesh dimensions that training supports
# variables in which launchers pass the number of processes: torch's, and those of MPI that accelerate reads
SIZES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]


def has_apple_gpu() -> bool:
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type == "mps"


def make_accelerator(
    find_unused_parameters: bool = False, timeout_minutes: float | None = None, **kwargs
) -> Accelerator:
    """Make the accelerator that `accelerate launch` configured.

    timeout_minutes: how long processes wait for each other; None is torch's default.

    Without GPUs accelerate would silently use DDP instead of FSDP2, or start independent runs in one folder; this
    function prevents both. Apple's GPUs are not used: losses are added up in float64, which they do not support.
    """
    ddp = DistributedDataParallelKwargs(find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True)
    handlers: list[KwargsHandler] = [ddp]
    if timeout_minutes is not None:
        handlers.append(InitProcessGroupKwargs(timeout=timedelta(minutes=timeout_minutes)))
    _check_launcher()
    num_processes = get_int_from_env(SIZES, 1)
    if has_apple_gpu() or num_processes > 1 and not torch.accelerator.is_available():
        kwargs["cpu"] = True
    has_mesh = is_set("ACCELERATE_USE_PARALLELISM_CONFIG")
    if has_mesh:
        _check_mesh(ParallelismConfig(), is_set("ACCELERATE_USE_FSDP"), num_processes)
    # accelerate's check of a mesh does not support CPUs
    with patch_environment(ACCELERATE_USE_PARALLELISM_CONFIG="false") if kwargs.get("cpu") else nullcontext():
        accelerator = Accelerator(kwargs_handlers=handlers, **kwargs)
    _check_options(accelerator)
    if accelerator.num_processes != num_processes:
        raise RecipeError(
            f"{num_processes} processes were launched, but they do not find each other: accelerate counts "
            f"{accelerator.num_processes}; see `accelerate env` and {LAUNCHES}"
        )
    if is_set("ACCELERATE_USE_FSDP"):
        plugin = getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
        _check_plugin(plugin)
        if accelerator.distributed_type == DistributedType.MULTI_CPU:
            # set in both: accelerate copies the value of PartialState to its own state whenever that is read
            PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
            accelerator.state.fsdp_plugin = plugin
            if has_mesh:
                accelerator.state.parallelism_config = ParallelismConfig()
                accelerator.state.device_mesh = accelerator.parallelism_config.get_device_mesh("cpu")
    return accelerator


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def distribute(
    accelerator: Accelerator, model: nn.Module, build: Callable[[nn.Module], list[torch.optim.Optimizer]]
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Place or shard the model. Return it with the optimizers that `build` makes for it."""
    if not accelerator.is_fsdp2:
        model, *optimizers = accelerator.prepare(model, *build(model))
        return model, optimizers
    # accelerate would wrap head and norm separately, and match parameters by address, but all empty shards share one
    return shard(accelerator, model), [accelerator.prepare_optimizer(optimizer) for optimizer in build(model)]


def shard(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard `model` in place: every parameter becomes a DTensor."""
    plugin = accelerator.state.fsdp_plugin
    model = model.to(accelerator.device)
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, src=0)
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is not None:
        if split_over(accelerator) > 1:
            split(model, mesh["tp"])
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    is_unit = fsdp2_prepare_auto_wrap_policy(plugin, model) or (lambda module: False)
    # no mp_policy: autocast keeps the residual stream in fp32, as on one process
    for unit in [*filter(is_unit, model.modules()), model]:
        gather_again = plugin.reshard_after_forward if unit is not model else None
        fully_shard(unit, mesh=mesh, offload_policy=plugin.cpu_offload, reshard_after_forward=gather_again)
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True)
    model.forward = with_autocast(accelerator, model.forward)
    return model


def check_units(accelerator: Accelerator, recipe: Recipe):
    """Refuse settings that conflict with one FSDP unit per block: all processes gather each block in every loop."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.auto_wrap_policy is None:
        return
    if recipe.depth.per != "batch":
        raise RecipeError(
            f"with depth.per={recipe.depth.per!r} processes run different numbers of loops, and would wait for each "
            "other's blocks for ever: set fsdp_auto_wrap_policy to NO_WRAP, or depth.per to 'batch'"
        )
    if recipe.training.gradient_checkpointing == "loops":
        raise RecipeError(
            "training.gradient_checkpointing='loops' computes blocks again that fsdp_auto_wrap_policy would have to "
            "gather by themselves: set it to true, or fsdp_auto_wrap_policy to NO_WRAP"
        )


def check_split(accelerator: Accelerator, recipe: Recipe):
    """Refuse, with tensor parallelism, options that need whole matrices or are untested with parts of them."""
    if split_over(accelerator) == 1:
        return
    if not can_split():
        raise RecipeError(
            f"parallelism_config_tp_size={split_over(accelerator)}: transformers {transformers.__version__} cannot "
            "split a model that is already made; 5.23 can"
        )
    training = recipe.training
    for name in ("compile", "cross_entropy", "kernels", "float8"):
        if value := getattr(training, name):
            raise RecipeError(
                f"training.{name}={value!r} does not go with parallelism_config_tp_size={split_over(accelerator)}, "
                "which splits matrices over processes: leave one of them out"
            )


def with_autocast(accelerator: Accelerator, forward: Callable) -> Callable:
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        with accelerator.autocast():
            return forward(*args, **kwargs)

    return wrapper


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside DDP's wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


@contextmanager
def without_sync(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """For all passes of a step but the last: each process adds up its gradients, and under FSDP2 the unit of the whole
    model, but not those of blocks, keeps its gathered weights for the next pass."""
    with accelerator.no_sync(model):
        if isinstance(model, FSDPModule):
            model.set_reshard_after_backward(False, recurse=False)
        yield
        if isinstance(model, FSDPModule):
            model.set_reshard_after_backward(True, recurse=False)


def rebuilds_buckets(model: nn.Module) -> bool:
    """Return whether DDP regroups gradients after its first backward pass in a way that changes results: the rounding
    of a sum over more than two processes depends on the buckets."""
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    return is_ddp and torch.distributed.get_world_size() > 2 and not model.find_unused_parameters


def bare_optimizer(optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def to_shards(model: nn.Module):
    """Under FSDP2, free the gathered weights that an evaluation leaves, so that the parameters are again the shards
    that the optimizers update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gradients_may_be_missing(model_config, sampled_depth: bool, backprop_loops: int | None) -> bool:
    """Return whether a backward pass may leave a parameter without gradient on any process: DDP must then search for
    such parameters, or it waits for their gradients.

    sampled_depth: whether depths differ between steps or rows.
    """
    shallow = sampled_depth or model_config.num_loops == 1 or backprop_loops == 1
    between_loops = (
        model_config.loop_damping
        or model_config.loop_change_gate
        or model_config.inter_loop_norm != "none"
        or (model_config.injection == "residual_all" and model_config.injection_norm)
    )
    return (
        # without an injection the embedding enters only before the first loop, which then may have no gradients
        (model_config.injection == "none" and backprop_loops is not None)
        or (model_config.exit_gate != "none" and model_config.loop_loss in ("terminal", "per_loop", "last_third"))
        or model_config.loop_loss == "gate"
        or (between_loops and shallow)
        or (model_config.readout_norm == "final_only" and sampled_depth)
        or model_config.readout_norm in ("final_raw", "final_alpha")  # if no loop before the last is read out
    )


def fill_missing_gradients(optimizers: list[torch.optim.Optimizer]):
    """Set missing gradients to zero, before clipping, so that the optimizers do the same whether a single process or
    only some of several processes had no gradient."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


def _check_launcher():
    """Refuse DeepSpeed, which takes one model with one optimizer, and a launch for several processes without
    `--multi_gpu` or FSDP: accelerate starts one process then, but sets MASTER_ADDR."""
    if is_set("ACCELERATE_USE_DEEPSPEED"):
        raise RecipeError(
            "ACCELERATE_USE_DEEPSPEED=true: recipes do not train with DeepSpeed; FSDP2 shares out what ZeRO-3 does: "
            f"start from {LAUNCHES / 'fsdp2.yaml'}"
        )
    launched, address = "ACCELERATE_MIXED_PRECISION" in os.environ, os.environ.get("MASTER_ADDR")
    if launched and address and not any(name in os.environ for name in SIZES):
        raise RecipeError(
            f"accelerate launch was asked for several processes, but started one: start from {LAUNCHES / 'ddp.yaml'}, "
            "whose processes also run on CPUs, or launch with --num_processes 1 (if that is what you did, unset "
            f"MASTER_ADDR, which is {address!r})"
        )


def _check_options(accelerator: Accelerator):
    """Refuse options of accelerate that interfere: accumulation divides gradients, dynamo wraps the whole model."""
    if (steps := accelerator.gradient_accumulation_steps) != 1:
        raise RecipeError(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}: a step has training.rows_per_step rows, in parts of "
            "training.micro_batch_size: set these, and unset the variable"
        )
    if (backend := accelerator.state.dynamo_plugin.backend) != DynamoBackend.NO:
        raise RecipeError(
            f"dynamo_backend {backend.value} compiles the whole model, with all its loops: leave it out, and set "
            "training.compile, which compiles a block once for all of them"
        )


def _check_mesh(config: ParallelismConfig, is_fsdp: bool, num_processes: int):
    others = {name: getattr(config, f"{name}_size") for name in ("cp", "sp")}
    others = {f"parallelism_config_{name}_size": size for name, size in others.items() if size > 1}
    if others:
        raise RecipeError(
            f"{others} would be dropped: training shards by data (parallelism_config_dp_replicate_size and "
            f"_dp_shard_size, see {LAUNCHES / 'hsdp.yaml'}) and splits matrices (parallelism_config_tp_size)"
        )
    if config.tp_size > 1 and (not is_fsdp or config.dp_shard_size < 2):
        raise RecipeError(
            f"parallelism_config_tp_size={config.tp_size} goes with FSDP2 and parallelism_config_dp_shard_size of 2 "
            f"or more, not with {'FSDP2' if is_fsdp else 'DDP'} and {config.dp_shard_size}: start from "
            f"{LAUNCHES / 'tensor_parallel.yaml'}"
        )
    sizes = {f"parallelism_config_{name}_size": getattr(config, f"{name}_size") for name in MESH}
    product = math.prod(sizes.values())
    if num_processes > 1 and product != num_processes:
        given = " times ".join(f"{name}={size}" for name, size in sizes.items())
        raise RecipeError(
            f"{num_processes} processes were launched, but {given} is {product}: change the sizes "
            "in a copy of the launch file together with --num_processes"
        )


def _check_plugin(plugin: FullyShardedDataParallelPlugin):
    advice = f"start from {LAUNCHES / 'fsdp2.yaml'}"
    if plugin.fsdp_version != 2:
        raise RecipeError(f"fsdp_version={plugin.fsdp_version} is not supported, only 2; {advice}")
    if plugin.activation_checkpointing:
        raise RecipeError(f"use training.gradient_checkpointing instead of fsdp_activation_checkpointing; {advice}")
    if plugin.cpu_ram_efficient_loading:
        raise RecipeError(f"every process makes the model: set fsdp_cpu_ram_efficient_loading to false; {advice}")
