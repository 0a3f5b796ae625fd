"""Keys and values in 8 bits: `cache_dtype="int8"` of generate.

A token's key in a head, and its value, is kept as up to 127 steps to either side of zero and the size of a step: at
most half a step is lost, 1/254 of the largest channel. The bytes of that size lie behind those of the channels, so
that what moves tokens about in a buffer need not know what they are.
"""

import torch


SIZE_BYTES = 4  # of a step, in float32


def to_int8(states: torch.Tensor) -> torch.Tensor:
    """[..., head_dim] as int8, [..., head_dim + 4]."""
    size = states.abs().amax(-1, keepdim=True).float() / 127
    steps = (states / size.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return torch.cat([steps, size.view(torch.int8)], dim=-1)


def from_int8(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `to_int8` gave, [..., head_dim + 4], as [..., head_dim] again."""
    aligned = stored[..., -SIZE_BYTES:].clone(memory_format=torch.contiguous_format)
    size = aligned.view(torch.float32)
    return (stored[..., :-SIZE_BYTES] * size).to(dtype)
