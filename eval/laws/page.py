"""The page of a fit: a sentence, charts, and coefficients beside those of the paper."""

from pathlib import Path

from looped_eval.common.page import Charts, Explanation, Folded, Section, Table, Text, numbers, to_html
from looped_recipes.common.axis import written
from looped_recipes.common.chart import save_charts
from looped_recipes.common.files import write_whole

from .charts import charts_of
from .fitting import Fit
from .run_table import RunTable


TITLES = {
    "isoflop": "Runs of equal compute",
    "parametric": "The law of training",
    "test_time": "Loss over test depth",
    "unified": "The law of training and test depth",
    "conditioning": "How decay depends on the trained depth",
}
EXPLANATIONS = {
    "isoflop": Explanation(
        "At each FLOP budget a parabola through loss over mean depth has its least loss at the best depth; best "
        "depths and best tokens follow power laws of FLOPs. Intervals are of the parabolas' minima, which differ from "
        "the lowest losses where a curve is no parabola; the frontier of the law of training has no such error.",
        "Each budget has runs on both sides of its optimum, and optima rise with FLOPs.",
        "Parcae, section 5: exponents 0.40 for mean depth and 0.78 for tokens.",
    ),
    "parametric": Explanation(
        "E + X N^-x + Y D^-y: N effective parameters at the trained depth, D tokens.",
        "Fitted losses lie on the diagonal, intervals are narrow, and runs that were held out are predicted as well.",
        "Parcae, table 11, 140M and 370M: E 2.662 and 2.439, x 0.771 and 0.775, y 0.525 and 0.448.",
    ),
    "test_time": Explanation(
        "Four forms of a curve over test depth, fitted to all depths, and to the trained range alone.",
        "The exponential has the least misfit, also beyond the trained depth: loss saturates.",
        "Parcae, table 12, mean Huber loss in units of its own: exponential 2.52 and 1.88, shifted power "
        "5.42 and 5.26, power 11.11 and 10.77, without floor 112.89 and 104.95, at 140M and 370M.",
    ),
    "unified": Explanation(
        "The law of training, and above it a decay over test depth whose speed depends on the trained depth μ.",
        "Fitted losses lie on the diagonal.",
        "Parcae, appendix L: γ = 1.19 at 140M and 1.17 at 370M where it is learned; 1 does as well.",
    ),
    "conditioning": Explanation(
        "Three forms of the decay above the law of training: speed by μ^-γ, by 1/μ, or the same for all.",
        "A decay that depends on μ fits better than one that does not.",
        "Parcae, table 14, total Huber loss at 140M: 0.001116 with γ learned, 0.001177 with 1, 0.003253 without μ.",
    ),
}


def between(law: dict) -> str:
    ends = law.get("interval")
    return f"{law['exponent']:.2f}" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")


def isoflop(result: dict) -> str:
    laws = result["power_laws"]
    return (
        f"The best mean depth grows as FLOPs^{between(laws['mean_depth'])}, the best tokens as "
        f"FLOPs^{between(laws['tokens'])}."
    )


def fit_of(result: dict) -> str:
    words = f"The law fits {result['rows']} losses with a floor of {result['coefficients']['E']:.3f}"
    if "held_out" in result:
        words += f", and predicts held-out ones within {result['held_out']['mean_percent']:.2f} % in the mean"
    return words + "."


def test_time(result: dict) -> str:
    sentences = []
    for key, where in (("in_range", "on all depths"), ("extrapolated", "beyond the trained depth")):
        known = {name: form[key]["huber"] for name, form in result["forms"].items() if key in form}
        if len(known) > 1:
            best, second = sorted(known, key=known.get)[:2]
            factor = written(known[second] / known[best], 3) if known[best] > 0 else "many"
            formula = result["forms"][best]["formula"]
            sentences.append(f"{formula} fits best {where}: the next form misses by {factor} times as much.")
    return " ".join(sentences) or "No form fits all curves."


def conditioning(result: dict) -> str:
    form = result["forms"][result["best"]]
    return f"{form['formula']} fits best, with a total Huber loss of {written(form['huber'], 3)}."


FINDINGS = {
    "isoflop": isoflop,
    "parametric": fit_of,
    "unified": fit_of,
    "test_time": test_time,
    "conditioning": conditioning,
}


def finding(law: str, result: dict) -> str:
    return FINDINGS[law](result)


def coefficients(result: dict) -> list:
    if "coefficients" not in result:
        return []
    intervals = result.get("intervals") or {}
    rows = []
    for name, value in result["coefficients"].items():
        ends = intervals.get(name)
        rows.append([name, written(value, 5), f"{written(ends[0], 4)} to {written(ends[1], 4)}" if ends else "–"])
    return [Table(["coefficient", "value", "95 % interval"], rows)]


def sections(law: str, result: dict, charts: list) -> list[Section]:
    left_out = [Text(str(line)) for line in result.get("left_out", [])]
    others = {key: value for key, value in result.items() if key not in ("coefficients", "intervals")}
    found = Section(TITLES[law], [Charts(charts), EXPLANATIONS[law], *coefficients(result)])
    omitted = [Section("What was left out", left_out)] if left_out else []
    return [found, *omitted, Section("How it was fitted", [Folded("Numbers", numbers(others, digits=5))])]


def write_page(law: str, result: dict, table: RunTable, fitted: Fit | None, path: Path):
    """Write the page to `path`.html, and its charts alone to `path`.svg."""
    charts = charts_of(law, result, table, fitted)
    save_charts(charts, f"{path}.svg")
    title = f"Scaling laws: {path.name.replace('_', ' ')}"
    write_whole(f"{path}.html", to_html(title, sections(law, result, charts), [finding(law, result)]))
