"""Ratios of sums over rows, such as nats over bytes, with their standard error."""

import math

import torch


def ratio(sums: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return the total of `sums` [..., rows] divided by the total of `sizes` [rows]."""
    return sums.sum(-1) / sizes.sum()


def standard_error(sums: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return the standard error of r = `ratio`, for independent rows:
    sqrt(n / (n - 1) sum (s_i - r b_i)^2) / sum b_i."""
    residual = sums - ratio(sums, sizes)[..., None] * sizes
    n = len(sizes)
    return (residual.square().sum(-1) * (n / (n - 1) if n > 1 else math.nan)).sqrt() / sizes.sum()
