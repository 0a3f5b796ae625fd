"""Keys and values in 8 bits: `cache_dtype="int8"` of generate.

A token's key in a head, and its value, is kept as up to 127 steps to either side of zero and the size of a step: at
most half a step is lost, 1/254 of the largest channel. The bytes of that size lie behind those of the channels, so
that what moves tokens about in a buffer need not know what they are.
"""

import torch


SIZE_BYTES = 4  # of a step, in float32


def to_int8(states: torch.Tensor) -> torch.Tensor:
    """[..., head_dim] as int8, [..., head_dim + 4]."""
    largest = torch.linalg.vector_norm(states, torch.inf, dim=-1, keepdim=True).float()
    sizes = largest.div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.cat([(states / sizes).round_().to(torch.int8), sizes.view(torch.int8)], dim=-1)


def from_int8(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `to_int8` gave, [..., head_dim + 4], as [..., head_dim] again."""
    return steps_of(stored).to(floats_of(dtype)).mul_(sizes_of(stored)).to(dtype)


def steps_of(stored: torch.Tensor) -> torch.Tensor:
    return stored[..., :-SIZE_BYTES]


def sizes_of(stored: torch.Tensor) -> torch.Tensor:
    """[..., 1]"""
    if stored.shape[-1] % SIZE_BYTES:  # not where a float may lie
        stored = stored[..., -SIZE_BYTES:].clone(memory_format=torch.contiguous_format)
    return stored.view(torch.float32)[..., -1:]


def floats_of(dtype: torch.dtype) -> torch.dtype:
    """What steps are multiplied in."""
    return torch.promote_types(dtype, torch.float32)


def attend_to_int8(queries, steps, sizes, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """Attention of single queries, [rows, heads, 1, head_dim], to tokens whose channels are steps, as floats.

    Scores are multiplied by the sizes of the keys' steps, and weights by those of the values': two numbers of a token
    instead of all its channels. steps, sizes: [rows, key heads, 2, tokens, head_dim] and [..., 1].
    """
    (keys, values), (key_sizes, value_sizes) = steps.unbind(2), sizes.mT.unbind(2)
    asked = queries.to(steps.dtype).reshape(len(keys), keys.shape[1], -1, keys.shape[-1])  # by key head
    scores = (asked @ keys.mT).mul_(key_sizes).mul_(scaling)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return (scores.softmax(-1).mul_(value_sizes) @ values).reshape(queries.shape).to(queries.dtype)
