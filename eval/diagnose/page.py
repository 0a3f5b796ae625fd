"""Results of the measures as sections of a page: first those of the model, then those of fresh models."""

from looped_eval.common.page import Charts, Finding, Folded, Heading, Section, Table, Text, numbers

from . import figures, sentences
from .readings import READINGS


HEADLINES = ("depth_curve", "norm_trajectory", "radial_gradient")
PARTS = {"loop_cosine": ("loop_cosine", "loop_cosine_fresh")}  # of the model, and of fresh models


def parts(name: str, result: dict) -> list[str]:
    """Return the names of the readings in a measure's result."""
    return [part for part in PARTS.get(name, (name,)) if part != "loop_cosine_fresh" or "looped" in result]


def said(part: str, result: dict) -> str:
    try:
        return getattr(sentences, part)(result)
    except (TypeError, ValueError, ZeroDivisionError):  # numbers that were not finite are None
        return "Some of what was measured is not a finite number."


def findings(name: str, result: dict) -> list[str]:
    """Return a sentence for each reading of a measure."""
    return [said(part, result) for part in parts(name, result)]


def charts_of(name: str, result: dict, beside: dict[str, dict] | None = None) -> list:
    """Return all charts of a result."""
    drawn = [chart for part in parts(name, result) for chart in getattr(figures, part)(result)]
    if beside:
        drawn = figures.depth_curve(result, beside)
    return drawn + figures.training(result.get("training", {}))


def side_by_side(results: dict[str, dict]) -> Table:
    """Return a table of the single numbers of one measure, a column for each model."""
    tables = {name: dict(numbers(without_training(result)).rows) for name, result in results.items()}
    every = dict.fromkeys(number for table in tables.values() for number in table)
    return Table(["", *tables], [[number, *(table.get(number, "–") for table in tables.values())] for number in every])


def without_training(result: dict) -> dict:
    return {key: value for key, value in result.items() if key != "training"}


def measured(part: str, result: dict) -> list:
    """Return the blocks of one reading, its finding first."""
    reading = READINGS[part]
    charts = getattr(figures, part)(result)
    if not reading.fresh:
        charts += figures.training(result.get("training", {}))
    blocks = [Finding(said(part, result)), Charts(charts), reading.explanation]
    table = numbers(without_training(result))
    return blocks + ([Folded("Numbers", table)] if table.rows else [])


def sections(results: dict[str, dict], left_out: dict[str, str] | None = None) -> list[Section]:
    """Return the sections of a page. results: {measure: result}; left_out: {measure: why}."""
    found = [(part, result) for name, result in results.items() for part in parts(name, result)]
    found.sort(key=lambda each: list(READINGS).index(each[0]))
    own = [Section(READINGS[part].title, measured(part, r)) for part, r in found if not READINGS[part].fresh]
    fresh = []
    for part, result in found:
        if READINGS[part].fresh:
            fresh += [Heading(READINGS[part].title), *measured(part, result)]
    if fresh:
        words = "These measures make models anew, with random weights, and say nothing of what a model has learned."
        own.append(Section("Fresh models of this config", [Text(words), *fresh]))
    if left_out:
        lines = [Text(f"{READINGS[name].title}: {why}.") for name, why in left_out.items()]
        own.append(Section("What does not apply", lines))
    return own


def headlines(results: dict[str, dict]) -> list[str]:
    return [said(name, results[name]) for name in HEADLINES if name in results]
