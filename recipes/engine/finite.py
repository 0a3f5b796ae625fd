"""Numbers that are none: a run stops before they get into a checkpoint or a saved model.

On a CPU, and where such steps may be left out, also before they get into the weights; else a GPU would be waited for
in every step (step.py), and the run ends one step later, with nothing written in between.
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
    """A run whose loss, gradients, weights or validation are no longer numbers."""


def first_nonfinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor that holds an infinity or a NaN. One synchronisation, if there is none."""
    named = [(name, local(tensor)) for name, tensor in tensors if tensor.is_floating_point()]
    named = [(name, tensor) for name, tensor in named if tensor.numel()]
    if not named:
        return None
    # counts of steps lie on the CPU, beside moments on a GPU
    device = next((tensor.device for _, tensor in named if tensor.device.type != "cpu"), "cpu")
    are_finite = torch.stack([tensor.isfinite().all().to(device) for _, tensor in named])
    if are_finite.all():
        return None
    return named[are_finite.tolist().index(False)][0]


def nonfinite_part(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str | None:
    """What of this process's weights and moments is not finite."""
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
    """What of it lies on this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
