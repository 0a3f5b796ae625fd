"""Fits of the laws of looping to tables of runs. Each returns its result as a dict."""

import math
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import norm as normal

from looped_recipes.common.intervals import students_quantile

from .fitting import Fit, FitError, bootstrap, draw_residuals, draw_runs, fit, huber, interval
from .forms import ABOVE_FLOOR, CONDITIONING, PARAMETRIC, TEST_TIME, UNIFIED
from .frontier import frontier, is_fixed_depth, measured_frontier, of_each_depth
from .run_table import RunTable


def budgets_of(table: RunTable, tolerance: float = 0.1) -> dict[float, RunTable]:
    """Group runs into budgets; return {geometric mean of FLOPs: runs}. Runs are in one budget if, in order of FLOPs,
    each has at most 1 + `tolerance` times the FLOPs of the run before it."""
    ordered = sorted(table.rows, key=lambda row: row["flops"])
    groups = [[ordered[0]]]
    for row in ordered[1:]:
        near = row["flops"] <= groups[-1][-1]["flops"] * (1 + tolerance)
        groups[-1].append(row) if near else groups.append([row])
    tables = [RunTable(rows, table.source) for rows in groups]
    return {group["flops"].log().mean().exp().item(): group for group in tables}


class Optimum(NamedTuple):
    """The minimum of a parabola of the loss over log x."""

    x: float
    loss: float
    spread: float  # standard error of log x, for losses whose noise has a standard deviation of 1
    squares: float  # the sum of squared residuals
    degrees: int  # runs less the three coefficients


def lowest(name: str, x: np.ndarray, loss: np.ndarray) -> Optimum:
    """Fit a parabola of the loss over log x; FitError if its minimum lies outside the runs. name: mean_depth or
    tokens, of which deeper runs have fewer at equal FLOPs."""
    middle = np.log(x).mean()
    powers = np.vander(np.log(x) - middle, 3, increasing=True)
    coefficients = np.linalg.lstsq(powers, loss)[0]
    _, slope, bend = coefficients
    if not bend > 0:
        raise FitError(f"the parabola over {name} has no minimum")
    best = -slope / (2 * bend)
    if not np.log(x.min()) <= best + middle <= np.log(x.max()):
        where = math.exp(min(best + middle, 700.0))  # a flat parabola has its minimum at no finite number
        beyond = "deeper" if (where > x.max()) == (name == "mean_depth") else "shallower"
        raise FitError(
            f"the minimum of the parabola over {name}, {where:.4g}, lies outside the runs, {x.min():.4g} to "
            f"{x.max():.4g}; add {beyond} runs"
        )
    by_coefficients = np.array([0.0, -1 / (2 * bend), slope / (2 * bend**2)])  # derivatives of `best`
    spread = np.linalg.norm(np.linalg.pinv(powers).T @ by_coefficients)
    squares = float(np.square(loss - powers @ coefficients).sum())
    least = float(coefficients @ best ** np.arange(3))
    return Optimum(math.exp(best + middle), least, float(spread), squares, len(x) - 3)


def optima(budgets: dict[float, RunTable]) -> tuple[dict[float, dict[str, Optimum]], list[str]]:
    """Return each budget's best loops and tokens, and the reasons why other budgets have none."""
    found, problems = {}, []
    for flops, group in budgets.items():
        loss, depth, tokens = (group[name].numpy() for name in ("loss", "mean_depth", "tokens"))
        try:
            if len(np.unique(depth)) < 4:
                raise FitError(f"{len(np.unique(depth))} different depths; a parabola needs 4")
            found[flops] = {name: lowest(name, x, loss) for name, x in (("mean_depth", depth), ("tokens", tokens))}
        except FitError as problem:
            problems.append(f"{flops:.3g} FLOPs left out: {problem}")
    return found, problems


def law_of_optima(of_budgets: dict[float, Optimum]) -> dict:
    """Fit x = scale * FLOPs ** exponent to the optima. The interval of the exponent is Student's: the noise of a loss
    is that of all runs around the parabolas of their budgets. If the optima lie farther from the power law than this
    noise lets expect, their own distances from it are taken, with as many degrees of freedom as budgets, less two. Of
    three budgets that is one: the interval may be ten times as wide, and holds the truth in about 9 of 10 cases. It is
    of the parabolas' minima, and does not tell how far these are from the lowest losses of curves of another form, as
    the law of training gives; the frontier of `parametric` has no such error."""
    flops, best = np.log(list(of_budgets)), list(of_budgets.values())
    logs = np.log([optimum.x for optimum in best])
    weights = (flops - flops.mean()) / np.square(flops - flops.mean()).sum()
    exponent = float(weights @ logs)
    degrees = sum(optimum.degrees for optimum in best)
    noise = math.sqrt(sum(optimum.squares for optimum in best) / degrees)
    errors = noise * np.array([optimum.spread for optimum in best])  # of the optima, by the noise
    distances = logs - logs.mean() - exponent * (flops - flops.mean())
    if np.square(distances / errors).sum() > len(best) - 2:
        degrees = len(best) - 2
        errors = np.full(len(best), math.sqrt(np.square(distances).sum() / degrees))
    reach = students_quantile(0.975, degrees) * np.linalg.norm(weights * errors)
    return {
        "exponent": exponent,
        "scale": math.exp(logs.mean() - exponent * flops.mean()),
        "interval": [exponent - float(reach), exponent + float(reach)],
    }


def isoflop(table: RunTable) -> dict:
    """Fit parabolas through the looped runs of each budget, and measure the gain of looping over a fixed depth. Runs
    of one mean depth must have as many parameters, if the table has these: a law is of one model."""
    table = table.need("mean_depth", "tokens", "flops", "loss").at_training_depth()
    for name in ("effective_parameters", "parameters"):
        sized = table.where(lambda row, name=name: name in row and not is_fixed_depth(row))
        of_each_depth(sized, name, itemgetter(name))
    budgets = budgets_of(table)
    looped = {flops: group.where(lambda row: not is_fixed_depth(row)) for flops, group in budgets.items()}
    found, problems = optima({flops: group for flops, group in looped.items() if len(group)})
    if len(found) < 3:
        raise FitError(
            "; ".join([f"a power law needs the optimum of at least 3 FLOP budgets, got {len(found)}", *problems])
        )
    best = [
        {"flops": flops, **{name: each.x for name, each in of.items()}, "loss": of["mean_depth"].loss}
        for flops, of in found.items()
    ]
    laws = {name: law_of_optima({flops: of[name] for flops, of in found.items()}) for name in ("mean_depth", "tokens")}
    frontier = measured_frontier(budgets)
    return {"law": "isoflop", "optima": best, "left_out": problems, "power_laws": laws, "frontier": frontier}


def summary(name: str, fitted: Fit) -> dict:
    facts = {
        "law": name,
        "formula": fitted.law.formula,
        "rows": len(fitted.huber),
        "restarts": fitted.restarts,
        "converged": fitted.at_minimum and not fitted.problem,
    }
    if fitted.refits is not None:
        facts["resamples_used"] = int(fitted.refits.isfinite().all(1).sum())
    if fitted.problem:
        return {**facts, "reason": fitted.problem}
    return {
        **facts,
        "agreeing_restarts": fitted.agreeing,
        "coefficients": fitted.coefficients,
        "intervals": fitted.intervals,
        "huber": fitted.huber.sum().item(),
    }


def errors(predicted: torch.Tensor, table: RunTable) -> dict:
    """Return the mean and the largest absolute error in percent, the total Huber loss, and every prediction."""
    percent = 100 * (predicted / table["loss"] - 1).abs()
    return {
        "mean_percent": percent.mean().item(),
        "max_percent": percent.max().item(),
        "huber": huber(predicted, table["loss"]).sum().item(),
        "rows": [
            {"run": row["run"], "test_depth": row.get("test_depth"), "loss": row["loss"], "predicted": value}
            for row, value in zip(table.rows, predicted.tolist())
        ],
    }


def fit_table(law, table: RunTable, restarts: int, resamples: int, seed: int) -> Fit:
    columns = table.columns(law.columns)
    fitted = fit(law, columns, table["loss"], restarts, seed)
    return bootstrap(fitted, columns, table["loss"], resamples, draw_runs(table.numbered("run"), resamples, seed))


def parametric(
    table: RunTable, held_out: RunTable | None = None, restarts: int = 500, resamples: int = 0, seed: int = 0
):
    """Fit the training law to the losses at T = mu, and predict those of `held_out`."""
    wanted = ("loss", *PARAMETRIC.columns)
    table = table.need(*wanted).at_training_depth()
    held_out = None if held_out is None else held_out.need(*wanted).at_training_depth()
    fitted = fit_table(PARAMETRIC, table, restarts, resamples, seed)
    result = summary("parametric", fitted)
    if result["converged"]:
        try:
            result["frontier"] = frontier(fitted, table)
        except FitError as reason:
            result["no_frontier"] = str(reason)
    if held_out is not None and result["converged"]:
        result["held_out"] = errors(fitted.predict(held_out.columns(PARAMETRIC.columns)), held_out)
    return result, fitted


def unified(
    table: RunTable,
    held_out: RunTable | None = None,
    conditioning: str = "one",
    restarts: int = 1000,
    resamples: int = 0,
    seed: int = 0,
):
    """Fit all parameters of the law of training and test depth jointly (Parcae, equation 4)."""
    law = UNIFIED[conditioning]
    wanted = ("loss", "mean_depth", *law.columns)
    table = table.need(*wanted)
    held_out = None if held_out is None else held_out.need(*wanted)
    measured = None if held_out is None else at_training_depth_of_each(held_out)
    fitted = fit_table(law, table, restarts, resamples, seed)
    result = {**summary("unified", fitted), "conditioning": conditioning}
    if held_out is not None and result["converged"]:
        columns = held_out.columns(law.columns)
        result["held_out"] = errors(fitted.predict(columns), held_out)
        decay = fitted.law.term_logs(fitted.free[None], columns)[0, :, -1].exp()
        result["held_out_above_measured"] = errors(measured + decay, held_out)
    return result, fitted


def at_training_depth_of_each(table: RunTable) -> torch.Tensor:
    """Return for each row the measured loss of its run at T = mu, [n]."""
    loss = {row["run"]: row["loss"] for row in table.at_training_depth().rows}
    return torch.tensor([loss[row["run"]] for row in table.rows], dtype=torch.float64)


def conditioning(
    table: RunTable, held_out: RunTable | None = None, restarts: int = 500, resamples: int = 0, seed: int = 0
) -> dict:
    """Compare three ways in which the decay above the training law's floor may depend on training depth (table 14).

    A resample draws whole runs, with all their depths, and refits both the floor and the forms above it.
    """
    wanted = ("loss", "mean_depth", "test_depth", *PARAMETRIC.columns)
    table.need(*wanted)
    if held_out is not None:
        held_out.need(*wanted)
    training, floor = parametric(table, None, restarts, resamples, seed)
    result = {"law": "conditioning", "training_law": training, "forms": {}}
    if not training["converged"]:
        return {**result, "converged": False, "reason": training["reason"]}
    weights = draw_runs(table.numbered("run"), resamples, seed)  # the same draws as in the training law's bootstrap

    def with_floor(part: RunTable, law, predict) -> dict:
        columns = part.columns([name for name in law.columns if name != "floor"])
        return {**columns, "floor": predict(part.columns(PARAMETRIC.columns))}

    for name in CONDITIONING:
        law = ABOVE_FLOOR[name]
        fitted = fit(law, with_floor(table, law, floor.predict), table["loss"], restarts, seed)
        if resamples:
            bootstrap(fitted, with_floor(table, law, floor.predict_again), table["loss"], resamples, weights)
        form = result["forms"][name] = summary(name, fitted)
        if not fitted.at_minimum:
            continue
        form["converged"] = True  # forms are compared by their misfit, even if their coefficients are not determined
        for key, part, drawn in (("huber", table, weights), ("held_out_huber", held_out, 1.0)):
            if part is None:
                continue
            predicted = fitted.predict(with_floor(part, law, floor.predict))
            form[key] = huber(predicted, part["loss"]).sum().item()
            if fitted.refits is not None:
                predicted = fitted.predict_again(with_floor(part, law, floor.predict_again))
                form[f"{key}_interval"] = interval((drawn * huber(predicted, part["loss"])).sum(1))
    good = {name: form["huber"] for name, form in result["forms"].items() if "huber" in form}
    return {**result, "converged": bool(good), "best": min(good, key=good.get, default=None)}


def test_time(table: RunTable, restarts: int = 100, resamples: int = 0, seed: int = 0) -> dict:
    """Fit four forms to the curve of every run, on all depths and on T <= mu (tables 12 and 13).

    A curve has few depths, which are not drawn at random. The intervals of its coefficients therefore come from
    resampled residuals, taken as independent; those of means over curves come from resampled curves.
    """
    table.need("loss", "mean_depth", "test_depth")
    curves = table.by("run")
    result = {"law": "test_time", "curves": {}, "forms": {}, "left_out": []}
    scores = {name: {"in_range": [], "extrapolated": []} for name in TEST_TIME}
    for run, curve in curves.items():
        fits = {name: curve_fit(law, curve, restarts, seed) for name, law in TEST_TIME.items()}
        result["curves"][run] = curve_summary(curve_bootstrap(fits["exponential"], curve, resamples, seed), curve)
        keep_together(
            scores, "in_range", {name: each.huber.mean().item() for name, each in fits.items() if each.at_minimum}
        )
        known, beyond = (
            curve.where(lambda row: row["test_depth"] <= row["mean_depth"]),
            curve.where(lambda row: row["test_depth"] > row["mean_depth"]),
        )
        if len(known) < 4 or not len(beyond):
            result["left_out"].append(
                f"{run}: {len(known)} depths up to mu and {len(beyond)} beyond; extrapolating needs 4 and 1"
            )
            continue
        keep_together(scores, "extrapolated", extrapolated(known, beyond, restarts, seed))
    for name, by_range in scores.items():
        result["forms"][name] = {"formula": TEST_TIME[name].formula} | {
            key: {**over_curves("huber", values, resamples, seed), "curves": len(values)}
            for key, values in by_range.items()
            if values
        }
    recovered = [curve["floor_percent"] for curve in result["curves"].values() if "floor_percent" in curve]
    if recovered:
        means = over_curves("mean_percent", recovered, resamples, seed)
        result["floor_against_loss_at_mu"] = {**means, "max_percent": max(recovered)}
    return result


def over_curves(name: str, values: list[float], resamples: int, seed: int) -> dict:
    """Return the mean and, if there are at least 3 curves, its interval over resampled curves."""
    means = {name: float(np.mean(values))}
    if resamples and len(values) >= 3:
        drawn = np.random.default_rng(seed).choice(values, (resamples, len(values)))
        means["interval"] = interval(torch.from_numpy(drawn.mean(1)))
    return means


def curve_bootstrap(fitted: Fit, curve: RunTable, resamples: int, seed: int) -> Fit:
    if not (fitted.at_minimum and resamples):
        return fitted
    columns = curve.columns(fitted.law.columns)
    degrees = len(curve) - len(fitted.law.names)
    losses = draw_residuals(fitted.predict(columns), curve["loss"], len(fitted.law.names), resamples, seed)
    again = bootstrap(fitted, columns, losses, resamples, criterion="squares")
    # the noise is estimated from few residuals: Student's distribution is wider than that of the resamples
    wider = float(students_quantile(0.975, degrees) / normal.ppf(0.975))
    again.refits = fitted.free + (again.refits - fitted.free) * wider
    return again


def curve_fit(law, curve: RunTable, restarts: int, seed: int) -> Fit:
    try:
        return fit(law, curve.columns(law.columns), curve["loss"], restarts, seed, criterion="squares")
    except FitError as error:
        raise FitError(f"run {curve.rows[0]['run']}: {error}") from None


def curve_summary(fitted: Fit, curve: RunTable) -> dict:
    facts = {"mean_depth": curve.rows[0]["mean_depth"], **summary("exponential", fitted)}
    trained = [row["loss"] for row in curve.rows if row["test_depth"] == row["mean_depth"]]
    if facts["converged"] and trained:
        facts["floor_percent"] = 100 * abs(fitted.coefficients["L_inf"] / trained[0] - 1)
    return facts


def keep_together(scores: dict, key: str, values: dict):
    """Keep the scores of a curve only if every form fits it, so that all forms are compared on the same curves."""
    if len(values) == len(scores):
        for name, value in values.items():
            scores[name][key].append(value)


def extrapolated(known: RunTable, beyond: RunTable, restarts: int, seed: int) -> dict[str, float]:
    values = {}
    for name, law in TEST_TIME.items():
        fitted = curve_fit(law, known, restarts, seed)
        if fitted.at_minimum:
            values[name] = huber(fitted.predict(beyond.columns(law.columns)), beyond["loss"]).mean().item()
    return values
