"""Tensor parallelism beside FSDP2: the matrices of blocks and the head are split over some processes, by the plan of
the model that transformers follows for inference, and all processes that share a model read the same rows.

The parts are sharded by data as any other weight is. What works on a process's own heads alone (norms of queries and
keys, value embeddings) is whole on all of them, and its gradient is added up once a step.
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
from modeling_looped.borrowed import look_up
from modeling_looped.config_plans import existing_sections


SUMMED = "replicated_with_grad_allreduce"  # transformers' name for it


class DataRank(NamedTuple):
    """Which share of the rows of a step a process reads."""

    index: int
    world: int


def split_over(accelerator: Accelerator) -> int:
    """How many processes a model is split over."""
    config = accelerator.parallelism_config
    return 1 if config is None else config.tp_size


def data_rank(accelerator: Accelerator) -> DataRank:
    """This process's share of the rows: processes that share a model have neighbouring ranks and read the same."""
    size = split_over(accelerator)
    return DataRank(accelerator.process_index // size, accelerator.num_processes // size)


split_as_planned = look_up("transformers.distributed.tensor_parallel", "apply_tensor_parallelism")
settings_of_split = look_up("transformers.distributed", "DistributedConfig")


def can_split() -> bool:
    """Whether transformers can split a model that is already made."""
    return None not in (split_as_planned, settings_of_split) and hasattr(PreTrainedModel, "_resolve_parallel_plans")


def split(model: nn.Module, mesh: DeviceMesh):
    """Split the matrices of a model, in place, before it is sharded."""
    check_heads(model.config, mesh.size())
    plan = model._resolve_parallel_plans(settings_of_split(tp_size=mesh.size()))[0]
    here = dict(model.named_modules()).keys() | dict(model.named_parameters()).keys()  # a tied head has no own weight
    split_as_planned(model, mesh, {name: style for name, style in plan.items() if style != SUMMED and name in here})
    model.tie_weights()
    own_heads = {name for name, style in plan.items() if style == SUMMED}
    model.known_in_part = [name for name, _ in model.named_parameters() if name in own_heads]
    model.mesh_of_parts = mesh


def check_heads(config: LoopedConfig, size: int):
    """An error if heads would have to be cut: each is on one process as a whole."""
    for section in existing_sections(config):
        heads = config.block_sizes(section).num_key_value_heads
        if heads % size:
            raise RecipeError(
                f"parallelism_config_tp_size={size} does not divide the {heads} key/value heads of the {section}: "
                "choose one that does"
            )


def add_up_gradients(model: nn.Module):
    """Sum, over processes that share a model, the gradients that each computes from its own heads alone. After the
    backward passes of a step."""
    mesh = getattr(model, "mesh_of_parts", None)
    if mesh is None:
        return
    for name in model.known_in_part:
        gradient = model.get_parameter(name).grad
        if gradient is not None:
            dist.all_reduce(gradient.to_local(), group=mesh.get_group())


def clip_gradients(model: nn.Module, limit: float) -> torch.Tensor:
    """Scale all gradients so that their norm is `limit` at most; the norm before."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = total_norm(parameter.grad for parameter in parameters)
    for each in by_mesh(parameters):
        clip_grads_with_norm_(each, limit, norm)
    return norm
