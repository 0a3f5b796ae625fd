"""Sentences that say what numbers come down to."""

from looped_recipes.common.words import counted, percent

from .curves import Curves


LESS_IS_BETTER = ("perplexity", "bits per byte", "bits_per_byte", "loss")
MOST = 3  # measures of which a sentence speaks


def loops_in_words(mean: float, full: float) -> str:
    """E.g. "2.30 of 4 loops, 42 % of them saved"."""
    saved = f", {percent(1 - mean / full)} of them saved" if mean < full else ""
    return f"{mean:.2f} of {full:g} loops{saved}"


def best_depths(curves: Curves) -> str:
    """E.g. "arc_easy acc is best at 4 loops (0.3125)."; with the model's name where there are several."""
    measures = [name for name in curves if name != "mean loops" and "less that of" not in name and "error" not in name]
    said = "; ".join(best_point(name, curves[name]) for name in measures[:MOST])
    rest = f"; of {len(measures) - MOST} more the table tells" if len(measures) > MOST else ""
    exits = [point for points in curves.get("mean loops", {}).values() for point in points.items()]
    saved = "".join(f" With exits: {loops_in_words(mean, depth)}." for depth, (mean, _) in exits)
    return f"{said}{rest}.{saved}"


def best_point(name: str, of_series: dict[str, dict]) -> str:
    sign = -1 if any(part in name for part in LESS_IS_BETTER) else 1
    points = [(sign * value, -depth, series) for series, of in of_series.items() for depth, (value, _) in of.items()]
    value, depth, series = max(points)
    model = f" for {series}" if len(of_series) > 1 else ""
    at = f"at {counted(-depth, 'loop')}"
    if len(points) == 1:
        return f"{name} is {sign * value:.4f} {at}"
    return f"{name} is best{model} {at} ({sign * value:.4f})"


def best_depth(values: dict[int, float], trained: int | None, unit: str, digits: int = 3) -> str:
    """Which depth has the least loss, and what the trained one and a single loop cost beside it."""
    best = min(values, key=values.get)
    words = f"{counted(best, 'loop')} {'is' if best == 1 else 'are'} best here: {values[best]:.{digits}f} {unit}"
    others = [k for k in dict.fromkeys((trained, 1)) if k in values and k != best]
    costs = [
        f"{counted(k, 'loop')}{' as trained' if k == trained else ''} cost{'s' * (k == 1)} "
        f"{values[k] - values[best]:.{digits}f}"
        for k in others
    ]
    return "; ".join([words + (", as trained" if best == trained else ""), *costs]) + "."
