"""Cross-entropy of single tokens."""

import math

import torch
from torch.nn.functional import cross_entropy

from modeling_looped.tensors import at_least_fp32


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token. logits: [batch, length, vocabulary]; targets and losses: [batch, length]."""
    return cross_entropy(at_least_fp32(logits).transpose(1, 2), targets, reduction="none")


def perplexity(mean_loss: float) -> float:
    return math.exp(mean_loss) if mean_loss < 700 else math.inf


def next_token_losses(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next token at every position that has one: [batch, length - 1]."""
    return token_losses(logits[:, :-1], input_ids[:, 1:])
