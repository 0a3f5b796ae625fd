"""Sentences that summarize measured numbers."""

import math
import re
from collections.abc import Collection
from statistics import NormalDist, stdev

from looped_recipes.common.intervals import level_of_chosen, students_reach
from looped_recipes.common.words import counted, percent

from .curves import Curves, Point


LESS_IS_BETTER = re.compile(r"\b(perplexity|bits per byte|loss)\b")  # used where lm-eval does not say it
MOST = 3  # measures named in a sentence


def loops_in_words(mean: float, full: float, each: str = "", are_saved: bool = True) -> str:
    """Return e.g. "2.30 of 4 loops a token, 42 % of them saved", with " a token" from `each`."""
    saved = f", {percent(1 - mean / full)} of them saved" if are_saved and mean < full else ""
    return f"{mean:.2f} of {full:g} loops{each}{saved}"


def best_depths(
    curves: Curves,
    more_is_better: dict[str, bool] | None = None,
    folders: dict[str, list[dict[str, dict[int, Point]]]] | None = None,
    few: Collection[str] = (),
    exits_stop: bool = True,
) -> str:
    """Return e.g. "arc_easy acc is best at 4 loops (0.3125).", with the model's name if there are several models.

    more_is_better: the result of `curves.more_is_better`; for other measures, the name decides. folders: {series:
    {measure: points} of each folder} if values of the curves are means of folders. few: `curves.of_few_questions`;
    none of these measures is called best. exits_stop: whether exits end loops, not only choose the one that is read.
    """
    known = more_is_better or {}
    measures = [name for name in curves if not name.startswith("mean loops") and not says_the_same(name, curves)]
    said = "; ".join(
        best_point(name, curves[name], known.get(name), folders, name in few) + where_nan(curves[name])
        for name in measures[:MOST]
    )
    rest = f"; {len(measures) - MOST} more in the table" if len(measures) > MOST else ""
    loops = curves.get("mean loops", {})
    exits = {
        name: "; ".join(loops_in_words(mean, depth, are_saved=exits_stop) for depth, (mean, _) in points.items())
        for name, points in loops.items()
    }
    said_of = [f"{name}, {of}" if len(exits) > 1 else of for name, of in exits.items()]
    saved = f" With exits: {'; '.join(said_of)}." if exits else ""
    return f"{said}{rest}.{saved}" if measures else f"Nothing was scored.{saved}"


def says_the_same(name: str, curves: Curves) -> bool:
    """Return whether this is a perplexity of a text and the curves also have its bits per byte."""
    task, _, metric = name.partition(" ")
    return metric in ("word_perplexity", "byte_perplexity") and f"{task} bits_per_byte" in curves


def where_nan(of_series: dict[str, dict[int, Point]]) -> str:
    """Return e.g. ", but nan for a at 1, 2 loops", or nothing if no value is nan, or all are."""
    nans = {name: [depth for depth, (value, _) in of.items() if math.isnan(value)] for name, of in of_series.items()}
    if not any(nans.values()) or nans == {name: [*of] for name, of in of_series.items()}:
        return ""
    places = [
        f"{f' for {name}' if len(nans) > 1 else ''} at {counted(', '.join(map(str, depths)), 'loop')}"
        for name, depths in nans.items()
        if depths
    ]
    return f", but nan{','.join(places)}"


def best_point(
    name: str,
    of_series: dict[str, dict],
    more_is_better: bool | None = None,
    folders: dict | None = None,
    is_of_few: bool = False,
) -> str:
    """Summarize one measure. If more is better, and errors are known, a depth is called best where the best and the
    worst value differ by more than chance would let any two of so many values differ, in 19 of 20 cases. Errors of
    losses say little of their differences, which are of the same text: the lowest is named. A value that is nan is
    neither best nor worst. folders: as in `best_depths`. is_of_few: of so few questions that no depth is called best.
    """
    if more_is_better is None:
        more_is_better = not LESS_IS_BETTER.search(name.replace("_", " "))
    sign = 1 if more_is_better else -1
    points = [
        (sign * value, -depth, series, error)
        for series, of in of_series.items()
        for depth, (value, error) in of.items()
        if not math.isnan(value)
    ]
    if not points:
        return f"{name} is nan everywhere"
    best, worst = max(points), min(points)
    value, depth, _, error = best
    equal = sorted(each for one, loops, each, _ in points if (one, loops) == (value, depth))
    model = f" for {', '.join(equal)}{' alike' if len(equal) > 1 else ''}" if len(of_series) > 1 else ""
    at = f"at {counted(-depth, 'loop')}"
    if len(points) == 1:
        return f"{name} is {sign * value:.4f}{model} {at}"
    if value == worst[0]:
        return f"{name} is {sign * value:.4f} {'everywhere' if model else 'at every depth'}"
    pairs = len(points) * (len(points) - 1) // 2
    at_both = [[folder[name][-each[1]][0] for folder in (folders or {}).get(each[2], [])] for each in (best, worst)]
    chance = None if None in (error, worst[3]) else by_chance(best, worst, at_both, pairs)
    if more_is_better and chance is not None and value - worst[0] < chance:
        return f"{name} is {sign * value:.4f} ± {error:.4f} at best{model}, {at}, and nowhere clearly worse"
    extreme = "lowest" if not more_is_better else "highest" if chance is None or is_of_few else "best"
    return f"{name} is {extreme}{model} {at} ({sign * value:.4f})"


def by_chance(best: tuple, worst: tuple, of_folders: list[list[float]], pairs: int) -> float | None:
    """Return the difference that two of so many points reach by chance, in 1 of 20 cases; None if a single folder is
    compared with several, as it does not tell how folders differ.

    of_folders: the values of either point by folder. The depths of a model are compared folder by folder.
    """
    error = math.hypot(best[3], worst[3])
    fewest, most = sorted(max(1, len(values)) for values in of_folders)
    if most == 1:
        return NormalDist().inv_cdf(1 - 0.025 / pairs) * error
    if fewest == 1:
        return None
    level = level_of_chosen(pairs)
    if best[2] == worst[2]:
        differences = [ours - theirs for ours, theirs in zip(*of_folders)]
        return students_reach(stdev(differences) / math.sqrt(fewest), fewest - 1, level)
    return students_reach(error, 2 * (fewest - 1), level)


def best_depth(values: dict[int, float], trained: int | None, unit: str) -> str:
    """Say which depth has the least loss, and how much higher the loss is at the trained depth and at one loop.

    Of depths whose losses exceed the least by less than the last digit shown, the one with the fewest loops is best.
    """
    least = min(values.values())
    same = [k for k in sorted(values) if values[k] - least < 1e-3]
    best = same[0]
    verdict = "best here" if same == [best] else "enough here"
    words = f"{counted(best, 'loop')} {'is' if best == 1 else 'are'} {verdict}: {values[best]:.3f} {unit}"
    parts = [words + (", as trained" if best == trained else "")]
    for k in dict.fromkeys((trained, 1)):
        named = f"{counted(k, 'loop')}{' as trained' * (k == trained)}"
        if k in same and k != best:
            parts.append(f"{named} are no better")
        elif k in values and k != best:
            parts.append(f"{named} cost{'s' * (k == 1)} {values[k] - values[best]:.3f}")
    return "; ".join(parts) + "."
