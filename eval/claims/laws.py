"""Parcae's laws fitted to the runs of a sweep over budgets and mean depths (parcae_laws.py)."""

from pathlib import Path

from looped_eval.laws.analyses import budgets_of, conditioning, isoflop, parametric, test_time, unified
from looped_eval.laws.fitting import FitError
from looped_eval.laws.frontier import is_fixed_depth
from looped_eval.laws.run_table import RunTable, collect


RESTARTS = 50


def laws(folder: Path) -> dict:
    """Return the exponents of the best depths and tokens, the gains of looping at each budget, the exponents of the
    training law, its held-out error, the misfits of forms over test depth, and the law of both depths."""
    table = RunTable([row for run in sorted(folder.glob("*/final")) for row in collect(run.parent)], str(folder))
    trained = table.at_training_depth()
    budgets = budgets_of(trained)
    largest = min(budgets[max(budgets)]["flops"].tolist())

    # runs of one loop are the baseline, to which no law is fitted
    looped = table.where(lambda row: not is_fixed_depth(row))
    known, beyond = looped.where(lambda row: row["flops"] < largest), looped.where(lambda row: row["flops"] >= largest)
    names = ("run", "mean_depth", "effective_parameters", "tokens", "flops", "loss")
    loss_at = {run: {row["test_depth"]: row["loss"] for row in rows.rows} for run, rows in table.by("run").items()}
    return {
        "runs": [{**{name: row[name] for name in names}, "loss_at": loss_at[row["run"]]} for row in trained.rows],
        "gains": [gain(group) for _, group in sorted(budgets.items())],
        **said(lambda: {"exponents": exponents(trained)}),
        **said(lambda: {"law": law(looped.at_training_depth())}),
        **said(lambda: {"held_out_percent": held_out_percent(known.at_training_depth(), beyond.at_training_depth())}),
        **said(lambda: test_depths(looped)),
        **said(lambda: {"both_depths": both_depths(known, beyond)}),
        **said(lambda: {"forms_of_decay": forms_of_decay(known, beyond)}),
    }


def said(measure) -> dict:
    """Return what `measure` returns, or an empty dict if the runs do not allow the fit."""
    try:
        return measure()
    except FitError:
        return {}


def gain(group: RunTable) -> float:
    """Return the least loss of runs without loops minus the least of looped runs."""
    fixed = [row["loss"] for row in group.rows if is_fixed_depth(row)]
    return min(fixed) - min(row["loss"] for row in group.rows if not is_fixed_depth(row))


def exponents(table: RunTable) -> dict:
    return {name: law["exponent"] for name, law in isoflop(table)["power_laws"].items()}


def law(table: RunTable) -> dict | None:
    """Return the exponents of effective parameters and tokens in the training law of looped runs of all budgets."""
    result, _ = parametric(table, restarts=RESTARTS)
    return {name: result["coefficients"][name] for name in ("x", "y")} if result["converged"] else None


def held_out_percent(known: RunTable, beyond: RunTable) -> float | None:
    """Fit the training law to the smaller budgets and return its mean error at the largest, in percent."""
    result, _ = parametric(known, beyond, restarts=RESTARTS)
    return result["held_out"]["mean_percent"] if "held_out" in result else None


def test_depths(table: RunTable) -> dict:
    found = test_time(table, restarts=RESTARTS)

    def misfits(of: str) -> dict[str, float]:
        return {name: form[of]["huber"] for name, form in found["forms"].items() if of in form}

    floor = found.get("floor_against_loss_at_mu", {}).get("mean_percent")
    return {"misfits": misfits("in_range"), "misfits_beyond": misfits("extrapolated"), "floor_percent": floor}


def both_depths(known: RunTable, beyond: RunTable) -> dict:
    """Fit the law of training and test depth to the smaller budgets and return its mean errors at the largest, in
    percent: with its own floor, and with each run's loss at its mean depth in place of it."""
    result, _ = unified(known, beyond, restarts=RESTARTS)
    names = {"held_out": "percent", "held_out_above_measured": "percent_above_measured"}
    return {ours: result[name]["mean_percent"] for name, ours in names.items() if name in result}


def forms_of_decay(known: RunTable, beyond: RunTable) -> dict[str, dict[str, float]]:
    """Return the misfits of three forms of the decay over loops, by how it depends on the mean depth, to the smaller
    budgets, which they are fitted to, and to the largest; and the power of the mean depth where it is learned."""
    forms, found = conditioning(known, beyond, restarts=RESTARTS)["forms"], {}
    for name, form in forms.items():
        if "huber" in form:
            gamma = form.get("coefficients", {}).get("gamma")
            power = {} if gamma is None else {"power": gamma}
            found[name] = {"misfit": form["huber"], "misfit_beyond": form["held_out_huber"], **power}
    return found
