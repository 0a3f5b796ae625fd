"""The sentences that pages begin with say what the numbers say."""

import itertools
import math
import random

import pytest
from scipy.stats import norm as normal
from scipy.stats import t as student

from looped_eval.common.curves import more_is_better, of_few_questions
from looped_eval.common.findings import best_depths, best_point, by_chance
from looped_eval.diagnose import command as diagnose
from looped_eval.diagnose import figures, page, sentences
from looped_eval.diagnose.figures import layer_name
from looped_eval.diagnose.readings import READINGS
from looped_eval.halting import page as halting_page
from looped_eval.laws import page as laws_page
from looped_recipes.common.chart import Chart
from looped_recipes.common.words import percent


def test_every_measure_is_explained_and_drawn():
    parts = {part for name in diagnose.MEASURES for part in page.parts(name, {"looped": {}})}
    assert parts == set(READINGS)
    assert all(hasattr(each, part) for part in parts for each in (figures, sentences))
    assert all(reading.explanation.what and reading.explanation.healthy for reading in READINGS.values())
    makes_models = {"residual_norm", "update_size", "lr_transfer", "loop_cosine_fresh"}
    assert {name for name, reading in READINGS.items() if reading.fresh} - makes_models == {
        "theorem_1",
        "theorem_2",
        "theorem_3",
    }


@pytest.mark.parametrize(
    "name, result, words",
    [
        ("spectral", {"A": {"spectral_radius": 0.8}}, "radius 0.8, below 1: it forgets"),
        ("spectral", {"A": {"spectral_radius": 1.0}}, "radius 1, 1: it keeps"),
        ("spectral", {"A": {"spectral_radius": 1.2}}, "radius 1.2, above 1: it amplifies"),
        ("norm_trajectory", {"norm": [1, 2, 6], "growth": 3.0}, "grows: after 2 loops it is 3.00 times that after"),
        (
            "norm_trajectory",
            {"norm": [1, 2, 2.1], "growth": 1.05},
            "stays of one size: after 2 loops it is 1.05 times",
        ),
        (
            "norm_trajectory",
            {"norm": [0.53, 26.35, 37.72, 37.65, 37.63, 37.63], "growth": 37.63 / 26.35},
            "grows until loop 2 and then stays of one size: after 5 loops it is 1.43 times that after the first",
        ),
        (
            "norm_trajectory",
            {"norm": [1, 4, 2, 1, 1.01, 0.99, 1], "growth": 0.25},
            "falls until loop 3 and then stays of one size: after 6 loops it is 0.25 times",
        ),
        ("norm_trajectory", {"norm": [1, 1, 10, *[3] * 6], "growth": 3.0}, "grows: after 8 loops it is 3.00 times"),
        ("norm_trajectory", {"norm": [1, *(1.02**k for k in range(20))], "growth": 1.02**19}, "grows: after 20 loops"),
        ("norm_trajectory", {"norm": [0, 1, 2, 3, 4, 5, 6, 7, 8], "growth": 8.0}, "grows: after 8 loops"),
        ("norm_trajectory", {"norm": [1, 2, 1, 0], "growth": 0.0}, "falls: after 3 loops it is 0 times"),
        ("norm_trajectory", {"norm": [1, 2], "growth": None}, "is not finite"),
        (
            "scale_sweep",
            {"alpha": [0.1, 1, 10], "ce_range": 1e-6},
            "does not matter to the readout: between α = 0.1 and",
        ),
        ("scale_sweep", {"alpha": [0.1, 1, 10], "ce_range": 2.0}, "matters to the readout"),
        ("radial_gradient", {"final_r": 5e-9}, "does not see the state's scale: 5×10⁻⁹"),
        ("radial_gradient", {"final_r": 0.05}, "sees the state's scale: 0.05"),
        (
            "radial_clamp",
            {"freeze": {"delta_ce": 0.0055, "norm_ratio": 0.53}},
            "costs 0.0055 in cross-entropy, at 0.53",
        ),
        ("radial_clamp", {"freeze": {"delta_ce": -0.01, "norm_ratio": 0.5}}, "gains 0.01 in cross-entropy"),
        (
            "radial_clamp",
            {"freeze": {"delta_ce": -2e-7, "norm_ratio": 1.0}},
            "gains less than 0.0001 in cross-entropy, at 1.00 times",
        ),
        ("token_norms", {"median": 8, "mean": 42, "max": 390}, "a few tokens carry it"),
        ("token_norms", {"median": 8, "mean": 8, "max": 9, "std": 1}, "tokens are alike"),
        ("token_norms", {"median": 8, "mean": 8, "max": 90, "std": 5}, "tokens differ"),
        (
            "token_norms",
            {"median": 8, "mean": 8, "max": 14, "std": 3, "classes": {"words": {"mean": 4}, "special": {"mean": 13}}},
            "tokens differ",
        ),
        (
            "state_dynamics",
            {"loop": [1, 2], "change": [1.0, 0.05], "state_norm": [1, 1]},
            "settles: the last moves it 0.05",
        ),
        ("loop_cosine", {"model": {"off_diagonal": {"mean": 0.77}}}, "push the same way: the mean cosine"),
        (
            "exit_weighted",
            {"loop": [1, 2], "exit": [0.5, 0.5], "num_loops": 2, "ce": 1, "last_ce": 2},
            "after 1.50 of 2",
        ),
        (
            "update_decomposition",
            {"table": {"measured_increment": 0.26, "a_rad_size": 0.27, "b": 0.28}},
            "grows by 0.26 in each loop, of updates of size",
        ),
        (
            "update_decomposition",
            {"table": {"measured_increment": -0.01, "a_rad_size": 0.27, "b": 0.28}},
            "falls by 0.01 in each loop, of updates of size 0.28: 96 % of them is along the state",
        ),
        ("depth_curve", {"loop": [1, 2], "ce": [2.0, None], "trained_loops": 2}, "1 loop is best here: 2.000"),
        (
            "update_decomposition",
            {"table": {"measured_increment": -6e-11, "b": 1e-7}},
            "the state stays where it is: updates are of",
        ),
        (
            "future_signal",
            {"loop": [1, 2], "largest_immediate": 2e-8, "largest_future": 1e-9},
            "No loss sees the scale of any loop",
        ),
        (
            "future_signal",
            {"loop": [1, 2], "largest_immediate": 0.3, "largest_future": 0.02},
            "own loss by up to 0.3 for each unit",
        ),
        ("future_signal", {"loop": [1], "largest_immediate": 0.3, "largest_future": None}, "there is no later loss"),
        (
            "future_signal",
            {"loop": [1, 2], "largest_immediate": None, "largest_future": None},
            "not a finite number",
        ),
        (
            "premises",
            {"increment_overlap": 0.4, "loops_orthogonal": 0.25, "branches": {"a": {"residual_overlap": 0.9}}},
            "between loops by 0.90 to 0.90, and what a whole loop adds by 0.40",
        ),
        (
            "premises",
            {"increment_overlap": None, "loops_orthogonal": 0.5, "branches": {"a": {"residual_overlap": 0.9}}},
            "not a finite number",
        ),
    ],
)
def test_measures_in_words(name, result, words):
    assert words in page.said(name, result)


def test_layers_are_counted_from_one_as_people_do():
    assert layer_name("model.core.0.self_attn") == "layer 1, attention"
    assert layer_name("core_1.mlp") == "layer 2, MLP" and layer_name("lm_head") == "head"


def halted(fixed: list[tuple], rows: list[tuple]) -> dict:
    """Perplexity against full depth, of fixed depths on both texts, and speed-up; criteria in so many loops."""
    depths = [
        {"loops": k, "calibrated_ratio": before, "ratio": ratio, "speedup": speed}
        | {"perplexity": 10 * ratio, "tokens_per_second": 100 * speed}
        for k, (before, ratio, speed) in enumerate(fixed, start=1)
    ]
    found = [
        {"criterion": name, "budget": 0.01, "ratio": ratio, "measured_speedup": speed, "mean_loops": loops}
        | {"perplexity": 10 * ratio, "tokens_per_second": 100 * speed, "calibrated_speedup": 3 / loops}
        for name, ratio, speed, loops in rows
    ]
    return {"fixed": depths, "halting": found, "tokens": found}


def test_halting_in_words():
    depths = [(1.2, 1.2, 3.0), (1.05, 1.004, 1.6), (1.0, 1.0, 1.0)]
    pays = halting_page.finding(halted(depths, [("kl", 1.004, 1.4, 1.8), ("logit_margin", 1.008, 1.5, 1.7)]))
    assert pays == (
        "Exits by logit margin score text 1.50 times as fast as 3 loops, in 1.70 loops and for 0.8 % more perplexity. "
        "No fixed depth below 3 stays within 1 % where it was calibrated."
    )
    lucky = halting_page.finding(halted(depths, [("kl", 1.004, 1.4, 1.6), ("logit_margin", 1.008, 1.5, 1.7)]))
    assert lucky.startswith("Exits by kl score text 1.40 times")  # the cheaper one where they were calibrated
    flat = halting_page.finding(halted([(1.001, 1.03, 3.0), (1.0, 1.0, 1.0)], [("kl", 1.03, 2.0, 1.0)]))
    assert "for 3 % more perplexity, beyond the 1 % that were calibrated for." in flat
    assert flat.endswith(
        "1 loop for all text, calibrated alike: 3.00 times as fast, for 3 % more perplexity. Exits gain nothing over "
        "that."
    )
    slow = halting_page.finding(halted(depths, [("kl", 1.0, 0.7, 2.9)]))
    assert slow == (
        "Exits do not pay within 1 % of perplexity: kl, the cheapest where it was calibrated, scores text 0.70 times "
        "as fast as 3 loops."
    )


def test_halting_is_drawn_with_its_limit():
    pareto, tokens = halting_page.charts(halted([(1.2, 1.2, 3.0), (1.0, 1.0, 1.0)], [("kl", 1.004, 1.4, 1.8)]))
    assert pareto.levels == {"1 % worse": pytest.approx(10.1)} and pareto.lines[0].points == [(300, 12), (100, 10)]
    assert isinstance(tokens, Chart) and tokens.lines[0].points == [(1.8, 1.004)]


def test_laws_in_words():
    laws = {"mean_depth": {"exponent": 0.4, "interval": [0.35, 0.45]}, "tokens": {"exponent": 0.78}}
    assert laws_page.finding("isoflop", {"power_laws": laws}) == (
        "The best mean depth grows as FLOPs^0.40 (0.35 to 0.45), the best tokens as FLOPs^0.78."
    )
    fit = {"rows": 36, "coefficients": {"E": 2.662}, "held_out": {"mean_percent": 0.5}}
    assert laws_page.finding("parametric", fit).endswith(
        "a floor of 2.662, and predicts held-out ones within 0.50 % in the mean."
    )
    forms = {n: {"formula": n, "in_range": {"huber": h}} for n, h in (("a", 3e-7), ("b", 1e-7), ("c", 9e-7))}
    assert (
        laws_page.finding("test_time", {"forms": forms})
        == "b fits best on all depths: the next form misses by 3 times as much."
    )
    assert laws_page.finding("test_time", {"forms": {}}) == "No form fits all curves."
    best = {"best": "one", "forms": {"one": {"formula": "f", "huber": 0.001}}}
    assert laws_page.finding("conditioning", best) == "f fits best, with a total Huber loss of 0.001."


@pytest.mark.parametrize(
    "share,words",
    [
        (0, "0 %"),
        (0.0123, "1.2 %"),
        (-0.005, "-0.5 %"),
        (0.384, "38 %"),
        (0.9951, "99.5 %"),
        (1, "100 %"),
        (1.034, "103 %"),
    ],
)
def test_shares_are_as_exact_as_they_need_to_be(share, words):
    assert percent(share) == words


def test_whether_more_is_better_is_what_lm_eval_says():
    metrics = {"brier_score,none": 0.5, "acc,none": 0.5, "ter,first": 50.0, "acc_stderr,none": 0.1}
    directions = {"glossary": {"brier_score": False, "acc": True, "ter": False}}
    known = more_is_better({"results": {"glossary": metrics}, "higher_is_better": directions})
    assert known == {"glossary brier_score": False, "glossary acc": True, "glossary ter (first)": False}
    points = {"": {1: (0.9, None), 4: (0.2, None)}}
    curves = {"glossary brier_score": points, "glossary acc": points}
    assert best_depths(curves, known) == (
        "glossary brier_score is lowest at 4 loops (0.2000); glossary acc is highest at 1 loop (0.9000)."
    )
    words = {
        "glossary acc": 1,
        "a loss": 4,
        "word_perplexity": 4,
        "t bits_per_byte": 4,
    }  # of what lm-eval says nothing
    ends = {1: "is highest at 1 loop", 4: "is lowest at 4 loops"}
    assert all(ends[depth] in best_point(name, points) for name, depth in words.items())


def test_no_depth_is_best_where_all_are_the_same():
    same = {1: (0.0, 0.0), 2: (0.0, 0.0)}
    assert best_point("hop acc", {"": same}) == "hop acc is 0.0000 at every depth"
    assert best_point("loss", {"a": same, "b": same}) == "loss is 0.0000 everywhere"
    assert best_point("loss", {"": {1: (1.0, 0.1), 2: (0.5, 0.1)}}) == "loss is lowest at 2 loops (0.5000)"


def test_models_that_are_equally_good_are_all_named():
    a, b = {1: (0.7, None), 2: (0.6, None)}, {1: (0.6, None), 2: (0.6, None)}
    assert best_point("loss", {"c": a, "a": a, "b": a}) == "loss is lowest for a, b, c alike at 2 loops (0.6000)"
    assert best_point("loss", {"a": a, "b": b}) == "loss is lowest for b at 1 loop (0.6000)"  # with fewer loops


def test_a_value_that_is_nan_is_neither_best_nor_worst():
    """Wherever it stands among the others. A model may have a single number, or none."""
    nan, values = (math.nan, math.nan), {"a": (0.5, None), "b": (0.6, None)}
    for order in itertools.permutations(["a", "b", "broken"]):
        points = {series: {1: values[series], 2: nan} if series in values else {1: nan, 2: nan} for series in order}
        of_nan = ", ".join(f"for {each} at {'2 loops' if each in values else '1, 2 loops'}" for each in order)
        assert best_depths({"acc": points}) == f"acc is highest for b at 1 loop (0.6000), but nan {of_nan}."
        assert best_depths({"loss": points}) == f"loss is lowest for a at 1 loop (0.5000), but nan {of_nan}."
    assert best_depths({"acc": {"": {1: nan, 2: (0.5, 0.1), 4: (0.6, 0.1)}}}) == (
        "acc is 0.6000 ± 0.1000 at best, at 4 loops, and nowhere clearly worse, but nan at 1 loop."
    )
    one = {"broken": {1: nan}, "a": {1: (0.5, None)}}
    assert best_depths({"loss": one}) == "loss is 0.5000 for a at 1 loop, but nan for broken at 1 loop."
    assert best_depths({"loss": {"a": {1: nan, 2: nan}, "b": {1: nan}}}) == "loss is nan everywhere."


def test_few_questions_tell_no_best_depth():
    """Where all are wrong or all are right, lm-eval's error is 0. A group has the questions of all of its tasks."""
    results = {
        "results": {"a": {"acc,none": 0.0, "acc_stderr,none": 0.0, "sample_len": 19}, "b": {"acc,none": 0.0}},
        "groups": {"g": {"acc,none": 0.0, "acc_stderr,none": 0.0, "sample_len": 20}},
    }
    few = of_few_questions(results)
    assert few == {"a acc"}
    curves = {f"{task} acc": {"": {1: (0.0, 0.0), 4: (1.0, 0.0)}} for task in "ag"}
    assert best_depths(curves, few=few) == ("a acc is highest at 4 loops (1.0000); g acc is best at 4 loops (1.0000).")
    same = {"a acc": {"": {1: (0.4, 0.2), 4: (0.6, 0.2)}}}
    assert best_depths(same, few=few).endswith("at best, at 4 loops, and nowhere clearly worse.")


def test_how_far_apart_chance_puts_two_points():
    """Errors of 0.03 and 0.04 are one of 0.05 of the difference; three pairs share the 5 %."""
    best, worst = (0.6, -2, "a", 0.03), (0.5, -1, "b", 0.04)
    assert by_chance(best, worst, [[], []], 3) == pytest.approx(0.05 * normal.ppf(1 - 0.05 / 2 / 3))
    assert by_chance(best, worst, [[0.6] * 3, [0.5] * 3], 1) == pytest.approx(0.05 * student.ppf(0.975, 4))


def test_a_best_depth_is_rarely_named_where_all_are_equally_good():
    draw, named = random.Random(0), 0
    for _ in range(1000):
        points = {depth: (draw.gauss(0.5, 0.02), 0.02) for depth in range(1, 9)}
        named += "is best" in best_point("hop acc", {"": points})
    assert named < 70  # of 50, and three standard deviations of that
    assert "is best at 2 loops" in best_point("hop acc", {"": {1: (0.4, 0.02), 2: (0.5, 0.02), 3: (0.45, 0.02)}})
