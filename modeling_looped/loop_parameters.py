"""Parameters of single loops, beside the weights that all loops share.

They are stacked, [sets, ...]: the t-th set belongs to loop t, and all deeper loops take the last set. So the stacked
parameter has a gradient at any depth, and rows at different loops read their sets by one lookup. `loop_set` is the
index of the set to take: an int if it is the same for all rows, else a tensor [rows].
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .depth import one_or_rows


DELTA = "_delta"


class LoopDelta(nn.Module):
    """B_t A_t x, which loop t adds to a linear layer's W x (relaxed recursion, Bae et al.); with a bias, b_t too.

    B starts at zero and A like the weight of nn.Linear, so that all loops of a new model are equal.
    """

    is_by_loop = True

    def __init__(self, layer: nn.Linear, rank: int, num_sets: int):
        super().__init__()
        self.a = nn.Parameter(torch.empty(num_sets, rank, layer.in_features))
        self.b = nn.Parameter(torch.empty(num_sets, layer.out_features, rank))
        self.bias = nn.Parameter(torch.empty(num_sets, layer.out_features)) if layer.bias is not None else None

    def init_parameters(self):
        bound = self.a.shape[-1] ** -0.5
        init.uniform_(self.a, -bound, bound)
        init.zeros_(self.b)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, loop_set: int | torch.Tensor) -> torch.Tensor:
        """x: [rows, length, in]."""
        a, b, bias = self.a[loop_set], self.b[loop_set], None if self.bias is None else self.bias[loop_set]
        if a.ndim == 2:
            return F.linear(F.linear(x, a), b, bias)
        y = x @ a.mT @ b.mT
        return y if bias is None else y + bias.unsqueeze(1)


class LoopDeltas(nn.ModuleDict):
    """The deltas of the linear layers of `module`, under other names than the layers, since PEFT searches by name."""

    def __init__(self, module: nn.Module, rank: int, num_sets: int):
        layers = {name: layer for name, layer in module.named_children() if isinstance(layer, nn.Linear)}
        named = {name: layer for name, layer in layers.items() if name.endswith("_proj")}
        super().__init__({name + DELTA: LoopDelta(layer, rank, num_sets) for name, layer in named.items()})

    def of(self, name: str) -> LoopDelta | None:
        """Return the delta of the layer of this name, if it has one."""
        return self._modules.get(name + DELTA)  # pyrefly: ignore[bad-return]


def layer_of_delta(path: str) -> str:
    """Return the path of the linear layer to which the delta at this path belongs."""
    return path.replace("loop_deltas.", "").removesuffix(DELTA)


def parameters_by_loop(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters inside a module that are stacked over loops, [sets, ...]."""
    stacked = (part for part in module.modules() if getattr(part, "is_by_loop", False))
    return [parameter for part in stacked for parameter in part.parameters(recurse=False)]


def count_in_a_loop(trunk) -> int:
    """Count the parameters of the core that one loop applies to each token: one of the per-loop sets, and no
    modulation, which makes factors from an embedding of the time once per sequence.

    Looks at no shapes: of a sharded model, whose parameters here are flat or empty, it counts what is here.
    """
    stacked = {id(parameter) for parameter in parameters_by_loop(trunk.core)}
    shared = of_all_loops = 0
    for name, parameter in trunk.core.named_parameters():
        if id(parameter) in stacked:
            of_all_loops += parameter.numel()
        elif "modulation" not in name.split("."):
            shared += parameter.numel()
    return shared + of_all_loops // trunk.config.num_loop_sets


def select_set(loop: int | list[int], num_sets: int, device) -> int | torch.Tensor:
    """Return the index of the set that loop t takes; one per row, [rows], if rows are at different loops."""
    return one_or_rows(lambda t: min(t, num_sets - 1), loop, device)
