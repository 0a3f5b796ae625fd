"""On the Residual Scaling of Looped Transformers."""

import math
from collections.abc import Callable
from functools import partial
from statistics import fmean

from looped_recipes.common.chart import Chart, Line, Matrix
from looped_recipes.common.intervals import level_of_chosen, over_seeds

from .definition import SIX_SEEDS, Claim, Figure, Measurement, Paper, each_seed
from .functions import function
from .learning_rates import BEST_RATES, PANELS, TRANSFER, panel_charts, panel_claims, transfer_charts, transfer_claims
from .rules import AtMost, Effect, Estimate, Near, Rule
from .slope import slope, with_interval_of_fit
from .sweeps import commands_of, runs_of
from .trained_loops import AFTER_TRAINING, TRAINED, after_training_charts, after_training_claims


RULES = {"none": "eps = 1", "sqrt": "eps = 1/sqrt(N)", "linear": "eps = 1/N"}
EXPONENTS = {"none": 1.0, "sqrt": 0.5, "linear": 0.0}
GROWS = {"none": "grows as N", "sqrt": "grows as the root of N", "linear": "stays"}
STATED = {"none": "section 3.2, theorem 1", "sqrt": "section 3.2, theorem 1", "linear": "figure 2 f"}
WIDE = "width 768, 12 layers, N = 1 to 64, 32 random tokens"
BLOCK = "diagnose/pre_norm_block/residual_norm"
BAND = 0.15  # of all exponents
STEPS = 10  # of figures 2 and 9; earlier seeds have one


def exponent(content: dict, rule: str, curves: str, step: int) -> float | None:
    """Return the slope on log N of the logarithm of one curve of a seed: of R before a step, or of a step's change;
    None if the seed was measured over fewer steps."""
    steps = content["rules"][rule][curves]
    return slope(content["loops"], steps[step]) if step < len(steps) else None


def exponent_at(rule: str, curves: str, step: int) -> Callable[[dict], Estimate | None]:
    return each_seed(partial(exponent, rule=rule, curves=curves, step=step))


def range_at(content: dict, step: int) -> float:
    """Return the largest change of h_N over the smallest, over N, under eps = 1/N."""
    changes = content["rules"]["linear"]["updates"][step]
    return max(changes) / min(changes)


def of_each_step(content: dict, number: Callable[..., float | None]) -> list[Estimate]:
    """Estimate a number at each step over the seeds with ten steps; none if a seed lacks one. The intervals allow for
    the choice of a step by its number."""
    seeds = [seed for seed in content["seeds"].values() if seed["steps"] == STEPS]
    steps = range(STEPS)
    values = [[number(seed, step=step) for seed in seeds] for step in steps]
    return (
        []
        if not seeds or any(None in each for each in values)
        else [over_seeds(each, level_of_chosen(len(steps))) for each in values]
    )


def farthest_step(content: dict, rule: str) -> Estimate | None:
    """Estimate the exponent of the change at the step where it is farthest from the paper's."""
    found = of_each_step(content, partial(exponent, rule=rule, curves="updates"))
    return max(found, key=lambda step: abs(step.value - EXPONENTS[rule]), default=None)


def widest_step(content: dict) -> Estimate | None:
    return max(of_each_step(content, range_at), key=lambda step: step.value, default=None)


def doublings_until(content: dict, loops: int) -> float:
    """Return log2 of the change of h_N by the first step with `loops` loops over that with one, under eps = 1/N."""
    at = dict(zip(content["loops"], content["rules"]["linear"]["updates"][0]))
    return math.log2(at[loops] / at[1])


def growth_claims() -> list[Claim]:
    """Claims on the norm of the state and on its change by a step."""
    norm = "slope of log R on log N"
    change = "slope of the logarithm of the RMS change on log N, rate 1e-4"

    def claim(where: str, says: str, number: str, read, rule: Rule) -> Claim:
        return Claim(where, says, number, WIDE, "claims/growth", read, rule)

    return [
        *(
            claim(STATED[rule], f"under {RULES[rule]} the norm of the state {GROWS[rule]}",
                  f"{norm}, at initialisation", exponent_at(rule, "R", 0), Near(EXPONENTS[rule], BAND))
            for rule in RULES
        ),
        claim("figure 2 e", "during the first ten steps the norm grows rapidly with N under eps = 1/sqrt(N)",
              f"{norm}, after ten steps", exponent_at("sqrt", "R", STEPS), Effect()),
        claim("figure 2 f", "and stays under eps = 1/N",
              f"{norm}, after ten steps", exponent_at("linear", "R", STEPS), Near(0.0, BAND)),
        *(
            claim("figure 4", f"under {RULES[rule]} what a step changes of h_N {GROWS[rule]}",
                  f"{change}, first step", exponent_at(rule, "updates", 0), Near(EXPONENTS[rule], BAND))
            for rule in ("none", "sqrt")
        ),
        *(
            claim(f"figure 9 {panel}", f"and so at each of the first ten steps, under {RULES[rule]}",
                  f"{change}, at the step of ten where it is farthest from the paper's",
                  partial(farthest_step, rule=rule), Near(EXPONENTS[rule], BAND))
            for panel, rule in (("a", "none"), ("b", "sqrt"))
        ),
        claim("figure 9 c",
              "under eps = 1/N what a step changes of h_N stays within a range of about 4, at each of ten steps",
              "largest change over N over the smallest, at the step of ten where that is most", widest_step,
              AtMost(4.0)),
        claim("section 5.1", "under eps = 1/N what a step changes of h_N grows mildly until about N = 32",
              "log2 of the change at N = 32 over that at N = 1, first step",
              each_seed(partial(doublings_until, loops=32)), Effect()),
    ]  # fmt: skip


def off_diagonal(arrangement: str, which: str) -> Callable[[dict], float]:
    return lambda content: content[arrangement]["off_diagonal"][which]


def largest_of_mean(content: dict) -> Estimate:
    """Return the largest cosine, by absolute value, of the matrix averaged over seeds. It has no interval, because
    averages of fewer seeds have larger cosines."""
    matrices = [found["unshared"]["cosine_of_every_eighth"] for found in content["seeds"].values()]
    means = [fmean(one[i][j] for one in matrices) for i in range(len(matrices[0])) for j in range(i)]
    return Estimate(max(map(abs, means)), None, None, len(matrices))


def cosine_claims() -> list[Claim]:
    size = "width 768, 12 layers, 64 passes, 32 random tokens, at initialisation (the paper: after 10 steps)"
    return [
        Claim(
            "figure 3",
            "shared weights align the increments of all passes: cosines from 0.03 to 0.995",
            "least cosine of two passes",
            size,
            "claims/cosines",
            each_seed(off_diagonal("looped", "min")),
            Effect(),
        ),
        Claim(
            "figure 3",
            "increments of independent layers are orthogonal: cosines from -0.037 to 0.034",
            "largest cosine, either sign, of every eighth pass, averaged over the seeds, as the paper averages norms "
            "(of figure 3 it does not say); no interval",
            size,
            "claims/cosines",
            largest_of_mean,
            AtMost(0.037),
        ),
    ]


def growth_without_bound(content: dict) -> Estimate | None:
    """Estimate the exponent of R over N with shared weights and eps = 1/sqrt(N)."""
    result = content["result"]
    return with_interval_of_fit(result["arrangements"]["shared"]["alpha=0.5"]["slope_of_R"]["all"], result["seeds"])


def theorem_claims() -> list[Claim]:
    """Some exponents hold by construction: with eps = 1/N and a shared block, whatever it is, the sum over loops is N
    times the displacement of a differential equation; for independent blocks expected squared norms add."""
    of_first, of_third = "width 512, N = 1 to 64, eps = 1/N", "width 128, eps = 1/(N sqrt L)"
    of_half = "width 256, N = 1 to 64; the mean of ten seeds"

    def first(kind: str):
        return each_seed(lambda content: content["theorem_1"][kind]["slope"])

    def of_stack(theorem: int, over: str):
        return each_seed(lambda content: content[f"theorem_{theorem}"][f"slope_over_{over}"])

    said = "slope of the logarithm of the squared norm of all that is added on log"
    source = "claims/theorems"
    return [
        Claim("theorem 1", "shared: the squared sum of residuals grows as N^2", f"{said} N", of_first, source,
              first("shared"), Near(2.0, BAND), by_construction=True),
        Claim("section 3.2, figure 1 a", "independent: it grows as N", f"{said} N", of_first, source,
              first("independent"), Near(1.0, BAND), by_construction=True),
        Claim("theorem 1", "shared: a bounded norm of the state needs alpha of at least 1, with eps = N^-alpha",
              "slope of log R on log N at alpha = 1/2; interval of the fit over N", of_half,
              "diagnose/theorems/theorem_1", growth_without_bound, Effect()),
        Claim("theorem 3", "in L layers it grows as N^2", f"{said} N, 16 layers, N = 1 to 8", of_third, source,
              of_stack(3, "loops"), Near(2.0, BAND), by_construction=True),
        Claim("theorem 3", "and as L", f"{said} L, L = 1 to 16, 8 loops", of_third, source,
              of_stack(3, "layers"), Near(1.0, BAND)),
        Claim("theorem 6", "its premise: one layer's weights change another's branch by at most a constant times "
              "(eps N)^2, whatever N", "slope of the logarithm of that constant on log N, 16 layers, N = 1 to 8",
              of_third, source, of_stack(6, "loops"), AtMost(BAND, 0)),
        Claim("theorem 6", "and whatever L", "slope of the logarithm of that constant on log L, L = 2 to 16, 8 loops",
              of_third, source, of_stack(6, "layers"), AtMost(BAND, 0)),
    ]  # fmt: skip


def slope_after_steps(content: dict, rule: str) -> float | None:
    """Return the slope of log R on log N; None where a run ended before its norm was measured."""
    runs = [run for run in content["runs"] if run["model.residual_scaling"] == rule]
    loops = [run["model.num_loops"] for run in runs]
    norms = [run.get(f"residual_norm/loop_{n}") for n, run in zip(loops, runs)]
    return None if None in norms else slope(loops, norms)


def slope_of_unshared(content: dict, rule: str) -> Estimate | None:
    """Estimate the slope of log R on log L of independent layers after ten steps."""
    result = content["result"]
    return with_interval_of_fit(result["unshared"][rule]["slope"]["last_step"], result["seeds"])


def fall_of_unshared(content: dict, rule: str) -> Estimate | None:
    found = slope_of_unshared(content, rule)
    return found and Estimate(-found.value, -found.high, -found.low, found.seeds)


def claims_after_steps() -> list[Claim]:
    shared, apart = "width 96, 2 layers, N = 1 to 64", "width 64, L = 1 to 64 layers; the mean of three seeds"
    said = "slope of log R on log"
    fitted = "after ten steps; interval of the fit over L"
    return [
        Claim("figure 2 e", "during the first ten steps the norm grows rapidly with N under eps = 1/sqrt(N)",
              f"{said} N after ten steps on text", shared, "claims/growth_on_text",
              each_seed(partial(slope_after_steps, rule="sqrt")), Effect()),
        Claim("figure 2 f", "and stays under eps = 1/N",
              f"{said} N after ten steps on text", shared, "claims/growth_on_text",
              each_seed(partial(slope_after_steps, rule="linear")), Near(0.0, BAND)),
        Claim("figure 1 a", "of independent layers without scaling it grows as the root of L",
              f"{said} L {fitted}", apart, BLOCK, partial(slope_of_unshared, rule="none"), Near(0.5, BAND)),
        Claim("figure 2 b", "and stays under eps = 1/sqrt(L)",
              f"{said} L {fitted}", apart, BLOCK, partial(slope_of_unshared, rule="sqrt"), Near(0.0, BAND)),
        Claim("workshop version, section 3.1", "and falls under eps = 1/L, which damps too much",
              f"fall of log R on log L {fitted}", apart, BLOCK, partial(fall_of_unshared, rule="linear"), Effect()),
    ]  # fmt: skip


AFTER_STEPS = Measurement("growth_on_text", commands_of("growth", name="growth_on_text"), runs_of, SIX_SEEDS)


# charts


def mean_curve(content: dict, rule: str, curves: str, step: int) -> list[tuple[float, float]]:
    seeds = list(content["seeds"].values())
    found = [seed["rules"][rule][curves] for seed in seeds]
    values = zip(*(of_seed[step] for of_seed in found if step < len(of_seed)))
    return [(n, fmean(of_n)) for n, of_n in zip(seeds[0]["loops"], values)]


def growth_charts(content: dict) -> list[Chart]:
    charts = []
    for title, y, curves, step in (
        ("Norm of the state at initialisation", "R", "R", 0),
        ("Norm of the state after ten steps", "R", "R", STEPS),
        ("Change of h_N by the first step", "RMS change", "updates", 0),
        ("Change of h_N by the tenth step", "RMS change", "updates", STEPS - 1),
    ):
        lines = []
        for i, (rule, name) in enumerate(RULES.items()):
            points = mean_curve(content, rule, curves, step)
            start = points[0][1]
            theory = [(n, start * n ** EXPONENTS[rule]) for n, _ in points]
            said = f"the paper: N^{EXPONENTS[rule]:g}"
            lines += [Line(name, points, f"c{i}"), Line(said, theory, f"c{i}", dashed=True)]
        charts.append(Chart(title, "loops", y, lines, log_x=True, log_y=True))
    return charts


def cosine_charts(content: dict) -> list[Matrix]:
    first = next(iter(content["seeds"].values()))
    names = {"looped": "Looped: cosines of every eighth pass", "unshared": "Independent layers: the same"}
    return [Matrix(title, "pass", first[kind]["cosine_of_every_eighth"]) for kind, title in names.items()]


def theorem_charts(content: dict) -> list[Chart]:
    seeds, lines = list(content["seeds"].values()), []
    for i, (kind, exponent) in enumerate((("shared", 2), ("independent", 1))):
        values = zip(*(found["theorem_1"][kind]["sum_squared"] for found in seeds))
        points = [(n, fmean(of_n)) for n, of_n in zip(seeds[0]["loops"], values)]
        theory = [(n, points[0][1] * n**exponent) for n, _ in points]
        lines += [Line(kind, points, f"c{i}"), Line(f"theorem: N^{exponent}", theory, f"c{i}", dashed=True)]
    return [Chart("Theorem 1: squared sum of residuals", "loops", "squared sum", lines, log_x=True, log_y=True)]


RESIDUAL_SCALING = Paper(
    "On the Residual Scaling of Looped Transformers",
    [
        function("growth", seeds=6),
        AFTER_STEPS,
        function("cosines", seeds=6),
        function("theorems", seeds=10),
        BEST_RATES,
        AFTER_TRAINING,
    ],
    [
        *growth_claims(),
        *cosine_claims(),
        *theorem_claims(),
        *panel_claims(),
        *transfer_claims(),
        *claims_after_steps(),
        *after_training_claims(),
    ],
    [
        Figure("claims/growth", growth_charts),
        Figure("claims/cosines", cosine_charts),
        Figure("claims/theorems", theorem_charts),
        Figure(PANELS, panel_charts),
        Figure(TRANSFER, transfer_charts),
        Figure(TRAINED, after_training_charts),
    ],
)
