"""Measures over depth, as a table and as charts.

curves[measure][series][depth] = (value, error or None)
"""

from collections.abc import Iterator
from pathlib import Path

from looped_recipes.common.chart import Chart, Line, named, save_charts
from looped_recipes.common.intervals import FEWEST
from looped_recipes.common.words import counted


Point = tuple[float, float | None]
Curves = dict[str, dict[str, dict[int, Point]]]
PLACE_AND_SPEED = {  # model arguments of lm-eval that change no result
    "batch_size", "max_batch_size", "logits_cache", "parallelize", "max_memory_per_gpu", "max_cpu_memory",
    "offload_folder", "tp_plan",
}  # fmt: skip
UNITS = ("bits per byte", "cross-entropy", "perplexity")
CHOICES = {  # answers per question of public tasks: guessing scores 1 over this; nearly all questions of ARC have 4
    "arc_challenge": 4,
    "arc_easy": 4,
    "boolq": 2,
    "commonsense_qa": 5,
    "copa": 2,
    "hellaswag": 4,
    "openbookqa": 4,
    "piqa": 2,
    "sciq": 4,
    "winogrande": 2,
}


def metrics_of(results: dict) -> Iterator[tuple[str, Point]]:
    """Yield (task and metric, (value, standard error)) from lm-eval's results, including groups of tasks."""
    for task, metrics in {**results["results"], **(results.get("groups") or {})}.items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            is_measure = filtered and metric != "bypass" and not metric.endswith("_stderr")  # bypass: not scored
            if is_measure and isinstance(value, (int, float)):
                error = metrics.get(f"{metric}_stderr,{filtered}")
                measure = f"{task} {metric}" + (f" ({filtered})" if filtered != "none" else "")
                yield measure, (value, error if isinstance(error, (int, float)) else None)


def more_is_better(results: dict) -> dict[str, bool]:
    """Return {measure: whether higher is better} for the metrics for which lm-eval's results say it."""
    of_tasks, found = results.get("higher_is_better") or {}, {}
    for measure, _ in metrics_of(results):
        task, _, metric = measure.partition(" ")
        if (better := (of_tasks.get(task) or {}).get(metric.partition(" (")[0])) is not None:
            found[measure] = better
    return found


def of_few_questions(results: dict) -> set[str]:
    """Return the measures of tasks and groups with so few questions that lm-eval's standard errors say little: where
    all answers are right, or all wrong, the error is 0."""
    found = {**results["results"], **(results.get("groups") or {})}
    few = {task for task, metrics in found.items() if metrics.get("sample_len", FEWEST) < FEWEST}
    return {measure for measure, _ in metrics_of(results) if measure.partition(" ")[0] in few}


def rows_over_depth(curves: Curves) -> tuple[list[int], list[list[str]]]:
    """Return the depths of all curves, and a row for each measure and series: both names and a cell for each depth."""
    depths = sorted({depth for of_series in curves.values() for points in of_series.values() for depth in points})
    rows = [
        [measure, series, *(cell(*points[depth]) if depth in points else "" for depth in depths)]
        for measure, of_series in curves.items()
        for series, points in of_series.items()
    ]
    return depths, rows


def table(curves: Curves) -> str:
    """Return a Markdown table with a row for each measure and series and a column for each depth."""
    depths, rows = rows_over_depth(curves)
    several = len({series for _, series, *_ in rows}) > 1
    lines = [["measure"] + ["model"] * several + [counted(depth, "loop") for depth in depths]]
    lines.append(["---"] * (1 + several) + ["---:"] * len(depths))
    lines += [[measure] + [series] * several + cells for measure, series, *cells in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(value: float, deviation: float | None) -> str:
    return f"{value:.4f}" if deviation is None else f"{value:.4f} ± {deviation:.4f}"


def chance_of(measure: str, configs: dict | None = None) -> float | None:
    """Return the score of guessing; None if it is not known or the measure is no accuracy.

    configs: {task: settings}, as lm-eval's results have them.
    """
    task, _, metric = measure.partition(" ")
    if not metric.startswith("acc"):
        return None
    known = (((configs or {}).get(task) or {}).get("metadata") or {}).get("chance")
    if isinstance(known, (int, float)):
        return known or None
    return 1 / CHOICES[task] if task in CHOICES else None


def charts(curves: Curves, chance: dict[str, float] | None = None, trained: int | None = None) -> list[Chart]:
    """Return a chart for each measure. chance: {measure: score of guessing}; trained: the depth to mark as trained."""
    drawn = []
    for measure, of_series in curves.items():
        lines = []
        for i, (series, points) in enumerate(of_series.items()):
            depths = sorted(points)
            values, errors = [(depth, points[depth][0]) for depth in depths], [points[depth][1] for depth in depths]
            lines.append(Line(series, values, named(i), errors=errors))
        level = (chance or {}).get(measure, chance_of(measure))
        levels, marks = {} if level is None else {"chance": level}, {"as trained": trained} if trained else {}
        title = measure.replace("_", " ")
        is_accuracy = level is not None or measure.partition(" ")[2].startswith("acc")
        y = "accuracy" if is_accuracy else next((unit for unit in UNITS if unit in title), title)
        drawn.append(Chart(title, "loops", y, lines, levels=levels, marks=marks, whole_x=True))
    return drawn


def draw(curves: Curves, path: Path, chance: dict[str, float] | None = None):
    save_charts(charts(curves, chance), path)
