"""The readout blind spot."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from looped_recipes.common.chart import Bars, Chart, Line, on_one_scale

from .definition import Beyond, Claim, Figure, Measurement, Paper, Setting, each_seed
from .functions import by_function, result_of
from .rules import AtMost, Effect, Estimate, Rule, over_seeds
from .sweeps import by_sweep, runs_of


SIZE = "width 96, 2 layers, 4 loops, 400 steps of 1,024 tokens"
SOURCE = "claims/core"
SYSTEMS = ("terminal_rmsnorm", "terminal_raw", "per_loop_rmsnorm", "per_loop_raw", "per_loop_penalty")
PAPER_NORMS = dict(zip(SYSTEMS, (5674, 15, 39207, 44, 17)))  # table 2, 44M
PAPER_PERPLEXITY = dict(zip(SYSTEMS, (5.40, 5.30, 6.04, 5.38, 5.44)))


def run_of(content: dict, system: str) -> dict:
    return next(run for run in content["runs"] if run["model.preset"] == f"readout_{system}")


def norm(content: dict, system: str) -> float:
    return run_of(content, system)["state_norm/loop_4"]


def norm_ratio(first: str, second: str):
    return each_seed(lambda content: math.log10(norm(content, first) / norm(content, second)))


def paper_norm_ratio(first: str, second: str) -> float:
    return math.log10(PAPER_NORMS[first] / PAPER_NORMS[second])


def loss_more(first: str, second: str):
    return each_seed(lambda content: run_of(content, first)["loss"] - run_of(content, second)["loss"])


def paper_loss_more(first: str, second: str) -> float:
    return math.log(PAPER_PERPLEXITY[first] / PAPER_PERPLEXITY[second])


def gap(content: dict, system: str) -> float:
    """CE(1) - CE(4)."""
    losses = run_of(content, system)["loss_at"]
    return losses["1"] - losses["4"]


# the probes of tables 3, 4 and 12


def commands(setting: Setting, seed: int) -> list[list[str]]:
    folder = setting.of("core", seed)
    return [by_sweep("core", folder, setting.text, seed), by_function("probes", folder, seed)]


def read(folder: Path) -> dict | None:
    found, probes = runs_of(folder), result_of("probes")(folder)
    if found is None or probes is None:
        return None
    probes.pop("made_by")
    return {**found, "probes": probes}


def probe(content: dict, system: str, name: str) -> float:
    return content["probes"][run_of(content, system)["name"]][name]


def raw_over_normed(name: str, order: int = 1):
    """Logarithm to base 10 of a probe behind the raw readout over that behind the normed one, or the other way."""

    def ratio(content: dict) -> float:
        values = [abs(probe(content, system, name)) for system in ("per_loop_raw", "per_loop_rmsnorm")]
        return order * math.log10(values[0] / values[1])

    return each_seed(ratio)


def probe_claims() -> list[Claim]:
    said = "both with a loss at every loop (the paper's 44M)"
    costs = [
        Claim(
            "table 4",
            f"to hold the scale after the first loop costs next to nothing behind a {kind} readout: {cost} nats",
            "loss with the scale held less that without",
            SIZE,
            SOURCE,
            each_seed(lambda content, system=system: probe(content, system, "clamp_cost")),
            AtMost(0.01),
        )
        for kind, system, cost in (("normed", "per_loop_rmsnorm", 0.0004), ("raw", "per_loop_raw", 0.0055))
    ]
    return [
        Claim(
            "table 3",
            "a normed readout has no gradient along the state: a fraction of 4.7e-9, a raw one 7.2e-2",
            f"log10 of the ratio of radial fractions, raw over normed, {said}",
            SIZE,
            SOURCE,
            raw_over_normed("radial_fraction"),
            Effect(math.log10(7.2e-2 / 4.7e-9)),
        ),
        Claim(
            "table 12",
            "behind a normed readout the scale grows by 258 a loop, behind a raw one by 0.27",
            f"log10 of the ratio of the growth from loop 10 on, normed over raw, {said}",
            SIZE,
            SOURCE,
            raw_over_normed("growth_per_loop", -1),
            Effect(math.log10(257.81 / 0.27)),
        ),
        *costs,
    ]


def earlier_ratio(content: dict) -> Estimate:
    """Of one seed."""
    norms = [run_of(content, name)["residual_norm_by_loop"]["residual_norm/loop_4"] for name in SYSTEMS[2:4]]
    return over_seeds([math.log10(norms[0] / norms[1])])


def charts(content: dict) -> list:
    seeds = content["seeds"].values()
    ours = {worded(name): fmean(norm(found, name) for found in seeds) for name in SYSTEMS}
    paper = {worded(name): float(value) for name, value in PAPER_NORMS.items()}
    bars = [
        Bars(f"{whose}: norm of the state after 4 loops", "norm", values, log=True)
        for whose, values in (("Ours", ours), ("The paper's 44M", paper))
    ]
    depths = range(1, 5)
    lines = []
    for i, name in enumerate(SYSTEMS):
        points = [(k, fmean(run_of(found, name)["loss_at"][str(k)] for found in seeds)) for k in depths]
        lines.append(Line(worded(name), points, f"c{i}"))
    return [*on_one_scale(bars), Chart("Ours: loss over depth", "loops", "loss", lines, whole_x=True)]


def ratio_claim(says: str, first: str, second: str) -> Claim:
    number = f"log10 of the ratio of norms: {worded(first)} over {worded(second)} (the paper's 44M)"
    rule = Effect(paper_norm_ratio(first, second))
    return Claim("table 2", says, number, SIZE, SOURCE, norm_ratio(first, second), rule)


def loss_claim(says: str, first: str, second: str) -> Claim:
    number = f"loss of {worded(first)} less that of {worded(second)} (the paper's 44M)"
    rule = Effect(paper_loss_more(first, second))
    return Claim("table 2", says, number, SIZE, SOURCE, loss_more(first, second), rule)


def depth_claim(says: str, system: str, number: Callable[[dict], float], rule: Rule) -> Claim:
    return Claim("table 11", says, f"CE(1) - CE(4), {system} readout", SIZE, SOURCE, each_seed(number), rule)


def worded(system: str) -> str:
    return system.replace("_", " ")


READOUT = Paper(
    "The readout blind spot",
    [Measurement("core", commands, read)],
    [
        ratio_claim(
            "under a loss at every loop the norm drifts behind a normed readout, not behind a raw one",
            "per_loop_rmsnorm",
            "per_loop_raw",
        ),
        ratio_claim("so it does under a loss at the last loop alone", "terminal_rmsnorm", "terminal_raw"),
        ratio_claim("a penalty on the norm holds it behind a normed readout", "per_loop_rmsnorm", "per_loop_penalty"),
        ratio_claim(
            "a loss at every loop makes that drift larger, not smaller",
            "per_loop_rmsnorm",
            "terminal_rmsnorm",
        ),
        loss_claim("the drifting readout has the worse loss", "per_loop_rmsnorm", "per_loop_raw"),
        loss_claim("so it has beside the penalty", "per_loop_rmsnorm", "per_loop_penalty"),
        depth_claim(
            "without a loss at every loop the first loop is useless: 19 nats above the fourth, normed readout",
            "terminal, normed",
            lambda content: gap(content, "terminal_rmsnorm"),
            Effect(19.21),
        ),
        depth_claim(
            "and 37 nats above it, raw readout",
            "terminal, raw",
            lambda content: gap(content, "terminal_raw"),
            Effect(37.17),
        ),
        depth_claim(
            "with it, loops behind a raw readout still help: 0.04 nats from the first to the fourth",
            "per loop, raw",
            lambda content: gap(content, "per_loop_raw"),
            Effect(0.04),
        ),
        depth_claim(
            "and those behind a normed one do not: the loss is the same at every depth",
            "per loop, normed",
            lambda content: abs(gap(content, "per_loop_rmsnorm")),
            AtMost(0.01),
        ),
        *probe_claims(),
        Claim(
            "table 2",
            "under a loss at every loop the norm drifts behind a normed readout, not behind a raw one",
            "log10 of the ratio of norms, an earlier run",
            SIZE,
            "readout",
            earlier_ratio,
            Effect(paper_norm_ratio("per_loop_rmsnorm", "per_loop_raw")),
        ),
        Beyond(
            "table 7",
            "at 1.4B a raw readout answers nine tasks better, and is surer of the answers",
            "two models of 1.4 billion parameters",
        ),
        Beyond(
            "appendix H",
            "halting by the margin of logits takes 1.00 loops behind a normed readout, 2.16 behind a raw one, 44M",
            "calibrated halting of longer runs is to be measured",
            later=True,
        ),
    ],
    [Figure(SOURCE, charts)],
)
