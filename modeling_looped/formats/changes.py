"""Changes between a tensor that a foreign layout stores and the parameters in it, both ways, bit for bit.

`read` turns one stored tensor into parameters, in the order in which a rule names them; `write` is its inverse.
"""

import torch

from ..configuration_looped import LoopedConfigError


class ShapeError(ValueError):
    """A stored tensor whose shape fits no parameter of this model."""


class Change:
    def read(self, stored: torch.Tensor, config) -> list[torch.Tensor]:
        raise NotImplementedError

    def write(self, ours: list[torch.Tensor], config) -> torch.Tensor:
        raise NotImplementedError


def to_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder rows [heads * head_dim, ...] so that rotary positions rotate halves of a head, not neighbours."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def to_pairs(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of `to_halves`."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


class Halves(Change):
    """A query or key projection stored for rotary positions that rotate pairs of neighbours."""

    def read(self, stored, config):
        check_rows(stored, config.head_dim)
        return [to_halves(stored, config.head_dim)]

    def write(self, ours, config):
        return to_pairs(ours[0], config.head_dim)


class FusedHeads(Change):
    """One matrix with the rows of queries, keys and values. pairs: rotary positions rotate pairs of neighbours."""

    def __init__(self, pairs: bool):
        self.pairs = pairs

    def read(self, stored, config):
        group = config.num_attention_heads // config.num_key_value_heads
        check_rows(stored, config.head_dim * (group + 2))
        size = stored.shape[0] // (group + 2)
        parts = stored.split([group * size, size, size])
        if self.pairs:
            parts = [to_halves(parts[0], config.head_dim), to_halves(parts[1], config.head_dim), parts[2]]
        return [part.clone() for part in parts]

    def write(self, ours, config):
        queries, keys, values = ours
        if self.pairs:
            queries, keys = to_pairs(queries, config.head_dim), to_pairs(keys, config.head_dim)
        return torch.cat([queries, keys, values])


class FusedBiases(Change):
    """Biases of queries and keys, [2, 1, heads, head_dim], where rotary positions rotate pairs of neighbours."""

    def read(self, stored, config):
        check_rows(stored[0].reshape(-1), config.head_dim)
        return [to_halves(part.reshape(-1), config.head_dim).clone() for part in stored]

    def write(self, ours, config):
        if config.num_key_value_heads != config.num_attention_heads:
            raise LoopedConfigError(
                "this layout has the biases of queries and keys in one tensor, as many heads of each: "
                f"num_key_value_heads={config.num_key_value_heads} beside attention_bias={config.attention_bias!r} "
                f"must be num_attention_heads={config.num_attention_heads}"
            )
        return torch.stack([to_pairs(part, config.head_dim).reshape(1, -1, config.head_dim) for part in ours])


class FusedGate(Change):
    """One matrix with the rows of the MLP's gate projection, then those of its up projection."""

    def read(self, stored, config):
        check_rows(stored, 2)
        return [part.clone() for part in stored.chunk(2)]

    def write(self, ours, config):
        return torch.cat(ours)


def check_rows(stored: torch.Tensor, multiple: int):
    if stored.shape[0] % multiple:
        raise ShapeError(f"a tensor of shape {tuple(stored.shape)} was found where rows are a multiple of {multiple}")
