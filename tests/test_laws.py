"""Scaling laws: published coefficients come back from losses drawn from them, the true form wins, doubt is said."""

import csv
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import optimize

from looped_eval.laws import analyses, fitting
from looped_eval.laws import charts as law_charts
from looped_eval.laws import command as laws
from looped_eval.laws.fitting import FitError, fit, huber, minimize, misfit_of
from looped_eval.laws.forms import PARAMETRIC, TEST_TIME, UNIFIED, Constant, Law
from looped_eval.laws.frontier import frontier, measured_frontier
from looped_eval.laws.run_table import RunTable, collect, read_table, write_table
from looped_recipes.common.flops import effective_parameters, training_flops_per_token
from looped_recipes.common.measures import power_law
from looped_recipes.settings.costs import plan
from looped_recipes.settings.recipe import load_recipe, recipe_from_dict
from modeling_looped import LoopedConfig


# Parcae, table 11: E, X, x, Y, y; and parameters outside and inside the loop, roughly, with the budgets of appendix O
SMALL = (2.662, 522733.307, 0.771, 25420.102, 0.525), (65e6, 28e6), (1e18, 2e18, 4e18, 8e18, 16e18, 64e18)
MEDIUM = (2.439, 832134.346, 0.775, 6386.865, 0.448), (134e6, 100e6), (32e18, 64e18, 128e18)
NAMES = ("E", "X", "x", "Y", "y")
TEST_DEPTHS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)


def training_rows(size, noise=0.0, seed=0, depths=(2, 4, 6, 8, 10, 12), held_out=False) -> list[dict]:
    (E, X, x, Y, y), (outer, core), budgets = size
    draw, rows = random.Random(seed), []
    for flops in [1.7 * budgets[-1]] if held_out else budgets:
        for depth in depths:
            n = outer + depth * core
            tokens = flops / (6 * n)
            loss = (E + X * n**-x + Y * tokens**-y) * math.exp(noise * draw.gauss(0, 1))
            row = {"mean_depth": depth, "tokens": tokens, "flops": flops, "effective_parameters": n, "loss": loss}
            rows.append({"run": f"{flops:g}_{depth}", "parameters": outer + core, "test_depth": depth, **row})
    return rows


def at_test_depths(rows, Z, z, gamma, test_depths=TEST_DEPTHS, noise=0.0) -> list[dict]:
    """Every run at every test depth, by equation 4 with the runs' losses as the floor."""
    draw = random.Random(1)
    return [
        {**r, "test_depth": t, "loss": (r["loss"] + Z * math.exp(-z * t * r["mean_depth"] ** -gamma)) * draw_noise}
        for r in rows
        for t in sorted({*test_depths, r["mean_depth"]})
        for draw_noise in [math.exp(noise * draw.gauss(0, 1))]
    ]


def table(rows) -> RunTable:
    return RunTable(rows, "runs")


# The optimiser


def test_every_row_of_a_batch_is_a_problem_of_its_own():
    scale = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    starts = torch.tensor([[-1.2, 1.0], [2.0, -1.0], [0.5, 3.0]], dtype=torch.float64)

    def rosenbrock(points, rows):
        return (1 - points[:, 0]) ** 2 + scale[rows] * (points[:, 1] - points[:, 0] ** 2) ** 2

    points, values = minimize(rosenbrock, starts)
    assert torch.allclose(points, torch.ones(3, 2, dtype=torch.float64), atol=1e-4)
    alone, _ = minimize(lambda x, rows: rosenbrock(x, torch.tensor([1])), starts[1:2])
    assert torch.allclose(alone[0], points[1], atol=1e-6)
    assert values.max() < 1e-8


def test_it_finds_what_scipy_finds():
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    target = torch.randn(30, generator=generator, dtype=torch.float64)

    def logistic(points, rows):
        return (points @ basis.T - target).cosh().log().mean(1) + points.square().sum(1) * 1e-3

    points, values = minimize(logistic, torch.zeros(1, 4, dtype=torch.float64))
    reference = optimize.minimize(
        lambda x: logistic(torch.as_tensor(x)[None], None).item(),
        torch.zeros(4, dtype=torch.float64).numpy(),
        method="L-BFGS-B",
        tol=1e-12,
    )
    assert values.item() == pytest.approx(reference.fun, rel=1e-8)
    assert points[0].tolist() == pytest.approx(reference.x.tolist(), abs=1e-4)


def test_huber_loss_of_logarithms():
    measured = torch.tensor([2.0, 3.0], dtype=torch.float64)
    value = huber(measured * torch.tensor([1.0005, 1.1], dtype=torch.float64), measured).tolist()
    near, far = math.log(1.0005), math.log(1.1)
    assert value == pytest.approx([near**2 / 2, 1e-3 * (far - 0.5e-3)], rel=1e-9)


def test_the_misfit_is_in_units_of_delta_and_each_row_has_its_own_weights():
    law, log_loss = Law("E", (Constant("E"),)), torch.zeros(1, dtype=torch.float64)
    residuals = torch.tensor([[0.5e-3], [5e-3]], dtype=torch.float64)  # half of delta, and five times
    found = misfit_of(law, {}, log_loss, None, "huber")(residuals, None)
    assert found.tolist() == pytest.approx([0.5**2 / 2, 5 - 0.5])
    weights = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    second = misfit_of(law, {}, log_loss, weights, "huber")(residuals[1:], torch.tensor([1]))  # the first is done
    assert second.tolist() == pytest.approx([3 * (5 - 0.5)])


# The forms

EQUATIONS = {  # Parcae: equation 7; (a) to (d) of appendix L; equations 4 and 8, and without conditioning
    PARAMETRIC: lambda c, n, d, t, mu: c["E"] + c["X"] * n ** -c["x"] + c["Y"] * d ** -c["y"],
    TEST_TIME["exponential"]: lambda c, n, d, t, mu: c["L_inf"] + c["Z"] * math.exp(-c["z"] * t),
    TEST_TIME["shifted_power"]: lambda c, n, d, t, mu: c["L_inf"] + c["Z"] * (1 + t) ** -c["z"],
    TEST_TIME["power"]: lambda c, n, d, t, mu: c["L_inf"] + c["Z"] * t ** -c["z"],
    TEST_TIME["power_without_floor"]: lambda c, n, d, t, mu: c["Z"] * t ** -c["z"],
    UNIFIED["learned"]: lambda c, n, d, t, mu: training_law(c, n, d) + decay(c, t * mu ** -c["gamma"]),
    UNIFIED["one"]: lambda c, n, d, t, mu: training_law(c, n, d) + decay(c, t / mu),
    UNIFIED["none"]: lambda c, n, d, t, mu: training_law(c, n, d) + decay(c, t),
}


def training_law(c, n, d) -> float:
    return EQUATIONS[PARAMETRIC](c, n, d, None, None)


def decay(c, t) -> float:
    return c["Z"] * math.exp(-c["z"] * t)


@pytest.mark.parametrize("law", EQUATIONS, ids=lambda law: law.formula)
def test_laws_are_the_equations(law):
    rows = table(at_test_depths(training_rows(SMALL), 1.5, 3.0, 1.0))
    columns = rows.columns(law.columns)
    centred = law.centred(columns)
    free = centred.starts(torch.Generator().manual_seed(1), 3, 3.0)
    for each in free:
        c = {name: value.item() for name, value in centred.coefficients(each).items()}
        expected = [
            EQUATIONS[law](c, row["effective_parameters"], row["tokens"], row["test_depth"], row["mean_depth"])
            for row in rows.rows
        ]
        assert centred.log(each[None], columns)[0].exp().tolist() == pytest.approx(expected, rel=1e-9)


# The training laws


@pytest.mark.parametrize(
    "size,restarts",
    [pytest.param(SMALL, 500, marks=pytest.mark.slow), pytest.param(MEDIUM, 40, marks=pytest.mark.slow)],
)
def test_coefficients_of_table_11_come_back(size, restarts):
    result, _ = analyses.parametric(table(training_rows(size)), restarts=restarts)
    assert result["converged"] and result["agreeing_restarts"] > restarts / 2
    assert result["coefficients"] == pytest.approx(dict(zip(NAMES, size[0])), rel=1e-5)
    assert result["huber"] < 1e-15


@pytest.mark.slow
def test_noisy_runs_predict_held_out_ones_and_intervals_hold_the_truth():
    rows, held_out = training_rows(SMALL, noise=1e-3), training_rows(SMALL, held_out=True)
    result, _ = analyses.parametric(table(rows), table(held_out), restarts=60, resamples=100)
    for name, truth in zip(NAMES, SMALL[0]):
        low, high = result["intervals"][name]
        assert low < truth < high and low < result["coefficients"][name] < high
    assert result["intervals"]["E"][1] - result["intervals"]["E"][0] < 0.2
    predicted = [row["predicted"] / row["loss"] - 1 for row in result["held_out"]["rows"]]
    assert len(predicted) == len(held_out) and max(map(abs, predicted)) < 0.005
    assert result["held_out"]["mean_percent"] == pytest.approx(100 * sum(map(abs, predicted)) / len(predicted))


def isoflop_rows(exponent=0.4, budgets=(1e15, 4e15, 1.6e16, 6.4e16), noise=0.0, seed=0, spread=0.01, scatter=0.0):
    """Parabolas in log mu around mu* = 3 (C / 1e15) ** exponent, with tokens in C ** 0.78 at the optimum. scatter: of
    log mu* around this power law."""
    draw, rows = random.Random(seed), []
    for flops in budgets:
        best = 3 * (flops / 1e15) ** exponent
        lowest = best * math.exp(scatter * draw.gauss(0, 1)) if scatter else best
        for depth in (best / 3, best / 2, best / 1.4, best * 1.1, best * 2, best * 2.6):
            tokens = 5e6 * (flops / 1e15) ** 0.78 * (best / depth) ** 0.8
            loss = 4 - 0.1 * math.log10(flops / 1e15) + 0.05 * math.log(depth / lowest) ** 2 + noise * draw.gauss(0, 1)
            rows.append(
                {
                    "mean_depth": depth,
                    "tokens": tokens,
                    "flops": flops * draw.uniform(1 - spread, 1 + spread),
                    "loss": loss,
                }
            )
    return [{"run": str(i), **row} for i, row in enumerate(rows)]


def test_isoflop_optima_and_their_power_laws():
    result = analyses.isoflop(table(isoflop_rows()))
    assert [best["mean_depth"] for best in result["optima"]] == pytest.approx(
        [3 * 4 ** (0.4 * i) for i in range(4)], rel=1e-6
    )
    assert [best["loss"] for best in result["optima"]] == pytest.approx(
        [4 - 0.1 * i * math.log10(4) for i in range(4)], rel=1e-6
    )
    for name, exponent in (("mean_depth", 0.4), ("tokens", 0.78)):
        assert result["power_laws"][name]["exponent"] == pytest.approx(exponent, abs=5e-3)  # FLOPs vary by 1 %


@pytest.mark.parametrize(
    "noise, scatter, budgets, least",  # least: of 190, three standard deviations; of three budgets about 9 of 10
    [(1e-3, 0.0, 4, 181), (5e-3, 0.0, 4, 181), (1e-3, 0.1, 4, 181), (1e-3, 0.1, 3, 170)],
)
def test_intervals_of_isoflop_exponents_hold_the_truth_as_often_as_they_say(noise, scatter, budgets, least):
    held = {"mean_depth": 0, "tokens": 0}
    flops = [1e15 * 4**i for i in range(budgets)]
    for seed in range(200):
        rows = isoflop_rows(budgets=flops, noise=noise, seed=seed, spread=0.0, scatter=scatter)
        laws = analyses.isoflop(table(rows))["power_laws"]
        for name, truth in (("mean_depth", 0.4), ("tokens", 0.78)):
            low, high = laws[name]["interval"]
            held[name] += low <= truth <= high
    assert all(least <= count <= 198 for count in held.values()), held


def test_isoflop_refuses_models_of_several_sizes():
    """One moves to a larger model with the budget; each size has its own best depths."""
    sizes = [
        [{**row, "mean_depth": round(row["mean_depth"]), "effective_parameters": n} for row in isoflop_rows(budgets=c)]
        for n, c in ((9e7, (1e15, 2e15, 4e15)), (2.3e8, (8e15, 1.6e16, 3.2e16)))
    ]
    words = r"mean depth 2 differ in size: fit each size apart, --by parameters .*effective_parameters: 9e.07, 2.3e.08"
    with pytest.raises(FitError, match=words):
        analyses.isoflop(table(sizes[0] + sizes[1]))
    only_parameters = [{"parameters" if k == "effective_parameters" else k: v for k, v in r.items()} for r in sizes[0]]
    with pytest.raises(FitError, match=r"differ in size: .*their parameters: 9e.07, 1.8e.08"):
        analyses.isoflop(table([*only_parameters, {**only_parameters[3], "parameters": 1.8e8}]))
    for rows in sizes:  # alone, also beside runs of one loop, whose size may be another
        assert len(analyses.isoflop(table([*rows, {**rows[0], "mean_depth": 1, "effective_parameters": 7}]))["optima"])


def test_a_flat_parabola_is_left_out_and_not_an_overflow():
    rows = isoflop_rows()
    for row in rows[:6]:
        row["loss"] = 4 - 1e-3 * math.log(row["mean_depth"]) + 1e-9 * math.log(row["mean_depth"]) ** 2
    result = analyses.isoflop(table(rows))
    assert len(result["optima"]) == 3 and "lies outside the runs" in result["left_out"][0]


@pytest.mark.parametrize("best, words", [(20.0, "2 to 8; add deeper runs"), (1.0, "2 to 8; add shallower runs")])
def test_what_to_add_where_the_minimum_lies_outside_the_runs(best, words):
    """More tokens of the same FLOPs are fewer loops."""
    depth = np.array([2.0, 4.0, 6.0, 8.0])
    loss = 4 + 0.05 * np.log(depth / best) ** 2
    with pytest.raises(FitError, match=f"over mean_depth, {best:g}, lies outside the runs, {words}"):
        analyses.lowest("mean_depth", depth, loss)
    words = words.replace("2 to 8", "3 to 12")
    with pytest.raises(FitError, match=f"over tokens, {24 / best:.4g}, lies outside the runs, {words}"):
        analyses.lowest("tokens", 24 / depth, loss)


def test_a_budget_holds_runs_that_are_each_near_the_one_before():
    rows = [{"run": str(flops), "flops": flops} for flops in (1.0, 1.08, 1.16, 2.0)]
    assert [len(group) for group in analyses.budgets_of(table(rows)).values()] == [3, 1]


def with_fixed_depth(rows: list[dict], losses: dict[float, float]) -> list[dict]:
    fixed = [{"run": f"fixed_{flops:g}", "mean_depth": 1, "flops": flops, "loss": x} for flops, x in losses.items()]
    return [*rows, *({**row, "tokens": row["flops"] / 1e9, "effective_parameters": 9e7} for row in fixed)]


def test_the_measured_frontier_and_what_looping_gains():
    """Figure 6: the best run of each budget beside the run of one loop, which takes no part in the parabolas."""
    budgets = (4e15, 1.6e16, 6.4e16)
    alone = isoflop_rows(budgets=budgets)
    rows = with_fixed_depth(alone, {4e15: 4.2, 6.4e16: 4.1})
    result = analyses.isoflop(table(rows))
    assert [best["mean_depth"] for best in result["optima"]] == [
        best["mean_depth"] for best in analyses.isoflop(table(alone))["optima"]
    ]
    for point, flops, fixed in zip(result["frontier"], budgets, (4.2, None, 4.1), strict=True):
        best = min((row for row in alone if abs(row["flops"] / flops - 1) < 0.02), key=lambda row: row["loss"])
        assert (point["run"], point["mean_depth"], point["loss"]) == (best["run"], best["mean_depth"], best["loss"])
        assert point.get("gain") == (None if fixed is None else pytest.approx(fixed - best["loss"]))
    parabolas, *_, gain = law_charts.isoflop(result, table(rows), None)
    _, best, fixed = gain.lines
    assert [loss for _, loss in best.points] == [point["loss"] for point in result["frontier"]]
    assert [loss for _, loss in fixed.points] == [4.2, 4.1]
    assert fixed.points[1][0] == pytest.approx(6.4e16, rel=0.01)
    *budgets_drawn, optima = [line for line in parabolas.lines if line.name]
    assert [depth for depth, _ in optima.points] == [best["mean_depth"] for best in result["optima"]]
    assert len(budgets_drawn) == 3 and not any(line.joined for line in budgets_drawn)  # points of each budget


def test_seeds_do_not_gain_by_their_best():
    """All depths have the loss 4 in the mean over three seeds, as the fixed depth has."""
    rows = [
        {"run": f"{mean}-{seed}", "mean_depth": mean, "flops": 1e15, "loss": 4 + 0.01 * (seed - 1)}
        for mean in (1, 2, 4, 8)
        for seed in range(3)
    ]
    rows[4]["loss"] -= 0.003  # of mean depth 2
    (point,) = measured_frontier({1e15: table(rows)})
    assert (point["run"], point["mean_depth"]) == ("2-0, 2-1, 2-2", 2)
    assert (point["loss"], point["fixed_loss"], point["gain"]) == pytest.approx((3.999, 4.0, 0.001))


def test_the_frontier_says_where_the_best_depth_is_that_of_the_shallowest_or_deepest_run():
    (E, X, x, Y, y), parameters, budgets = SMALL
    law = SimpleNamespace(predict=lambda c: E + X * c["effective_parameters"] ** -x + Y * c["tokens"] ** -y)
    depths = {"inside": set(), "edge": set()}
    for point in frontier(law, table(training_rows((SMALL[0], parameters, (1e17, *budgets))))):
        depths["edge" if point["at_edge"] else "inside"].add(round(point["mean_depth"], 6))
    assert depths["edge"] == {2, 12} and depths["inside"] and not depths["inside"] & {2, 12}


@pytest.mark.slow
def test_the_frontier_takes_the_least_flops_for_each_loss():
    """Figure 4: against the depth that a minimiser finds, with tokens from the law solved for them."""
    rows = training_rows(SMALL)
    result, fitted = analyses.parametric(table(rows), restarts=20)
    (E, X, x, Y, y), (outer, core), _ = SMALL

    def least_flops(loss):
        def flops(log_depth):
            n = outer + math.exp(log_depth) * core
            return 6 * n * (Y / (loss - E - X * n**-x)) ** (1 / y)

        return optimize.minimize_scalar(flops, bounds=(math.log(2), math.log(12)), method="bounded")

    inside = [point for point in result["frontier"] if not point["at_edge"]]
    assert len(result["frontier"]) == 25 and len(inside) >= 5
    for point in inside:
        least = least_flops(point["loss"])
        assert point["flops"] == pytest.approx(least.fun, rel=1e-4)
        assert point["mean_depth"] == pytest.approx(math.exp(least.x), rel=0.02)
        assert point["flops"] == pytest.approx(6 * (outer + point["mean_depth"] * core) * point["tokens"], rel=1e-6)
    depths = [point["mean_depth"] for point in result["frontier"]]
    edges = [point["mean_depth"] for point in result["frontier"] if point["at_edge"]]
    assert depths == sorted(depths) and all(depth in (2, pytest.approx(12)) for depth in edges)
    chart, _ = law_charts.parametric(result, table(rows), fitted)
    assert chart.lines[-1].points == [(point["mean_depth"], point["tokens"]) for point in inside]
    for line in chart.lines:
        if line.name.startswith("loss "):  # along each line the law gives the loss that it is called by
            depth, tokens = zip(*line.points)
            n = outer + np.array(depth) * core
            losses = E + X * n**-x + Y * np.array(tokens) ** -y
            assert losses == pytest.approx(float(line.name.removeprefix("loss ")), abs=5e-3)
    both = table(rows + training_rows((SMALL[0], MEDIUM[1], SMALL[2])))  # one law, two sizes
    several, fitted = analyses.parametric(both, restarts=20)
    assert "frontier" not in several and "differ in size: fit each size apart" in several["no_frontier"]
    chart, _ = law_charts.parametric(several, both, fitted)
    assert chart.lines[-1].name == "runs" and chart.x == "effective parameters"


# What the paper's numbers say of its counting


PARCAE = {"small": (SMALL[0], 19.06, 1.3), "medium": (MEDIUM[0], 14.49, 0.8)}  # perplexity of table 5; stated error, %


def parcae(size: str):
    recipe = load_recipe(f"recipes/parcae/{size}.yaml")
    return recipe, recipe.model_config()


@pytest.mark.parametrize("size", PARCAE)
def test_published_coefficients_predict_table_5_with_value_tables(size):
    """Section 5.2: the errors that the paper states lie between those with and without the tables in N(mu)."""
    (E, X, x, Y, y), perplexity, stated = PARCAE[size]
    recipe, config = parcae(size)

    def error(value_tables: bool) -> float:
        n = effective_parameters(config, 8, value_tables=value_tables)
        return 100 * abs((E + X * n**-x + Y * recipe.training.tokens**-y) / math.log(perplexity) - 1)

    assert error(True) < 1 and error(True) < stated < error(False)


@pytest.mark.parametrize(("size", "best"), [("small", (2, 2, 4, 6, 8, 10)), ("medium", (4, 6, 6))])
def test_published_coefficients_are_nearer_to_the_depths_of_table_6_with_value_tables(size, best):
    (E, X, x, Y, y), budgets = PARCAE[size][0], (SMALL if size == "small" else MEDIUM)[2]
    _, config = parcae(size)

    def distance(value_tables: bool) -> float:
        """Mean ratio, in logarithms, of the depth of least loss on the grid and the one of the paper."""
        costs = {
            depth: (
                effective_parameters(config, depth, value_tables=value_tables),
                training_flops_per_token(config, 2048, depth, depth // 2),
            )
            for depth in (2, 4, 6, 8, 10, 12)
        }
        found = [
            min(costs, key=lambda depth: E + X * costs[depth][0] ** -x + Y * (flops / costs[depth][1]) ** -y)
            for flops in budgets
        ]
        return sum(abs(math.log(ours / theirs)) for ours, theirs in zip(found, best)) / len(best)

    assert distance(True) < 0.75 * distance(False)


def test_operations_without_value_tables_give_the_exponent_of_the_best_tokens():
    """Section 5.2: mu in C^0.40 through the optima of table 6 leaves tokens in about C^0.78."""
    found = {}
    for value_tables in (False, True):
        for size, budgets, depths in (
            ("small", SMALL[2], (2, 2, 4, 6, 8, 10)),
            ("medium", MEDIUM[2], (4, 6, 6)),
        ):
            _, config = parcae(size)
            mean = [math.exp(sum(map(math.log, values)) / len(values)) for values in (budgets, depths)]
            tokens = [
                flops / training_flops_per_token(config, 2048, depth, depth / 2, value_tables)
                for flops in budgets
                for depth in [mean[1] * (flops / mean[0]) ** 0.40]
            ]
            found[size, value_tables] = power_law(budgets, tokens)["slope"]
    without, counted = ([found[size, tables] for size in PARCAE] for tables in (False, True))
    assert sum(without) / 2 == pytest.approx(0.78, abs=0.01) and max(abs(x - 0.78) for x in without) < 0.025
    assert min(counted) > 0.83


def test_budgets_without_an_optimum_are_named():
    rows = isoflop_rows()
    for row in rows[:6]:
        row["loss"] = 8 - row["loss"]  # upside down
    outside = [{**row, "loss": 4 + 0.1 * math.log(row["mean_depth"] / 90) ** 2} for row in rows[6:12]]
    result = analyses.isoflop(table(rows[:6] + rows[6:]))
    assert len(result["optima"]) == 3 and "has no minimum" in result["left_out"][0]
    with pytest.raises(FitError, match="at least 3 FLOP budgets, got 2.*has no minimum.*outside the runs"):
        analyses.isoflop(table(rows[:6] + outside + rows[12:]))
    with pytest.raises(FitError, match="got 0.*3 different depths; a parabola needs 4"):
        analyses.isoflop(table([row for i, row in enumerate(rows) if i % 6 < 3]))


# Test depth


def curve_rows(form, depths=(4, 8, 12), noise=1e-5):
    """Curves of several runs, up to twice the training depth; the speed falls with the training depth."""
    draw, rows = random.Random(0), []
    for mu in depths:
        for t in range(1, 2 * mu + 1):
            loss = (2.8 - 0.02 * mu + form(t, 3 / mu)) * math.exp(noise * draw.gauss(0, 1))
            rows.append({"run": f"mu{mu}", "mean_depth": mu, "test_depth": t, "loss": loss})
    return rows


TRUE_FORMS = {
    "exponential": lambda t, rate: 1.2 * math.exp(-rate * t),
    "shifted_power": lambda t, rate: 1.2 * (1 + t) ** -(1 + rate),
    "power": lambda t, rate: 0.7 * t ** -(1 + rate),
}


@pytest.mark.slow
@pytest.mark.parametrize("truth", TRUE_FORMS)
def test_the_true_form_wins_in_range_and_beyond(truth):
    result = analyses.test_time(table(curve_rows(TRUE_FORMS[truth])), restarts=12)
    assert not result["left_out"]
    for key in ("in_range", "extrapolated"):
        scores = {name: form[key]["huber"] for name, form in result["forms"].items()}
        assert min(scores, key=scores.get) == truth
        assert min(value for name, value in scores.items() if name != truth) > 2 * scores[truth]
        assert result["forms"][truth][key]["curves"] == 3 and "interval" not in result["forms"][truth][key]
    assert "interval" not in result["floor_against_loss_at_mu"]  # not asked for
    assert not result["curves"]["mu8"]["intervals"] and "resamples_used" not in result["curves"]["mu8"]


@pytest.mark.slow
def test_coefficients_of_every_curve_and_the_floor_against_the_loss_at_mu():
    rows = curve_rows(TRUE_FORMS["exponential"], noise=0.0)
    result = analyses.test_time(table(rows), restarts=6)
    percents = []
    for mu in (4, 8, 12):
        found = result["curves"][f"mu{mu}"]["coefficients"]
        assert found == pytest.approx({"L_inf": 2.8 - 0.02 * mu, "Z": 1.2, "z": 3 / mu}, rel=1e-6)
        floor = 2.8 - 0.02 * mu
        percents.append(100 * (1 - floor / (floor + 1.2 * math.exp(-3))))
    assert result["floor_against_loss_at_mu"]["mean_percent"] == pytest.approx(sum(percents) / 3, rel=1e-4)
    assert result["floor_against_loss_at_mu"]["max_percent"] == pytest.approx(max(percents), rel=1e-4)


@pytest.mark.slow
def test_short_curves_are_not_extrapolated():
    result = analyses.test_time(table(curve_rows(TRUE_FORMS["exponential"], depths=(3, 8))), restarts=6)
    assert result["left_out"] == ["mu3: 3 depths up to mu and 3 beyond; extrapolating needs 4 and 1"]
    assert result["forms"]["exponential"]["extrapolated"]["curves"] == 1


# The unified law


def test_the_unified_law_comes_back_and_predicts():
    rows = at_test_depths(training_rows(SMALL), 1.5, 3.0, 1.19, test_depths=(1, 2, 4, 8, 16))
    held_out = at_test_depths(training_rows(SMALL, held_out=True, depths=(8,)), 1.5, 3.0, 1.19)
    result, _ = analyses.unified(table(rows), table(held_out), "learned", restarts=4)
    truth = dict(zip((*NAMES, "Z", "z", "gamma"), (*SMALL[0], 1.5, 3.0, 1.19)))
    assert result["coefficients"] == pytest.approx(truth, rel=1e-4)
    assert result["held_out"]["max_percent"] < 0.01
    # above the measured loss at mu, which holds what is left of the decay there: a known overshoot
    rest = 1.5 * math.exp(-3.0 * 8 * 8**-1.19)
    floor = held_out[-1]["loss"] - 1.5 * math.exp(-3.0 * 24 * 8**-1.19)
    last = result["held_out_above_measured"]["rows"][-1]
    assert last["predicted"] - last["loss"] == pytest.approx(rest, rel=1e-3) and last["loss"] > floor


@pytest.mark.slow
def test_conditioning_on_the_training_depth_wins_where_it_is_true():
    rows = at_test_depths(training_rows(SMALL), 1.0, 5.0, 1.0, test_depths=(1, 2, 4, 8, 16, 24), noise=1e-4)
    held_out = at_test_depths(training_rows(SMALL, held_out=True, depths=(8,)), 1.0, 5.0, 1.0)
    result = analyses.conditioning(table(rows), table(held_out), restarts=12)
    learned, one, none = (result["forms"][name] for name in ("learned", "one", "none"))
    assert learned["coefficients"]["gamma"] == pytest.approx(1.0, abs=0.05)
    assert none["huber"] > 2 * one["huber"] and learned["huber"] <= one["huber"] * (1 + 1e-6)
    assert none["held_out_huber"] > one["held_out_huber"]

    rows = at_test_depths(training_rows(SMALL), 8.0, 4.0, 0.0, test_depths=(1, 2, 4, 8, 16, 24), noise=1e-4)
    forms = analyses.conditioning(table(rows), restarts=12)["forms"]
    assert forms["none"]["huber"] < forms["one"]["huber"] / 2


# Intervals


def width(ends) -> float:
    return ends[1] - ends[0]


def conditioned_rows(noise: float) -> list[dict]:
    """z = 12, so that next to nothing of the decay is left at T = mu, where the floor is fitted."""
    return at_test_depths(training_rows(SMALL, noise), 1.0, 12.0, 1.0, test_depths=(1, 2, 4, 8), noise=noise)


@pytest.mark.slow
def test_intervals_of_conditioning_hold_the_truth_and_shrink_with_the_noise():
    held_out = table(at_test_depths(training_rows(SMALL, held_out=True, depths=(8,)), 1.0, 12.0, 1.0))
    wide, narrow = (
        analyses.conditioning(table(conditioned_rows(noise)), held_out, restarts=10, resamples=100)
        for noise in (1e-3, 2e-4)
    )
    for name, truth in (("Z", 1.0), ("z", 12.0), ("gamma", 1.0)):
        ends = [result["forms"]["learned"]["intervals"][name] for result in (wide, narrow)]
        assert all(low < truth < high for low, high in ends)
        assert width(ends[1]) < width(ends[0]) / 2
    for result in (wide, narrow):
        none, one = result["forms"]["none"], result["forms"]["one"]
        assert none["resamples_used"] == 100 and none["huber_interval"][0] > one["huber_interval"][1]
        for form in (none, one):
            assert form["huber_interval"][0] < form["huber"] and 0 < width(form["held_out_huber_interval"])
    assert width(narrow["training_law"]["intervals"]["E"]) < width(wide["training_law"]["intervals"]["E"]) / 2


@pytest.mark.slow
def test_a_resample_of_conditioning_refits_the_floor_too():
    """Its coefficients are those of a table in which the drawn runs are written out."""
    rows = conditioned_rows(1e-3)
    random.Random(0).shuffle(rows)  # runs need not be in order
    again = analyses.conditioning(table(rows), restarts=10, resamples=1, seed=3)
    times = fitting.draw_runs(table(rows).numbered("run"), 1, 3)[0].long().tolist()
    written_out = [row for row, count in zip(rows, times) for _ in range(count)]
    assert len({row["run"] for row in written_out}) < len({row["run"] for row in rows})
    direct = analyses.conditioning(table(written_out), restarts=10)
    for name in ("learned", "one"):
        assert not direct["forms"][name]["intervals"] and "huber_interval" not in direct["forms"][name]
        form = again["forms"][name]
        for coefficient, value in direct["forms"][name]["coefficients"].items():
            assert form["intervals"][coefficient] == pytest.approx([value, value], rel=1e-3)
        assert form["huber_interval"][0] == pytest.approx(direct["forms"][name]["huber"], rel=1e-3)


@pytest.mark.slow
def test_intervals_of_curves_hold_the_truth_as_often_as_they_say():
    held = {name: 0 for name in ("L_inf", "Z", "z")}
    form = TEST_TIME["exponential"]
    for seed in range(16):
        draw = random.Random(seed)
        curve = table(
            [
                {"run": "a", "mean_depth": 5, "test_depth": t, "loss": loss * math.exp(1e-3 * draw.gauss(0, 1))}
                for t in range(1, 11)
                for loss in [2.5 + 1.2 * math.exp(-0.5 * t)]
            ]
        )
        fitted = analyses.curve_bootstrap(analyses.curve_fit(form, curve, 2, 0), curve, 60, seed)
        for name, truth in (("L_inf", 2.5), ("Z", 1.2), ("z", 0.5)):
            low, high = fitted.intervals[name]
            held[name] += low < truth < high
    assert all(12 <= count <= 16 for count in held.values()), held


def test_refits_of_a_curve_are_spread_as_students_distribution(monkeypatch):
    """Of 10 losses and three coefficients; by tables of the quantiles, 2.3646 and 1.9600."""
    curve = table(curve_rows(TRUE_FORMS["exponential"], depths=(5,)))
    fitted = analyses.curve_fit(TEST_TIME["exponential"], curve, 2, 0)
    monkeypatch.setattr(analyses, "bootstrap", lambda *_, **__: SimpleNamespace(refits=fitted.free + 1))
    spread = analyses.curve_bootstrap(fitted, curve, 1, 0).refits - fitted.free
    assert spread.tolist() == pytest.approx([2.3646 / 1.9600] * 3, rel=1e-4)


@pytest.mark.slow
def test_intervals_of_test_time_shrink_with_the_noise():
    wide, narrow = (
        analyses.test_time(table(curve_rows(TRUE_FORMS["exponential"], (4, 5, 6), noise)), restarts=2, resamples=40)
        for noise in (1e-3, 1e-4)
    )
    for run in ("mu4", "mu5", "mu6"):
        for name in ("L_inf", "Z", "z"):
            ends = [result["curves"][run]["intervals"][name] for result in (wide, narrow)]
            assert width(ends[1]) < width(ends[0]) / 4
        assert wide["curves"][run]["resamples_used"] == 40
    for key in ("in_range", "extrapolated"):
        low, high = wide["forms"]["exponential"][key]["interval"]
        assert low < wide["forms"]["exponential"][key]["huber"] < high
    floor = wide["floor_against_loss_at_mu"]
    assert floor["interval"][0] < floor["mean_percent"] < floor["interval"][1] <= floor["max_percent"]


def test_an_interval_over_curves_is_that_of_a_mean():
    draw = random.Random(0)
    values = [draw.gauss(5, 2) for _ in range(200)]
    low, high = analyses.over_curves("huber", values, 2000, 0)["interval"]
    mean = sum(values) / 200
    error = math.sqrt(sum((value - mean) ** 2 for value in values)) / 200
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.15 * error)
    assert analyses.over_curves("huber", values[:2], 2000, 0) == {"huber": pytest.approx(sum(values[:2]) / 2)}


def test_a_seed_draws_the_same_runs_again():
    first, again, other = (fitting.draw_runs(torch.arange(6), 5, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_resamples_that_find_nothing_are_not_counted():
    rows = table(training_rows(SMALL, noise=1e-3))
    columns, weights = rows.columns(PARAMETRIC.columns), fitting.draw_runs(rows.numbered("run"), 5, 0)
    weights[2] = math.inf
    fitted = fitting.bootstrap(fit(PARAMETRIC, columns, rows["loss"], 8), columns, rows["loss"], 5, weights)
    facts = analyses.summary("parametric", fitted)
    assert facts["resamples_used"] == 4 and all(map(math.isfinite, facts["intervals"]["E"]))


# Fits that give no number


def test_a_fit_without_a_minimum_gives_no_number(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fitting, "minimize", lambda objective, start: (start, objective(start, None)))
    monkeypatch.setattr(fitting, "polished", lambda objective, free: free)
    result, fitted = analyses.parametric(table(training_rows(SMALL)), restarts=2, resamples=10)
    assert not result["converged"] and "no minimum was reached from 2 starts" in result["reason"]
    assert not {"coefficients", "intervals", "huber"} & set(result)
    for number in (lambda: fitted.coefficients, lambda: fitted.predict({})):
        with pytest.raises(FitError, match="no minimum"):
            number()
    write_table(training_rows(SMALL), tmp_path / "runs.csv")
    assert laws.main(["parametric", str(tmp_path / "runs.csv"), "--output", str(tmp_path)]) == 1
    assert "no minimum was reached" in capsys.readouterr().out and not (tmp_path / "parametric.svg").exists()


@pytest.mark.slow
def test_what_the_runs_do_not_show_is_said():
    flat = [{**row, "loss": 2.5 + 3e4 * row["tokens"] ** -0.5} for row in training_rows(SMALL)]  # no use of loops
    result, _ = analyses.parametric(table(flat), restarts=40)
    assert not result["converged"] and "X" in result["reason"] and "coefficients" not in result
    constant = [{**row, "loss": 2.5} for row in curve_rows(TRUE_FORMS["exponential"], depths=(8,))]
    fitted = fit(TEST_TIME["exponential"], table(constant).columns(["test_depth"]), table(constant)["loss"], 20)
    assert "Z" in fitted.problem


# Bad input


def test_missing_columns_and_bad_numbers_are_named(tmp_path):
    rows = training_rows(SMALL)
    bare = [{key: row[key] for key in ("run", "loss", "tokens", "mean_depth")} for row in rows]
    with pytest.raises(FitError, match="runs lacks 1 column: flops; it has"):
        analyses.isoflop(table(bare))
    with pytest.raises(FitError, match="lacks 2 columns: test_depth, effective_parameters"):
        analyses.conditioning(table(bare))
    for value, words in (
        (0.0, "got 0.0"),
        (-1.0, "got -1.0"),
        (math.nan, "got nan"),
        (math.inf, "got inf"),
        ("high", "a number, got 'high'"),
    ):
        with pytest.raises(FitError, match=f"row 3 .*: loss must be .*{words}"):
            analyses.parametric(table([*rows[:2], {**rows[2], "loss": value}, *rows[3:]]))
    with pytest.raises(FitError, match="row 1 .*tokens must be a number, got None"):
        analyses.parametric(table([{k: v for k, v in rows[0].items() if k != "tokens"}, *rows[1:]]))


def test_too_few_runs_and_columns_that_do_not_vary():
    rows = training_rows(SMALL)
    with pytest.raises(FitError, match=r"5 parameters \(E, X, x, Y, y\) and needs at least 6 losses, got 5"):
        analyses.parametric(table(rows[:5]))
    with pytest.raises(FitError, match="different values of tokens, but all 36 rows have 1e.09"):
        analyses.parametric(table([{**row, "tokens": 1e9} for row in rows]))
    with pytest.raises(FitError, match="run mu8: .*needs at least 4 losses, got 2"):
        analyses.test_time(table(curve_rows(TRUE_FORMS["exponential"], depths=(8,))[:2]))
    untested = [{**row, "test_depth": row["test_depth"] + 1} for row in rows]
    with pytest.raises(FitError, match="no row with test_depth equal to mean_depth for 1.6e.19_10, .* and others"):
        analyses.parametric(table(untested))


def test_tables_that_can_not_be_read(tmp_path):
    with pytest.raises(FitError, match="a .csv or .jsonl, got"):
        read_table(tmp_path / "runs.xlsx")
    with pytest.raises(FitError, match="there is no table .*laws collect"):
        read_table(tmp_path / "runs.csv")
    (tmp_path / "empty.csv").write_text("run,loss\n")
    with pytest.raises(FitError, match="holds no runs"):
        read_table(tmp_path / "empty.csv")
    (tmp_path / "bad.jsonl").write_text('{"run": 1}\n{"run"\n')
    with pytest.raises(FitError, match="bad.jsonl, line 2 is not JSON"):
        read_table(tmp_path / "bad.jsonl")
    for suffix in ("csv", "jsonl"):
        write_table(training_rows(SMALL), tmp_path / f"runs.{suffix}")
        again = read_table(tmp_path / f"runs.{suffix}")
        assert again["loss"].tolist() == pytest.approx([row["loss"] for row in training_rows(SMALL)], rel=1e-12)


# Command line


def written(folder, name):
    assert (folder / f"{name}.svg").read_text().startswith("<svg") and (folder / f"{name}.html").is_file()
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.slow
def test_every_law_from_the_command_line(tmp_path, capsys):
    rows = training_rows(SMALL) + training_rows(MEDIUM)
    write_table(rows, tmp_path / "runs.csv")
    write_table(at_test_depths(training_rows(MEDIUM), 1.5, 3.0, 1.0, (1, 2, 4, 16)), tmp_path / "depths.jsonl")
    write_table(isoflop_rows(), tmp_path / "isoflop.csv")
    write_table(curve_rows(TRUE_FORMS["exponential"], depths=(6,)), tmp_path / "curves.csv")
    options = ["--output", str(tmp_path / "out"), "--bootstrap", "5"]
    few = ["--restarts", "12"]
    for law, file, *more in (
        ("isoflop", "isoflop.csv"),
        ("parametric", "runs.csv", *few, "--by", "parameters", "--held-out", str(tmp_path / "runs.csv")),
        ("test_time", "curves.csv", *few),
        ("unified", "depths.jsonl", *few, "--conditioning", "one", "--min-depth", "4"),
        ("conditioning", "depths.jsonl", *few),
    ):
        assert laws.main([law, str(tmp_path / file), *options, *more]) == 0
    assert written(tmp_path / "out", "isoflop")["power_laws"]["mean_depth"]["exponent"] == pytest.approx(0.4, abs=0.01)
    small = written(tmp_path / "out", "parametric_parameters=9.3e+07")
    assert small["coefficients"]["E"] == pytest.approx(2.662, rel=1e-4)
    assert len(small["held_out"]["rows"]) == 36 and small["command"].startswith("looped laws parametric")
    assert written(tmp_path / "out", "parametric_parameters=2.34e+08")["coefficients"]["E"] == pytest.approx(2.439)
    assert small["columns"] == {"N": "effective_parameters", "C": "flops"}
    assert set(written(tmp_path / "out", "test_time")["forms"]) == set(TEST_TIME)
    unified = written(tmp_path / "out", "unified")
    assert unified["coefficients"]["z"] == pytest.approx(3.0, rel=1e-3) and unified["conditioning"] == "one"
    assert written(tmp_path / "out", "conditioning")["best"] in ("one", "learned")
    assert "predicted" not in capsys.readouterr().out  # row by row in the JSON alone


def test_a_part_without_held_out_runs_is_said(tmp_path, capsys, monkeypatch):
    seen = []

    def run(law, part, held_out, args):
        seen.append(held_out)
        return {"converged": False}, None

    monkeypatch.setattr(laws, "run", run)
    write_table(training_rows(SMALL) + training_rows(MEDIUM), tmp_path / "runs.csv")
    write_table(training_rows(SMALL, held_out=True), tmp_path / "more.csv")
    arguments = ["parametric", str(tmp_path / "runs.csv"), "--output", str(tmp_path), "--by", "parameters"]
    assert laws.main([*arguments, "--held-out", str(tmp_path / "more.csv")]) == 1
    assert "more.csv holds no runs of parameters=2.34e+08: nothing is predicted" in capsys.readouterr().out
    assert [held_out is None for held_out in seen] == [False, True]


def test_the_columns_that_count_as_parameters_and_operations(tmp_path):
    """Other columns, named by the command and in the result; runs of depth 1 are in no law."""
    rows = with_fixed_depth(training_rows(SMALL), {1e18: 9.0})
    for row in rows:
        row |= {"bare": row.pop("effective_parameters"), "flops_with_value_tables": 2 * row["flops"]}
        row |= {"effective_parameters": 7e7, "test_depth": row["mean_depth"]}
    write_table(rows, tmp_path / "runs.jsonl")
    arguments = ["parametric", str(tmp_path / "runs.jsonl"), "--output", str(tmp_path), "--restarts", "12"]
    arguments += ["--bootstrap", "0", "--effective-parameters"]
    assert laws.main([*arguments, "bare", "--flops", "flops_with_value_tables"]) == 0
    result = written(tmp_path, "parametric")
    assert result["columns"] == {"N": "bare", "C": "flops_with_value_tables"} and result["rows"] == len(rows) - 1
    assert result["coefficients"] == pytest.approx(dict(zip(NAMES, SMALL[0])), rel=1e-4)
    assert result["frontier"][0]["flops"] == pytest.approx(2e18)
    with pytest.raises(FitError, match="lacks 1 column: unheard"):
        laws.main([*arguments, "unheard"])
    write_table(rows[-1:], tmp_path / "runs.jsonl")
    with pytest.raises(FitError, match="holds only runs of mean depth 1, the baseline"):
        laws.main([*arguments, "bare"])
    with pytest.raises(FitError, match="holds no looped runs of mean depth 3 or more"):
        laws.main([*arguments, "bare", "--min-depth", "3"])


def test_runs_of_several_sweeps_keep_apart(tmp_path):
    folders = [str(tmp_path / size / "a") for size in ("small", "medium")]
    for folder in folders:
        make_run(Path(folder))
    laws.main(["collect", *folders, "--output", str(tmp_path / "runs.csv")])
    assert list(read_table(tmp_path / "runs.csv").by("run")) == sorted(folders)


def test_a_run_counts_once(tmp_path):
    """The folder of a sweep stands for the runs in it."""
    output = str(tmp_path / "runs.csv")
    for name in "ab":
        make_run(tmp_path / "sweep" / name)
    laws.main(["collect", str(tmp_path / "sweep"), "--output", output])
    assert [row["run"] for row in read_table(output).rows] == ["a", "a", "b", "b"]
    for named in (["sweep/a", "sweep/b", "sweep/../sweep/a/"], ["sweep/b", "sweep"]):
        with pytest.raises(FitError, match="sweep/[ab] is named 2 times: name it once"):
            laws.main(["collect", *(str(tmp_path / name) for name in named), "--output", output])
    header, *lines = Path(output).read_text().splitlines()
    Path(output).write_text("\n".join([header, *lines, *lines]))
    with pytest.raises(FitError, match=r"runs.csv: rows 1 and 5 \(a\) are the same: leave one out"):
        read_table(output)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_names_of_runs_are_no_numbers(kind, tmp_path):
    names = ["20261128_110133_001", "20261128_110133_002", "007", "7", "140_4e+18_6", "370_1e+20_12", "inf"]
    rows = [{"run": name, "data": "1_000", "loss": 3.0} for name in names]
    write_table(rows, tmp_path / f"runs.{kind}")
    assert read_table(tmp_path / f"runs.{kind}").rows == rows


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_as_spreadsheets_save_it(kind, tmp_path):
    """With a byte order mark and lines that end with \\r\\n; in another encoding than UTF-8 it is refused."""
    path = tmp_path / f"runs.{kind}"
    text = "run,loss\r\ncafé,3\r\n" if kind == "csv" else '{"run": "café", "loss": 3.0}\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_table(path).rows == [{"run": "café", "loss": 3.0}]
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FitError, match=f"runs.{kind} is not UTF-8 .*: save it as that"):
        read_table(path)


def test_members_of_a_sweep_without_losses_are_left_out(tmp_path, capsys):
    """As `looped laws collect runs/sweep/*/` names them: runs that diverged, and the folder of the cluster's jobs."""
    make_run(tmp_path / "a")
    limited = make_run(tmp_path / "c")  # it ended at 4
    limited.training.max_loss = 3.5
    limited.save(tmp_path / "c/recipe.yaml")
    for folder in ("b", "jobs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "b/diverged.txt").write_text("the loss of step 3 is nan")
    folders = [str(tmp_path / name) for name in ("a", "b", "c", "jobs")]
    laws.main(["collect", *folders, "--output", str(tmp_path / "runs.csv")])
    printed = capsys.readouterr().out
    assert f"left out: {tmp_path}/b diverged: the loss of step 3 is nan" in printed
    assert f"left out: {tmp_path}/c diverged: the run ended at 4.0000, above training.max_loss=3.5" in printed
    assert f"left out: {tmp_path}/jobs holds no run" in printed and "2 losses of 1 run are" in printed
    assert list(read_table(tmp_path / "runs.csv").by("run")) == ["a"]
    with pytest.raises(FitError, match="no folder is left"):
        laws.main(["collect", *folders[1:]])


@pytest.mark.parametrize(
    "rows, law",
    [
        ([(run, 4, 1e6 * run, 1e5) for run in range(1, 7)], None),  # all of the same tokens
        ([(run, 4, 1e6 * run, 1e5 * run) for run in range(1, 7)], "parametric"),
        ([(run, 4, 1e6 * run, 1e5 * run) for run in range(1, 6)], None),
        ([(run, 1, 1e6 * run, 1e5 * run) for run in range(1, 7)], None),  # without loops
        ([(1, depth, 1e6, 1e5) for depth in (1, 2, 4, 8)], "test_time"),
    ],
)
def test_which_law_a_table_is_enough_for(rows, law):
    table = [
        {"run": str(run), "mean_depth": min(depth, 4) if law is None else 4, "test_depth": depth}
        | {"effective_parameters": n, "tokens": tokens}
        for run, depth, n, tokens in rows
    ]
    words, found = laws.enough_for(table)
    assert found == law and ("too few" in words) == (law is None)


def test_bad_arguments(tmp_path):
    for arguments, words in (
        (["parametric", "a.csv", "b.csv"], "reads one table, got a.csv, b.csv"),
        (["parametric", "a.csv", "--restarts", "0"], "--restarts must be at least 1, got 0"),
        (["test_time", "a.csv", "--bootstrap", "-1"], "--bootstrap must be at least 0, got -1"),
        (["isoflop", "a.csv", "--held-out", "b.csv"], "--held-out has no effect on isoflop, only on parametric, "),
        (["test_time", "a.csv", "--held-out", "b.csv"], "--held-out has no effect on test_time"),
        (["parametric", "a.csv", "--conditioning", "none"], "--conditioning has no effect on parametric, only on uni"),
        (["isoflop", "a.csv", "--restarts", "5"], "--restarts has no effect on isoflop"),
        (["isoflop", str(tmp_path / "a.csv")], "there is no table"),
        (["collect", str(tmp_path)], "has no recipe.yaml: it is no run of looped pretrain"),
    ):
        with pytest.raises(FitError, match=words):
            laws.main(arguments)


def test_held_out_runs_are_those_of_the_law_too(tmp_path, monkeypatch):
    """Neither of fixed depth, nor shallower than --min-depth."""
    rows = [
        {
            "run": f"mu={depth}",
            "mean_depth": depth,
            "tokens": 1e6,
            "loss": 4.0,
            "flops": 1e12,
            "effective_parameters": 9,
        }
        for depth in (1, 2, 4, 8)
    ]
    for name in ("runs.csv", "held_out.csv"):
        write_table(rows, tmp_path / name)
    seen = []

    def remember(law, table, held_out, args):
        seen.extend([row["run"] for row in part.rows] for part in (table, held_out))
        return {"converged": False}, None

    monkeypatch.setattr(laws, "run", remember)
    paths = [str(tmp_path / name) for name in ("runs.csv", "held_out.csv", "out")]
    laws.main(["parametric", paths[0], "--held-out", paths[1], "--min-depth", "3", "--output", paths[2]])
    assert seen == [["mu=4", "mu=8"]] * 2


def make_run(folder, steps=20):
    """The folder of a finished run, without weights."""
    recipe = recipe_from_dict(
        {
            "model": {
                "preset": "parcae",
                "hidden_size": 256,
                "vocab_size": 512,
                "num_attention_heads": 2,
                "num_loops": 4,
            },
            "data": {"sequence_length": 64, "tokenizer_vocab_size": 512},
            "depth": {"sampler": "poisson", "backprop_loops": "half"},
            "training": {"steps": steps, "rows_per_step": 8},
        }
    )
    config = recipe.model_config()
    (folder / "final").mkdir(parents=True)
    recipe.save(folder / "recipe.yaml")
    config.save_pretrained(folder / "final")
    records = [{"step": 9, "validation/loss": 5.0, "validation/loss_at_1": 6.0, "validation/loss_at_4": 5.0}]
    records += [{"step": steps - 1, "loss": 4.5}]
    records += [{"step": steps - 1, "validation/loss": 4.0, "validation/loss_at_1": 5.0, "validation/loss_at_4": 4.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 2')
    return recipe


def test_the_table_is_made_from_run_folders(tmp_path):
    recipe = make_run(tmp_path / "a")
    make_run(tmp_path / "b", steps=40)
    laws.main(["collect", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "runs.csv")])
    with open(tmp_path / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["test_depth"], float(row["loss"])) for row in rows] == [
        ("a", "1", 5.0), ("a", "4", 4.0), ("b", "1", 5.0), ("b", "4", 4.0),
    ]  # fmt: skip
    costs = plan(recipe)
    assert float(rows[0]["tokens"]) == costs["tokens"] == 20 * 8 * 64
    assert float(rows[0]["flops"]) == pytest.approx(costs["training FLOPs"])
    assert float(rows[0]["effective_parameters"]) == costs["effective parameters"]
    config = LoopedConfig.from_pretrained(tmp_path / "a" / "final")
    core = costs["effective parameters"] - plan_at(recipe, 3)
    tables = 3 * 512 * 256  # of every other one of six layers; embedding and head are not these
    assert float(rows[0]["flops_with_value_tables"]) / float(rows[0]["tokens"]) == pytest.approx(
        costs["training FLOPs per token"] + 6 * tables
    )
    assert float(rows[0]["effective_parameters_without_value_tables"]) == costs["effective parameters"] - tables
    assert rows[0]["depth_sampler"] == "poisson"
    assert 1 < costs["effective parameters"] / core < 10 and config.num_loops == float(rows[0]["mean_depth"]) == 4
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    with pytest.raises(FitError, match="holds no validation loss"):
        collect(tmp_path / "a")


def plan_at(recipe, loops):
    recipe.model["num_loops"] = loops
    return plan(recipe)["effective parameters"]


@pytest.mark.slow
def test_the_law_of_a_fit_is_centred_on_its_runs():
    """The same losses in other units give the same exponents, and a scale in those units."""
    rows = training_rows(MEDIUM)
    columns, loss = table(rows).columns(PARAMETRIC.columns), table(rows)["loss"]
    shrunk = {name: values / 1e6 for name, values in columns.items()}
    here, there = (fit(PARAMETRIC, each, loss, 20).coefficients for each in (columns, shrunk))
    assert there["x"] == pytest.approx(here["x"], rel=1e-6)
    assert there["X"] == pytest.approx(here["X"] * 1e6 ** -here["x"], rel=1e-5)
