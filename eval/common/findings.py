"""Sentences that say what numbers come down to."""

from looped_recipes.common.words import counted


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
