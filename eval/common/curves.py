"""Measures over depth, as a table and a picture.

curves[measure][series][depth] = (value, what it may be off by, or None)
"""

from pathlib import Path

from looped_recipes.common.canvas import as_label, canvas


Point = tuple[float, float | None]
Curves = dict[str, dict[str, dict[int, Point]]]


def table(curves: Curves) -> str:
    """Markdown: a row for each measure and series, a column for each depth."""
    depths = sorted({depth for of_series in curves.values() for points in of_series.values() for depth in points})
    named = len({series for of_series in curves.values() for series in of_series}) > 1
    lines = [["measure"] + ["model"] * named + [f"{depth} loop{'s' * (depth > 1)}" for depth in depths]]
    lines.append(["---"] * (1 + named) + ["---:"] * len(depths))
    for measure, of_series in curves.items():
        for series, points in of_series.items():
            cells = [cell(*points[depth]) if depth in points else "" for depth in depths]
            lines.append([measure] + [series] * named + cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(value: float, deviation: float | None) -> str:
    return f"{value:.4f}" if deviation is None else f"{value:.4f} ± {deviation:.4f}"


def draw(curves: Curves, path: Path):
    with canvas(path, len(curves), columns=3, size=(4, 3), dpi=150) as axes:
        for axis, (measure, of_series) in zip(axes, curves.items()):
            for series, points in of_series.items():
                depths = sorted(points)
                values = [points[depth][0] for depth in depths]
                deviations = [points[depth][1] or 0 for depth in depths]
                axis.errorbar(depths, values, deviations, marker="o", markersize=3, capsize=2, label=as_label(series))
            axis.set(
                title=measure, xlabel="loops", xticks=sorted({d for points in of_series.values() for d in points})
            )
            if len(of_series) > 1:
                axis.legend(fontsize="small")
