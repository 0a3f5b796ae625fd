"""Figure 5 of the residual scaling paper: where the best learning rate lies over loops and layers.

In four panels, a seed at a time; and from earlier measurements, whose shifts come with the interval of the parabolas
that are fitted to the losses over rates and seeds; the verdict takes it as it takes one over seeds.
"""

import math
from statistics import fmean

from looped_recipes.common.chart import Chart, Line, ordered
from looped_recipes.common.optimum import optimum, shift

from .definition import Claim, Measurement, each_seed
from .rules import AtMost, Effect, Estimate, Near, over_seeds
from .sweeps import runs_of, sweep_alone


TRANSFER, FACTORED = "diagnose/transfer/lr_transfer", "diagnose/factored/lr_transfer"
SMALL = "width 64, one layer, 150 steps of 512 tokens; interval of the fit over rates"
STACKED = "width 64, 3 to 12 layers, 200 steps of 512 tokens; interval of the fit over rates and seeds"
SAME = 0.5  # octaves: half the distance of two rates of the grid
NAMES = {"sqrt": "eps = 1/sqrt(N)", "linear": "eps = 1/N"}

PANELS = "claims/best_rates"
FOUR = "width 64, 320 words, 2, 4 and 8 layers, 1 to 8 loops, six rates, 100 steps of 512 tokens"
PANEL = {"a": ("sqrt", 2), "b": ("linear", 2), "c": ("factored", 4), "d": ("factored", 8)}  # rule, layers
LOOPS = (1, 2, 4, 8)
BEST_RATES = Measurement("best_rates", sweep_alone("best_rates"), runs_of)


def losses_over_rates(content: dict, panel: str, loops: int) -> dict[float, float]:
    """Of the runs that trained."""
    wanted = (*PANEL[panel], loops)
    of_run = ("model.residual_scaling", "model.num_core_layers", "model.num_loops")
    runs = [run for run in content["runs"] if tuple(run[name] for name in of_run) == wanted]
    return {run["optimizer.lr"]: run["loss"] for run in runs if run["loss"] is not None}


def best_of(content: dict, panel: str, loops: int) -> dict:
    losses = losses_over_rates(content, panel, loops)
    rates = sorted(losses)
    return optimum(rates, [losses[rate] for rate in rates])


def octaves(content: dict, first: tuple[str, int], other: tuple[str, int]) -> float | None:
    """From the best rate of one curve, a panel at so many loops, to that of another."""
    rates = [best_of(content, *one)["lr"] for one in (first, other)]
    return None if None in rates else math.log2(rates[1] / rates[0])


def widest(content: dict, panel: str) -> float | None:
    """Octaves between the least and the greatest best rate over N."""
    rates = [best_of(content, panel, n)["lr"] for n in LOOPS]
    return None if None in rates else math.log2(max(rates) / min(rates))


def less_at_8(content: dict) -> float:
    """Least loss under 1/sqrt(N) less that under 1/N; infinite where no rate trains under one of them."""
    root, linear = (min(losses_over_rates(content, panel, 8).values(), default=math.inf) for panel in ("a", "b"))
    return root - linear


def panel_claims() -> list[Claim]:
    def claim(where: str, says: str, number: str, read, rule) -> Claim:
        return Claim(where, says, number, FOUR, PANELS, each_seed(read), rule)

    return [
        claim("figure 5 a and b", "at N = 8, eps = 1/N has 0.025 nats less than 1/sqrt(N), each at its best rate",
              "least loss under 1/sqrt(N) less that under 1/N",
              less_at_8, Effect(0.025)),
        claim("figure 5 a", "under eps = 1/sqrt(N) the best rate shifts with N",
              "octaves from the best rate of N = 8 to that of N = 1", lambda c: octaves(c, ("a", 8), ("a", 1)),
              Effect()),
        *(
            claim(f"figure 5 {panel}", f"under eps = {eps} it stays, {PANEL[panel][1]} layers",
                  "octaves between the least and the greatest best rate, N = 1 to 8",
                  lambda c, panel=panel: widest(c, panel), AtMost(2 * SAME))
            for panel, eps in (("b", "1/N"), ("c", "1/(N sqrt L)"), ("d", "1/(N sqrt L)"))
        ),
        claim("figure 5 b to d", "and, with the correction for depth, over L",
              "octaves from the best base rate of 2 layers to that of 8, N = 8",
              lambda c: octaves(c, ("b", 8), ("d", 8)), Near(0.0, 2 * SAME)),
    ]  # fmt: skip


def panel_charts(content: dict) -> list[Chart]:
    charts, seeds = [], list(content["seeds"].values())
    for panel, (rule, layers) in PANEL.items():
        lines = []
        for i, n in enumerate(LOOPS):
            curves = [losses_over_rates(found, panel, n) for found in seeds]
            shared = sorted(set.intersection(*map(set, curves)))
            points = [(rate, fmean(curve[rate] for curve in curves)) for rate in shared]
            lines.append(Line(f"N = {n}", points, ordered(i, len(LOOPS))))
        title = f"{panel}: loss over rates, {rule}, {layers} layers"
        charts.append(Chart(title, "learning rate", "loss", lines, log_x=True))
    return charts


def curves_of(content: dict, rule: str, layers: int) -> dict[str, dict]:
    panels = content["result"]["panels"]
    return next(panel["curves"] for panel in panels if (panel["rule"], panel["layers"]) == (rule, layers))


def best(content: dict, rule: str, layers: int, loops: int) -> dict:
    curve = curves_of(content, rule, layers)[str(loops)]
    return optimum(content["result"]["rates"], curve.get("loss_of_seeds", curve["loss"]))


def moved(rule: str, first: tuple[int, int], other: tuple[int, int], sign: int = 1):
    """Octaves between the best rates of two (layers, loops)."""

    def read(content: dict) -> Estimate | None:
        found = shift(best(content, rule, *first), best(content, rule, *other))
        if found["octaves"] is None:
            return None
        low, high = sorted(sign * end for end in found["interval"]) if found["interval"] else (None, None)
        return Estimate(sign * found["octaves"], low, high, content["result"]["seeds"])

    return read


def gain_at_8(content: dict) -> Estimate:
    """Of one seed."""
    root, linear = (best(content, rule, 1, 8)["loss"] for rule in ("sqrt", "linear"))
    return over_seeds([root - linear])


def transfer_claims() -> list[Claim]:
    over_loops = "octaves from the best rate of N = 1 to that of N ="
    stays = Near(0.0, SAME)
    return [
        Claim("figure 5 a and b", "at N = 8, eps = 1/N has 0.025 nats less than 1/sqrt(N), each at its best rate",
              "least loss under 1/sqrt(N) less that under 1/N", SMALL, TRANSFER, gain_at_8, Effect(0.025)),
        Claim("figure 5 a", "under eps = 1/sqrt(N) the best rate shifts with N", f"{over_loops} 4, downwards", SMALL,
              TRANSFER, moved("sqrt", (1, 1), (1, 4), -1), Effect()),
        Claim("figure 5 b", "under eps = 1/N it stays", f"{over_loops} 4", SMALL, TRANSFER,
              moved("linear", (1, 1), (1, 4)), stays),
        Claim("figure 5 c and d", "under eps = 1/(N sqrt L) it stays over N too", f"{over_loops} 4, 6 layers",
              STACKED, FACTORED, moved("factored", (6, 1), (6, 4)), stays),
        *(
            Claim("figure 5 c and d", "and, with the correction for depth, over L",
                  f"octaves from the best base rate of 3 layers to that of 12, N = {n}", STACKED, FACTORED,
                  moved("factored", (3, n), (12, n)), stays)
            for n in (1, 4)
        ),
    ]  # fmt: skip


def transfer_charts(content: dict) -> list[Chart]:
    charts, rates = [], content["result"]["rates"]
    for rule, name in NAMES.items():
        curves = curves_of(content, rule, 1)
        lines = [
            Line(f"N = {n}", list(zip(rates, found["loss"])), ordered(i, len(curves)))
            for i, (n, found) in enumerate(curves.items())
        ]
        charts.append(Chart(f"Loss over rates, {name}", "learning rate", "loss", lines, log_x=True))
    return charts
