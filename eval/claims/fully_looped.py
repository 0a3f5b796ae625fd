"""Simply Stabilizing the Loop via Fully Looped Transformer."""

import math
from collections.abc import Callable
from statistics import fmean

from looped_recipes.common.chart import Chart, Line

from .definition import Beyond, Claim, Figure, Paper
from .rules import Effect, Estimate, over_seeds


SOURCE = "twelve_loops"
SIZE = "width 96, 3 layers, 120 steps of 1,024 tokens"
OTHERS = ("lt", "lt_input", "lt_attention", "flt_residual")
NAMES = {"lt": "LT", "lt_input": "LT_i", "lt_attention": "LT_ai", "flt": "FLT", "flt_residual": "FLT_res"}
BITS = {  # bits per byte of the small models at 3, 6 and 9 loops in table 1
    "lt": (1.054, 1.067, 1.115),
    "lt_input": (1.043, 1.042, 1.044),
    "flt": (1.044, 1.039, 1.040),
}


def runs_at(content: dict, system: str, loops: int) -> dict[int, dict]:
    """By seed."""
    runs = (run for run in content["runs"] if run["model.preset"] == system and run["model.num_loops"] == loops)
    return {run["training.seed"]: run for run in runs}


def between(number: Callable[[dict, dict], float], *pair: tuple[str, int]) -> Callable[[dict], Estimate]:
    """A number of two runs of the same seed."""

    def read(content: dict) -> Estimate:
        first, second = (runs_at(content, *one) for one in pair)
        return over_seeds(number(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys()))

    return read


def collapses_more(first: dict, second: dict) -> float:
    return float(first["collapsed"]) - float(second["collapsed"])


def excess(first: dict, second: dict) -> float:
    """Loss of the first over that of the second, less 1, in percent."""
    return 100 * (first["loss"] / second["loss"] - 1)


def gradient_ratio(first: dict, second: dict) -> float:
    """Logarithm to base 10, of the largest gradients of the first MLP."""
    largest = [max(run["first_mlp_gradient_norm_by_step"].values()) for run in (first, second)]
    return math.log10(largest[0] / largest[1])


def state_ratio(first: dict, second: dict) -> float:
    """Logarithm to base 10, of the norms of the last states."""
    return math.log10(first["residual_norm_by_loop"][-1] / second["residual_norm_by_loop"][-1])


def percent(system: str, loops: int, other: str, other_loops: int) -> float:
    at = {3: 0, 6: 1, 9: 2}
    return 100 * (BITS[system][at[loops]] / BITS[other][at[other_loops]] - 1)


def bits_claim(says: str, number: str, first: tuple[str, int], second: tuple[str, int]) -> Claim:
    """That the first of two systems at their loops has so much the greater loss."""
    rule = Effect(percent(*first, *second))
    return Claim("table 1", says, number, SIZE, SOURCE, between(excess, first, second), rule)


def charts(content: dict) -> list[Chart]:
    ours = []
    for i, (system, name) in enumerate(NAMES.items()):
        points = [(k, fmean(run["loss"] for run in runs_at(content, system, k).values())) for k in (3, 6, 9, 12)]
        ours.append(Line(name, points, f"c{i}"))
    colors = {system: f"c{i}" for i, system in enumerate(NAMES)}
    paper = [Line(NAMES[system], list(zip((3, 6, 9), bits)), colors[system]) for system, bits in BITS.items()]
    levels = {"frequencies of tokens": content["loss_of_word_frequencies"]}
    return [
        Chart("Ours: loss over trained loops", "loops", "loss", ours, levels=levels, x_ticks=[3, 6, 9, 12]),
        Chart("The paper's small models", "loops", "bits per byte", paper, x_ticks=[3, 6, 9]),
    ]


FULLY_LOOPED = Paper(
    "Simply Stabilizing the Loop via Fully Looped Transformer",
    [],
    [
        Claim(
            "figures 3 and 4",
            "with 12 loops LT collapses and FLT does not",
            "share of runs that collapse: LT less FLT",
            f"{SIZE}, 12 loops",
            SOURCE,
            between(collapses_more, ("lt", 12), ("flt", 12)),
            Effect(1.0),
        ),
        *(
            Claim(
                "figure 4",
                f"with 12 loops {NAMES[system]} collapses too",
                f"share of runs that collapse: {NAMES[system]} less FLT",
                f"{SIZE}, 12 loops",
                SOURCE,
                between(collapses_more, (system, 12), ("flt", 12)),
                Effect(1.0),
            )
            for system in OTHERS[1:]
        ),
        bits_claim(
            "LT gets worse with loops: 5.8 % more bits per byte at 9 than at 3, small",
            "loss of LT at 9 over that at 3, %",
            ("lt", 9),
            ("lt", 3),
        ),
        bits_claim(
            "FLT gains from loops: 0.4 % fewer bits per byte at 9 than at 3, small",
            "loss of FLT at 3 over that at 9, %",
            ("flt", 3),
            ("flt", 9),
        ),
        bits_claim(
            "at 9 loops LT has 7.2 % more bits per byte than FLT, small",
            "loss of LT over that of FLT, 9 loops, %",
            ("lt", 9),
            ("flt", 9),
        ),
        bits_claim(
            "at 9 loops LT_i has 0.4 % more bits per byte than FLT, small",
            "loss of LT_i over that of FLT, 9 loops, %",
            ("lt_input", 9),
            ("flt", 9),
        ),
        Claim(
            "figure 3",
            "LT's gradients of the first MLP are larger than FLT's with 12 loops",
            "log10 of the ratio of the largest",
            f"{SIZE}, 12 loops",
            SOURCE,
            between(gradient_ratio, ("lt", 12), ("flt", 12)),
            Effect(),
        ),
        Claim(
            "figure 3",
            "LT's state is larger than FLT's with 12 loops",
            "log10 of the ratio of the last norms",
            f"{SIZE}, 12 loops",
            SOURCE,
            between(state_ratio, ("lt", 12), ("flt", 12)),
            Effect(),
        ),
        Beyond(
            "table 1",
            "FLT has the best average accuracy on six tasks at 9 loops, 41.72, base",
            "models of this size and training answer none of the six tasks above chance",
        ),
        Beyond(
            "table 2",
            "FLT with sliding windows, grouped queries or latent attention trains as well at 12 loops",
            "the four systems at 12 loops are to be run",
            later=True,
        ),
    ],
    [Figure(SOURCE, charts)],
)
