"""Numbers for the claims of the readout blind spot, read from runs and probes. Each is read from the content of one
seed."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean
from typing import NamedTuple

from .definition import BETTER_THAN_FREQUENCIES, Claim, each_seed, loss_of
from .rules import Estimate, Rule, ratio_of_spreads


Number = Callable[[dict], float]  # KeyError where the seed has no such number


class Trained(NamedTuple):
    """The training of the models whose numbers a claim reads."""

    source: str
    steps: str
    size: str
    frequencies: float  # loss of the token frequencies (frequencies.py), for runs of the JSON that lack this loss

    def claim(self, where: str, says: str, number: str, read: Number, rule: Rule, **more) -> Claim:
        return Claim(where, says, number, self.size, self.source, self.over_seeds(read), rule, **more)

    def of_seed(self, number: Number) -> Callable[[dict], float | None]:
        """Return a function that reads `number`, or None where a seed lacks it. Earlier seeds have fewer systems and
        probes, models that learnt nothing are left out, and a diverged run has neither norm nor probe."""

        def read(content: dict) -> float | None:
            try:
                return number({**content, "runs": learnt(content["runs"], self.frequencies)})
            except KeyError:
                return None

        return read

    def over_seeds(self, number: Number) -> Callable[[dict], Estimate | None]:
        """Return a function that estimates `number` over the seeds that have it."""
        return each_seed(self.of_seed(number))


def learnt(runs: Iterable[dict], frequencies: float) -> list[dict]:
    """Drop runs that learnt no more than token frequencies. Diverged runs stay: their loss counts as infinite."""

    def bound(run: dict) -> float:
        return run.get("loss_of_frequencies", frequencies) - BETTER_THAN_FREQUENCIES

    return [run for run in runs if run["loss"] is None or run["loss"] < bound(run)]


def run_of(content: dict, system: str) -> dict:
    """Return the run of a system; KeyError if it was not trained."""
    return {run["model.preset"]: run for run in content["runs"]}[f"readout_{system}"]


def sound_run_of(content: dict, system: str) -> dict:
    """Return the run of a system; KeyError if it was not trained or diverged."""
    run = run_of(content, system)
    if run["loss"] is None:
        raise KeyError(system)
    return run


def norm(content: dict, system: str) -> float:
    return sound_run_of(content, system)["state_norm/loop_4"]


def norm_ratio(first: str, second: str) -> Number:
    """Log10 of the ratio of two systems' norms."""
    return lambda content: math.log10(norm(content, first) / norm(content, second))


def spread_ratio(trained: Trained, first: str, second: str) -> Callable[[dict], Estimate | None]:
    """Log10 of how much more the logarithm of the first system's norm varies from seed to seed than the second's."""

    def logarithms(content: dict, system: str) -> list[float]:
        norms = map(trained.of_seed(partial(norm, system=system)), content["seeds"].values())
        return [math.log(each) for each in norms if each is not None]

    return lambda content: ratio_of_spreads(logarithms(content, first), logarithms(content, second))


def loss_more(first: str, second: str, depth: int = 4) -> Number:
    """Loss of the first system minus that of the second, after 4 loops (the trained depth) or fewer."""
    return lambda content: loss_at(content, first, depth) - loss_at(content, second, depth)


def loss_at(content: dict, system: str, depth: int = 4) -> float:
    """Return the loss of a system after `depth` loops, infinite if the run diverged."""
    run = run_of(content, system)
    return loss_of(run) if depth == 4 or run["loss"] is None else run["loss_at"][str(depth)]


def loss_in_table_2(content: dict, system: str) -> float:
    """Return the loss of which the release's perplexity is exp: the mean over loops where every loop has a loss, else
    that of the last loop."""
    depths = range(1, 5) if has_loss_at_every_loop(system) else (4,)
    return fmean(loss_at(content, system, depth) for depth in depths)


def has_loss_at_every_loop(system: str) -> bool:
    return system.startswith("per_loop_")


def table_2_loss_more(first: str, second: str) -> Number:
    """Loss of the first system minus that of the second, each as table 2 counts it."""
    return lambda content: loss_in_table_2(content, first) - loss_in_table_2(content, second)


def least_loss_more(first: str, second: str) -> Number:
    """Loss of the first system minus that of the second, at the depth from 1 to 4 where this is least."""
    return lambda content: min(loss_more(first, second, depth)(content) for depth in range(1, 5))


def gap(system: str, depth: int = 1) -> Number:
    """CE(depth) - CE(4)."""
    return lambda content: loss_at(content, system, depth) - loss_at(content, system)


def probe(content: dict, system: str, name: str):
    return content["probes"][sound_run_of(content, system)["name"]][name]


def probe_ratio(name: str, above: str, below: str) -> Number:
    """Log10 of the ratio of the absolute values of a probe in two systems."""
    return lambda content: math.log10(abs(probe(content, above, name) / probe(content, below, name)))


def logarithm(number: Number) -> Number:
    """Log10 of a number."""
    return lambda content: math.log10(number(content))


def radial_fractions_of_loops(system: str) -> Number:
    """Log10 of the radial fraction after the first loop over that after the last."""
    first, last = "radial_fraction_of_first", "radial_fraction"
    return lambda content: math.log10(probe(content, system, first) / probe(content, system, last))


def more_halting_loops(first: str, second: str) -> Number:
    return lambda content: probe(content, first, "halting")["loops"] - probe(content, second, "halting")["loops"]


def cost_of_halting(systems: Iterable[str]) -> Number:
    """The largest cost of halting of these systems, in percent of perplexity."""

    def cost(content: dict) -> float:
        return max(100 * (probe(content, system, "halting")["perplexity_ratio"] - 1) for system in systems)

    return cost


def change_beyond_trained_depth(system: str) -> Number:
    """Change of the loss from 4 loops to 8."""

    def change(content: dict) -> float:
        losses = probe(content, system, "loss_by_loop")
        return losses[7] - losses[3]

    return change
