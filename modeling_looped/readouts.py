"""Readouts, which turn a state into the head's input: those that `readout_norm` selects, besides a block's norm."""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .depth import one_or_rows
from .norms import LoopedNorm, block_norm
from .tensors import at_least_fp32, on_device, wide_dtype


def readout_norm(config) -> nn.Module | None:
    """Return the norm of the readout. Shared inter-loop norms, normed exit gates and coda inputs use it too."""
    if not config.has_readout_norm:
        return None
    if config.readout_norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, config.rms_norm_eps, elementwise_affine=config.norm_affine)
    return TaperNorm(config) if config.readout_norm == "taper" else block_norm(config)


def has_reached(trained_depth: int, depth: int | list[int] | torch.Tensor, device) -> bool | torch.Tensor:
    """Whether `depth` (for all rows, per row, or per token) is the trained depth or more: one bool if all agree, else
    a mask that broadcasts over [rows, length, hidden]."""
    if torch.is_tensor(depth):
        return (depth >= trained_depth).unsqueeze(-1)
    return one_or_rows(lambda loops: loops >= trained_depth, depth, device, 3)


class AlphaReadout(nn.Module):
    """x (s_ref / s)^(1 - alpha) with s = rms(x), so that the result has the scale s_ref^(1 - alpha) s^alpha: it is
    independent of the state's scale at alpha = 0 and keeps that scale at alpha = 1, where this is the raw readout.

    s_ref is learned, and so is alpha = sigmoid(a) unless it is fixed. There may be several of both: loop k takes the
    k-th, and deeper loops take the last.
    """

    def __init__(self, config):
        super().__init__()
        self.alpha, self.eps, self.count = config.readout_alpha, config.rms_norm_eps, config.num_readout_alphas
        self.log_scale = nn.Parameter(torch.zeros(self.count))
        self.logit = nn.Parameter(torch.empty(self.count)) if config.learns_alpha else None

    def init_parameters(self):
        init.zeros_(self.log_scale)
        if self.logit is not None:
            init.constant_(self.logit, math.log(self.alpha / (1 - self.alpha)))

    def forward(self, x, depth: int | list[int] | torch.Tensor):
        wide = wide_dtype(x)
        log_rms = x.to(wide).square().mean(-1, keepdim=True).clamp(min=self.eps**2).log() / 2
        exponent = 1 - self.alpha if self.logit is None else torch.sigmoid(-self.values_at(depth, self.logit.to(wide)))
        return (x * (exponent * (self.values_at(depth, self.log_scale.to(wide)) - log_rms)).exp()).to(x.dtype)

    def values_at(self, depth: int | list[int] | torch.Tensor, values):
        """Select the entries of `values` [count] for loop `depth`, to broadcast over [rows, length, hidden]."""
        if isinstance(depth, int):
            return values[min(depth, self.count) - 1]
        depths = depth if torch.is_tensor(depth) else on_device(depth, values.device)[:, None]
        return values[depths.clamp(max=self.count) - 1].unsqueeze(-1)


class TaperNorm(LoopedNorm):
    """g RMSNorm(x) + (1 - g) c v x: a norm that training removes (Kanavalau et al.).

    The gate g goes from 1 to 0 over training. When it starts to fall, `linearise` sets the constant c and the learned
    v so that the linear term is closest to the norm. The training loop sets gate and c, which are saved with the
    model; a forward pass changes neither.
    """

    def __init__(self, config):
        super().__init__(
            config.hidden_size, config.rms_norm_eps, config.norm_affine, config.norm_offset, config.norm_rounding
        )
        self.linear_weight = nn.Parameter(torch.ones(self.size)) if config.norm_affine else None
        self.register_buffer("gate", torch.ones(()))
        self.register_buffer("scale", torch.ones(()))

    def init_parameters(self):
        super().init_parameters()
        for tensor in (self.linear_weight, self.gate, self.scale):
            if tensor is not None:
                init.ones_(tensor)

    def forward(self, x):
        gate, linear = self.gate.to(x.dtype), x * self.scale.to(x.dtype)
        if self.linear_weight is not None:
            linear = linear * self.linear_weight.to(x.dtype)
        return gate * super().forward(x) + (1 - gate) * linear

    @torch.no_grad()
    def fit_terms(self, x) -> torch.Tensor:
        """Return two sums over the tokens of x; their ratio is the c that minimises |RMSNorm(x) - c w x|^2."""
        wide = at_least_fp32(x)
        weight: Any = 1 if self.weight is None else self.factor(wide.dtype)
        squares = (weight * wide).square().sum(-1)
        rms = (wide.square().mean(-1) + self.eps).sqrt()
        return torch.stack([(squares / rms).sum(), squares.sum()])

    @torch.no_grad()
    def linearise(self, scale: float):
        self.scale.fill_(scale)
        if self.weight is not None and self.linear_weight is not None:
            factor: Any = self.factor(self.weight.dtype)
            self.linear_weight.copy_(factor)
