"""What measures over depth say, in one sentence."""

from looped_recipes.common.words import counted

from .curves import Curves
from .loops_in_words import loops_in_words


LESS_IS_BETTER = ("perplexity", "bits per byte", "bits_per_byte", "loss")
MOST = 3  # measures of which a sentence speaks


def best_depths(curves: Curves) -> str:
    """E.g. "arc_easy acc is best at 4 loops (0.3125)."; with the model's name where there are several."""
    measures = [name for name in curves if name != "mean loops" and "less that of" not in name and "error" not in name]
    said = "; ".join(best_depth(name, curves[name]) for name in measures[:MOST])
    rest = f"; of {len(measures) - MOST} more the table tells" if len(measures) > MOST else ""
    exits = [point for points in curves.get("mean loops", {}).values() for point in points.items()]
    saved = "".join(f" With exits: {loops_in_words(mean, depth)}." for depth, (mean, _) in exits)
    return f"{said}{rest}.{saved}"


def best_depth(name: str, of_series: dict[str, dict]) -> str:
    sign = -1 if any(part in name for part in LESS_IS_BETTER) else 1
    points = [(sign * value, -depth, series) for series, of in of_series.items() for depth, (value, _) in of.items()]
    value, depth, series = max(points)
    model = f" for {series}" if len(of_series) > 1 else ""
    at = f"at {counted(-depth, 'loop')}"
    if len(points) == 1:
        return f"{name} is {sign * value:.4f} {at}"
    return f"{name} is best{model} {at} ({sign * value:.4f})"
