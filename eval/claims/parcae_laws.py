"""Parcae beside Transformers, and its scaling laws: table 5, figures 4 to 8, tables 12 and 13, with small models."""

import math
from functools import partial
from pathlib import Path
from statistics import fmean

from looped_recipes.common.chart import Chart, Line, ordered

from .definition import SIX_SEEDS, Claim, Measurement, each_seed, losses_by_name
from .functions import result_of
from .rules import AtMost, Effect, Near
from .sweeps import commands_of, runs_of


WIDTHS = (64, 96, 128)
PAPER_GAINS = {768: 11.3, 1024: 8.2, 1280: 4.5, 1536: 4.4}  # % of perplexity by width, of 140M to 1.3B, in table 5
EPOCH = "1 + 1 + 1 layers, mean depth 8, English text, 6,000 steps of 1,024 tokens, one rate, decayed at the end"
BUDGETS = "width 64, 1 + 1 + 1 layers, budgets of 2.5e11, 5e11 and 1e12 operations, mean depths 2 to 12"
# for what the small ones cannot tell: no floor of the loss is found there, and curves over loops are flat
LARGER = {
    "size": "width 64, 1 + 1 + 1 layers, budgets of 5e12, 1e13, 2e13 and 4e13 operations, mean depths 2 to 12",
    "source": "claims/isoflop_long",
}

MISFITS = {"exponential": 2.52, "shifted_power": 5.42, "power": 11.11, "power_without_floor": 112.89}  # table 12, 140M
MISFITS_BEYOND = {"exponential": 3.18, "shifted_power": 21.41}
OF_DECAY = {"one": 0.001177, "none": 0.003253}  # table 14, 140M: with the loops over the mean depth, and without
OF_DECAY_BEYOND = {"one": 0.000212, "none": 0.000266}
FLOOR = 0.16  # % between the floor and the loss at the mean depth, 140M, table 13
DELTA = 1e-3  # of the Huber loss
WITHOUT_EXPONENTS = "at every budget in every seed the loss rises with mean depth, so there is no best depth to fit"


# table 5


def less_perplexity(content: dict, width: int) -> float:
    """Return by how many percent Parcae's perplexity is below the Transformer's at a width."""
    losses = losses_by_name(content)
    return 100 * (1 - math.exp(losses[f"parcae_{width}"] - losses[f"transformer_{width}"]))


def size_claims() -> list[Claim]:
    """Compare with the paper's smallest model, 140M, because ours are smaller than all of its models."""
    return [
        Claim(
            "table 5",
            "Parcae has 11.3 % less perplexity than a Transformer of as many layers and tokens, 140M, by the table's "
            "cells (section 5.1: 4.3 to 9.2 % over all sizes)",
            f"perplexity less than the Transformer's, %, width {width}",
            EPOCH,
            "claims/epoch" if width == WIDTHS[0] else "claims/epoch_sizes",
            each_seed(partial(less_perplexity, width=width)),
            Effect(PAPER_GAINS[768]),
        )
        for width in WIDTHS
    ]


def size_charts(content: dict) -> list[Chart]:
    """Draw the two larger widths, which are measured together."""
    points = [(width, each_seed(partial(less_perplexity, width=width))(content).value) for width in WIDTHS[1:]]
    paper = list(PAPER_GAINS.items())
    return [
        Chart(f"{whose}: perplexity less than a Transformer's", "width", "%", [Line("", line)], whole_x=True)
        for whose, line in (("Ours", points), ("The paper's", paper))
    ]


# laws


def read_laws(folder: Path) -> dict | None:
    return result_of("laws")(folder) if runs_of(folder) else None


def log_ratio(misfits: dict[str, float], form: str, other: str) -> float | None:
    """Return log10 of the misfit of a form over that of another; None where one of them is not known."""
    one, two = misfits.get(form), misfits.get(other)
    return math.log10(one / two) if one and two else None


def over_exponential(content: dict, form: str, misfits: str = "misfits") -> float | None:
    """Return log10 of the misfit of a form over that of the exponential, on curves over test depth."""
    return log_ratio(content.get(misfits, {}), form, "exponential")


def without_mean_depth(content: dict, misfit: str) -> float | None:
    """Return log10 of the misfit of the law of both depths without the mean depth in its decay, over that with it."""
    forms = content.get("forms_of_decay", {})
    return log_ratio({name: found[misfit] for name, found in forms.items()}, "none", "one")


def percent_of_misfit(huber: float) -> float:
    """Return the error of a loss, in percent, whose Huber loss between logarithms is `huber`."""
    return 100 * (math.sqrt(2 * huber) if huber <= DELTA**2 / 2 else huber / DELTA + DELTA / 2)


def floor_percent(content: dict) -> float | None:
    """Return how far the fitted floor is from the loss at the mean depth, in percent.

    None where the curves are so flat that a law without a floor is as near to them as the paper's floor is.
    """
    without_floor = content.get("misfits", {}).get("power_without_floor")
    if without_floor is None or percent_of_misfit(without_floor) <= FLOOR:
        return None
    return content["floor_percent"]


def learned_power(content: dict) -> float | None:
    return content.get("forms_of_decay", {}).get("learned", {}).get("power")


def of_both_depths(content: dict, error: str) -> float | None:
    return content.get("both_depths", {}).get(error)


def law_claims() -> list[Claim]:
    def claim(
        where: str, says: str, number: str, read, rule, size: str = BUDGETS, source: str = "claims/isoflop", **lacks
    ) -> Claim:
        return Claim(where, says, number, size, source, each_seed(read), rule, **lacks)

    def exponent_claim(where: str, says: str, law: str, of: str, published: float, **others) -> Claim:
        return claim(where, says, "exponent", lambda c: (c.get(law) or {}).get(of), Near(published, 0.15), **others)

    return [
        exponent_claim("figure 5", "the best mean depth grows with operations as their power of 0.40", "exponents",
                       "mean_depth", 0.40, absent=WITHOUT_EXPONENTS),
        exponent_claim("figure 5", "the best number of tokens grows as their power of 0.78", "exponents", "tokens",
                       0.78, absent=WITHOUT_EXPONENTS),
        claim("figures 4 and 6", "at a fixed budget the best looped model beats the one without loops",
              "loss without loops less the least with them, mean of three budgets", lambda c: fmean(c["gains"]),
              Effect()),
        claim("section 5.2", "a law of depth and tokens, fitted to runs of fixed operations, foretells the loss of "
              "the held-out models of section 5.1, whose tokens are fixed, to 1.3 %, 140M",
              "mean error at the largest budget, which the fit has not seen, %", lambda c: c.get("held_out_percent"),
              AtMost(1.3), **LARGER),
        exponent_claim("table 11", "and its loss falls with effective parameters as their power of -0.771, 140M",
                       "law", "x", 0.771, **LARGER),
        exponent_claim("table 11", "and with tokens as their power of -0.525, 140M", "law", "y", 0.525, **LARGER),
        *(
            claim("figure 8, table 12", "the loss over loops at test time is nearer to an exponential than to "
                  f"{words}, 140M", f"log10 of the misfit of {words} over that of an exponential",
                  partial(over_exponential, form=form), Effect(log_ratio(MISFITS, form, "exponential")), **LARGER)
            for form, words in (("shifted_power", "a shifted power"), ("power", "a power"),
                                ("power_without_floor", "a power without a floor"))
        ),
        claim("table 12", "and, fitted to loops up to the mean depth, foretells those beyond it 6.7 times as near as "
              "a shifted power, 140M, by the cells",
              "log10 of the misfit of a shifted power over that of an exponential",
              partial(over_exponential, form="shifted_power", misfits="misfits_beyond"),
              Effect(log_ratio(MISFITS_BEYOND, "shifted_power", "exponential")), **LARGER),
        claim("table 13", f"the floor of the exponential is the loss at the mean depth, to {FLOOR:g} %, 140M",
              "mean difference, %", floor_percent, AtMost(FLOOR), **LARGER),
        claim("section 5.3, figure 26", "one law of training and test depth foretells the loss of held-out models to "
              "0.85 to 1.31 %", "mean error over loops at the largest budget, which the fit has not seen, %",
              partial(of_both_depths, error="percent"), AtMost(1.31), **LARGER),
        claim("section 5.3, figure 26", "and to 0.10 to 0.17 % with their own loss at the mean depth as its floor",
              "the same, %", partial(of_both_depths, error="percent_above_measured"), AtMost(0.17), **LARGER),
        claim("appendix L, table 14", "without the mean depth in its decay that law misses the runs it was fitted to "
              "2.8 times as far, 140M, by the cells (the text: 3.5 times)", "log10 of the ratio of misfits",
              partial(without_mean_depth, misfit="misfit"), Effect(log_ratio(OF_DECAY, "none", "one")), **LARGER),
        claim("appendix L, table 14", "and held-out ones 1.25 times as far, 140M", "the same at the largest budget",
              partial(without_mean_depth, misfit="misfit_beyond"), Effect(log_ratio(OF_DECAY_BEYOND, "none", "one")),
              **LARGER),
        claim("appendix L, table 14", "it divides loops by a power of the mean depth that, learned, is 1.19, 140M",
              "power", learned_power, Near(1.19, 0.15), **LARGER),
    ]  # fmt: skip


def law_charts(content: dict) -> list[Chart]:
    """Draw the loss of the first seed over mean depth, a line for each budget."""
    runs = sorted(next(iter(content["seeds"].values()))["runs"], key=lambda run: (run["flops"], run["mean_depth"]))
    by_budget: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        by_budget.setdefault(f"{run['flops']:.1e}", []).append((run["mean_depth"], run["loss"]))
    lines = [Line(f"{name} operations", sorted(line), ordered(i, len(by_budget)))
             for i, (name, line) in enumerate(by_budget.items())]  # fmt: skip
    return [Chart("Ours: loss over mean depth at fixed budgets", "mean depth", "loss", lines, log_x=True)]


LAW_MEASUREMENTS = [
    Measurement("sizes", commands_of("sizes"), runs_of, SIX_SEEDS),
    Measurement("epoch", commands_of("epoch"), runs_of, SIX_SEEDS),
    Measurement("epoch_sizes", commands_of("epoch_sizes"), runs_of, SIX_SEEDS),
    Measurement("isoflop", commands_of("isoflop", "laws"), read_laws),
    Measurement("isoflop_long", commands_of("isoflop_long", "laws"), read_laws),
]
