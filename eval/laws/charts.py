"""Charts of fitted laws (Parcae, figures 4, 5, 6, 8, 25 and 26)."""

import numpy as np
from contourpy import contour_generator

from looped_recipes.common.axis import written
from looped_recipes.common.chart import Bars, Chart, Line, ordered

from .analyses import budgets_of
from .fitting import Fit
from .forms import TEST_TIME
from .frontier import depth_costs, is_fixed_depth, predicted
from .run_table import RunTable


MOST = 8  # curves in one chart


def charts_of(law: str, result: dict, table: RunTable, fitted: Fit | None) -> list:
    drawn = {
        "isoflop": isoflop,
        "parametric": parametric,
        "test_time": test_time,
        "unified": unified,
        "conditioning": conditioning,
    }
    return drawn[law](result, table, fitted)


def points_of(rows: list[dict], x: str, y: str) -> list[tuple[float, float]]:
    return [(row[x], row[y]) for row in rows]


def measured_and_fitted(name: str, measured: list, fitted: list, color: str) -> list[Line]:
    """Return dots, and a line through them without an entry in the key."""
    return [Line(name, measured, color, joined=False), Line("", fitted, color)]


def isoflop(result: dict, table: RunTable, fitted) -> list:
    table = table.at_training_depth()
    budgets = budgets_of(table.where(lambda row: not is_fixed_depth(row)))
    lines = []
    for i, (flops, group) in enumerate(budgets.items()):
        depth, loss = group["mean_depth"].numpy(), group["loss"].numpy()
        curve = []
        if len(np.unique(depth)) > 3:
            at = np.geomspace(depth.min(), depth.max(), 60)
            curve = list(zip(at, np.polyval(np.polyfit(np.log(depth), loss, 2), np.log(at))))
        name = f"{written(flops, 2)} FLOPs"
        lines += measured_and_fitted(name, list(zip(depth, loss)), curve, ordered(i, len(budgets)))
    lines.append(Line("best", points_of(result["optima"], "mean_depth", "loss"), "ink", dashed=True))
    charts = [Chart("Runs of equal compute", "mean depth", "validation loss", lines, log_x=True)]
    for name, label in (("mean_depth", "best mean depth"), ("tokens", "best tokens")):
        law, flops = result["power_laws"][name], [best["flops"] for best in result["optima"]]
        line = [(at, law["scale"] * at ** law["exponent"]) for at in flops]
        both = measured_and_fitted("", points_of(result["optima"], "flops", name), line, "c0")
        title = f"{label.capitalize()}: FLOPs^{law['exponent']:.2f}"
        charts.append(Chart(title, "training FLOPs", label, both, log_x=True, log_y=True))
    return [*charts, measured_frontier(result, table)]


def measured_frontier(result: dict, table: RunTable) -> Chart:
    """Draw every run, and lines through the best mean depth and the fixed depth of each budget (figure 6)."""
    fixed = [point for point in result["frontier"] if "fixed_loss" in point]
    lines = [
        Line("runs", points_of(table.rows, "flops", "loss"), "c7", joined=False),  # drawn first, below the lines
        Line("best mean depth", points_of(result["frontier"], "flops", "loss"), "c0"),
        Line("one loop", points_of(fixed, "flops", "fixed_loss"), "c1"),
    ]
    return Chart("What looping gains", "training FLOPs", "validation loss", lines, log_x=True)


def against_measured(predicted, table: RunTable) -> Chart:
    loss = table["loss"].tolist()
    ends = [min(loss), max(loss)]
    lines = [
        Line("as measured", list(zip(ends, ends)), "c7", dashed=True, dots=False),
        Line("runs", list(zip(loss, np.asarray(predicted).tolist())), joined=False),
    ]
    return Chart("The fit", "measured loss", "fitted loss", lines)


def parametric(result: dict, table: RunTable, fitted: Fit) -> list:
    """Draw lines of equal loss and, if all runs have one size, the frontier through them (figures 4 and 25)."""
    table = table.at_training_depth()
    columns = table.columns(fitted.law.columns)
    tokens, of_one_size = columns["tokens"].numpy(), "frontier" in result
    x = table["mean_depth" if of_one_size else "effective_parameters"].numpy()
    across, up = np.geomspace(x.min(), x.max(), 60), np.geomspace(tokens.min(), tokens.max(), 60)
    grid = np.meshgrid(across, up)
    size = depth_costs(table).at(grid[0])[0] if of_one_size else grid[0]
    losses = predicted(fitted, size.ravel(), grid[1].ravel()).reshape(60, 60)
    levels = np.linspace(losses.min(), losses.max(), MOST + 2)[1:-1]
    contours = contour_generator(np.log(across), np.log(up), losses)
    lines = []
    for i, level in enumerate(levels):
        for number, part in enumerate(contours.lines(level)):
            points = [tuple(point) for point in np.exp(part)]
            lines.append(Line(f"loss {level:.3f}" if number == 0 else "", points, ordered(i, MOST), dots=False))
    lines.append(Line("runs", list(zip(x, tokens)), "c7", joined=False))
    if of_one_size:
        inside = [point for point in result["frontier"] if not point["at_edge"]]
        lines.append(Line("least FLOPs", points_of(inside, "mean_depth", "tokens"), "c0", dashed=True))
    label = "mean depth" if of_one_size else "effective parameters"
    return [
        Chart("Lines of equal loss", label, "tokens", lines, log_x=True, log_y=True),
        against_measured(fitted.predict(columns).numpy(), table),
    ]


def curves_of(table: RunTable) -> dict[str, RunTable]:
    """Return the curves of at most MOST runs, evenly picked and ordered by their trained depth."""
    curves = sorted(table.by("run").items(), key=lambda each: each[1].rows[0]["mean_depth"])
    return dict(curves[:: -(-len(curves) // MOST)])


def misfits(title: str, y: str, forms: dict[str, dict], key: str, names: dict[str, str]) -> Bars:
    values = {names[name]: form[key] for name, form in forms.items() if key in form}
    return Bars(title, y, {name: v["huber"] if isinstance(v, dict) else v for name, v in values.items()}, log=True)


def test_time(result: dict, table: RunTable, fitted) -> list:
    shown = curves_of(table)
    lines = []
    for i, (run, curve) in enumerate(shown.items()):
        depth, found, line = curve["test_depth"].numpy(), result["curves"][run], []
        if found["converged"]:
            c, at = found["coefficients"], np.linspace(depth.min(), depth.max(), 60)
            line = list(zip(at, c["L_inf"] + c["Z"] * np.exp(-c["z"] * at)))
        name = f"{run}, trained at {curve.rows[0]['mean_depth']:g}"
        lines += measured_and_fitted(name, points_of(curve.rows, "test_depth", "loss"), line, ordered(i, len(shown)))
    names, forms = {name: law.formula for name, law in TEST_TIME.items()}, result["forms"]
    return [
        Chart("Loss over test depth", "test depth", "validation loss", lines),
        misfits("Misfit on all depths", "mean Huber loss", forms, "in_range", names),
        misfits("Misfit beyond the trained depth", "mean Huber loss", forms, "extrapolated", names),
    ]


def unified(result: dict, table: RunTable, fitted: Fit) -> list:
    predicted = fitted.predict(table.columns(fitted.law.columns)).tolist()
    shown, lines = curves_of(table), []
    for i, run in enumerate(shown):
        rows = sorted(
            ((row["test_depth"], row["loss"], value) for row, value in zip(table.rows, predicted) if row["run"] == run)
        )
        line = [(depth, value) for depth, _, value in rows]
        lines += measured_and_fitted(run, [(depth, loss) for depth, loss, _ in rows], line, ordered(i, len(shown)))
    return [
        Chart("Loss over test depth", "test depth", "validation loss", lines),
        against_measured(predicted, table),
    ]


DEPENDENCE = {"learned": "z T μ^-γ", "one": "z T / μ", "none": "z T"}


def conditioning(result: dict, table: RunTable, fitted) -> list:
    return [
        misfits("Misfit", "total Huber loss", result["forms"], "huber", DEPENDENCE),
        misfits("Misfit on held-out runs", "total Huber loss", result["forms"], "held_out_huber", DEPENDENCE),
    ]
