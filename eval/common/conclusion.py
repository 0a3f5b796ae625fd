"""What measures over depth say, in one sentence."""

import math

from looped_recipes.common.words import counted

from .curves import Curves
from .loops_in_words import loops_in_words


LESS_IS_BETTER = ("perplexity", "bits per byte", "bits_per_byte", "loss")
MOST = 3  # measures of which a sentence speaks


def best_depths(curves: Curves) -> str:
    """E.g. "arc_easy acc is best at 4 loops (0.3125)."; with the model's name where there are several."""
    measures = [name for name in curves if name != "mean loops" and "less that of" not in name and "error" not in name]
    measures = [name for name in measures if not says_the_same(name, curves)]
    said = "; ".join(best_depth(name, curves[name]) for name in measures[:MOST])
    rest = f"; of {len(measures) - MOST} more the table tells" if len(measures) > MOST else ""
    exits = [point for points in curves.get("mean loops", {}).values() for point in points.items()]
    saved = "".join(f" With exits: {loops_in_words(mean, depth)}." for depth, (mean, _) in exits)
    return f"{said}{rest}.{saved}"


def says_the_same(name: str, curves: Curves) -> bool:
    """Whether it is a perplexity of a text whose bits per byte are there."""
    task, _, metric = name.partition(" ")
    return metric in ("word_perplexity", "byte_perplexity") and f"{task} bits_per_byte" in curves


def best_depth(name: str, of_series: dict[str, dict]) -> str:
    """Of accuracies no best one is named where even the worst is within what chance makes of so few questions."""
    sign = -1 if any(part in name for part in LESS_IS_BETTER) else 1
    points = [
        (sign * value, -depth, series, error or 0.0)
        for series, of in of_series.items()
        for depth, (value, error) in of.items()
    ]
    (value, depth, series, error), worst = max(points), min(points)
    model = f" for {series}" if len(of_series) > 1 else ""
    at = f"at {counted(-depth, 'loop')}"
    if len(points) == 1:
        return f"{name} is {sign * value:.4f} {at}"
    if sign == 1 and value - worst[0] < 2 * math.hypot(error, worst[3]):
        return f"{name} is {sign * value:.4f} ± {error:.4f} at best{model}, {at}, and nowhere clearly worse"
    return f"{name} is best{model} {at} ({sign * value:.4f})"
