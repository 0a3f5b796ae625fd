"""The rules that compare estimates over seeds with the claims of a paper.

A rule sees the whole 95 % interval, never the mean alone. A single seed has no interval, so its verdict is `open`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import stdev
from typing import Protocol

from scipy.stats import beta
from scipy.stats import f as fisher

from looped_recipes.common.intervals import LEVEL, Estimate


AGREES, SIGN, WEAKER, STRONGER = "agrees", "sign agrees", "weaker", "stronger"
NOT_SEEN, DISAGREES, OPEN = "not seen", "disagrees", "open"
BY_CONSTRUCTION, UNMEASURED, UNREACHABLE = "by construction", "not measured", "not reachable here"
COUNTED = (AGREES, SIGN, WEAKER, STRONGER, NOT_SEEN, DISAGREES, OPEN)  # on claims that were measured
VERDICTS = (*COUNTED, BY_CONSTRUCTION, UNMEASURED, UNREACHABLE)


def share(count: int, of: int) -> Estimate:
    """Return the share count / of of runs, with the exact interval of Clopper and Pearson."""
    tail = (1 - LEVEL) / 2
    low = float(beta.ppf(tail, count, of - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, of - count)) if count < of else 1.0
    return Estimate(count / of, low, high, of)


def ratio_of_spreads(first: Iterable[float], second: Iterable[float]) -> Estimate | None:
    """Estimate log10 of the ratio of two standard deviations over seeds, with the interval of the F distribution; None
    of fewer than two seeds."""
    first, second = list(first), list(second)
    if min(len(first), len(second)) < 2:
        return None
    ratio = math.log10(stdev(first) / stdev(second))
    degrees, tail = (len(first) - 1, len(second) - 1), (1 - LEVEL) / 2
    below, above = (math.log10(float(fisher.ppf(each, *degrees))) / 2 for each in (1 - tail, tail))
    return Estimate(ratio, ratio - below, ratio - above, min(len(first), len(second)))


class Rule(Protocol):
    @property
    def words(self) -> str: ...

    def judge(self, value: float, low: float, high: float) -> str: ...


def verdict(rule: Rule, estimate: Estimate) -> str:
    return OPEN if estimate.low is None else rule.judge(estimate.value, estimate.low, estimate.high)


@dataclass(frozen=True)
class Near:
    """A number of the paper, such as an exponent, and the largest distance from it at which ours agrees."""

    published: float
    within: float

    @property
    def words(self) -> str:
        return f"{self.published:g} ± {self.within:g}"

    def judge(self, value: float, low: float, high: float) -> str:
        """Agree if the interval is inside the band, open if it only overlaps the band. Outside the band, weaker if the
        interval has the paper's sign and is nearer to 0; else disagree."""
        least, most = self.published - self.within, self.published + self.within
        if least <= low and high <= most:
            return AGREES
        if low <= most and high >= least:
            return OPEN
        return WEAKER if 0 < low and high < least or most < low and high < 0 else DISAGREES


@dataclass(frozen=True)
class Effect:
    """A difference above 0, from half to twice the paper's size; if the paper gives no size, only the sign counts."""

    published: float | None = None

    @property
    def words(self) -> str:
        return "above 0" if self.published is None else f"{self.published:.3g}"

    def judge(self, value: float, low: float, high: float) -> str:
        """Agree if the interval lies within those sizes. Below them, disagree if no part of the interval is above 0,
        "not seen" if a part is, weaker if all is; above them, stronger. Where it overlaps them, the sign agrees if it
        lies above 0; else it is open."""
        least, most = (0.0, math.inf) if self.published is None else (self.published / 2, 2 * self.published)
        if high <= 0:
            return NOT_SEEN if low == high == 0 else DISAGREES
        if high < least:
            return WEAKER if low > 0 else NOT_SEEN
        if low > most:
            return STRONGER
        if low <= 0:
            return OPEN
        return AGREES if least <= low and high <= most else SIGN


@dataclass(frozen=True)
class Differs:
    """A difference whose sign and size the paper does not state."""

    @property
    def words(self) -> str:
        return "not 0"

    def judge(self, value: float, low: float, high: float) -> str:
        return OPEN if low <= 0 <= high else AGREES


@dataclass(frozen=True)
class AtLeast:
    """A lower bound, such as a number of the paper that the end of its grid cuts off."""

    bound: float

    @property
    def words(self) -> str:
        return f"at least {self.bound:g}"

    def judge(self, value: float, low: float, high: float) -> str:
        return AGREES if low >= self.bound else DISAGREES if high < self.bound else OPEN


@dataclass(frozen=True)
class AtMost:
    """An upper bound: the paper's own, or ours, with the paper's number (`published`) beside it."""

    bound: float
    published: float | None = None

    @property
    def words(self) -> str:
        bound = f"at most {self.bound:g}"
        return bound if self.published is None else f"{self.published:g}, here {bound}"

    def judge(self, value: float, low: float, high: float) -> str:
        return AGREES if high <= self.bound else DISAGREES if low > self.bound else OPEN


SELDOM = AtMost(0.5, 0.0)  # share of runs: 0 in the paper, which has one run of each system; here at most half
