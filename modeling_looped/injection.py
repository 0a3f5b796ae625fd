"""How the state of the last loop meets the embedded input at the start of a loop.

`forward` returns the stream that enters the first core layer. `before_layer` returns the input of core layer l and the
state that its queries come from (None: the same input). `first` says whether this is loop 0: a bool, or a bool tensor
[rows, 1, 1] if rows are at different loops; `looks_at_first` says whether the result depends on it. `normed` applies
`injection_norm` to the stream that combines state and input.
"""

import math

import torch
from torch import nn
from transformers import initialization as init

from .cpu import project
from .layers import linear
from .norms import block_norm
from .tensors import wide_dtype


def where_first(first, if_first, otherwise):
    """Return `if_first` in rows at loop 0, `otherwise` in all other rows, on the device of `if_first`."""
    if isinstance(first, bool):
        return if_first if first else otherwise
    return torch.where(first.to(if_first.device), if_first, otherwise.to(if_first.device))


class LoopChangeGate(nn.Module):
    """H_{t+1} = h_t + g (core(h_t) - h_t) from the second loop on, with one learned factor per channel.

    g starts at 0, so that loops after the first do not change the state: a model that was trained with one loop starts
    as the same function at every depth. g = 1 is the loop without a gate.
    """

    def __init__(self, config):
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(config.state_size))

    def init_parameters(self):
        init.zeros_(self.factor)

    def forward(self, before, after, first):
        """before: h_t; after: core(h_t). first: as for injections."""
        if first is True:
            return after
        return where_first(first, after, before + self.factor.to(after.dtype) * (after - before))


class Injection(nn.Module):
    """x = h"""

    looks_at_first = False

    def __init__(self, config):
        super().__init__()
        self.norm = block_norm(config, config.state_size) if config.injection_norm else None

    def normed(self, x):
        return x if self.norm is None else self.norm(x)

    def forward(self, state, embedded):
        return state

    def before_layer(self, layer: int, x, state, first) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x, None


class AddInjection(Injection):
    """x = h + e"""

    def forward(self, state, embedded):
        return self.normed(state + embedded)


class ConcatInjection(Injection):
    """x = W [h; e] (Huginn)"""

    def __init__(self, config):
        super().__init__(config)
        self.proj = linear(config.state_size + config.hidden_size, config.state_size, "adapter")

    def forward(self, state, embedded):
        return self.normed(project(self.proj, torch.cat([state, embedded], dim=-1)))


class DiagonalInjection(Injection):
    """x = exp(-dt exp(a)) h + dt B e, dt = softplus(b): a decay below 1 for all parameter values (Parcae)."""

    def __init__(self, config):
        super().__init__(config)
        self.log_rate = nn.Parameter(torch.zeros(config.state_size))
        self.dt_bias = nn.Parameter(torch.zeros(config.state_size))
        self.input_proj = linear(config.hidden_size, config.state_size, "identity")

    def init_parameters(self):
        init.zeros_(self.log_rate)
        # softplus of this is ln sqrt 5, so that the decay starts at 1 / sqrt 5
        init.constant_(self.dt_bias, math.log(math.sqrt(5) - 1))

    def decay_and_step(self):
        wide = wide_dtype(self.dt_bias)
        step = nn.functional.softplus(self.dt_bias.to(wide))
        return torch.exp(-step * torch.exp(self.log_rate.to(wide))), step

    def forward(self, state, embedded):
        decay, step = (factor.to(state.dtype) for factor in self.decay_and_step())
        return self.normed(decay * state + step * project(self.input_proj, embedded))


class ResidualAllInjection(Injection):
    """The stream restarts at e; h is added before every layer, from loop 1 on (FLT_res, which then norms the sum)."""

    looks_at_first = True

    def forward(self, state, embedded):
        return embedded

    def before_layer(self, layer: int, x, state, first) -> tuple[torch.Tensor, torch.Tensor | None]:
        if first is True:
            return x, None
        return where_first(first, x, self.normed(x + state.to(x.device))), None


class AttentionAllInjection(ResidualAllInjection):
    """The stream restarts at e; every layer takes its queries from h, from the second loop on (FLT)."""

    def before_layer(self, layer: int, x, state, first) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x, where_first(first, x, state)


class AttentionFirstInjection(ResidualAllInjection):
    """The stream restarts at e; the first layer takes its queries from h, which at loop 0 is e itself (LT_ai).
    They do not see the loop embedding, which is added to the stream."""

    looks_at_first = False

    def before_layer(self, layer: int, x, state, first) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x, state if layer == 0 else None


INJECTIONS = {
    "none": Injection,
    "add": AddInjection,
    "concat": ConcatInjection,
    "diagonal": DiagonalInjection,
    "residual_all": ResidualAllInjection,
    "attention_first": AttentionFirstInjection,
    "attention_all": AttentionAllInjection,
}
