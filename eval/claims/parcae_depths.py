"""Sampling of depths and the number of loops with gradients in Parcae: tables 8 to 10, figures 10 and 14 to 16, with
small models."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from looped_recipes.common.chart import Chart, Line
from looped_recipes.common.metrics import read_metrics, series
from looped_recipes.common.words import counted

from .definition import SIX_SEEDS, Claim, Measurement, each_seed, losses_by_name
from .rules import AtMost, Effect, Estimate, Near
from .sweeps import commands_of, runs_of


SAMPLING = "width 64, 1 + 1 + 1 layers, mean depth 8, English text, 2,000 steps of 1,024 tokens"
GRADIENTS = "RDM of width 64, 1 + 1 + 1 layers, English text, 1,000 steps of 1,024 tokens"
SPIKE = 0.5  # nats above the mean loss of the ten steps before
LEAST_OF_DEPTH = 0.1  # nats; a run uses its depth if its loss after one loop is this much above that after eight
ALIKE = 0.005  # nats; the paper's curves are "almost identical"
PLATEAU = 5.0  # %; the paper's curves "plateau"


def run_named(content: dict, name: str) -> dict:
    return next(run for run in content["runs"] if run["name"] == name)


def loss_at(content: dict, name: str, depth: int) -> float:
    """Return the loss of a run after `depth` loops, infinite if the run diverged."""
    run = run_named(content, name)
    loss = run["loss"] and run["loss_at"][str(depth)]
    return math.inf if loss is None else loss


def less_at(depth: int, better: str, worse: str) -> Callable[[dict], float]:
    """Return a function that gives by how much the loss of `better` is below that of `worse` after `depth` loops."""
    return lambda content: loss_at(content, worse, depth) - loss_at(content, better, depth)


# table 8, figures 10 and 14


DEPTHS = (1, 4, 8, 16)
PAPER_LOSSES = {  # perplexities of the 100M models at these depths
    "step": (300.32, 36.75, 16.65, 13.81),
    "sequence": (70.47, 17.15, 14.08, 13.59),
}


def spikes(records: list[dict]) -> int:
    losses = series(records, "loss")
    return sum(losses[i] > fmean(losses[i - 10 : i]) + SPIKE for i in range(10, len(losses)))


def last_change(records: list[dict]) -> float:
    """Return the norm of the last loop's change of the state over the norm of the state, in the second half of
    training."""
    change, state = (series(records, name) for name in ("state_change", "residual_norm"))
    later = len(change) // 2
    return fmean(change[later:]) / fmean(state[later:])


def read_sampling(folder: Path) -> dict | None:
    found = runs_of(folder)
    if found is None:
        return None
    records = {run["name"]: read_metrics(folder / run["name"] / "metrics.jsonl") for run in found["runs"]}
    measures = {"spikes": spikes, "last_change": last_change}
    of_runs = {key: {name: measure(of) for name, of in records.items()} for key, measure in measures.items()}
    return {**found, **of_runs}


def uses_depth(content: dict) -> bool:
    """Return whether a run of either kind has a clearly higher loss after one loop than after eight."""
    return not all(less_at_depths(content, name, 1, 8) < LEAST_OF_DEPTH for name in PAPER_LOSSES)


def where_depth_is_used(number: Callable[[dict], float]) -> Callable[[dict], Estimate | None]:
    """Return a function that estimates `number` over seeds; None where no run of any seed uses its depth."""
    return lambda content: each_seed(number)(content) if any(map(uses_depth, content["seeds"].values())) else None


def fewer_spikes(content: dict) -> Estimate | None:
    """Estimate how many spikes fewer a run has with a depth for each sequence than with one for each step; None where
    no run of any seed has a spike."""
    seeds = content["seeds"].values()
    if not any(found["spikes"][name] for found in seeds for name in PAPER_LOSSES):
        return None
    return each_seed(lambda found: found["spikes"]["step"] - found["spikes"]["sequence"])(content)


def nearer_to_fixed_point(content: dict) -> float | None:
    """Return log10 of the last loop's change with a depth for each step over that with a depth for each sequence; None
    for seeds that were measured without this number."""
    changes = content.get("last_change")
    return math.log10(changes["step"] / changes["sequence"]) if changes else None


def percent_beyond_mean(content: dict) -> float:
    """Return how much loops 9 to 16, beyond the mean depth, lower the loss, in percent of what loops 2 to 8 do."""
    return 100 * less_at_depths(content, "sequence", 8, 16) / less_at_depths(content, "sequence", 1, 8)


def less_at_depths(content: dict, name: str, shallow: int, deep: int) -> float:
    """Return by how much the loss of a run after `deep` loops is below that after `shallow` loops."""
    return loss_at(content, name, shallow) - loss_at(content, name, deep)


def sampling_charts(content: dict) -> list[Chart]:
    seeds = content["seeds"].values()
    ours = [[(k, fmean(loss_at(found, name, k) for found in seeds)) for k in DEPTHS] for name in PAPER_LOSSES]
    paper = [[(k, math.log(value)) for k, value in zip(DEPTHS, values)] for values in PAPER_LOSSES.values()]
    return [
        Chart(title, "loops", "loss", [Line("one depth a step", one, "c0"), Line("for each sequence", other, "c1")])
        for title, (one, other) in (("Ours: loss over depth", ours), ("The paper's: 100M", paper))
    ]


def sampling_claims() -> list[Claim]:
    unused = (
        f"after one loop no run is {LEAST_OF_DEPTH:g} nats worse than after eight (the paper's 100M: 2.9 and 1.6), so "
        "depth does not matter to these runs"
    )

    def claim(where: str, says: str, number: str, read, rule, absent: str = "") -> Claim:
        return Claim(where, says, number, SAMPLING, "claims/sampling", read, rule, without=unused, absent=absent)

    return [
        *(
            claim("table 8", "a depth for each sequence instead of the step lowers the loss at "
                  f"{counted(k, 'loop')}, 100M", f"loss at {k}: one depth a step less one for each sequence",
                  where_depth_is_used(less_at(k, "sequence", "step")), Effect(math.log(batch / sequence)))
            for k, batch, sequence in zip(DEPTHS, *PAPER_LOSSES.values())
        ),
        claim("figure 10", "a depth for each sequence leaves out the spikes of the loss, 350M",
              f"steps with a loss {SPIKE} above the ten before: one depth a step less one for each sequence",
              fewer_spikes, Effect(), absent="no run of either kind has a spike"),
        claim("figure 11", "and brings the state nearer to a fixed point, 350M",
              "log10 of how far the last loop moves the state, one depth a step over one for each sequence",
              each_seed(nearer_to_fixed_point), Effect()),
        *(
            claim("figure 14", "drawing the whole depth instead of the loops before the last eight lowers the loss at "
                  f"{k} loops, 100M", f"loss at {k}: drawn before the last eight less drawn whole",
                  where_depth_is_used(less_at(k, "sequence", "prefix")), Effect())
            for k in (4, 16, 64)
        ),
        claim("figure 14", "and makes almost no difference at 8 loops", "the same at 8",
              where_depth_is_used(less_at(8, "sequence", "prefix")), Near(0, ALIKE)),
        claim("figure 14", "nor do gradients of the last eight loops alone instead of all",
              "loss at 8: the last eight less all", where_depth_is_used(less_at(8, "all_loops", "sequence")),
              Near(0, ALIKE)),
        claim("figure 7", "at test time loops beyond the mean depth of training gain next to nothing",
              "what loops 9 to 16 lower the loss by, of what loops 2 to 8 do, %",
              where_depth_is_used(percent_beyond_mean), AtMost(PLATEAU)),
    ]  # fmt: skip


# tables 9 and 10, figures 15 and 16


MEANS = {4: 2.477, 8: 2.453, 20: 2.457, 32: 2.458}  # losses of table 9
# table 10: run -> (loops with gradients, loss)
WITH_GRADIENTS = {"mean_20": (4, 2.500), "gradients_8": (8, 2.480), "gradients_12": (12, 2.474)}


def less_of_own(better: str, worse: str) -> Callable[[dict], float]:
    """Return a function that gives by how much the loss of `better` is below that of `worse`, each at its own mean
    depth."""

    def number(content: dict) -> float:
        losses = losses_by_name(content)
        return losses[worse] - losses[better]

    return number


def percent_left(content: dict, name: str) -> float:
    """Return the part of the gain of 64 loops that comes after the fourth loop, in percent."""
    return 100 * less_at_depths(content, name, 4, 64) / less_at_depths(content, name, 1, 64)


def gradient_charts(content: dict) -> list[Chart]:
    seeds = content["seeds"].values()

    def mean_of(name: str) -> float:
        return fmean(losses_by_name(found)[name] for found in seeds)

    depths = [(mean, mean_of(f"mean_{mean}")) for mean in MEANS], list(MEANS.items())
    loops = [(k, mean_of(name)) for name, (k, _) in WITH_GRADIENTS.items()], list(WITH_GRADIENTS.values())
    return [
        Chart(f"{whose}: loss over {words}", words, "loss", [Line("", points)])
        for words, both in (("mean depth", depths), ("loops with gradients", loops))
        for whose, points in zip(("Ours", "The paper's"), both)
    ]


def gradient_claims() -> list[Claim]:
    def claim(where: str, says: str, number: str, read, rule) -> Claim:
        return Claim(where, says, number, GRADIENTS, "claims/gradient_loops", each_seed(read), rule)

    return [
        claim("table 9", "with gradients of four loops a mean depth of 8 has a lower loss than one of 4",
              "loss at the mean depth: 4 less 8", less_of_own("mean_8", "mean_4"), Effect(0.024)),
        claim("table 9", "and than one of 32",
              "loss at the mean depth: 32 less 8", less_of_own("mean_8", "mean_32"), Effect(0.005)),
        *(
            claim("figure 15", f"a mean depth of 8 has a lower loss than one of 32 at {counted(k, 'loop')} too",
                  f"loss at {k}: mean depth 32 less 8", less_at(k, "mean_8", "mean_32"), Effect())
            for k in (1, 4, 16, 64)
        ),
        claim("table 10", "at a mean depth of 20 gradients of 12 loops give a lower loss than those of 4",
              "loss at the mean depth: gradients of 4 less 12", less_of_own("gradients_12", "mean_20"),
              Effect(0.026)),
        claim("figure 16", "and so at 64 loops", "loss at 64: gradients of 4 less 12",
              less_at(64, "gradients_12", "mean_20"), Effect()),
        claim("table 14", "the loss falls over loops at test time the more slowly the deeper a model was trained",
              "what is left after 4 loops of the gain of 64, %: mean depth 32 less 4",
              lambda content: percent_left(content, "mean_32") - percent_left(content, "mean_4"), Effect()),
    ]  # fmt: skip


DEPTH_MEASUREMENTS = [
    Measurement("sampling", commands_of("sampling"), read_sampling, SIX_SEEDS),
    Measurement("gradient_loops", commands_of("gradient_loops"), runs_of, SIX_SEEDS),
]
