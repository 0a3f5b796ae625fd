"""Keys and values in 8 bits: `cache_dtype="int8"` of generate.

Each head's key or value of a token is stored as int8 numbers from -127 to 127 ("steps") and one step size by which
they are multiplied. The error is at most half a step size, 1/254 of the largest channel. The bytes of the step size
follow those of the channels, so that code that moves tokens within a buffer need not know the format.
"""

import torch


SIZE_BYTES = 4  # of a step size, in float32


def to_int8(states: torch.Tensor) -> torch.Tensor:
    """Quantise [..., head_dim] to int8, [..., head_dim + 4]."""
    largest = torch.linalg.vector_norm(states, torch.inf, dim=-1, keepdim=True).float()
    sizes = largest.div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.cat([(states / sizes).round_().to(torch.int8), sizes.view(torch.int8)], dim=-1)


def from_int8(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Restore [..., head_dim] from the result of `to_int8`, [..., head_dim + 4]."""
    return steps_of(stored).to(torch.promote_types(dtype, torch.float32)).mul_(sizes_of(stored)).to(dtype)


def steps_of(stored: torch.Tensor) -> torch.Tensor:
    return stored[..., :-SIZE_BYTES]


def sizes_of(stored: torch.Tensor) -> torch.Tensor:
    """Return the step sizes, [..., 1]."""
    if stored.shape[-1] % SIZE_BYTES:  # not aligned for float32
        stored = stored[..., -SIZE_BYTES:].clone(memory_format=torch.contiguous_format)
    return stored.view(torch.float32)[..., -1:]


def attend_to_int8(queries, steps, sizes, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """Attend with single queries, [rows, heads, 1, head_dim], to tokens whose channels are steps, as floats.

    Scores are multiplied by the step sizes of the keys, and weights by those of the values: two numbers per token
    instead of all its channels. steps, sizes: [rows, key heads, 2, tokens, head_dim] and [..., 1].
    """
    (keys, values), (key_sizes, value_sizes) = steps.unbind(2), sizes.mT.unbind(2)
    asked = queries.to(steps.dtype).reshape(len(keys), keys.shape[1], -1, keys.shape[-1])  # grouped by key head
    scores = (asked @ keys.mT).mul_(key_sizes).mul_(scaling)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return (scores.softmax(-1).mul_(value_sizes) @ values).reshape(queries.shape).to(queries.dtype)
