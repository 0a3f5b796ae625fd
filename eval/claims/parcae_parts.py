"""The gain of each part of Parcae, and of all parts over a recurrent-depth model (RDM): tables 3 and 4, figures 23 and
24."""

import math
from statistics import fmean

from looped_recipes.common.chart import Chart, Line

from .definition import SIX_SEEDS, Claim, Measurement, each_seed, loss_of
from .parcae_depths import less_at, loss_at, run_named
from .rules import SELDOM, Effect, Estimate, Near, share
from .sweeps import commands_of, has_trained, read_with_frequencies, runs_of


PARTS = "width 64, 1 + 1 + 1 layers, mean depth 8, English text, 2,000 steps of 1,024 tokens, rate 8e-3"
BESIDE_RDM = "width 64, 1 + 1 + 1 layers, mean depth 8, English text, 1,500 steps of 1,024 tokens"
NAMES = {  # run -> label; each run adds one part to the run before it
    "rdm": "RDM",
    "constrained": "constrained A",
    "sequence": "a depth for each sequence",
    "prelude_norm": "prelude norm",
}
PAPER_LOSSES = {  # table 4, by loops
    "constrained": {1: 8.99, 4: 3.15, 8: 2.97},
    "sequence": {1: 3.38, 4: 3.01, 8: 2.98},
    "prelude_norm": {1: 3.28, 4: 2.97, 8: 2.95},
}
ALIKE = 0.02  # nats; the paper's difference, 0.01, is one unit of its last printed digit
PAPER_GAIN = 100 * (1 - 13.59 / 14.23)  # % of perplexity, 100M, table 3


def share_that_train(name: str):
    """Return a function that gives the share of seeds in which a run trains."""

    def read(content: dict) -> Estimate:
        seeds = list(content["seeds"].values())
        return share(sum(has_trained(run_named(found, name), found) for found in seeds), len(seeds))

    return read


def of_state(run: dict) -> float:
    """Return the largest norm of the state over loops, at the last measurement."""
    return max((value for key, value in run.items() if key.startswith("residual_norm/")), default=math.nan)


def norm_ratio(content: dict) -> float:
    without, with_norm = (of_state(run_named(content, name)) for name in ("sequence", "prelude_norm"))
    return math.log10(without / with_norm)


def part_claims() -> list[Claim]:
    def claim(where: str, says: str, number: str, read, rule) -> Claim:
        return Claim(where, says, number, PARTS, "claims/parts", read, rule)

    def gain_claim(name: str, before: str, depth: int, says: str, where: str = "table 4") -> Claim:
        published = PAPER_LOSSES[before][depth] - PAPER_LOSSES[name][depth]
        return claim(where, says, f"loss at {depth}: without less with", each_seed(less_at(depth, name, before)),
                     Effect(round(published, 2)))  # fmt: skip

    return [
        claim("table 4", "an RDM with a Transformer's blocks diverges, 140M", "share of the runs that train",
              share_that_train("rdm"), SELDOM),
        gain_claim("sequence", "constrained", 1, "a depth for each sequence lowers the loss at 1 loop, 140M"),
        gain_claim("sequence", "constrained", 4, "and at 4 loops"),
        claim("table 4", "and makes almost no difference at 8", "loss at 8: without less with",
              each_seed(less_at(8, "sequence", "constrained")), Near(0, ALIKE)),
        gain_claim("prelude_norm", "sequence", 1, "a prelude norm lowers the loss at 1 loop, 140M"),
        gain_claim("prelude_norm", "sequence", 4, "and at 4 loops"),
        gain_claim("prelude_norm", "sequence", 8, "and at 8", "table 4, figure 24"),
        claim("figure 23", "a prelude norm holds the norm of the state",
              "log10 of the largest norm over loops: without over with", each_seed(norm_ratio), Effect()),
    ]  # fmt: skip


def part_charts(content: dict) -> list[Chart]:
    seeds = content["seeds"].values()
    loops = list(PAPER_LOSSES["constrained"])
    ours = {
        label: [(k, fmean(loss_at(found, name, k) for found in seeds)) for k in loops] for name, label in NAMES.items()
    }
    paper = {NAMES[name]: list(losses.items()) for name, losses in PAPER_LOSSES.items()}
    colours = {label: f"c{i}" for i, label in enumerate(NAMES.values())}
    return [
        Chart(title, "loops", "loss", [Line(label, points, colours[label]) for label, points in of.items()])
        for title, of in (("Ours: loss over depth, a part at a time", ours), ("The paper's: 140M", paper))
    ]


# table 3


def of_injection(found: dict, injection: str) -> dict[float, float]:
    """Return rate -> loss of the runs with this injection."""
    return {run["optimizer.lr"]: loss_of(run) for run in found["runs"] if run["model.injection"] == injection}


def less_perplexity(content: dict) -> Estimate | None:
    """Estimate by how many percent Parcae's perplexity is below the RDM's, at the rate that is best for the RDM."""
    rates = [of_injection(found, "concat") for found in content["seeds"].values()]
    best = min(rates[0], key=lambda rate: fmean(losses[rate] for losses in rates))

    def number(found: dict) -> float:
        rdm, parcae = (of_injection(found, injection)[best] for injection in ("concat", "diagonal"))
        return 100 * (1 - math.exp(parcae - rdm))

    return each_seed(number)(content)


def rdm_claims() -> list[Claim]:
    return [
        Claim("table 3", "Parcae has 4.5 % less perplexity than an RDM at the rate that is best for the RDM, 100M",
              "perplexity less than the RDM's, %, at the best of three rates", BESIDE_RDM, "claims/against_rdm",
              less_perplexity, Effect(round(PAPER_GAIN, 1)))
    ]  # fmt: skip


def rdm_charts(content: dict) -> list[Chart]:
    seeds = content["seeds"].values()
    lines = []
    for i, (injection, name) in enumerate((("concat", "RDM"), ("diagonal", "Parcae"))):
        losses = [of_injection(found, injection) for found in seeds]
        lines.append(Line(name, [(rate, fmean(each[rate] for each in losses)) for rate in losses[0]], f"c{i}"))
    return [Chart("Ours: loss over learning rates", "learning rate", "loss", lines, log_x=True)]


PART_MEASUREMENTS = [
    Measurement("parts", commands_of("parts", "frequencies"), read_with_frequencies, SIX_SEEDS),
    Measurement("against_rdm", commands_of("against_rdm"), runs_of, SIX_SEEDS),
]
