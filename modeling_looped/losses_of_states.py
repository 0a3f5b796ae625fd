"""Losses that read states instead of logits, so that they see the scale which a normed readout hides.

Each is a sum over labelled tokens, where K is the depth of the token's row, and is added to the loss over logits with
its weight:

norm_penalty    mean over loops and channels of H_k^2
scale_anchor    (s - target)^2, s the RMS of all states of the token's row: loops, labelled tokens and channels
latent_loss     mean over loops and channels of (H_k - H_{k-1} - (E - H_{k-1}) / (K - k + 1))^2: each loop covers its
                share of the remaining difference between the state and E, the embedding of the next token
latent_anchor   mean over channels of (H_K - E)^2

No gradient flows into the targets: E and the remaining difference. The last two losses adapt the readout paper's
latent losses for denoising: there, states move from noise to the embedding of a known token; here they start at the
embedding of one token and predict the next.
"""

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch

from .tensors import wide_dtype


class LoopStates(NamedTuple):
    after_loops: tuple[torch.Tensor, ...]  # H_k, [batch, length, hidden]; a row that ran fewer loops keeps its last
    first: torch.Tensor  # h_0
    targets: torch.Tensor | None  # E, if a latent loss is on


def loss_of_states(config, states: LoopStates, positions, depth, labelled) -> torch.Tensor:
    """Return the weighted sum of the losses. positions: [tokens] labelled positions in batch * length; depth: [tokens]
    depth of each token's row; labelled: [tokens] weights 0 or 1."""
    wide = wide_dtype(states.first)

    def tokens(tensor):  # [tokens, hidden]
        return tensor.flatten(0, 1)[positions.to(tensor.device)].to(positions.device, wide)

    total = torch.zeros((), device=positions.device, dtype=wide)
    if config.norm_penalty or config.scale_anchor:
        squares = mean_squares(map(tokens, states.after_loops), depth)
        total = total + config.norm_penalty * (squares * labelled).sum()
        if config.scale_anchor:
            rows = positions // states.first.shape[1]
            total = total + config.scale_anchor * anchor(squares, rows, len(states.first), labelled, config)
    if config.latent_loss or config.latent_anchor:
        targets = tokens(states.targets).detach()
        if config.latent_loss:
            total = total + config.latent_loss * (path_errors(states, targets, tokens, depth) * labelled).sum()
        if config.latent_anchor:
            errors = (tokens(states.after_loops[-1]) - targets).square().mean(-1)
            total = total + config.latent_anchor * (errors * labelled).sum()
    return total


def mean_squares(states: Iterable[torch.Tensor], depth: torch.Tensor) -> torch.Tensor:
    """Return K^-1 sum_k mean_channels(H_k^2) of every token."""
    return reduce(torch.add, (s.square().mean(-1) * (loop < depth) / depth for loop, s in enumerate(states)))


def anchor(squares: torch.Tensor, rows: torch.Tensor, num_rows: int, labelled: torch.Tensor, config) -> torch.Tensor:
    """Return the sum over rows of (s - target)^2 times the row's number of labelled tokens. s is computed per row, so
    that the loss does not depend on which rows share a batch; documents packed into one row share its s."""
    counts = squares.new_zeros(num_rows).index_add(0, rows, labelled.to(squares.dtype))
    sums = squares.new_zeros(num_rows).index_add(0, rows, squares * labelled)
    rms = (sums / counts.clamp(min=1)).clamp(min=torch.finfo(sums.dtype).tiny).sqrt()
    return (counts * (rms - config.scale_anchor_target).square()).sum()


def path_errors(states: LoopStates, targets: torch.Tensor, tokens, depth: torch.Tensor) -> torch.Tensor:
    before = tokens(states.first)
    total = before.new_zeros(len(depth))
    for loop, state in enumerate(states.after_loops):
        after, loops_left = tokens(state), (depth - loop).clamp(min=1)
        share = (targets - before.detach()) / loops_left.unsqueeze(-1)
        total = total + (after - before - share).square().mean(-1) * (loop < depth) / depth
        before = after
    return total
