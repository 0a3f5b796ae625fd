"""Summarizes the result in a few sentences."""

import math

from looped_eval.common.findings import loops_in_words


def shallowest(fixed: list[dict], budget: float) -> dict:
    """Return the row of the smallest fixed depth that keeps the budget on the text on which thresholds, too, need
    only keep it."""
    return min((row for row in fixed if row["calibrated_ratio"] <= 1 + budget), key=lambda row: row["loops"])


def worse(ratio: float) -> str:
    """Return e.g. "0.82 % worse" for a perplexity of 1.0082 times that of full depth."""
    return f"{abs(100 * ratio - 100):.2f} % {'worse' if ratio >= 1 else 'better'}"


def cheapest(tokens: list[dict]) -> dict:
    """Return the row with the greatest speed-up by FLOPs on the text of its calibration: the best of several on the
    other text would look better than it is."""
    return max(tokens, key=lambda row: row["calibrated_speedup"])


MORE_LOOPS = 1.05  # times those asked for: more are not equal


def at_equal_loops(tokens: list[dict]) -> list[dict]:
    """Return the rows that took at most 5 % more loops on the other text than were asked for, or all if none did."""
    return [row for row in tokens if row["mean_loops"] <= MORE_LOOPS * row["wanted_loops"]] or tokens


def best_at_equal_loops(tokens: list[dict]) -> dict:
    """Return the row with the lowest perplexity on the text of its calibration, of those that do not buy it with more
    loops on the other: `at_equal_loops`.

    Rows with fewer loops than were asked for take part, so a better criterion may be among the others: thresholds at
    which many tokens have the same score leave no nearer number of loops.
    """
    return min(at_equal_loops(tokens), key=lambda row: row["calibrated_ratio"])


def exits_gain(fixed: list[dict], tokens: list[dict], budget: float) -> bool:
    """Return whether the cheapest criterion, checks included, saves compute against the smallest fixed depth within
    the budget, which may be full depth."""
    return cheapest(tokens)["predicted_speedup"] > shallowest(fixed, budget)["predicted_speedup"]


def conclusion(fixed: list[dict], tokens: list[dict], budget: float, num_loops: int) -> str:
    """Compare the cheapest criterion for tokens with the smallest fixed depth that keeps the same budget on the same
    text, and say what both have on the other.

    fixed: perplexity at each depth; tokens: for each criterion, the results of its calibrated threshold on other text.
    """
    within = f"within {100 * budget:g} % of the perplexity at {num_loops} loops"
    depth, best = shallowest(fixed, budget), cheapest(tokens)
    loops = depth["loops"]
    if best["predicted_speedup"] <= 1:
        if loops == num_loops:
            return f"No exit and no smaller depth pays {within}: this model needs its {num_loops} loops."
        found = f"No exit pays {within}, but a fixed depth of {loops} does (on the other text {worse(depth['ratio'])})"
        return f"{found}: num_loops={loops} is enough."
    found = f"{best['criterion']} takes {loops_in_words(best['mean_loops'], num_loops)}, calibrated to be {within}"
    error = best["ratio_error"]  # of a single sequence it is not known
    sure = f", ± {100 * error:.2f} by its sequences" if math.isfinite(error) else ""
    found += f" (on the other text it is {worse(best['ratio'])}{sure})"
    if loops == num_loops:
        return f"{found}; no smaller fixed depth is."
    speeds = f"{best['predicted_speedup']:.2f} times as fast, and that depth {depth['predicted_speedup']:.2f} times"
    verdict = "they gain over it" if exits_gain(fixed, tokens, budget) else "they gain nothing over it"
    found += f"; so is a fixed depth of {loops} (there {worse(depth['ratio'])})"
    return f"{found}. By FLOPs, checks included, exits are {speeds}: {verdict}."


def conclusion_at_loops(fixed: list[dict], tokens: list[dict]) -> str:
    """Name the criterion with the lowest perplexity where it was calibrated at each mean number of loops, what it has
    on the other text beside the fixed depth if there is one, and those that are left out for taking more loops.

    tokens: for each criterion and number of loops, the results of its calibrated threshold on other text.
    """
    said = []
    for wanted in dict.fromkeys(row["wanted_loops"] for row in tokens):
        rows = [row for row in tokens if row["wanted_loops"] == wanted]
        best, compared = best_at_equal_loops(rows), at_equal_loops(rows)
        words = f"Calibrated to {wanted:g} mean loops, {best['criterion']} has the lowest perplexity there"
        words += f", and on the other text {best['perplexity']:.2f} in {best['mean_loops']:.2f} loops"
        at_depth = {row["loops"]: row["perplexity"] for row in fixed}.get(wanted)
        words += "" if at_depth is None else f"; a fixed depth of {wanted:g} has {at_depth:.2f}"
        more = [f"{row['criterion']} ({row['mean_loops']:.2f})" for row in rows if row not in compared]
        words += f"; left out for more loops on the other text: {', '.join(more)}" if more else ""
        said.append(f"{words}.")
    return " ".join(said)
