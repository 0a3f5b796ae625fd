"""The optimum of a curve and its interval: against a parabola that is known, with and without noise."""

import json
import math

import numpy as np
import pytest

from looped_eval.optimum import main
from looped_recipes.common.optimum import in_words, nearest, optimum, shift, shifts


OCTAVES = [2.0**k for k in range(-12, -4)]
PAPER = [5e-4, 7.5e-4, 1e-3, 1.25e-3, 1.5e-3, 2e-3, 3e-3, 4e-3]  # residual scaling, table 4


def valley(rates, lowest: float, curvature: float = 0.05, floor: float = 3.0):
    return [floor + curvature * math.log2(rate / lowest) ** 2 for rate in rates]


def test_a_parabola_is_found_exactly():
    found = optimum(OCTAVES, valley(OCTAVES, 2**-8.3))
    assert found["lr"] == pytest.approx(2**-8.3) and found["best"] == 2**-8
    assert found["interval"] == pytest.approx([2**-8.3] * 2, rel=1e-4)


def test_diverged_runs_are_no_optimum():
    losses = valley(OCTAVES, 2**-8.3)
    for gap in (None, math.nan, math.inf):
        found = optimum(OCTAVES, [losses[0], losses[1], gap, *losses[3:7], gap])
        assert found["lr"] == pytest.approx(2**-8.3)
    # of two seeds, one diverged: the rate counts as diverged
    pairs = [[loss, loss] for loss in losses[:-1]] + [[0.0, None]]
    assert optimum(OCTAVES, pairs)["lr"] == pytest.approx(2**-8.3)


@pytest.mark.parametrize(
    ("rates", "lowest", "seeds", "noise"),
    [(OCTAVES, 2**-8.3, 1, 0.005), (PAPER, 1.4e-3, 1, 0.005), (PAPER, 1.4e-3, 3, 0.01)],
)
def test_intervals_hold_the_truth_as_often_as_they_say(rates, lowest, seeds, noise):
    """95 % and 80 % intervals over 400 draws of noise; a seed shifts all of its losses by ten times the noise."""
    random = np.random.default_rng(0)
    held = {0.95: 0, 0.8: 0}
    for _ in range(400):
        losses = np.array(valley(rates, lowest))[:, None] + random.normal(0, noise, (len(rates), seeds))
        losses = (losses + random.normal(0, 10 * noise, seeds)).tolist()
        for level in held:
            low, high = optimum(rates, losses, level)["interval"]
            held[level] += low <= lowest <= high
    # three standard errors of a binomial of 400
    assert held[0.95] / 400 == pytest.approx(0.95, abs=0.033)
    assert held[0.8] / 400 == pytest.approx(0.8, abs=0.06)


def test_intervals_hold_the_truth_where_best_rates_differ_by_seed():
    """Over 120 draws of three seeds, whose best rates scatter by 0.3 octaves: the rate, and the shift to a curve that
    shares two thirds of that scatter."""
    random = np.random.default_rng(0)
    rates, held = [2.0**k for k in range(5)], [0, 0]
    for _ in range(120):
        common, own = random.normal(0, 0.25, 3), random.normal(0, 0.17, (2, 3))
        found = []
        for of_seeds in common + own:
            clean = np.array([valley(rates, 4 * 2**octaves) for octaves in of_seeds]).T
            found.append(optimum(rates, (clean + random.normal(0, 0.002, clean.shape)).tolist()))
        low, high = found[0]["interval"] or (0, math.inf)
        held[0] += low <= 4 <= high
        low, high = shift(*found)["interval"]
        held[1] += low <= 0 <= high
    assert [each / 120 for each in held] == pytest.approx([0.95, 0.95], abs=0.06)  # three standard errors


def test_the_interval_over_seeds_is_students():
    octaves, later = np.array([-8.5, -8.1, -7.9]), np.array([-7.2, -7.1, -6.4])
    curves = [list(zip(*(valley(OCTAVES, 2.0**v) for v in each))) for each in (octaves, later)]
    first, other = (optimum(OCTAVES, curve) for curve in curves)
    reach = 4.302653 * octaves.std(ddof=1) / 3**0.5  # Student's quantile of two degrees of freedom
    assert np.log2([first["lr"], *first["interval"]]) == pytest.approx(octaves.mean() + np.array([0, -reach, reach]))
    moved = shift(first, other)
    reach = 4.302653 * (later - octaves).std(ddof=1) / 3**0.5
    assert moved["interval"] == pytest.approx([moved["octaves"] - reach, moved["octaves"] + reach])
    assert moved["octaves"] == pytest.approx((later - octaves).mean())
    only_two = optimum(OCTAVES, [of_rate[:2] for of_rate in curves[1]])
    assert shift(first, only_two)["octaves"] == pytest.approx(later[:2].mean() - octaves.mean())


def test_a_seed_without_a_best_rate_leaves_no_interval():
    falling = [0.1 * loss for loss in valley(OCTAVES, 1.0)]  # so little that the mean curve has a vertex
    found = optimum(OCTAVES, list(zip(valley(OCTAVES, 2**-8.3), valley(OCTAVES, 2**-7.9), falling)))
    assert found["lr"] and found["interval"] is None
    assert "seeds without a best rate of their own: 1 of 3" in found["why"]
    moved = shift(found, optimum(OCTAVES, valley(OCTAVES, 2**-8)))
    assert moved == {"octaves": pytest.approx(-8 - math.log2(found["lr"])), "interval": None}


def test_the_mean_curve_of_seeds_has_no_interval(tmp_path, capsys):
    losses = valley(PAPER, 1.4e-3)
    saved = {"loss": losses, "loss_of_seeds": [[loss - 0.01, loss + 0.01] for loss in losses]}
    path = tmp_path / "lr_transfer.json"
    for curve, said in (
        (saved, "0.0014 [0.0014, 0.0014]"),
        ({"loss": losses}, "no interval: the file has the means of 2"),
    ):
        result = {"rates": PAPER, "seeds": 2, "panels": [{"rule": "sqrt", "layers": 12, "curves": {"1": curve}}]}
        path.write_text(json.dumps({"measure": "lr_transfer", "result": result}))
        main([str(path)])
        assert said in capsys.readouterr().out


def test_more_seeds_narrow_the_interval():
    random = np.random.default_rng(1)
    noise = random.normal(0, 0.01, (len(PAPER), 16))
    widths = []
    for seeds in (2, 16):
        losses = np.array(valley(PAPER, 1.4e-3))[:, None] + noise[:, :seeds]
        low, high = optimum(PAPER, losses.tolist())["interval"]
        widths.append(math.log(high / low))
    assert widths[1] < widths[0] / 2


def test_what_is_no_parabola_widens_the_interval():
    """A steep right side: the interval of noiseless losses is not a point."""
    crooked = [
        loss + 0.02 * max(0.0, math.log2(rate / 2**-8.3)) ** 3 for rate, loss in zip(OCTAVES, valley(OCTAVES, 2**-8.3))
    ]
    low, high = optimum(OCTAVES, crooked)["interval"]
    assert low < 2**-8.3 < high and math.log2(high / low) > 0.2


def test_the_edge_of_the_grid_is_no_optimum():
    edge = optimum(OCTAVES, valley(OCTAVES, 1.0))
    assert edge["lr"] is None and "the highest rate, 0.03125, is the best: widen the grid" in edge["why"]
    assert edge["best"] == OCTAVES[-1]
    edge = optimum(OCTAVES, valley(OCTAVES, 1e-9))
    assert edge["lr"] is None and "the lowest rate" in edge["why"]
    beside = optimum(OCTAVES, [*valley(OCTAVES, 1.0)[:-1], None])
    assert beside["lr"] is None
    assert "0.015625, lies beside one that diverged, 0.03125: add rates between them" in beside["why"]


def test_too_few_or_too_noisy_losses():
    few = optimum([1e-3, 2e-3, 4e-3], [3.0, None, 1.0])
    assert few["lr"] is None and "only 2 of 3" in few["why"]
    three = optimum([1e-3, 2e-3, 4e-3], [3.0, 2.0, 3.0])
    assert three["lr"] == pytest.approx(2e-3) and three["interval"] is None and "fourth rate" in three["why"]
    noisy = optimum(OCTAVES, [3.05, 3.05, 2.97, 3.0, 2.94, 2.95, 3.0, 3.05])
    assert noisy["lr"] and noisy["interval"] is None and "too noisy" in noisy["why"]
    spike = optimum(OCTAVES, [3.0, 3.1, 2.9, 3.1, 2.8, 3.1, 2.9, 3.1])  # the parabola opens downwards
    assert spike["lr"] is None and "no valley" in spike["why"] and spike["best"] == OCTAVES[4]
    with pytest.raises(ValueError, match=r"a loss from every seed, got \[2, 1, 2\]"):
        optimum([1e-3, 2e-3, 4e-3], [[3.0, 3.1], [2.0], [3.0, 3.1]])


def test_the_parabola_is_fitted_near_the_best_rate():
    points = [(rate, [loss]) for rate, loss in zip(PAPER, valley(PAPER, 1.25e-3))]
    assert [rate for rate, _ in nearest(points, 3)] == PAPER[:-1]  # 1.5 octaves
    points = [(rate, [loss]) for rate, loss in zip(OCTAVES, valley(OCTAVES, 2**-8))]
    assert [rate for rate, _ in nearest(points, 4)] == OCTAVES[2:7]  # five rates at least
    assert [rate for rate, _ in nearest(points, 1)] == OCTAVES[:5]


def test_shifts_in_octaves():
    first, other = ({"lr": lr, "interval": [lr / 2**0.3, lr * 2**0.4]} for lr in (1e-3, 4e-3))
    found = shift(first, other)
    assert found["octaves"] == pytest.approx(2)
    assert found["interval"] == pytest.approx([2 - 0.5, 2 + 0.5])
    assert shift(first, {"lr": 2e-3, "interval": None}) == {"octaves": pytest.approx(1), "interval": None}
    assert shifts({"1": first, "2": other, "4": {"lr": None}}) == {
        "1": {"octaves": 0.0},
        "2": found,
        "4": {"octaves": None},
    }
    assert shifts({"1": {"lr": None}, "2": other}) == {"1": {"octaves": None}, "2": {"octaves": None}}


def test_optima_of_a_file(tmp_path, capsys):
    curves = {str(n): {"loss": valley(PAPER, lowest)} for n, lowest in ((1, 1e-3), (2, 2e-3))}
    result = {"rates": PAPER, "panels": [{"rule": "sqrt", "layers": 12, "curves": curves}]}
    path = tmp_path / "lr_transfer.json"
    path.write_text(json.dumps({"measure": "lr_transfer", "result": result}))
    main([str(path)])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("sqrt, 12 layers, N = 1: 0.001 [0.001, 0.001]")
    assert second.endswith("octaves from the first +1.00 [+1.00, +1.00]")
    for other in (json.dumps({"measure": "spectral", "result": {}}), "[1]", "lr,loss\n0.1,2.0"):
        path.write_text(other)
        with pytest.raises(ValueError, match="holds no learning rates"):
            main([str(path)])


def test_a_line_for_each_outcome():
    assert in_words(optimum(OCTAVES, valley(OCTAVES, 2**-8.3))) == (
        "0.00317 [0.00317, 0.00317] (of the fit to one seed)"
    )
    assert in_words(optimum(OCTAVES, [[loss, loss] for loss in valley(OCTAVES, 2**-8.3)])) == (
        "0.00317 [0.00317, 0.00317] (of the parabolas' vertices over seeds)"
    )
    assert in_words(optimum([1e-3, 2e-3, 4e-3], [3.0, 2.0, 3.0])).startswith("0.002 (no interval")
    assert in_words(optimum(OCTAVES, valley(OCTAVES, 1.0))).startswith("none (the highest rate")
