"""Parcae beside Transformers, and its scaling laws: table 5, figures 4 to 8, tables 12 and 13, in small."""

import math
from functools import partial
from pathlib import Path

from looped_recipes.common.chart import Chart, Line, ordered

from .definition import SIX_SEEDS, Claim, Measurement, Setting, each_seed, loss_of
from .functions import by_function, result_of
from .rules import AtMost, Effect, Near
from .sweeps import by_sweep, runs_of, sweep_alone


WIDTHS = (64, 96, 128)
LEAST_GAIN = 4.3  # % of perplexity; the abstract's range is 4.3 to 9.2
SIZES = "1 + 1 + 1 layers, mean depth 8, English text, 300 steps of 1,024 tokens, the same rate for both"
EPOCH = "1 + 1 + 1 layers, mean depth 8, English text, 6,000 steps of 1,024 tokens, one rate, decayed at the end"
BUDGETS = "width 64, 1 + 1 + 1 layers, budgets of 2.5e11, 5e11 and 1e12 operations, mean depths 2 to 12"


# table 5


def less_perplexity(content: dict, width: int) -> float:
    """In percent of the Transformer's."""
    losses = {run["name"]: loss_of(run) for run in content["runs"]}
    return 100 * (1 - math.exp(losses[f"parcae_{width}"] - losses[f"transformer_{width}"]))


def size_claims() -> list[Claim]:
    measured = [
        *(("claims/sizes", SIZES, width) for width in WIDTHS),
        *(("claims/epoch" if width == WIDTHS[0] else "claims/epoch_sizes", EPOCH, width) for width in WIDTHS),
    ]
    return [
        Claim(
            "table 5",
            "Parcae has 4.3 to 9.2 % less perplexity than a Transformer of as many layers and tokens",
            f"perplexity less than the Transformer's, %, width {width}",
            size,
            source,
            each_seed(partial(less_perplexity, width=width)),
            Effect(LEAST_GAIN),
        )
        for source, size, width in measured
    ]


def size_charts(content: dict) -> list[Chart]:
    found = {width: each_seed(partial(less_perplexity, width=width))(content) for width in WIDTHS}
    points = [(width, each.value) for width, each in found.items() if each and math.isfinite(each.value)]
    paper = [(768, 11.3), (1024, 8.2), (1280, 4.5), (1536, 4.4)]
    return [
        Chart(f"{whose}: perplexity less than a Transformer's", "width", "%", [Line("", line)], whole_x=True)
        for whose, line in (("Ours", points), ("The paper's", paper))
    ]


# laws


def laws_of(setting: Setting, seed: int) -> list[list[str]]:
    folder = setting.of("isoflop", seed)
    return [by_sweep("isoflop", folder, setting.text, seed), by_function("laws", folder, seed)]


def read_laws(folder: Path) -> dict | None:
    return result_of("laws")(folder) if runs_of(folder) else None


def power_over_exponential(content: dict) -> float | None:
    """Logarithm to base 10, of the misfits over test depth."""
    misfits = content.get("misfits", {})
    power, exponential = misfits.get("power"), misfits.get("exponential")
    return math.log10(power / exponential) if power and exponential else None


def law_claims() -> list[Claim]:
    def claim(where: str, says: str, number: str, read, rule) -> Claim:
        return Claim(where, says, number, BUDGETS, "claims/isoflop", each_seed(read), rule)

    return [
        claim("figure 5", "the best mean depth grows with operations as their power of 0.40", "exponent",
              lambda c: c.get("exponents", {}).get("mean_depth"), Near(0.40, 0.15)),
        claim("figure 5", "the best number of tokens grows as their power of 0.78", "exponent",
              lambda c: c.get("exponents", {}).get("tokens"), Near(0.78, 0.15)),
        claim("figures 4 and 6", "at a fixed budget the best looped model beats the one without loops",
              "loss without loops less the least with them, largest budget", lambda c: c["gains"][-1], Effect()),
        claim("figure 4", "a law of depth and tokens foretells the loss at a larger budget to 1.3 %",
              "mean error at the largest budget, %", lambda c: c.get("held_out_percent"), AtMost(1.3)),
        claim("figure 8, table 12", "the loss falls exponentially over loops at test time, not as a power",
              "log10 of the misfit of a power law over that of an exponential (the paper's 140M)",
              power_over_exponential, Effect(math.log10(11.11 / 2.52))),
        claim("table 13", "its floor is the loss at the mean depth, to 0.16 %", "mean difference, %",
              lambda c: c.get("floor_percent"), AtMost(0.5)),
    ]  # fmt: skip


def law_charts(content: dict) -> list[Chart]:
    """Of the first seed: the loss over mean depth at each budget."""
    runs = sorted(next(iter(content["seeds"].values()))["runs"], key=lambda run: (run["flops"], run["mean_depth"]))
    by_budget: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        by_budget.setdefault(f"{run['flops']:.1e}", []).append((run["mean_depth"], run["loss"]))
    lines = [Line(f"{name} operations", sorted(line), ordered(i, len(by_budget)))
             for i, (name, line) in enumerate(by_budget.items())]  # fmt: skip
    return [Chart("Ours: loss over mean depth at fixed budgets", "mean depth", "loss", lines, log_x=True)]


LAW_MEASUREMENTS = [
    Measurement("sizes", sweep_alone("sizes"), runs_of),
    Measurement("epoch", sweep_alone("epoch"), runs_of, SIX_SEEDS),
    Measurement("epoch_sizes", sweep_alone("epoch_sizes"), runs_of),
    Measurement("isoflop", laws_of, read_laws),
]
