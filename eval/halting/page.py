"""Results of halting as sections of a page and as charts."""

import math
from pathlib import Path

from looped_eval.common.page import Charts, Explanation, Folded, Section, Table, Text, to_html
from looped_recipes.common.axis import written
from looped_recipes.common.chart import Chart, Line, named, save_charts
from looped_recipes.common.files import write_whole
from looped_recipes.common.words import counted, percent

from .conclusion import cheapest, conclusion, conclusion_at_loops, shallowest


EXPLANATION = Explanation(
    "On one slice of text each criterion gets the threshold with the fewest loops within the budget of perplexity; "
    "what it then costs and saves is measured on another slice. The smallest fixed depth within the budget is chosen "
    "and measured in the same way.",
    "Exits beat every fixed depth: fewer loops at the same perplexity. Where one loop alone stays within the budget, "
    "a high speed-up means that the model makes no use of its loops.",
    "Readout Blind Spot, table 13, sequences, budget 1 %: 3.39 to 3.77 times as fast in 1.00 loops of 4 with normed "
    "readouts, which make no use of depth; 1.29 to 2.09 times in 1.76 to 2.60 loops with the scale held.",
)
COLUMNS = {
    "loops": "loops",
    "criterion": "criterion",
    "budget": "budget",
    "wanted_loops": "loops asked for",
    "threshold": "threshold",
    "calibrated_loops": "loops calibrated",
    "mean_loops": "mean loops",
    "perplexity": "perplexity",
    "calibrated_ratio": "against full depth, calibrated",
    "ratio": "against full depth",
    "ratio_error": "±",
    "speedup": "speed-up",
    "predicted_speedup": "speed-up by FLOPs",
    "measured_speedup": "speed-up measured",
    "tokens_per_second": "tokens/s",
}


def in_words(name: str) -> str:
    return name.replace("_", " ")


def cell(key: str, value) -> str:
    if isinstance(value, str):
        return in_words(value)
    if value is None or not math.isfinite(value):
        return "never" if key == "threshold" else "unknown"
    if key == "budget":
        return percent(value)
    digits = {"tokens_per_second": 0, "threshold": None, "loops": None}.get(key, 4 if "ratio" in key else 2)
    return written(value) if digits is None else f"{value:,.{digits}f}"


def table(rows: list[dict]) -> Table:
    keys = [key for key in COLUMNS if key in rows[0]]
    return Table([COLUMNS[key] for key in keys], [[cell(key, row.get(key)) for key in keys] for row in rows])


def cost(ratio: float) -> str:
    return f"{percent(abs(ratio - 1))} {'more' if ratio >= 1 else 'less'} perplexity"


def finding(result: dict) -> str:
    """Compare the cheapest criterion for sequences, at the first budget, with the smallest fixed depth within it."""
    fixed, budget = result["fixed"], result["halting"][0]["budget"]
    full = fixed[-1]["loops"]
    best = cheapest([row for row in result["halting"] if row["budget"] == budget])
    name, speed = in_words(best["criterion"]), best["measured_speedup"]
    if speed <= 1:
        return (
            f"Exits do not pay within {percent(budget)} of perplexity: {name}, the cheapest where it was calibrated, "
            f"scores text {speed:.2f} times as fast as {full} loops."
        )
    words = (
        f"Exits by {name} score text {speed:.2f} times as fast as {full} loops, in {best['mean_loops']:.2f} loops and "
        f"for {cost(best['ratio'])}"
    )
    words += f", beyond the {percent(budget)} that were calibrated for" if best["ratio"] > 1 + budget else ""
    shallow = shallowest(fixed, budget)
    if shallow["loops"] == full:
        return f"{words}. No fixed depth below {full} stays within {percent(budget)} where it was calibrated."
    verdict = "Exits gain over that" if speed > shallow["speedup"] else "Exits gain nothing over that"
    return (
        f"{words}. {counted(shallow['loops'], 'loop')} for all text, calibrated alike: {shallow['speedup']:.2f} times "
        f"as fast, for {cost(shallow['ratio'])}. {verdict}."
    )


def findings(content: dict) -> list[str]:
    """Summarize tokens that exit as in generate, and scored sequences. content: content of halting.json."""
    result, found = content["result"], []
    fixed, tokens = result["fixed"], result["tokens"]
    if tokens:
        of_tokens = conclusion(fixed, tokens, tokens[0]["budget"], fixed[-1]["loops"])
        found += [f"Tokens: {in_words(of_tokens)}", f"Sequences: {finding(result)}"]
    at_loops = conclusion_at_loops(fixed, rows_at_loops(result, "tokens"))
    return [*found, f"Tokens: {in_words(at_loops)}"] if at_loops else found


def rows_at_loops(result: dict, unit: str) -> list[dict]:
    """Return the rows of --mean-loops, of which there are none without it."""
    return result.get("at_mean_loops", {}).get(unit, [])


def charts(result: dict) -> list[Chart]:
    of_budget = charts_of_budget(result) if result["halting"] else []
    at_loops = [chart_at_loops(result)] if rows_at_loops(result, "tokens") else []
    return of_budget + at_loops


def chart_at_loops(result: dict) -> Chart:
    """Draw fixed depths as one line and each criterion as another, for tokens."""
    rows = rows_at_loops(result, "tokens")
    lines = [Line("fixed depth", [(row["loops"], row["ratio"]) for row in result["fixed"]], "ink")]
    for i, name in enumerate(dict.fromkeys(row["criterion"] for row in rows)):
        points = sorted((row["mean_loops"], row["ratio"]) for row in rows if row["criterion"] == name)
        lines.append(Line(in_words(name), points, named(i)))
    return Chart("Tokens at equal loops: low is good", "mean loops", "perplexity, full depth: 1", lines)


def charts_of_budget(result: dict) -> list[Chart]:
    """Draw fixed depths as one line and each criterion as another through its budgets; right and low is good."""
    fixed, budget = result["fixed"], result["halting"][0]["budget"]

    def points(rows: list[dict]) -> list[tuple[float, float]]:
        return [(row["tokens_per_second"], row["perplexity"]) for row in rows]

    depths = [counted(row["loops"], "loop") for row in fixed]
    lines = [Line("fixed depth", points(fixed), "ink", labels=depths)]
    for i, name in enumerate(dict.fromkeys(row["criterion"] for row in result["halting"])):
        rows = [row for row in result["halting"] if row["criterion"] == name]
        lines.append(Line(in_words(name), points(sorted(rows, key=lambda row: row["tokens_per_second"])), named(i)))
    values = [row["perplexity"] for row in fixed]
    limit = {f"{percent(budget)} worse": (1 + budget) * values[-1]}
    title, log = "Sequences: right and low is good", max(values) > 5 * min(values)
    pareto = Chart(title, "tokens/s of scoring", "perplexity", lines, log_y=log, levels=limit)
    loops = [(row["mean_loops"], row["ratio"]) for row in result["tokens"]]
    words = [in_words(row["criterion"]) for row in result["tokens"]]
    tokens = [
        Line(name, [point], named(i), joined=False, labels=[name]) for i, (name, point) in enumerate(zip(words, loops))
    ]
    return [pareto, Chart("Tokens: left and low is good", "mean loops", "perplexity, full depth: 1", tokens)]


def sections(content: dict) -> list[Section]:
    """Return the sections of the page. content: content of halting.json."""
    result = content["result"]
    explained = [EXPLANATION] if result["halting"] else []
    parts = [
        Section("Exits and fixed depths", [Charts(charts(result)), *explained]),
        Section("Fixed depth", [table(result["fixed"])]),
    ]
    if result["halting"]:
        budget = result["halting"][0]["budget"]
        first, others = (
            [row for row in result["halting"] if (row["budget"] == budget) == own] for own in (True, False)
        )
        parts += [
            Section("Tokens that exit by themselves, as in generate", [table(result["tokens"])]),
            Section(
                "Sequences that leave their batch",
                [table(first), *([Folded("Other budgets", table(others))] if others else [])],
            ),
        ]
    for unit in ("tokens", "sequences"):
        if rows := rows_at_loops(result, unit):
            parts.append(Section(f"{unit.capitalize()} at equal loops", [table(rows)]))
    where = f"{content['sequences']} sequences of {content['length']} tokens in each slice, {content['text']}."
    notes = [Text(f"{note[0].upper()}{note[1:]}.") for note in content.get("notes", [])]
    return [*parts, Section("How it was measured", [Text(where), *notes])]


def write_page(name: str, content: dict, folder: Path):
    """Write halting.html, and halting.svg with its charts only."""
    save_charts(charts(content["result"]), folder / "halting.svg")
    page = to_html(f"Early exit: {name}", sections(content), findings(content))
    write_whole(folder / "halting.html", page)
