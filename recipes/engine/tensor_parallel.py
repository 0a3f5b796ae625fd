"""Tensor parallelism with FSDP2: the matrices of blocks and the head are split over some processes, by the plan of the
model that transformers uses for inference. All processes that share a model read the same rows.

The parts are sharded over data-parallel processes like all other weights. Modules that work only on the heads of one
process (norms of queries and keys, value embeddings) are whole on all processes, and their gradients are summed once
a step.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_
from transformers import PreTrainedModel

from looped_recipes.common.measures import by_mesh, total_norm
from looped_recipes.settings.recipe import RecipeError
from modeling_looped import LoopedConfig
from modeling_looped.compatibility import look_up
from modeling_looped.config_plans import existing_sections


SUMMED = "replicated_with_grad_allreduce"  # transformers' name for whole weights whose gradients are summed


class DataRank(NamedTuple):
    """The share of the rows of a step that a process reads: part `index` of `world` parts."""

    index: int
    world: int


def split_over(accelerator: Accelerator) -> int:
    """Return the number of processes that a model is split over."""
    config = accelerator.parallelism_config
    return 1 if config is None else config.tp_size


def data_rank(accelerator: Accelerator) -> DataRank:
    """Return this process's share of the rows. Processes that share a model have neighbouring ranks and the same
    share."""
    size = split_over(accelerator)
    return DataRank(accelerator.process_index // size, accelerator.num_processes // size)


split_as_planned = look_up("transformers.distributed.tensor_parallel", "apply_tensor_parallelism")
settings_of_split = look_up("transformers.distributed", "DistributedConfig")


def can_split() -> bool:
    """Return whether transformers can split a model that is already built."""
    return None not in (split_as_planned, settings_of_split) and hasattr(PreTrainedModel, "_resolve_parallel_plans")


def split(model: nn.Module, mesh: DeviceMesh):
    """Split the matrices of a model, in place, before it is sharded."""
    check_heads(model.config, mesh.size())
    plan = model._resolve_parallel_plans(settings_of_split(tp_size=mesh.size()))[0]
    here = dict(model.named_modules()).keys() | dict(model.named_parameters()).keys()  # a tied head has no weight here
    split_as_planned(model, mesh, {name: style for name, style in plan.items() if style != SUMMED and name in here})
    model.tie_weights()
    own_heads = {name for name, style in plan.items() if style == SUMMED}
    model.known_in_part = [name for name, _ in model.named_parameters() if name in own_heads]
    model.mesh_of_parts = mesh


def check_heads(config: LoopedConfig, size: int):
    """Raise an error if the split would cut heads: each head must be on one process."""
    for section in existing_sections(config):
        heads = config.block_sizes(section).num_key_value_heads
        if heads % size:
            raise RecipeError(
                f"parallelism_config_tp_size={size} does not divide the {heads} key/value heads of the {section}: "
                "choose one that does"
            )


def add_up_gradients(model: nn.Module):
    """Sum, over the processes that share a model, the gradients that each computes only from the heads it has. Called
    after the backward passes of a step."""
    mesh = getattr(model, "mesh_of_parts", None)
    if mesh is None:
        return
    for name in model.known_in_part:
        gradient = model.get_parameter(name).grad
        if gradient is not None:
            dist.all_reduce(gradient.to_local(), group=mesh.get_group())


def clip_gradients(model: nn.Module, limit: float) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `limit`. Return the norm before scaling."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = total_norm(parameter.grad for parameter in parameters)
    for each in by_mesh(parameters):
        clip_grads_with_norm_(each, limit, norm)
    return norm
