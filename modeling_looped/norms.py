"""RMSNorms: without a weight, with one, or with one for each loop.

No class name here ends with RMSNorm: SGLang would take such a class for Llama's and replace it.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init


class LoopedNorm(nn.Module):
    """x / rms(x), statistics in at least fp32, with or without a weight, or with one for each loop.

    offset: added to the weight. rounding: rounds to x's dtype either the product with the weight ("after_weight") or
    the normed x before it is multiplied ("before_weight"). num_sets: number of weights, if each loop has one.
    """

    # a fused kernel that recipes/engine/kernels.py may set: (x, weight, eps) -> normed x
    kernel: Callable | None = None

    def __init__(
        self,
        size: int,
        eps: float,
        affine: bool = True,
        offset: float = 0.0,
        rounding: str = "after_weight",
        num_sets: int | None = None,
    ):
        super().__init__()
        self.size, self.eps, self.offset = (size,), eps, offset
        self.rounds_first = affine and rounding == "before_weight"
        self.is_plain = not affine or (offset == 0 and not self.rounds_first)
        self.is_by_loop = affine and num_sets is not None
        shape = (num_sets, size) if affine and num_sets is not None else (size,)
        self.weight = nn.Parameter(torch.full(shape, 1.0 - offset)) if affine else None

    def init_parameters(self):
        if self.weight is not None:
            init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x, loop_set=None):
        factor = self.factor(x.dtype, loop_set)
        if self.kernel is not None:
            return self.kernel(x, factor, self.eps)
        wide = x if factor is None or self.rounds_first else x.to(factor.dtype)
        if factor is None or (factor.ndim == 1 and not self.rounds_first):
            return F.rms_norm(wide, self.size, factor, self.eps).to(x.dtype)
        if factor.ndim == 2:  # one weight per row
            factor = factor.view(-1, *[1] * (x.ndim - 2), *self.size)
        return (F.rms_norm(wide, self.size, None, self.eps) * factor.to(wide.dtype)).to(x.dtype)

    def factor(self, dtype: torch.dtype, loop_set=None) -> torch.Tensor | None:
        """Return weight + offset: in `dtype` without offset and with rounding after the weight, else at least fp32."""
        if self.weight is None:
            return None
        weight = self.weight[loop_set] if self.is_by_loop else self.weight
        weight = weight.to(dtype if self.is_plain else torch.promote_types(dtype, torch.float32))
        return weight + self.offset if self.offset else weight

    def extra_repr(self):
        return f"{self.size[0]}, eps={self.eps}, affine={self.weight is not None}"


def configured_norm(config, size: int, affine: bool = True, num_sets: int | None = None) -> LoopedNorm:
    """Return a norm with the settings of the config. num_sets: number of weights, if each loop has one."""
    return LoopedNorm(size, config.rms_norm_eps, affine, config.norm_offset, config.norm_rounding, num_sets)


def block_norm(config, size: int | None = None, num_sets: int | None = None) -> LoopedNorm:
    return configured_norm(config, config.hidden_size if size is None else size, config.norm_affine, num_sets)
