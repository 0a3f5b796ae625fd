"""Pictures of fitted laws (Parcae, figures 4, 5, 6, 8, 25 and 26)."""

from pathlib import Path

import numpy as np

from looped_recipes.common.canvas import canvas

from .analyses import budgets_of
from .fitting import Fit
from .forms import TEST_TIME
from .frontier import depth_costs, is_fixed_depth, predicted
from .run_table import Table


def draw(law: str, result: dict, table: Table, fitted: Fit | None, path: Path):
    panels = {"isoflop": 4, "conditioning": 1, "parametric": 2, "test_time": 2, "unified": 2}[law]
    drawn = {
        "isoflop": draw_isoflop,
        "parametric": draw_parametric,
        "test_time": draw_test_time,
        "unified": draw_unified,
        "conditioning": draw_conditioning,
    }[law]
    with canvas(path, panels, size=(4.6, 3.6), dpi=150) as axes:
        drawn(axes, result, table, fitted)


def draw_isoflop(axes, result, table, fitted):
    table = table.at_training_depth()
    for flops, group in budgets_of(table.where(lambda row: not is_fixed_depth(row))).items():
        depth, loss = group["mean_depth"].numpy(), group["loss"].numpy()
        points = axes[0].scatter(depth, loss, s=14, label=f"{flops:.2g} FLOPs")
        if len(np.unique(depth)) > 3:
            line = np.geomspace(depth.min(), depth.max(), 100)
            parabola = np.polyfit(np.log(depth), loss, 2)
            axes[0].plot(line, np.polyval(parabola, np.log(line)), color=points.get_facecolor()[0])
    for best in result["optima"]:
        axes[0].plot(best["mean_depth"], best["loss"], marker="*", markersize=12, color="black")
    axes[0].set(xscale="log", xlabel="mean depth", ylabel="validation loss")
    axes[0].margins(y=0.25)
    axes[0].legend(fontsize=6, ncols=3, loc="upper center")
    plain_ticks(axes[0].xaxis, table["mean_depth"])
    flops = np.array([best["flops"] for best in result["optima"]])
    for axis, name, label in zip(axes[1:], ("mean_depth", "tokens"), ("best mean depth", "best tokens")):
        law = result["power_laws"][name]
        axis.scatter(flops, [best[name] for best in result["optima"]], color="black")
        axis.plot(flops, law["scale"] * flops ** law["exponent"], label=f"FLOPs^{law['exponent']:.2f}")
        axis.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel=label)
        plain_ticks(axis.xaxis, flops, "{x:.2g}")
        axis.legend()
    plain_ticks(axes[1].yaxis, table["mean_depth"])
    axes[2].yaxis.set_minor_formatter("{x:.2g}")
    draw_measured_frontier(axes[3], result, table)


def draw_measured_frontier(axis, result, table):
    """Every run, and lines through the best looped run and the fixed-depth runs of each budget (figure 6)."""
    for rows, color in ((table.where(lambda row: not is_fixed_depth(row)), "C0"), (table.where(is_fixed_depth), "C1")):
        axis.scatter(rows["flops"].numpy(), rows["loss"].numpy(), s=10, alpha=0.5, color=color)
    axis.plot(*columns_of(result["frontier"], "flops", "loss"), color="C0", label="best mean depth")
    fixed = [point for point in result["frontier"] if "fixed_loss" in point]
    if fixed:
        axis.plot(*columns_of(fixed, "flops", "fixed_loss"), color="C1", label="fixed depth 1")
    axis.set(xscale="log", xlabel="training FLOPs", ylabel="validation loss")
    axis.legend()


def plain_ticks(axis, values, form: str = "{x:g}"):
    """Ticks of a logarithmic axis at these values, written out."""
    ticks = sorted(set(np.asarray(values).tolist()))
    axis.set_ticks(ticks, [form.format(x=tick) for tick in ticks], fontsize=7)
    axis.set_ticks([], minor=True)


def columns_of(rows: list[dict], *names: str) -> list[list]:
    return [[row[name] for row in rows] for name in names]


def against_measured(axis, predicted, table):
    loss = table["loss"].numpy()
    axis.scatter(loss, predicted, s=12)
    axis.plot([loss.min(), loss.max()], [loss.min(), loss.max()], color="gray", linestyle=":")
    axis.set(xlabel="measured loss", ylabel="fitted loss")


def draw_parametric(axes, result, table, fitted):
    """Contours of equal loss and, where the runs are of one size, the frontier through them (figures 4 and 25)."""
    table = table.at_training_depth()
    columns = table.columns(fitted.law.columns)
    tokens = columns["tokens"].numpy()
    of_one_size = "frontier" in result
    x = table["mean_depth" if of_one_size else "effective_parameters"].numpy()
    grid = np.meshgrid(np.geomspace(x.min(), x.max(), 60), np.geomspace(tokens.min(), tokens.max(), 60))
    size = depth_costs(table).at(grid[0])[0] if of_one_size else grid[0]
    lines = axes[0].contour(*grid, predicted(fitted, size.ravel(), grid[1].ravel()).reshape(60, 60), levels=12)
    axes[0].clabel(lines, fontsize=7)
    axes[0].scatter(x, tokens, s=12, color="black")
    if of_one_size:
        inside = [point for point in result["frontier"] if not point["at_edge"]]
        axes[0].plot(*columns_of(inside, "mean_depth", "tokens"), color="blue", linewidth=2, label="least FLOPs")
        axes[0].legend()
    label = "mean depth" if of_one_size else "effective parameters"
    axes[0].set(xscale="log", yscale="log", xlabel=label, ylabel="tokens", title="loss")
    if of_one_size:
        plain_ticks(axes[0].xaxis, x)
    against_measured(axes[1], fitted.predict(columns).numpy(), table)


def scatter(axis, values: dict, intervals: dict, marker: str, name: str):
    """A point for each key, and a line over its interval."""
    if values:
        (points,) = axis.plot(*zip(*values.items()), marker=marker, linestyle="", label=name.replace("_", " "))
        for x, ends in intervals.items():
            axis.plot([x, x], ends, color=points.get_color(), linewidth=1)


def draw_test_time(axes, result, table, fitted):
    for run, curve in table.by("run").items():
        depth = curve["test_depth"].numpy()
        points = axes[0].scatter(
            depth, curve["loss"].numpy(), s=12, label=f"{run} (mu {curve.rows[0]['mean_depth']:g})"
        )
        found = result["curves"][run]
        if found["converged"]:
            c, line = found["coefficients"], np.linspace(depth.min(), depth.max(), 200)
            axes[0].plot(line, c["L_inf"] + c["Z"] * np.exp(-c["z"] * line), color=points.get_facecolor()[0])
    axes[0].set(xlabel="test depth", ylabel="validation loss")
    axes[0].legend(fontsize=7)
    for key, marker in (("in_range", "o"), ("extrapolated", "s")):
        known = {i: form[key] for i, form in enumerate(result["forms"].values()) if key in form}
        ends = {i: scores["interval"] for i, scores in known.items() if "interval" in scores}
        scatter(axes[1], {i: scores["huber"] for i, scores in known.items()}, ends, marker, key)
    axes[1].set(yscale="log", ylabel="mean Huber loss")
    axes[1].set_xticks(range(len(TEST_TIME)), [law.formula for law in TEST_TIME.values()], rotation=20, fontsize=7)
    axes[1].legend()


def draw_unified(axes, result, table, fitted):
    predicted = fitted.predict(table.columns(fitted.law.columns))
    curves = list(table.by("run"))
    shown = set(curves[:: max(1, len(curves) // 8)])  # at most about eight
    for run in curves:
        chosen = [i for i, row in enumerate(table.rows) if row["run"] == run]
        if run in shown:
            chosen.sort(key=lambda i: table.rows[i]["test_depth"])
            depth = [table.rows[i]["test_depth"] for i in chosen]
            points = axes[0].scatter(depth, [table.rows[i]["loss"] for i in chosen], s=12, label=run)
            axes[0].plot(depth, predicted[chosen].numpy(), color=points.get_facecolor()[0])
    axes[0].set(xlabel="test depth", ylabel="validation loss")
    axes[0].legend(fontsize=6)
    against_measured(axes[1], predicted.numpy(), table)


def draw_conditioning(axes, result, table, fitted):
    for key, marker in (("huber", "o"), ("held_out_huber", "s")):
        known = {name: form[key] for name, form in result["forms"].items() if key in form}
        ends = {name: form[f"{key}_interval"] for name, form in result["forms"].items() if f"{key}_interval" in form}
        scatter(axes[0], known, ends, marker, key)
    axes[0].set(yscale="log", xlabel="dependence on mean depth", ylabel="total Huber loss")
    axes[0].legend()
