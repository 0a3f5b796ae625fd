"""Estimates over seeds with Student's interval."""

import math
from collections.abc import Iterable
from functools import cache
from statistics import fmean, median_low, stdev
from typing import NamedTuple


LEVEL = 0.95
FEWEST = 20  # items that a verdict needs: intervals of fewer hold the difference less often than they say


class Estimate(NamedTuple):
    value: float
    low: float | None  # None: a single value has no interval
    high: float | None
    seeds: int

    @property
    def words(self) -> str:
        said = f"{self.value:.3g}"
        return said if self.low is None else f"{said} [{self.low:.3g}, {self.high:.3g}]"


def over_seeds(values: Iterable[float], level: float = LEVEL) -> Estimate:
    """Return the mean over seeds with Student's interval.

    Where some values are infinite because runs collapsed, return the median instead, with an interval from the least
    to the greatest value. This interval contains the median of all possible seeds with a probability of 1 - 2^(1 - n),
    which reaches 95 % with six seeds. With fewer seeds it is unbounded, unless all seeds give the same value.
    """
    values = list(values)
    if any(map(math.isnan, values)):
        raise ValueError(f"a mean over seeds needs numbers, got {values}: leave out seeds that have none")
    if len(values) > 1 and not all(map(math.isfinite, values)):
        low, high = min(values), max(values)
        if low != high and 1 - 2 ** (1 - len(values)) < level:
            low, high = -math.inf, math.inf
        return Estimate(median_low(values), low, high, len(values))
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, len(values))
    reach = students_reach(stdev(values) / len(values) ** 0.5, len(values) - 1, level)
    return Estimate(mean, mean - reach, mean + reach, len(values))


def level_of_chosen(candidates: int) -> float:
    """Return the level for the interval of one of so many estimates that was chosen by its value (Bonferroni)."""
    return 1 - (1 - LEVEL) / candidates


def students_reach(standard_error: float, degrees: float, level: float = LEVEL) -> float:
    """Return the distance from an estimate to either end of its interval."""
    return students_quantile(1 - (1 - level) / 2, degrees) * standard_error


@cache
def students_quantile(probability: float, degrees: float) -> float:
    from scipy.stats import t as student  # takes a second

    return float(student.ppf(probability, degrees))
