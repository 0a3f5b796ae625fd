"""Figures 6 to 8 of the residual scaling paper: loops of small models after training (after_training.py)."""

from pathlib import Path
from statistics import fmean

from looped_recipes.common.chart import Chart, Line, Matrix

from .definition import SIX_SEEDS, Claim, Measurement, each_seed
from .functions import result_of
from .rules import AtMost, Effect, Near
from .sweeps import commands_of, runs_of


SIZE = "width 96, 2 layers, 2 to 8 loops, 300 steps of 1,024 tokens"
TRAINED = "claims/after_training"


def read(folder: Path) -> dict | None:
    return result_of("after_training")(folder) if runs_of(folder) else None


def before_the_last(content: dict, loops: int) -> float:
    """Return the mean cosine of two different increments, neither of them the last loop's."""
    cosines = content["by_loops"][str(loops)]["cosine"]
    return fmean(cosines[i][j] for i in range(loops - 1) for j in range(i))


def with_the_last(content: dict, loops: int) -> float:
    return fmean(content["by_loops"][str(loops)]["cosine"][-1][:-1])


def spread_of_norms(content: dict) -> float:
    last = [found["norm"][-1] for found in content["by_loops"].values()]
    return max(last) / min(last)


def after_training_claims() -> list[Claim]:
    def claim(where: str, says: str, number: str, number_of, rule) -> Claim:
        return Claim(where, says, number, SIZE, TRAINED, each_seed(number_of), rule)

    return [
        claim("figure 6", "after training increments of early and middle loops have cosines of 0.3 to 0.6",
              "mean cosine of two increments but the last, 8 loops",
              lambda c: before_the_last(c, 8), Near(0.45, 0.15)),
        claim("figure 8", "with 4 loops they are positively correlated too",
              "mean cosine of two increments but the last, 4 loops", lambda c: before_the_last(c, 4), Effect()),
        claim("figure 6", "the last loop's increment is correlated less",
              "mean cosine of two but the last less that of each with the last, 8 loops",
              lambda c: before_the_last(c, 8) - with_the_last(c, 8), Effect()),
        claim("section 5.4, figure 6", "with the others it has cosines near 0 or mildly negative",
              "mean cosine of each with the last, 8 loops", lambda c: with_the_last(c, 8), AtMost(0.1, 0.0)),
        claim("figure 7", "the last norm is about the same for 2, 4 and 8 loops",
              "largest norm of the last state over the least", spread_of_norms, AtMost(1.25, 1.0)),
    ]  # fmt: skip


def after_training_charts(content: dict) -> list:
    """Draw the cosines of the first seed, and the norms as means over all seeds."""
    seeds = [found["by_loops"] for found in content["seeds"].values()]
    cosines = [Matrix(f"After training: cosines of {n} loops", "loop", seeds[0][n]["cosine"]) for n in ("4", "8")]
    lines = []
    for i, n in enumerate(seeds[0]):
        norms = zip(*(found[n]["norm"] for found in seeds))
        lines.append(Line(f"{n} loops", [(k, fmean(values)) for k, values in enumerate(norms)], f"c{i}"))
    return [*cosines, Chart("After training: norm of the state", "loop", "norm", lines, whole_x=True)]


AFTER_TRAINING = Measurement("after_training", commands_of("after_training", "after_training"), read, SIX_SEEDS)
