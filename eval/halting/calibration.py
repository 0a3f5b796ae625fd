"""Finds the threshold with the fewest loops within a budget of perplexity, or the one for a mean number of loops, from
the losses and scores of one pass.

A *unit* is a sequence, whose score is the mean over its tokens (readout blind spot, appendix H), or a token. It exits
at the first loop whose score passes the threshold. So whether it has exited by loop k depends only on its best score
up to k, and all thresholds can be tried at once:

    loss(threshold) = loss_K + sum over k < K of (loss_k - loss_k+1) [best score up to loop k passes the threshold]
    loops(threshold) = K - sum over k < K of [best score up to loop k passes the threshold]
"""

import math
from typing import NamedTuple

import torch

from looped_recipes.common.token_losses import perplexity
from modeling_looped.exit_criteria import CRITERIA, ExitRule


LARGEST = {"max_prob": 1.0, "gate": 1 - 2**-53}  # limits that rounded scores may exceed; a gate never exits at 1


class Units(NamedTuple):
    """Losses and scores of sequences or tokens after every loop."""

    losses: torch.Tensor  # [loops, units] cross-entropy
    scores: dict[str, torch.Tensor]  # of each criterion, [loops, units]


class Measured(NamedTuple):
    """Losses and scores of every token after every loop, from one pass."""

    losses: torch.Tensor  # [loops, sequences, tokens]
    scores: dict[str, torch.Tensor]  # of each criterion, [loops, sequences, tokens]

    def sequences(self, learned: torch.Tensor | None = None) -> Units:
        """Return means over tokens. learned: which targets count in losses, [sequences, tokens]; default: all."""
        learned = self.all() if learned is None else learned
        losses = self.losses.where(learned, 0).sum(-1) / learned.sum(-1).clamp(min=1)
        return Units(losses, {name: scores.mean(-1) for name, scores in self.scores.items()})

    def tokens(self, learned: torch.Tensor | None = None) -> Units:
        """Return all tokens, or those before learned targets."""
        learned = self.all() if learned is None else learned
        return Units(self.losses[:, learned], {name: scores[:, learned] for name, scores in self.scores.items()})

    def all(self) -> torch.Tensor:
        return torch.ones_like(self.losses[0], dtype=torch.bool)


def never(name: str) -> float:
    """Return a threshold that no score passes."""
    return math.inf if CRITERIA[name].exits_above else -math.inf


class Tried(NamedTuple):
    """All thresholds that make a difference, from the one with the fewest exits to the one with the most."""

    thresholds: torch.Tensor
    losses: torch.Tensor  # mean loss of each, less that of the last loop
    loops: torch.Tensor  # mean loops of each


def try_all(name: str, units: Units, min_loops: int) -> Tried:
    scores = units.scores[name].clamp(CRITERIA[name].least, LARGEST.get(name))
    sign = 1 if CRITERIA[name].exits_above else -1
    exits = slice(min_loops - 1, -1)  # loops at which a threshold makes a difference
    best = (sign * scores)[exits].cummax(0).values.flatten()
    change = (units.losses[exits] - units.losses[exits.start + 1 :]).flatten()

    num_loops, num_units = units.losses.shape
    best, order = best.sort(descending=True)
    losses = change[order].cumsum(0) / num_units
    loops = num_loops - torch.arange(1, len(best) + 1, dtype=torch.double, device=best.device) / num_units
    is_last_of_equals = torch.ones_like(best, dtype=torch.bool)
    is_last_of_equals[:-1] = best[:-1] != best[1:]
    possible = is_last_of_equals & best.isfinite()
    return Tried(sign * between(best)[possible], losses[possible], loops[possible])


def between(best: torch.Tensor) -> torch.Tensor:
    """Return thresholds in the middle between each score and the next lower one: a score that another pass rounds
    otherwise passes the same ones. best: from the highest down."""
    lower = torch.cat([best[1:], best[-1:]])
    middles = (best + lower) / 2
    return torch.where(middles.isfinite() & (middles > lower), middles, best)


def calibrate(name: str, units: Units, budget: float, min_loops: int) -> float:
    """Return the threshold with the fewest loops whose perplexity is at most 1 + budget times the last loop's."""
    tried = try_all(name, units, min_loops)
    allowed = (tried.losses <= math.log1p(budget)).nonzero()
    return tried.thresholds[allowed[-1]].item() if len(allowed) else never(name)


def calibrate_loops(name: str, units: Units, mean_loops: float, min_loops: int) -> float | None:
    """Return the threshold whose mean loops are nearest to `mean_loops`, and not above; None if all have more."""
    tried = try_all(name, units, min_loops)
    few = (tried.loops <= mean_loops + 1e-9).nonzero()
    return tried.thresholds[few[0]].item() if len(few) else None


def least_loops(name: str, units: Units, min_loops: int) -> float:
    """Return the mean loops of the threshold with the most exits."""
    loops = try_all(name, units, min_loops).loops
    return loops[-1].item() if len(loops) else float(len(units.losses))


def exit_loops(rule: ExitRule, scores: torch.Tensor) -> torch.Tensor:
    """Return after how many loops each unit exits. scores: [loops, units]."""
    exits = rule.exits(scores)
    exits[: rule.min_loops - 1] = False
    return ((exits.cumsum(0) == 0).sum(0) + 1).clamp(max=len(scores))


def perplexity_at(loops: torch.Tensor, losses: torch.Tensor) -> float:
    """Return the perplexity if each unit exits after its number of loops. loops: [units]; losses: [loops, units]."""
    return mean_perplexity(losses.gather(0, loops[None] - 1))


def mean_perplexity(losses: torch.Tensor) -> float:
    return perplexity(losses.double().mean().item())
