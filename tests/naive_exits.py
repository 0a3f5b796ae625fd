"""Exit rules for one token, straight from the formulas, in float64.

A token's `readings` are three lists with one entry for every loop it has run: logits [vocabulary], states [hidden] and
gate logits. A score is that of the last loop; nothing is carried from loop to loop.
"""

import math
from typing import NamedTuple

import torch


class Readings(NamedTuple):
    logits: list[torch.Tensor]
    states: list[torch.Tensor]
    gates: list[float]


def probabilities(logits) -> list[float]:
    exponentials = [math.exp(x) for x in logits.tolist()]
    return [x / sum(exponentials) for x in exponentials]


def entropy(logits) -> float:
    return -sum(p * math.log(p) for p in probabilities(logits))


def logit_margin(now, before):
    second, first = sorted(now.logits[-1].tolist())[-2:]
    return first - second


def max_prob(now, before):
    return max(probabilities(now.logits[-1]))


def plain_entropy(now, before):
    return entropy(now.logits[-1])


def entropy_diff(now, before):
    return abs(entropy(now.logits[-1]) - entropy(before[-1].logits[-1])) if before else math.inf


def kl(now, before):
    if not before:
        return math.inf
    p, q = probabilities(before[-1].logits[-1]), probabilities(now.logits[-1])
    return sum(a * math.log(a / b) for a, b in zip(p, q))


def minp_kl(now, before):
    if not before:
        return math.inf

    def filtered(logits):
        p = probabilities(logits)
        kept = [x if x >= 0.1 * max(p) else 1 / len(p) for x in p]
        return [x / sum(kept) for x in kept]

    p, q = filtered(before[-1].logits[-1]), filtered(now.logits[-1])
    return sum(a * math.log(a / b) for a, b in zip(p, q))


def cosine(now, before):
    if not before:
        return math.inf
    state, last = now.states[-1].tolist(), before[-1].states[-1].tolist()
    return 1 - sum(a * b for a, b in zip(state, last)) / math.hypot(*state) / math.hypot(*last)


def latent_diff(now, before):
    if not before:
        return math.inf
    state, last = now.states[-1].tolist(), before[-1].states[-1].tolist()
    return math.dist(state, last) / math.hypot(*state)


def argmax_stability(now, before):
    best = [max(range(len(r.logits[-1])), key=r.logits[-1].tolist().__getitem__) for r in [*before, now]]
    same = 0
    while same + 1 < len(best) and best[-2 - same] == best[-1]:
        same += 1
    return same


def gate(now, before):
    return 1 - math.prod(1 - 1 / (1 + math.exp(-logit)) for logit in now.gates)


SCORES = {
    "logit_margin": logit_margin,
    "max_prob": max_prob,
    "entropy": plain_entropy,
    "entropy_diff": entropy_diff,
    "kl": kl,
    "minp_kl": minp_kl,
    "latent_diff": latent_diff,
    "cosine": cosine,
    "argmax_stability": argmax_stability,
    "gate": gate,
}
EXITS_ABOVE = ("logit_margin", "max_prob", "argmax_stability", "gate")


class NaiveRule(NamedTuple):
    name: str
    threshold: float
    min_loops: int = 1
    interval: int = 1

    def score(self, readings: Readings) -> float:
        """Compared with the readings `interval`, 2 * `interval`, ... loops ago, the oldest first."""
        loops = len(readings.logits)
        before = [
            Readings(*(kind[:loop] for kind in readings)) for loop in range(loops - self.interval, 0, -self.interval)
        ][::-1]
        return SCORES[self.name](readings, before)

    def checks_at(self, loops: int) -> bool:
        return loops in range(self.min_loops, loops + 1, self.interval)

    def stops(self, readings: Readings) -> bool:
        if not self.checks_at(len(readings.logits)):
            return False
        score = self.score(readings)
        return score >= self.threshold if self.name in EXITS_ABOVE else score <= self.threshold
