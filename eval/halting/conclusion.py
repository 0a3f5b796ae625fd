"""What was found, in one sentence."""

from looped_eval.common.findings import loops_in_words


def conclusion(fixed: list[dict], tokens: list[dict], budget: float, num_loops: int) -> str:
    """The cheapest criterion for tokens, beside the fixed depth that keeps the same budget.

    fixed: perplexity at each depth; tokens: of each criterion, what its calibrated threshold gave on other text.
    """
    within = f"within {100 * budget:g} % of the perplexity at {num_loops} loops"
    shallowest = min(row["loops"] for row in fixed if row["ratio"] <= 1 + budget)
    best = max(tokens, key=lambda row: row["predicted_speedup"])
    if best["predicted_speedup"] <= 1:
        if shallowest == num_loops:
            return f"No exit and no smaller depth pays {within}: this model needs its {num_loops} loops."
        return f"No exit pays {within}, but a fixed depth of {shallowest} does: num_loops={shallowest} is enough."
    found = f"{best['criterion']} takes {loops_in_words(best['mean_loops'], num_loops)}, calibrated to be {within}"
    if best["ratio"] > 1 + budget:
        found += f" (on the other text it is {100 * best['ratio'] - 100:.2f} % worse)"
    if shallowest == num_loops:
        return f"{found}; no smaller fixed depth is."
    verdict = "exits gain over that" if best["mean_loops"] < shallowest else "exits gain nothing over that"
    return f"{found}; so is a fixed depth of {shallowest}: {verdict}."
