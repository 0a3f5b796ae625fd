"""Estimates over seeds, and the rules by which they are compared with what a paper says.

A rule sees the whole 95 % interval, never the mean alone, so one seed decides nothing: its verdict is `open`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median_low, stdev
from typing import NamedTuple, Protocol

from scipy.stats import t as student


AGREES, WEAKER, DISAGREES, OPEN = "agrees", "weaker", "disagrees", "open"
UNMEASURED, UNREACHABLE = "not measured", "not reachable here"
VERDICTS = (AGREES, WEAKER, DISAGREES, OPEN, UNMEASURED, UNREACHABLE)
LEVEL = 0.95


class Estimate(NamedTuple):
    value: float
    low: float | None  # None: a single value has no interval
    high: float | None
    seeds: int

    @property
    def words(self) -> str:
        said = f"{self.value:.3g}"
        return said if self.low is None else f"{said} [{self.low:.3g}, {self.high:.3g}]"


def over_seeds(values: Iterable[float]) -> Estimate:
    """The mean and Student's interval of it; where some are infinite, since runs collapsed, the median and what
    counting tells: from the least to the greatest of n seeds lies the median of all with a probability of
    1 - 2^(1 - n). Below the level, of six seeds, that excludes nothing, unless all seeds give the same.
    """
    values = list(values)
    if len(values) > 1 and not all(map(math.isfinite, values)):
        low, high = min(values), max(values)
        if low != high and 1 - 2 ** (1 - len(values)) < LEVEL:
            low, high = -math.inf, math.inf
        return Estimate(median_low(values), low, high, len(values))
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, len(values))
    reach = student.ppf((1 + LEVEL) / 2, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return Estimate(mean, mean - float(reach), mean + float(reach), len(values))


class Rule(Protocol):
    @property
    def words(self) -> str: ...

    def judge(self, low: float, high: float) -> str: ...


def verdict(rule: Rule, estimate: Estimate) -> str:
    return OPEN if estimate.low is None else rule.judge(estimate.low, estimate.high)


@dataclass(frozen=True)
class Near:
    """A number of the paper, such as an exponent, and how far ours may lie from it."""

    published: float
    within: float

    @property
    def words(self) -> str:
        return f"{self.published:g} ± {self.within:g}"

    def judge(self, low: float, high: float) -> str:
        """Agrees: the interval lies inside the band. Outside, it is weaker where it has the paper's sign and less of
        its size."""
        least, most = self.published - self.within, self.published + self.within
        if least <= low and high <= most:
            return AGREES
        if low <= most and high >= least:
            return OPEN
        return WEAKER if 0 < low and high < least or most < low and high < 0 else DISAGREES


@dataclass(frozen=True)
class Effect:
    """A difference above 0, which agrees from half of the paper's size on; without a size, its sign alone counts."""

    published: float | None = None
    enough: float = 0.5

    @property
    def words(self) -> str:
        return "above 0" if self.published is None else f"{self.published:.3g}"

    def judge(self, low: float, high: float) -> str:
        """Disagrees: the interval reaches down to 0 and not up to half of the paper's size."""
        wanted = self.enough * (self.published or 0.0)
        if low > 0:
            return AGREES if high >= wanted else WEAKER
        return DISAGREES if high < wanted or high <= 0 else OPEN


@dataclass(frozen=True)
class AtMost:
    published: float

    @property
    def words(self) -> str:
        return f"at most {self.published:g}"

    def judge(self, low: float, high: float) -> str:
        return AGREES if high <= self.published else DISAGREES if low > self.published else OPEN
