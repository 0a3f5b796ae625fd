"""The readout blind spot."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from looped_recipes.common.chart import Bars, Chart, Line, on_one_scale

from .definition import SIX_SEEDS, Beyond, Claim, Figure, Measurement, Paper, Setting, each_seed, loss_of
from .functions import by_function, result_of
from .rules import AtMost, Effect, Estimate, Rule
from .sweeps import by_sweep, runs_of


class Trained(NamedTuple):
    """How the models were trained whose numbers a claim reads."""

    source: str
    size: str

    def claim(self, where: str, says: str, number: str, read: Callable[[dict], float], rule: Rule) -> Claim:
        """read: of a seed."""
        return Claim(where, says, number, self.size, self.source, over_runs(read), rule)


SHORT = Trained("claims/core", "width 96, 2 layers, 4 loops, 400 steps of 1,024 tokens")
LONG_SIZE = "width 64, 2 layers, 4 loops, 5,000 steps of 1,024 words, white space and signs"
LONG, LONG_REST = (Trained(f"claims/{name}", LONG_SIZE) for name in ("table_2", "table_2_rest"))
SYSTEMS = ("terminal_rmsnorm", "terminal_raw", "per_loop_rmsnorm", "per_loop_raw", "per_loop_penalty")
ADDED = ("per_loop_final_only", "terminal_penalty", "exit_weighted", "damping")  # later: earlier seeds lack them
PAPER_NORMS = dict(zip(SYSTEMS + ADDED, (5674, 15, 39207, 44, 17, 57, 21, 6470, 2432)))  # table 2, appendix G, 44M
PAPER_PERPLEXITY = dict(zip(SYSTEMS + ADDED, (5.40, 5.30, 6.04, 5.38, 5.44, 5.42, 5.28)))


def over_runs(number: Callable[[dict], float]) -> Callable[[dict], Estimate | None]:
    """Over the seeds that have what it reads: earlier ones have fewer systems and probes, and the state of a run that
    diverged has neither norm nor probe."""

    def read(content: dict) -> float | None:
        try:
            return number(content)
        except KeyError:
            return None

    return each_seed(read)


def run_of(content: dict, system: str) -> dict:
    """KeyError where it was not trained."""
    return {run["model.preset"]: run for run in content["runs"]}[f"readout_{system}"]


def sound_run_of(content: dict, system: str) -> dict:
    """KeyError where it diverged, too."""
    run = run_of(content, system)
    if run["loss"] is None:
        raise KeyError(system)
    return run


def norm(content: dict, system: str) -> float:
    return sound_run_of(content, system)["state_norm/loop_4"]


def norm_ratio(first: str, second: str):
    return over_runs(lambda content: math.log10(norm(content, first) / norm(content, second)))


def paper_norm_ratio(first: str, second: str) -> float:
    return math.log10(PAPER_NORMS[first] / PAPER_NORMS[second])


def loss_more(first: str, second: str):
    return over_runs(lambda content: loss_of(run_of(content, first)) - loss_of(run_of(content, second)))


def paper_loss_more(first: str, second: str) -> float:
    return math.log(PAPER_PERPLEXITY[first] / PAPER_PERPLEXITY[second])


def loss_at(content: dict, system: str, depth: int) -> float:
    """Infinite where the run diverged."""
    run = run_of(content, system)
    return math.inf if run["loss"] is None else run["loss_at"][str(depth)]


def gap(content: dict, system: str, depth: int = 1) -> float:
    """CE(1) - CE(4), or of another depth."""
    return loss_at(content, system, depth) - loss_at(content, system, 4)


# the probes


def commands_of(sweep: str) -> Callable[[Setting, int], list[list[str]]]:
    def commands(setting: Setting, seed: int) -> list[list[str]]:
        folder = setting.of(sweep, seed)
        return [by_sweep(sweep, folder, setting.text, seed), by_function("probes", folder, seed)]

    return commands


def read(folder: Path) -> dict | None:
    found, probes = runs_of(folder), result_of("probes")(folder)
    if found is None or probes is None:
        return None
    probes.pop("made_by")
    return {**found, "probes": probes}


def probe(content: dict, system: str, name: str) -> float:
    return content["probes"][sound_run_of(content, system)["name"]][name]


def about_four(trained: Trained) -> list[Claim]:
    """Loss at the last loop or at every one, through a normed readout or a raw one: table 2, tables 3, 4, 10 to 14,
    figures 1, 4 and 5."""
    claim, both = trained.claim, "both with a loss at every loop (the paper's 44M)"

    def probe_claim(where: str, says: str, number: str, name: str, order: int, paper: float) -> Claim:
        """Logarithm to base 10 of a probe behind the raw readout over that behind the normed one, or the other way."""

        def ratio(content: dict) -> float:
            values = [abs(probe(content, system, name)) for system in ("per_loop_raw", "per_loop_rmsnorm")]
            return order * math.log10(values[0] / values[1])

        return claim(where, says, f"log10 of the ratio of {number}, {both}", ratio, Effect(paper))

    return [
        norm_claim(trained, "under a loss at every loop the norm drifts behind a normed readout, not behind a raw one",
                   "per_loop_rmsnorm", "per_loop_raw"),
        norm_claim(trained, "so it does under a loss at the last loop alone", "terminal_rmsnorm", "terminal_raw"),
        norm_claim(trained, "a loss at every loop makes that drift larger, not smaller",
                   "per_loop_rmsnorm", "terminal_rmsnorm"),
        loss_claim(trained, "the drifting readout has the worse loss", "per_loop_rmsnorm", "per_loop_raw"),
        *(
            claim("figure 1, table 11", says, f"CE(1) - CE(4), {worded(system)} readout",
                  lambda c, system=system: gap(c, system), Effect(paper))
            for system, paper, says in (
                ("terminal_rmsnorm", 19.21,
                 "without a loss at every loop the first loop is useless: 19 nats above the fourth, normed readout"),
                ("terminal_raw", 37.17, "and 37 nats above it, raw readout"),
                ("per_loop_raw", 0.04,
                 "with it, loops behind a raw readout still help: 0.04 nats from the first to the fourth"),
            )
        ),
        claim("figure 1, table 11", "and those behind a normed one do not: the loss is the same at every depth",
              "CE(1) - CE(4), per loop rmsnorm readout", lambda c: abs(gap(c, "per_loop_rmsnorm")), AtMost(0.01)),
        probe_claim("table 3",
                    "a normed readout has no gradient along the state: a fraction of 4.7e-9, a raw one 7.2e-2",
                    "radial fractions, raw over normed", "radial_fraction", 1, math.log10(7.2e-2 / 4.7e-9)),
        probe_claim("table 12", "behind a normed readout the scale grows by 258 a loop, behind a raw one by 0.27",
                    "the growth from loop 10 on, normed over raw", "growth_per_loop", -1, math.log10(257.81 / 0.27)),
        *(
            claim("table 4",
                  f"to hold the scale after the first loop costs next to nothing behind a {kind} readout: {cost} nats",
                  "loss with the scale held less that without",
                  lambda c, system=system: probe(c, system, "clamp_cost"), AtMost(0.01))
            for kind, system, cost in (("normed", "per_loop_rmsnorm", 0.0004), ("raw", "per_loop_raw", 0.0055))
        ),
        claim("figure 4", "at every depth a raw readout has the lower loss",
              "loss of per loop rmsnorm less that of per loop raw, the least over 1 to 4 loops",
              lambda c: min(loss_at(c, "per_loop_rmsnorm", k) - loss_at(c, "per_loop_raw", k) for k in range(1, 5)),
              Effect()),
        claim("table 10", "with a loss at every loop few tokens drift far: the mean norm is 21 times the median",
              "log10 of mean over median, per loop rmsnorm",
              lambda c: math.log10(heavy_tail(c, "per_loop_rmsnorm")), Effect(math.log10(63347 / 2986))),
        claim("table 10", "without it all tokens drift alike: mean and median are the same to 3 %",
              "mean over median, terminal rmsnorm", lambda c: heavy_tail(c, "terminal_rmsnorm"), AtMost(1.1)),
        claim("figure 5", "a normed readout does not see the scale of the last state, 0.1 to 10 times",
              "largest loss less the least, per loop rmsnorm",
              lambda c: probe(c, "per_loop_rmsnorm", "scale_range"), AtMost(0.01)),
        claim("figure 5", "without the norm the loss depends sharply on it",
              "largest loss less the least, per loop raw",
              lambda c: probe(c, "per_loop_raw", "scale_range"), Effect()),
        *(
            claim("table 14", f"one loop too few costs {cost} behind a {kind} readout, losses at the last loop alone",
                  f"CE(3) - CE(4), terminal {kind} (the paper's 129M)",
                  lambda c, system=system: gap(c, system, 3), Effect(size))
            for kind, system, cost, size in (("normed", "terminal_rmsnorm", "1.6 nats", 3.18 - 1.54),
                                             ("raw", "terminal_raw", "more than 12 nats", 13.8 - 1.55))
        ),
        claim("table 13", "halting within 1 % of perplexity takes 1.00 loops behind a normed readout",
              "mean loops, per loop rmsnorm", lambda c: halting_loops(c, "per_loop_rmsnorm"), AtMost(1.05)),
        halting_claim(trained, "a raw readout", "per_loop_raw", 2.16),
    ]  # fmt: skip


def about_others(trained: Trained) -> list[Claim]:
    """What is tried against the drift: the rest of table 2, tables 3, 5 and 13."""
    claim = trained.claim
    return [
        norm_claim(trained, "a penalty on the norm holds it behind a normed readout",
                   "per_loop_rmsnorm", "per_loop_penalty"),
        loss_claim(trained, "so the loss is better", "per_loop_rmsnorm", "per_loop_penalty"),
        norm_claim(trained, "raw readouts before the last loop hold the norm",
                   "per_loop_rmsnorm", "per_loop_final_only"),
        loss_claim(trained, "so the loss is better too", "per_loop_rmsnorm", "per_loop_final_only"),
        norm_claim(trained, "the penalty holds it under a loss at the last loop",
                   "terminal_rmsnorm", "terminal_penalty"),
        loss_claim(trained, "and the loss is better", "terminal_rmsnorm", "terminal_penalty"),
        claim("table 3", "raw readouts before the last loop see scale, the last, normed one does not",
              "log10 of the radial fraction after the first loop over that after the last, final-only norm",
              lambda c: math.log10(probe(c, "per_loop_final_only", "radial_fraction_of_first")
                                   / probe(c, "per_loop_final_only", "radial_fraction")),
              Effect(math.log10(6.4e-2 / 1.2e-8))),
        *(
            claim("table 5", f"loops help a model with {name}: {first} to {last} perplexity",
                  f"CE(1) - CE(4), {worded(system)}", lambda c, system=system: gap(c, system),
                  Effect(math.log(first / last)))
            for name, system, first, last in (("a norm after the last loop alone", "per_loop_final_only", 5.20, 5.00),
                                              ("the penalty", "per_loop_penalty", 5.22, 5.00))
        ),
        halting_claim(trained, "the penalty", "per_loop_penalty", 2.6),
    ]  # fmt: skip


def about_appendix_g(trained: Trained) -> list[Claim]:
    return [
        norm_claim(trained, "losses weighted by exits do not hold it", "exit_weighted", "per_loop_raw", "appendix G"),
        norm_claim(trained, "damping between loops lowers it", "terminal_rmsnorm", "damping", "appendix G"),
        norm_claim(trained, "to far above that behind a raw readout", "damping", "terminal_raw", "appendix G"),
    ]


def of_a_norm_between_loops() -> Claim:
    def change(content: dict) -> float:
        losses = probe(content, "inter_loop_norm", "loss_by_loop")
        return abs(losses[7] - losses[3])

    says = "a norm between loops keeps the loss from the trained depth on, to twice of it"
    number = "loss after 8 loops less that after 4, either sign"
    return SHORT.claim("figure 7", says, number, change, AtMost(0.05))


def halting_loops(content: dict, system: str) -> float:
    return probe(content, system, "halting")["loops"]


def halting_claim(trained: Trained, name: str, system: str, mean: float) -> Claim:
    def more(content: dict) -> float:
        return halting_loops(content, system) - halting_loops(content, "per_loop_rmsnorm")

    number = f"mean loops: {worded(system)} less per loop rmsnorm"
    says = f"with {name} it takes {mean} loops"
    return trained.claim("table 13", says, number, more, Effect(mean - 1))


def heavy_tail(content: dict, system: str) -> float:
    return probe(content, system, "mean_over_median_norm")


def charts_of(systems: tuple[str, ...], steps: str) -> Callable[[dict], list]:
    def charts(content: dict) -> list:
        norms = {name: over_runs(partial(norm, system=name))(content) for name in systems}
        ours = {worded(name): found.value for name, found in norms.items() if found}
        paper = {worded(name): float(PAPER_NORMS[name]) for name in systems}
        bars = [
            Bars(f"{whose}: norm of the state after 4 loops", "norm", values, log=True)
            for whose, values in ((f"Ours, {steps} steps", ours), ("The paper's 44M", paper))
        ]
        depths = range(1, 5)
        lines = []
        for i, name in enumerate(systems):
            losses = {k: over_runs(partial(loss_at, system=name, depth=k))(content) for k in depths}
            points = [(k, found.value) for k, found in losses.items() if found and math.isfinite(found.value)]
            lines.append(Line(worded(name), points, f"c{i}"))
        title = f"Ours, {steps} steps: loss over depth"
        return [*on_one_scale(bars), Chart(title, "loops", "loss", lines, whole_x=True)]

    return charts


def norm_claim(trained: Trained, says: str, first: str, second: str, where: str = "table 2") -> Claim:
    number = f"log10 of the ratio of norms: {worded(first)} over {worded(second)} (the paper's 44M)"
    rule = Effect(paper_norm_ratio(first, second))
    return Claim(where, says, number, trained.size, trained.source, norm_ratio(first, second), rule)


def loss_claim(trained: Trained, says: str, first: str, second: str) -> Claim:
    number = f"loss of {worded(first)} less that of {worded(second)} (the paper's 44M)"
    rule = Effect(paper_loss_more(first, second))
    return Claim("table 2", says, number, trained.size, trained.source, loss_more(first, second), rule)


def worded(system: str) -> str:
    return system.replace("_", " ")


READOUT = Paper(
    "The readout blind spot",
    [
        Measurement("core", commands_of("core"), read, SIX_SEEDS),
        Measurement("table_2", commands_of("table_2"), read, SIX_SEEDS),
        Measurement("table_2_rest", commands_of("table_2_rest"), read, beside="table_2"),
    ],
    [
        *about_four(SHORT),
        *about_others(SHORT),
        *about_appendix_g(SHORT),
        of_a_norm_between_loops(),
        *about_four(LONG),
        *about_others(LONG_REST),
        Beyond(
            "table 7",
            "at 1.4B a raw readout answers nine tasks better, and is surer of the answers",
            "two models of 1.4 billion parameters",
        ),
    ],
    [Figure(SHORT.source, charts_of(SYSTEMS, "400")), Figure(LONG.source, charts_of(SYSTEMS[:4], "5,000"))],
)
