"""Sentences that say what numbers come down to."""

from looped_recipes.common.words import counted


def best_depth(values: dict[int, float], trained: int | None, unit: str, digits: int = 3) -> str:
    """Which depth has the least loss, and what the trained one and a single loop cost beside it.

    Of depths that are the same to the last digit the fewest loops count.
    """
    least, close = min(values.values()), 10**-digits
    same = [k for k in sorted(values) if values[k] - least < close]
    best = same[0]
    verdict = "best here" if same == [best] else "enough here"
    words = f"{counted(best, 'loop')} {'is' if best == 1 else 'are'} {verdict}: {values[best]:.{digits}f} {unit}"
    parts = [words + (", as trained" if best == trained else "")]
    for k in dict.fromkeys((trained, 1)):
        named = f"{counted(k, 'loop')}{' as trained' * (k == trained)}"
        if k in same and k != best:
            parts.append(f"{named} are no better")
        elif k in values and k != best:
            parts.append(f"{named} cost{'s' * (k == 1)} {values[k] - values[best]:.{digits}f}")
    return "; ".join(parts) + "."
