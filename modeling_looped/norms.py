"""RMSNorms: without a weight, with one, or with one for each loop.

No class here has a name that ends with RMSNorm: SGLang takes each of those for Llama's, and replaces it.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class LoopedNorm(nn.Module):
    """x / rms(x), statistics in at least fp32, with or without a weight.

    offset: what is added to the weight. rounding: whether the product with the weight is rounded to x's dtype, or
    what is multiplied ("after_weight", "before_weight").
    """

    kernel: Callable | None = None  # of others: x, weight and eps to the normed x

    def __init__(
        self, size: int, eps: float, affine: bool = True, offset: float = 0.0, rounding: str = "after_weight"
    ):
        super().__init__()
        self.size, self.eps, self.offset = (size,), eps, offset
        self.rounds_first = affine and rounding == "before_weight"
        self.is_plain = not affine or (offset == 0 and not self.rounds_first)
        self.weight = nn.Parameter(torch.full((size,), self.initial_weight)) if affine else None

    @property
    def initial_weight(self) -> float:
        return 1.0 - self.offset

    def forward(self, x, loop=None):
        if not self.is_plain:
            return self.with_exact_weight(x)
        weight = self.weight
        if weight is not None and weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        if self.kernel is not None:
            return self.kernel(x, weight, self.eps)
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)

    def factor(self, dtype: torch.dtype) -> torch.Tensor:
        """What is multiplied by, weight + offset, added in at least fp32."""
        assert self.weight is not None
        weight = self.weight.to(torch.promote_types(dtype, torch.float32))
        return weight + self.offset if self.offset else weight

    def with_exact_weight(self, x):
        factor = self.factor(x.dtype)
        if self.rounds_first:
            return F.rms_norm(x, x.shape[-1:], None, self.eps) * factor.to(x.dtype)
        return F.rms_norm(x.to(factor.dtype), x.shape[-1:], factor, self.eps).to(x.dtype)

    def extra_repr(self):
        return f"{self.size[0]}, eps={self.eps}, affine={self.weight is not None}"


class LoopNorm(LoopedNorm):
    """A norm with a weight for each loop."""

    is_by_loop = True

    def __init__(self, size: int, eps: float, num_sets: int, offset: float = 0.0, rounding: str = "after_weight"):
        super().__init__(size, eps, True, offset, rounding)
        self.weight: nn.Parameter = nn.Parameter(torch.full((num_sets, size), self.initial_weight))

    def forward(self, x, loop=None):
        weight = self.weight[loop]
        factor = weight.to(x.dtype if self.is_plain else torch.promote_types(x.dtype, torch.float32))
        factor = factor + self.offset if self.offset else factor
        if weight.ndim == 2:  # of rows
            factor = factor.view(-1, *[1] * (x.ndim - 2), self.size[0])
        if self.rounds_first:
            return F.rms_norm(x, x.shape[-1:], None, self.eps) * factor.to(x.dtype)
        if weight.ndim == 2:
            return (F.rms_norm(x.to(factor.dtype), x.shape[-1:], None, self.eps) * factor).to(x.dtype)
        return F.rms_norm(x.to(factor.dtype), x.shape[-1:], factor, self.eps).to(x.dtype)


def weighted_norm(config, size: int, affine: bool = True, num_sets: int | None = None) -> LoopedNorm:
    """num_sets: of weights, where each loop has its own."""
    how = config.norm_offset, config.norm_rounding
    if num_sets is not None and affine:
        return LoopNorm(size, config.rms_norm_eps, num_sets, *how)
    return LoopedNorm(size, config.rms_norm_eps, affine, *how)


def block_norm(config, size: int | None = None, num_sets: int | None = None) -> LoopedNorm:
    return weighted_norm(config, config.hidden_size if size is None else size, config.norm_affine, num_sets)
