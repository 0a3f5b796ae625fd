"""An exponent as a number by itself."""

from collections.abc import Sequence

from looped_recipes.common.measures import power_law


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Of log y on log x, least squares; None where a value is no number above 0."""
    return power_law(list(x), list(y))["slope"]
