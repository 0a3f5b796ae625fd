"""What the head reads of a state: the parts that `readout_norm` chooses between, besides a norm of a block."""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .depth import one_or_rows
from .norms import LoopedNorm, block_norm
from .tensors import at_least_fp32, on_device, wide_dtype


def readout_norm(config) -> nn.Module | None:
    """The norm of the readout, which shared norms between loops, normed gates and codas read too."""
    if not config.has_readout_norm:
        return None
    if config.readout_norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, config.rms_norm_eps, elementwise_affine=config.norm_affine)
    return TaperNorm(config) if config.readout_norm == "taper" else block_norm(config)


def has_reached(trained_depth: int, depth: int | list[int] | torch.Tensor, device) -> bool | torch.Tensor:
    """Whether loop `depth` (of all, of each row, or of each token) is the trained one or deeper: one bool if all
    agree, else a mask that broadcasts over [rows, length, hidden]."""
    if torch.is_tensor(depth):
        return (depth >= trained_depth).unsqueeze(-1)
    return one_or_rows(lambda loops: loops >= trained_depth, depth, device, 3)


class AlphaReadout(nn.Module):
    """x (s_ref / s)^(1 - alpha) with s = rms(x), so that what is read has the scale s_ref^(1 - alpha) s^alpha: nothing
    of the state's own scale at alpha = 0, all of it at 1, where this is the raw readout.

    s_ref is learned, and so is alpha = sigmoid(a) unless it is fixed. There may be several of both: loop k takes the
    k-th, and what is deeper than they are the last.
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
        """The entries of `values` [count] for loop `depth`, to broadcast over [rows, length, hidden]."""
        if isinstance(depth, int):
            return values[min(depth, self.count) - 1]
        depths = depth if torch.is_tensor(depth) else on_device(depth, values.device)[:, None]
        return values[depths.clamp(max=self.count) - 1].unsqueeze(-1)


class TaperNorm(LoopedNorm):
    """g RMSNorm(x) + (1 - g) c v x: a norm that training takes away (Kanavalau et al.).

    The gate g goes from 1 to 0 over training. Where it starts to, `linearise` sets the constant c and the learned v to
    what comes nearest to the norm. Gate and c are set by the training loop and saved with the model; a pass changes
    neither.
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
        """Two sums over the tokens of x whose ratio is the c with the least |RMSNorm(x) - c w x|^2."""
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
