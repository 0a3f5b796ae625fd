"""On the Residual Scaling of Looped Transformers."""

from collections.abc import Callable
from functools import partial
from statistics import fmean

from looped_recipes.common.chart import Chart, Line, Matrix

from .definition import SIX_SEEDS, Claim, Figure, Measurement, Paper, each_seed
from .functions import function
from .learning_rates import BEST_RATES, PANELS, TRANSFER, panel_charts, panel_claims, transfer_charts, transfer_claims
from .rules import AtMost, Effect, Estimate, Near
from .slope import slope
from .sweeps import runs_of, sweep_alone
from .trained_loops import AFTER_TRAINING, TRAINED, after_training_charts, after_training_claims


RULES = {"none": "eps = 1", "sqrt": "eps = 1/sqrt(N)", "linear": "eps = 1/N"}
EXPONENTS = {"none": 1.0, "sqrt": 0.5, "linear": 0.0}
GROWS = {"none": "grows as N", "sqrt": "grows as the root of N", "linear": "stays"}
WIDE = "width 768, 12 layers, N = 1 to 64, 32 random tokens"


def of_rule(rule: str, number: str) -> Callable[[dict], Estimate | None]:
    return each_seed(lambda content: content["rules"][rule][number])


def growth_claims() -> list[Claim]:
    norms = [
        Claim(
            "figure 2",
            f"under {RULES[rule]} the norm of the state {GROWS[rule]}",
            "slope of log R on log N, at initialisation",
            WIDE,
            "claims/growth",
            of_rule(rule, "slope_of_R"),
            Near(EXPONENTS[rule], 0.15),
        )
        for rule in RULES
    ]
    updates = [
        Claim(
            "figure 4",
            f"under {RULES[rule]} what a step changes of h_N {GROWS[rule]}",
            "slope of the logarithm of the RMS change by the first step on log N, rate 1e-4",
            WIDE,
            "claims/growth",
            of_rule(rule, "slope_of_update"),
            Near(EXPONENTS[rule], 0.15),
        )
        for rule in ("none", "sqrt")
    ]
    return [
        *norms,
        *updates,
        Claim(
            "figure 9",
            "under eps = 1/N what a step changes of h_N stays within a range of about 4",
            "largest change over N over the smallest, first step",
            WIDE,
            "claims/growth",
            of_rule("linear", "largest_over_smallest_update"),
            AtMost(4.0),
        ),
    ]


def off_diagonal(arrangement: str, which: str) -> Callable[[dict], float]:
    return lambda content: content[arrangement]["off_diagonal"][which]


def largest_apart(content: dict) -> float:
    return max(abs(content["unshared"]["off_diagonal"][end]) for end in ("min", "max"))


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
            "largest cosine of two passes, either sign",
            size,
            "claims/cosines",
            each_seed(largest_apart),
            AtMost(0.037),
        ),
    ]


def theorem_claims() -> list[Claim]:
    of_first, of_third = "width 512, N = 1 to 64, eps = 1/N", "width 128, eps = 1/(N sqrt L)"

    def first(kind: str):
        return each_seed(lambda content: content["theorem_1"][kind]["slope"])

    def third(over: str):
        return each_seed(lambda content: content["theorem_3"][f"slope_over_{over}"])

    said = "slope of the logarithm of the squared norm of all that is added on log"
    source = "claims/theorems"
    return [
        Claim("theorem 1", "shared: the squared sum of residuals grows as N^2", f"{said} N", of_first, source,
              first("shared"), Near(2.0, 0.15)),
        Claim("appendix 7.1", "independent: it grows as N", f"{said} N", of_first, source,
              first("independent"), Near(1.0, 0.15)),
        Claim("theorem 3", "in L layers it grows as N^2", f"{said} N, 16 layers, N = 1 to 8", of_third, source,
              third("loops"), Near(2.0, 0.15)),
        Claim("theorem 3", "and as L", f"{said} L, L = 1 to 16, 8 loops", of_third, source,
              third("layers"), Near(1.0, 0.15)),
    ]  # fmt: skip


def slope_after_steps(content: dict, rule: str) -> float | None:
    """None where a run ended before its norm was measured."""
    runs = [run for run in content["runs"] if run["model.residual_scaling"] == rule]
    loops = [run["model.num_loops"] for run in runs]
    norms = [run.get(f"residual_norm/loop_{n}") for n, run in zip(loops, runs)]
    return None if None in norms else slope(loops, norms)


def claims_after_steps() -> list[Claim]:
    return [
        Claim(
            "figure 2",
            f"after ten steps too the norm {GROWS[rule]} under {RULES[rule]}",
            "slope of log R on log N after ten steps on text",
            "width 96, 2 layers, N = 1 to 64",
            "claims/growth_on_text",
            each_seed(partial(slope_after_steps, rule=rule)),
            Near(EXPONENTS[rule], 0.15),
        )
        for rule in RULES
    ]


AFTER_STEPS = Measurement("growth_on_text", sweep_alone("growth", "growth_on_text"), runs_of, SIX_SEEDS)


# charts


def mean_curve(content: dict, rule: str, curve: Callable[[dict], list[float]]) -> list[tuple[float, float]]:
    seeds = list(content["seeds"].values())
    values = zip(*(curve(found["rules"][rule]) for found in seeds))
    return [(n, fmean(of_n)) for n, of_n in zip(seeds[0]["loops"], values)]


def growth_charts(content: dict) -> list[Chart]:
    charts = []
    for title, y, curve in (
        ("Norm of the state at initialisation", "R", lambda found: found["R"][0]),
        ("Change of h_N by the first step", "RMS change", lambda found: found["update"]),
    ):
        lines = []
        for i, (rule, name) in enumerate(RULES.items()):
            points = mean_curve(content, rule, curve)
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
        function("growth"),
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
