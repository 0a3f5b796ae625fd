"""The readout blind spot."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from looped_recipes.common.chart import Bars, Chart, Line, on_one_scale

from .definition import LARGER, SIX_SEEDS, Beyond, Claim, Figure, Measurement, Paper
from .functions import result_of
from .readout_numbers import (
    Trained,
    change_beyond_trained_depth,
    cost_of_halting,
    gap,
    has_loss_at_every_loop,
    least_loss_more,
    logarithm,
    loss_at,
    loss_more,
    more_halting_loops,
    norm,
    norm_ratio,
    probe,
    probe_ratio,
    radial_fractions_of_loops,
    spread_ratio,
    table_2_loss_more,
)
from .rules import AtMost, Effect, Near
from .sweeps import commands_of, runs_of


# frequencies: loss of the token frequencies of the same text and tokens; that of SHORT is also in claims/rates.json
SHORT = Trained("claims/core", "400", "width 96, 2 layers, 4 loops, 400 steps of 1,024 tokens", frequencies=6.606)
LONG = Trained(
    "claims/table_2",
    "5,000",
    "width 64, 2 layers, 4 loops, 5,000 steps of 1,024 words, white space and signs",
    frequencies=3.400,
)
LONG_REST = LONG._replace(source="claims/table_2_rest")
LONG_G = LONG._replace(source="claims/appendix_g")
LONG_ROWS = LONG._replace(source="claims/halting", size=f"{LONG.size}, in rows of 256")
SYSTEMS = ("terminal_rmsnorm", "terminal_raw", "per_loop_rmsnorm", "per_loop_raw", "per_loop_penalty")
ADDED = ("per_loop_final_only", "terminal_penalty", "exit_weighted", "damping")  # added later: earlier seeds lack them
PAPER_NORMS = dict(zip(SYSTEMS + ADDED, (5674, 15, 39207, 44, 17, 57, 21, 6470, 2432)))  # table 2, appendix G, 44M
PAPER_PERPLEXITY = dict(zip(SYSTEMS + ADDED, (5.40, 5.30, 6.04, 5.38, 5.44, 5.42, 5.28)))
NEXT_TO_NOTHING = 0.01  # nats: 1 % of perplexity, the cost that the paper allows halting
COST_OF_CLAMP = 0.0055  # nats: the most in table 4


# the probes


def read(folder: Path) -> dict | None:
    found, probes, frequencies = runs_of(folder), result_of("probes")(folder), result_of("frequencies")(folder)
    if found is None or probes is None or frequencies is None:
        return None
    probes.pop("made_by")
    runs = [{**run, "loss_of_frequencies": frequencies["loss"]} for run in found["runs"]]
    return {**found, "runs": runs, "probes": probes}


# the claims


def norm_claim(trained: Trained, says: str, first: str, second: str, where: str = "table 2") -> Claim:
    number = f"log10 of the ratio of norms: {worded(first)} over {worded(second)} (the paper's 44M)"
    published = math.log10(PAPER_NORMS[first] / PAPER_NORMS[second])
    return trained.claim(where, says, number, norm_ratio(first, second), Effect(published))


def loss_claim(trained: Trained, says: str, first: str, second: str) -> Claim:
    number = f"{worded_loss(first)} less {worded_loss(second)} (the paper's 44M)"
    published = math.log(PAPER_PERPLEXITY[first] / PAPER_PERPLEXITY[second])
    return trained.claim("table 2", says, number, table_2_loss_more(first, second), Effect(published))


def worded_loss(system: str) -> str:
    return f"{'mean over loops of the ' if has_loss_at_every_loop(system) else ''}loss of {worded(system)}"


def worded(system: str) -> str:
    return system.replace("_", " ")


def of_table_2(trained: Trained) -> list[Claim]:
    return [
        norm_claim(trained, "under a loss at every loop the norm drifts behind a normed readout, not behind a raw one",
                   "per_loop_rmsnorm", "per_loop_raw"),
        norm_claim(trained, "so it does under a loss at the last loop alone", "terminal_rmsnorm", "terminal_raw"),
        norm_claim(trained, "a loss at every loop makes that drift larger, not smaller",
                   "per_loop_rmsnorm", "terminal_rmsnorm"),
        Claim("table 2", "under a loss at every loop the norm differs from seed to seed, 39,207 ± 19,891, more than "
              "under one at the last loop, 5,674 ± 393", "log10 of the ratio of the standard deviations over seeds of "
              "the logarithm of the norm: per loop rmsnorm over terminal rmsnorm (the paper's 44M)", trained.size,
              trained.source, spread_ratio(trained, "per_loop_rmsnorm", "terminal_rmsnorm"),
              Effect(math.log10(19891 / 39207 / (393 / 5674)))),
        loss_claim(trained, "the drifting readout has the worse loss", "per_loop_rmsnorm", "per_loop_raw"),
        loss_claim(trained, "under a loss at the last loop too at 44M (at 129M it has the better one)",
                   "terminal_rmsnorm", "terminal_raw"),
        loss_claim(trained, "behind a raw readout a loss at every loop costs a little at 44M (at 129M nothing)",
                   "per_loop_raw", "terminal_raw"),
    ]  # fmt: skip


def of_depth(trained: Trained) -> list[Claim]:
    """Figures 1 and 4, tables 5, 11 and 14. Table 14 at 1 loop repeats the loss of table 11, so it has no separate
    claim."""
    claim = trained.claim
    raw, normed = "per_loop_raw", "per_loop_rmsnorm"
    return [
        *(
            claim("figure 1, table 11", says, f"CE(1) - CE(4), {worded(system)} (the paper's 44M)", gap(system),
                  Effect(paper))
            for system, paper, says in (
                ("terminal_rmsnorm", 19.21, "without a loss at every loop the first loop is useless: 19 nats above "
                                            "the fourth behind a normed readout at 44M (4 at 129M)"),
                ("terminal_raw", 37.17, "and 37 nats above it behind a raw one at 44M (28 at 129M)"),
                (raw, 0.04, "with it, loops behind a raw readout still help: 0.04 nats from the first to the fourth"),
            )
        ),
        claim("table 5, table 11", "and loops behind a normed one change nothing: 5.58 and 5.59 perplexity",
              f"CE(1) - CE(4), {worded(raw)} less the size of that of {worded(normed)} (the paper's 44M)",
              lambda c: gap(raw)(c) - abs(gap(normed)(c)), Effect(math.log(5.14 / 4.94) - math.log(5.59 / 5.58))),
        claim("table 5, section 6", "after one loop a raw readout is 0.30 perplexity below a normed one",
              f"loss after one loop, {worded(normed)} less {worded(raw)} (the paper's 129M)",
              loss_more(normed, raw, 1), Effect(math.log(4.98 / 4.68))),
        claim("table 5, section 6", "and after four loops 0.42 below it",
              f"loss after four loops, {worded(normed)} less {worded(raw)} (the paper's 129M)",
              loss_more(normed, raw), Effect(math.log(4.97 / 4.55))),
        claim("figure 4", "at every depth a raw readout has the lower loss",
              f"loss of {worded(normed)} less that of {worded(raw)}, the least over 1 to 4 loops (the paper's 129M)",
              least_loss_more(normed, raw), Effect()),
        *(
            claim("table 14", f"{few} costs {cost} behind a {kind} readout, losses at the last loop alone",
                  f"CE({depth}) - CE(4), {worded(system)} (the paper's 129M)", gap(system, depth), Effect(size))
            for few, depth, kind, system, cost, size in (
                ("one loop too few", 3, "normed", "terminal_rmsnorm", "1.6 nats", 3.18 - 1.54),
                ("one loop too few", 3, "raw", "terminal_raw", "more than 12 nats", 13.8 - 1.55),
                ("half of the loops", 2, "normed", "terminal_rmsnorm", "3.3 nats", 4.80 - 1.54),
                ("half of the loops", 2, "raw", "terminal_raw", "more than 14 nats", 16.1 - 1.55),
            )
        ),
    ]  # fmt: skip


def of_the_mechanism(trained: Trained) -> list[Claim]:
    """Tables 3, 10 and 12, and figure 6, which repeats figure 5 with models trained with each readout."""
    claim, ours = trained.claim, "with a loss at every loop (the paper's 44M)"
    raw, normed = "per_loop_raw", "per_loop_rmsnorm"
    growth = "growth_per_loop"
    return [
        claim("table 3", "a normed readout has no gradient along the state: a fraction of 4.7e-9, a raw one 7.2e-2",
              f"log10 of the ratio of radial fractions, raw over normed, {ours}",
              probe_ratio("radial_fraction", raw, normed), Effect(math.log10(7.2e-2 / 4.7e-9)), by_construction=True),
        claim("table 3", "and the loss behind a raw one still grows with the scale of the last state",
              f"derivative of the loss by the logarithm of the scale, raw readout {ours}",
              lambda c: probe(c, raw, "radial_derivative"), Effect(8.2e-2)),
        claim("table 12", "behind a normed readout the scale grows by 258 a loop, behind a raw one by 0.27",
              f"log10 of the ratio of the growth from loop 10 on, normed over raw, {ours}",
              probe_ratio(growth, normed, raw), Effect(math.log10(257.81 / 0.27))),
        claim("table 12", "with a loss at the last loop alone it grows by 211 a loop behind a normed readout",
              "growth from loop 10 on, terminal rmsnorm (the paper's 44M)",
              lambda c: probe(c, "terminal_rmsnorm", growth), Effect(210.81)),
        claim("table 12", "and falls by 0.02 a loop behind a raw one",
              "fall from loop 10 on, terminal raw (the paper's 44M)",
              lambda c: -probe(c, "terminal_raw", growth), Effect(0.02)),
        *(
            claim("table 10", says, f"log10 of mean over median, {worded(system)} (the paper's 44M)",
                  logarithm(partial(probe, system=system, name="mean_over_median_norm")),
                  Effect(math.log10(mean / median)))
            for system, mean, median, says in (
                (normed, 63347, 2986,
                 "with a loss at every loop few tokens drift far: the mean norm is 21 times the median"),
                (raw, 42, 8, "behind a raw readout it is 5.25 times the median"),
            )
        ),
        claim("table 10", "with a loss at the last loop alone all tokens drift alike behind a normed readout: mean "
                          "and median are the same to 3 %",
              "mean over median, terminal rmsnorm (the paper's 44M)",
              lambda c: probe(c, "terminal_rmsnorm", "mean_over_median_norm"), AtMost(1.1, 1.03)),
        claim("figure 6, table 6", "trained with a norm, a model does not see its last state's scale, 0.1 to 10 times",
              "largest loss less the least, per loop rmsnorm (the paper's 1.4B)",
              lambda c: probe(c, normed, "scale_range"), AtMost(NEXT_TO_NOTHING, 0), by_construction=True),
        claim("figure 6, table 6", "trained without it, its loss depends sharply on that scale",
              "largest loss less the least, per loop raw (the paper's 1.4B)",
              lambda c: probe(c, raw, "scale_range"), Effect(), by_construction=True),
    ]  # fmt: skip


def of_the_clamp(trained: Trained, kind: str, system: str, ratio: float, cost: float) -> list[Claim]:
    """Table 4: the part of the norm that the clamp removes, and the cost of the clamp. The cost is meaningful only if
    the removed part is large."""
    part = 1 - ratio
    return [
        trained.claim(
            "table 4",
            f"to hold the scale after the first loop takes away {part:.0%} of the norm behind a {kind} readout",
            f"part of the norm, {worded(system)} (the paper's 44M)",
            lambda c: 1 - probe(c, system, "clamp_norm_ratio"),
            Effect(part),
        ),
        trained.claim(
            "table 4",
            f"and costs next to nothing behind it: {cost} nats",
            f"loss with the scale held less that without, {worded(system)} (the paper's 44M: {cost})",
            lambda c: probe(c, system, "clamp_cost"),
            AtMost(COST_OF_CLAMP, cost),
        ),
    ]


def of_the_update(trained: Trained) -> list[Claim]:
    """What tables 10 and 12 have of the tail of norms and of the whole update, which the earliest seeds lack."""
    raw, normed = "per_loop_raw", "per_loop_rmsnorm"
    return [
        trained.claim(
            "table 10",
            "with a loss at every loop behind a normed readout the 99th percentile of norms is 115 times the median, "
            "and the largest 126 times",
            f"log10 of the 99th percentile over the median, {worded(normed)} (the paper's 44M)",
            logarithm(partial(probe, system=normed, name="p99_over_median_norm")),
            Effect(math.log10(342685 / 2986)),
        ),
        trained.claim(
            "section 5, table 12",
            "the whole update of a loop is 20.4 to 258 behind a normed readout and 0.07 to 0.51 behind a raw one, "
            "1.00 to 3.74 times its part along the state",
            "log10 of the ratio of updates from loop 10 on, normed over raw, with a loss at every loop (the paper's "
            "44M)",
            probe_ratio("update", normed, raw),
            Effect(math.log10(258.27 / 0.28)),
        ),
    ]


def of_halting(trained: Trained) -> list[Claim]:
    """Table 13, measured as in appendix H."""
    claim, normed = partial(trained.claim, "table 13"), "per_loop_rmsnorm"
    others = {"per_loop_raw": 2.16, "per_loop_final_only": 1.78, "per_loop_penalty": 2.6}
    names = ("a raw readout", "a norm after the last loop alone", "the penalty")
    halted = (normed, *others)
    return [
        claim("halting within 1 % of perplexity takes 1.00 loops behind a normed readout",
              f"mean loops, {worded(normed)} (the paper's 44M)", lambda c: probe(c, normed, "halting")["loops"],
              AtMost(1.05, 1)),
        *(
            claim(f"with {name} it takes {mean} loops",
                  f"mean loops: {worded(system)} less {worded(normed)} (the paper's 44M)",
                  more_halting_loops(system, normed), Effect(mean - 1))
            for name, (system, mean) in zip(names, others.items())
        ),
        claim("what is calibrated on some sequences to 1 % of perplexity keeps about that on others, up to 1.03 %",
              f"percent that halting adds to perplexity, the most of {', '.join(map(worded, halted))}",
              cost_of_halting(halted), AtMost(1.03)),
    ]  # fmt: skip


def about_four(trained: Trained) -> list[Claim]:
    """Claims on four systems: loss at the last loop or at every loop, through a normed or a raw readout."""
    return [
        *of_table_2(trained),
        *of_depth(trained),
        *of_the_mechanism(trained),
        *of_the_clamp(trained, "normed", "per_loop_rmsnorm", 0.40, 0.0004),
        *of_the_clamp(trained, "raw", "per_loop_raw", 0.53, 0.0055),
    ]


def about_others(trained: Trained) -> list[Claim]:
    """Claims on remedies against the drift: the rest of table 2, tables 3, 4, 5 and 13."""
    claim, hybrid = trained.claim, "per_loop_final_only"
    return [
        norm_claim(trained, "a penalty on the norm holds it behind a normed readout",
                   "per_loop_rmsnorm", "per_loop_penalty"),
        loss_claim(trained, "so the loss is better", "per_loop_rmsnorm", "per_loop_penalty"),
        norm_claim(trained, "it holds the norm below that behind a raw readout", "per_loop_raw", "per_loop_penalty"),
        norm_claim(trained, "raw readouts before the last loop hold the norm", "per_loop_rmsnorm", hybrid),
        loss_claim(trained, "so the loss is better too", "per_loop_rmsnorm", hybrid),
        norm_claim(trained, "the penalty holds it under a loss at the last loop",
                   "terminal_rmsnorm", "terminal_penalty"),
        loss_claim(trained, "and the loss is better", "terminal_rmsnorm", "terminal_penalty"),
        norm_claim(trained, "there the norm is above that behind a raw readout", "terminal_penalty", "terminal_raw"),
        claim("table 3", "raw readouts before the last loop see scale, the last, normed one does not",
              "log10 of the radial fraction after the first loop over that after the last, final-only norm "
              "(the paper's 44M)",
              radial_fractions_of_loops(hybrid), Effect(math.log10(6.4e-2 / 1.2e-8)), by_construction=True),
        *of_the_clamp(trained, "final-only normed", hybrid, 0.41, 0.0035),
        *(
            claim("table 5", f"loops help a model with {name}: {first} to {last} perplexity",
                  f"CE(1) - CE(4), {worded(system)} (the paper's 44M)", gap(system), Effect(math.log(first / last)))
            for name, system, first, last in (("a norm after the last loop alone", hybrid, 5.20, 5.00),
                                              ("the penalty", "per_loop_penalty", 5.22, 5.00))
        ),
    ]  # fmt: skip


def about_appendix_g(trained: Trained) -> list[Claim]:
    return [
        norm_claim(trained, "losses weighted by exits do not hold it", "exit_weighted", "per_loop_raw", "appendix G"),
        norm_claim(trained, "their norm is below that of equal weights: 6,470 and 39,207", "per_loop_rmsnorm",
                   "exit_weighted", "table 2, appendix G"),
        norm_claim(trained, "damping between loops lowers it", "terminal_rmsnorm", "damping", "appendix G"),
        norm_claim(trained, "to far above that behind a raw readout", "damping", "terminal_raw", "appendix G"),
        trained.claim("appendix G", "a norm between loops holds it",
                      "log10 of the ratio of norms: terminal rmsnorm over inter loop norm",
                      norm_ratio("terminal_rmsnorm", "inter_loop_norm"), Effect()),
    ]  # fmt: skip


def of_the_far_loops(trained: Trained) -> list[Claim]:
    """Figure 3 and equation 4: loops whose scale has grown large, with a normed readout and a loss at every loop."""
    system = "per_loop_rmsnorm"

    def claim(where: str, says: str, number: str, key: str, rule, **more) -> Claim:
        return trained.claim(where, says, f"{number}, loops 10 to 30, {worded(system)} (the paper's 44M)",
                             lambda c: probe(c, system, key), rule, **more)  # fmt: skip

    return [
        claim("figure 3 b, section 5", "the radial update foretells the growth of scale to 3 %",
              "growth foretold over that measured, less 1, either sign", "growth_error", AtMost(0.03),
              by_construction=True),  # a Taylor expansion: models that were never trained have it too
        claim("figure 3 c", "a loop turns the state by what lies across it over the scale, at leading order",
              "turn times scale over that part, less 1, either sign, at its largest", "turn_error", AtMost(0.1, 0),
              by_construction=True),
        claim("equation 4", "what the loss one loop later says of the scale falls at least as its inverse",
              "exponent of the scale", "future_slope", AtMost(-0.85, -1)),
    ]  # fmt: skip


def of_a_norm_between_loops(trained: Trained) -> Claim:
    return trained.claim(
        "figure 7",
        "a norm between loops keeps the loss from the trained depth on, to twice of it",
        "loss after 8 loops less that after 4 (the paper's: the published Ouro 1.4B)",
        change_beyond_trained_depth("inter_loop_norm"),
        Near(0, NEXT_TO_NOTHING),
        without="these models learnt no more than how often tokens come",
    )


def charts_of(trained: Trained, systems: tuple[str, ...]) -> Callable[[dict], list]:
    def charts(content: dict) -> list:
        norms = {name: trained.over_seeds(partial(norm, system=name))(content) for name in systems}
        ours = {worded(name): found.value for name, found in norms.items() if found}
        paper = {worded(name): float(PAPER_NORMS[name]) for name in systems}
        bars = [
            Bars(f"{whose}: norm of the state after 4 loops", "norm", values, log=True)
            for whose, values in ((f"Ours, {trained.steps} steps", ours), ("The paper's 44M", paper))
        ]
        depths = range(1, 5)
        lines = []
        for i, name in enumerate(systems):
            losses = {k: trained.over_seeds(partial(loss_at, system=name, depth=k))(content) for k in depths}
            points = [(k, found.value) for k, found in losses.items() if found and math.isfinite(found.value)]
            lines.append(Line(worded(name), points, f"c{i}"))
        title = f"Ours, {trained.steps} steps: loss over depth"
        return [*on_one_scale(bars), Chart(title, "loops", "loss", lines, whole_x=True)]

    return charts


READOUT = Paper(
    "The readout blind spot",
    [
        Measurement("core", commands_of("core", "probes", "frequencies"), read, SIX_SEEDS),
        Measurement("table_2", commands_of("table_2", "probes", "frequencies"), read, SIX_SEEDS),
        Measurement("table_2_rest", commands_of("table_2_rest", "probes", "frequencies"), read, SIX_SEEDS, "table_2"),
        Measurement("appendix_g", commands_of("appendix_g", "probes", "frequencies"), read, SIX_SEEDS, "table_2"),
        Measurement("halting", commands_of("halting", "probes", "frequencies"), read),
    ],
    [  # each claim uses the longer training if that has its models
        *about_four(LONG),
        *about_others(LONG_REST),
        *of_halting(LONG_ROWS),
        *of_the_update(LONG_ROWS),
        *about_appendix_g(LONG_G),
        *of_the_far_loops(SHORT),
        of_a_norm_between_loops(LONG_G),
        Beyond(
            "tables 2 to 5, 10, 12 and 13",
            "what else these tables have at 129M, as that with a loss at every loop the norm is 56,051 behind a "
            "normed readout, 77 behind a raw one, 83 with a norm after the last loop alone and 22 with the penalty, "
            "at perplexities of 5.35, 4.92, 4.93 and 4.91; with one at the last loop 5,997, 24 and, with the penalty, "
            "27, at 4.88, 4.92 and 4.81",
            f"{LARGER} that has the number",
        ),
        Beyond(
            "table 13",
            "halting makes a normed readout 3.39 and 3.77 times as fast at 44M and 129M, and the others 1.29 to 2.09 "
            "times",
            "times of the authors' code and GPU, and two processor cores tell nothing of them; the loops are compared "
            "above",
        ),
        Beyond(
            "appendix G",
            "with damping one of three seeds becomes unstable at 129M, with norms above 10^5",
            "seen at 129 million parameters only, and not at 44 million",
        ),
        Beyond(
            "appendix G",
            "losses of the state itself at every loop can prevent the drift, in experiments with denoising",
            "the paper gives no number of these experiments",
        ),
        Beyond(
            "tables 6 and 8",
            "at 1.4B the loss of logits mixed by exits is 4.987 with a normed readout and 4.999 with a raw one; of "
            "other text the raw one has 0.016 to 0.017 nats less at 1 to 4 loops, and 2 to 4 loops differ by less "
            "than 0.01",
            "two models of 1.4 billion parameters",
        ),
        Beyond(
            "table 7",
            "at 1.4B a raw readout answers as many questions of nine tasks, and is surer of the answers: loss of "
            "candidates less by 0.056, margin more by 0.040, probability of the right one by 0.47 points",
            "two models of 1.4 billion parameters",
        ),
    ],
    [Figure(SHORT.source, charts_of(SHORT, SYSTEMS)), Figure(LONG.source, charts_of(LONG, SYSTEMS[:4]))],
)
