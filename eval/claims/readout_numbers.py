"""How the claims of the readout blind spot are read from runs and probes: every number is of one seed's content."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .definition import BETTER_THAN_FREQUENCIES, Claim, each_seed, loss_of
from .rules import Estimate, Rule


Number = Callable[[dict], float]  # KeyError where the seed has no such number


class Trained(NamedTuple):
    """How the models were trained whose numbers a claim reads."""

    source: str
    steps: str
    size: str
    frequencies: float  # loss of predicting tokens by how often they come (frequencies.py), where the JSON lacks it

    def claim(self, where: str, says: str, number: str, read: Number, rule: Rule, **more) -> Claim:
        return Claim(where, says, number, self.size, self.source, self.over_seeds(read), rule, **more)

    def over_seeds(self, number: Number) -> Callable[[dict], Estimate | None]:
        """Over the seeds that have what it reads: earlier ones have fewer systems and probes, a model that learnt
        nothing is left out, and the state of a run that diverged has neither norm nor probe."""

        def read(content: dict) -> float | None:
            try:
                return number({**content, "runs": learnt(content["runs"], self.frequencies)})
            except KeyError:
                return None

        return each_seed(read)


def learnt(runs: Iterable[dict], frequencies: float) -> list[dict]:
    """Without those that learnt no more than how often tokens come. What diverged stays: its loss is infinite."""

    def bound(run: dict) -> float:
        return run.get("loss_of_frequencies", frequencies) - BETTER_THAN_FREQUENCIES

    return [run for run in runs if run["loss"] is None or run["loss"] < bound(run)]


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


def norm_ratio(first: str, second: str) -> Number:
    """As a logarithm to base 10."""
    return lambda content: math.log10(norm(content, first) / norm(content, second))


def loss_more(first: str, second: str, depth: int = 4) -> Number:
    """After 4 loops, which are the trained depth, or fewer."""
    return lambda content: loss_at(content, first, depth) - loss_at(content, second, depth)


def loss_at(content: dict, system: str, depth: int = 4) -> float:
    """Infinite where the run diverged."""
    run = run_of(content, system)
    return loss_of(run) if depth == 4 or run["loss"] is None else run["loss_at"][str(depth)]


def least_loss_more(first: str, second: str) -> Number:
    """The least over 1 to 4 loops."""
    return lambda content: min(loss_more(first, second, depth)(content) for depth in range(1, 5))


def gap(system: str, depth: int = 1) -> Number:
    """CE(1) - CE(4), or of another depth."""
    return lambda content: loss_at(content, system, depth) - loss_at(content, system)


def gap_beyond(system: str, other: str) -> Number:
    """What loops gain beyond what the loss of another system changes over them, to either side."""
    return lambda content: gap(system)(content) - abs(gap(other)(content))


def probe(content: dict, system: str, name: str):
    return content["probes"][sound_run_of(content, system)["name"]][name]


def probe_ratio(name: str, above: str, below: str) -> Number:
    """Of sizes, as a logarithm to base 10."""
    return lambda content: math.log10(abs(probe(content, above, name) / probe(content, below, name)))


def mean_over_median(system: str) -> Number:
    """Of the norms of tokens."""
    return lambda content: probe(content, system, "mean_over_median_norm")


def logarithm(number: Number) -> Number:
    """To base 10."""
    return lambda content: math.log10(number(content))


def clamp_cost(system: str) -> Number:
    """What the loss changes, to either side."""
    return lambda content: abs(probe(content, system, "clamp_cost"))


def part_clamped(system: str) -> Number:
    """Of the norm."""
    return lambda content: 1 - probe(content, system, "clamp_norm_ratio")


def radial_fractions_of_loops(system: str) -> Number:
    """After the first loop over that after the last, as a logarithm to base 10."""
    first, last = "radial_fraction_of_first", "radial_fraction"
    return lambda content: math.log10(probe(content, system, first) / probe(content, system, last))


def halting_loops(system: str) -> Number:
    return lambda content: probe(content, system, "halting")["loops"]


def more_halting_loops(first: str, second: str) -> Number:
    return lambda content: halting_loops(first)(content) - halting_loops(second)(content)


def most_that_halting_costs(systems: Iterable[str]) -> Number:
    """Of perplexity, in percent."""

    def most(content: dict) -> float:
        return max(100 * (probe(content, system, "halting")["perplexity_ratio"] - 1) for system in systems)

    return most


def change_beyond_trained_depth(system: str) -> Number:
    """Of the loss, from 4 loops to 8, to either side."""

    def change(content: dict) -> float:
        losses = probe(content, system, "loss_by_loop")
        return abs(losses[7] - losses[3])

    return change
