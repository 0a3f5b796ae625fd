"""Figure 5 of the residual scaling paper: where the best learning rate lies over loops and layers.

From earlier measurements. Shifts come with the interval of the parabolas that are fitted to the losses over rates and
seeds; the verdict takes it as it takes one over seeds.
"""

from looped_recipes.common.chart import Chart, Line, ordered
from looped_recipes.common.optimum import optimum, shift

from .definition import Claim
from .rules import Effect, Estimate, Near, over_seeds


TRANSFER, FACTORED = "diagnose/transfer/lr_transfer", "diagnose/factored/lr_transfer"
SMALL = "width 64, one layer, 150 steps of 512 tokens; interval of the fit over rates"
STACKED = "width 64, 3 to 12 layers, 200 steps of 512 tokens; interval of the fit over rates and seeds"
SAME = 0.5  # octaves: half the distance of two rates of the grid
NAMES = {"sqrt": "eps = 1/sqrt(N)", "linear": "eps = 1/N"}


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
