"""Figure 5 of the residual scaling paper: where the best learning rate lies over loops and layers.

The four panels are measured one seed at a time. Claims on deeper models use the shifts of the seeds' own best rates,
which one file holds for all seeds. A shift over loops covers the whole range of loops that both the file and the
paper have, and is given for every number of layers; a shift over layers likewise for every number of loops.
"""

import math
from statistics import fmean

from looped_recipes.common.chart import Chart, Line, ordered
from looped_recipes.common.optimum import of_saved, optimum, shift

from .definition import SIX_SEEDS, Claim, Measurement, each_seed
from .rules import Differs, Effect, Estimate, Near
from .sweeps import commands_of, runs_of


TRANSFER, FACTORED = "diagnose/transfer/lr_transfer", "diagnose/factored/lr_transfer"
STACKED = "width 64, 3 to 12 layers, 200 steps of 512 tokens; interval over the best rates of seeds"
NAMES = {"sqrt": "eps = 1/sqrt(N)", "linear": "eps = 1/N"}
SAME = Near(0.0, 0.5)  # octaves: half the distance of two rates of the grid

PANELS = "claims/best_rates"
FOUR = "width 64, 320 words, 2, 4 and 8 layers, 1 to 8 loops, six rates, 100 steps of 512 tokens"
PANEL = {"a": ("sqrt", 2), "b": ("linear", 2), "c": ("factored", 4), "d": ("factored", 8)}  # rule, layers
LOOPS = (1, 2, 4, 8)
LEARNT = 4.3  # nats; a run that ends above it has learnt next to nothing (the paper leaves out runs that end above 4)
FEWEST_LEARNT = 3  # rates; a parabola needs three points
UNTRAINED = "under 1/sqrt(N) no seed has three rates that end below 4.3 at N = 8: it does not train"
AT_EDGE = "a bound where a best rate is the last of the grid"
BEST_RATES = Measurement("best_rates", commands_of("best_rates"), runs_of, SIX_SEEDS)


def losses_over_rates(content: dict, panel: str, loops: int) -> dict[float, float]:
    """Return rate -> loss of a panel at this number of loops; runs that collapsed are left out."""
    wanted = (*PANEL[panel], loops)
    of_run = ("model.residual_scaling", "model.num_core_layers", "model.num_loops")
    runs = [run for run in content["runs"] if tuple(run[name] for name in of_run) == wanted]
    return {run["optimizer.lr"]: run["loss"] for run in runs if run["loss"] is not None}


def rates_that_train(content: dict, panel: str, loops: int) -> list[float]:
    return [rate for rate, loss in losses_over_rates(content, panel, loops).items() if loss < LEARNT]


def best_of(content: dict, panel: str, loops: int) -> dict | None:
    """Return the best rate and the least loss; None where too few rates train to find a best one."""
    if len(rates_that_train(content, panel, loops)) < FEWEST_LEARNT:
        return None
    losses = losses_over_rates(content, panel, loops)
    found = optimum(list(losses), list(losses.values()))
    return {"rate": found["lr"] or found["best"], "loss": found["loss"]}


def octaves(content: dict, first: tuple[str, int], other: tuple[str, int]) -> float | None:
    """Return the octaves from the best rate of one curve to that of another. A curve is (panel, loops)."""
    one, two = (best_of(content, *curve) for curve in (first, other))
    return math.log2(two["rate"] / one["rate"]) if one and two else None


def more_under_root(content: dict, loops: int) -> float | None:
    """Return the size of the shift from 1 loop to `loops` loops under 1/sqrt(N) minus that under 1/N."""
    root, linear = (octaves(content, (panel, 1), (panel, loops)) for panel in ("a", "b"))
    return None if root is None or linear is None else abs(root) - abs(linear)


def less_at_8(content: dict) -> float | None:
    """Return the least loss under 1/sqrt(N) minus that under 1/N, at 8 loops."""
    root, linear = (best_of(content, panel, 8) for panel in ("a", "b"))
    return root["loss"] - linear["loss"] if root and linear else None


def narrower(content: dict, first: tuple[str, int], other: tuple[str, int]) -> float | None:
    """Return the octaves from the highest rate that trains in one curve down to that in another."""
    one, two = (max(rates_that_train(content, *curve), default=None) for curve in (first, other))
    return math.log2(one / two) if one and two else None


def panel_claims() -> list[Claim]:
    def claim(where: str, says: str, number: str, read, rule, without: str = "") -> Claim:
        return Claim(where, says, number, FOUR, PANELS, each_seed(read), rule, without=without)

    return [
        claim("figure 5 a and b", "at N = 8, eps = 1/N has 0.025 nats less than 1/sqrt(N), each at its best rate",
              "least loss under 1/sqrt(N) less that under 1/N",
              less_at_8, Effect(0.025), UNTRAINED),
        claim("figure 5 a", "under eps = 1/sqrt(N) the best rate shifts with N",
              "octaves from the best rate of N = 1 to that of N = 8, 2 layers",
              lambda c: octaves(c, ("a", 1), ("a", 8)), Differs(), UNTRAINED),
        claim("figure 5 a and b", "the best rate shifts under 1/sqrt(N) and stays under 1/N",
              "octaves from the best rate of N = 1 to that of N = 2, up to which 1/sqrt(N) trains in all "
              "seeds, either sign, 2 layers: under 1/sqrt(N) less under 1/N",
              lambda c: more_under_root(c, 2), Effect()),
        *(
            claim(f"figure 5 {panel}", f"under eps = {eps} it stays",
                  f"octaves from the best rate of N = 1 to that of N = 8, {PANEL[panel][1]} layers; {AT_EDGE}",
                  lambda c, panel=panel: octaves(c, (panel, 1), (panel, 8)), SAME)
            for panel, eps in (("b", "1/N"), ("c", "1/(N sqrt L)"), ("d", "1/(N sqrt L)"))
        ),
        *(
            claim("figure 5 b to d", "and, with the correction for depth, over L",
                  f"octaves from the best base rate of 2 layers to that of 8, N = {n}; {AT_EDGE}",
                  lambda c, n=n: octaves(c, ("b", n), ("d", n)), SAME)
            for n in LOOPS
        ),
        claim("section 5.3", "with the most layers and loops, base rates diverge earlier",
              "octaves from the highest rate that ends below 4.3 with 2 layers, N = 1, the last of the grid, down to "
              "that with 8 layers, N = 8",
              lambda c: narrower(c, ("b", 1), ("d", 8)), Effect()),
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
    result = content["result"]
    return of_saved(result["rates"], curves_of(content, rule, layers)[str(loops)], result["seeds"])


def moved(rule: str, first: tuple[int, int], other: tuple[int, int]):
    """Return a function that gives the octaves from the best rate of one (layers, loops) to that of another. With one
    seed the estimate has no interval."""

    def read(content: dict) -> Estimate | None:
        seeds = content["result"]["seeds"]
        found = shift(best(content, rule, *first), best(content, rule, *other))
        if found["octaves"] is None:
            return None
        low, high = found["interval"] if found["interval"] and seeds > 1 else (None, None)
        return Estimate(found["octaves"], low, high, seeds)

    return read


def transfer_claims() -> list[Claim]:
    over_loops = "octaves from the best rate of N = 1 to that of N = 4"
    return [
        *(
            Claim("figure 5 c and d", "under eps = 1/(N sqrt L) it stays over N too", f"{over_loops}, {layers} layers",
                  STACKED, FACTORED, moved("factored", (layers, 1), (layers, 4)), SAME)
            for layers in (3, 6, 12)
        ),
        *(
            Claim("figure 5 c and d", "and, with the correction for depth, over L",
                  f"octaves from the best base rate of 3 layers to that of 12, N = {n}", STACKED, FACTORED,
                  moved("factored", (3, n), (12, n)), SAME)
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
