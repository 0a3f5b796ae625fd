"""Exponents of power laws, as bare numbers or with the interval of their fit."""

from collections.abc import Sequence

from looped_recipes.common.intervals import Estimate, students_reach
from looped_recipes.common.measures import power_law


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the least-squares slope of log y on log x; None where a value is not a number above 0."""
    return power_law(list(x), list(y))["slope"]


def with_interval_of_fit(found: dict, seeds: int) -> Estimate | None:
    """Return the slope in `found`, a result of `power_law`, with Student's interval of a line through the logarithms.
    seeds: number of seeds whose mean was fitted."""
    if found["slope"] is None:
        return None
    reach = students_reach(found["standard_error"], found["points"] - 2)
    return Estimate(found["slope"], found["slope"] - reach, found["slope"] + reach, seeds)
