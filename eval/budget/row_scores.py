"""Scores of one model on rows of text, kept apart by row, so that bits per byte come with their standard error."""

import math
from dataclasses import dataclass

import torch

from looped_recipes.common.ratios import ratio, standard_error


@dataclass
class RowScores:
    """Sums over each row, float64; a row is a document or a window of a stream."""

    nats: torch.Tensor  # [depths, rows] cross-entropy of all targets
    byte_nats: torch.Tensor  # [depths, rows] of the targets that encode bytes, without special tokens
    tokens: torch.Tensor  # [rows] targets
    bytes: torch.Tensor  # [rows]

    @property
    def has_error(self) -> bool:
        """Whether there are enough rows for a standard error."""
        return len(self.bytes) > 1

    def perplexity(self) -> torch.Tensor:
        """Return the perplexity at each depth."""
        return (self.nats.sum(-1) / self.tokens.sum()).clamp(max=700).exp()

    def bits_per_byte(self) -> torch.Tensor:
        return ratio(self.byte_nats, self.bytes) / math.log(2)

    def bits_per_byte_error(self) -> torch.Tensor:
        return standard_error(self.byte_nats, self.bytes) / math.log(2)

    def less(self, other: "RowScores") -> tuple[torch.Tensor, torch.Tensor]:
        """Return bits per byte minus those of another model on the same rows, and the difference's standard error."""
        difference = (self.byte_nats - other.byte_nats) / math.log(2)
        return ratio(difference, self.bytes), standard_error(difference, self.bytes)

    def tokens_for(self, error: float) -> int | None:
        """Estimate how many tokens of similar rows would bring the largest standard error over depths to `error`; None
        if the model gives no numbers at some depth."""
        largest = self.bits_per_byte_error().max().item()
        return math.ceil(self.tokens.sum().item() * (largest / error) ** 2) if math.isfinite(largest) else None


def mean_of(seeds: list[RowScores]) -> RowScores:
    """Average the scores of several seeds of a model on the same rows."""
    nats, byte_nats = (torch.stack([getattr(seed, name) for seed in seeds]).mean(0) for name in ("nats", "byte_nats"))
    return RowScores(nats, byte_nats, seeds[0].tokens, seeds[0].bytes)


def variance_of_mean(seeds: list[RowScores]) -> torch.Tensor:
    """Return the squared standard error over seeds, two at least, of their mean bits per byte."""
    return torch.stack([seed.bits_per_byte() for seed in seeds]).var(0) / len(seeds)
