"""Infinities and NaN: a run stops before they get into a checkpoint or a saved model.

On a CPU, and if such steps may be skipped, it also stops before they get into the weights. Otherwise this check would
have to wait for the GPU in every step (step.py), so the run ends one step later, with nothing written in between.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from looped_recipes.common.errors import CommandError

from .distributed import bare, to_shards


ADVICE = (
    "Lower optimizer.lr (training.resume=changed goes on with it), leave such steps out "
    "(training.skip_nonfinite_steps), or control the state (norm_penalty, inter_loop_norm, injection, "
    "residual_scaling) in another run."
)


class Divergence(CommandError):
    """The loss, gradients, weights or validation loss of a run are no longer finite."""


def first_nonfinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first tensor with an infinity or a NaN; None, after one synchronisation, if all are
    finite."""
    named = [(name, local(tensor)) for name, tensor in tensors if tensor.is_floating_point()]
    named = [(name, tensor) for name, tensor in named if tensor.numel()]
    if not named:
        return None
    # step counts are on the CPU even if the moments are on a GPU
    device = next((tensor.device for _, tensor in named if tensor.device.type != "cpu"), "cpu")
    are_finite = torch.stack([tensor.isfinite().all().to(device) for _, tensor in named])
    if are_finite.all():
        return None
    return named[are_finite.tolist().index(False)][0]


def nonfinite_part(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str | None:
    """Describe the first weight or moment of this process that is not finite; None if all are finite."""
    to_shards(model)
    parameters = dict(bare(model).named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = first_nonfinite(parameters.items())
    if found is not None:
        return f"the weight {found}"
    for optimizer in optimizers:
        moments = (
            (f"{kind} of {names.get(id(parameter), 'a parameter')}", value)
            for parameter, state in optimizer.state.items()
            for kind, value in state.items()
            if isinstance(value, torch.Tensor)
        )
        found = first_nonfinite(moments)
        if found is not None:
            return f"the optimizer's {found}"
    return None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is stored on this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
