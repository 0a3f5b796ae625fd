"""An exponent as a number by itself, or with the interval of its fit."""

from collections.abc import Sequence

from looped_recipes.common.measures import power_law

from .rules import Estimate, students_reach


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Of log y on log x, least squares; None where a value is no number above 0."""
    return power_law(list(x), list(y))["slope"]


def with_interval_of_fit(found: dict, seeds: int) -> Estimate | None:
    """Student's, of a straight line through the logarithms: what `power_law` gives, for a mean of so many seeds."""
    if found["slope"] is None:
        return None
    reach = students_reach(found["standard_error"], found["points"] - 2)
    return Estimate(found["slope"], found["slope"] - reach, found["slope"] + reach, seeds)
