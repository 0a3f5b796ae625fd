"""Simply Stabilizing the Loop via Fully Looped Transformer."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

from looped_recipes.common.chart import Chart, Line, ordered
from looped_recipes.common.metrics import read_metrics

from .definition import SIX_SEEDS, Beyond, Claim, Figure, Measurement, Paper, each_seed, loss_of
from .rules import AtMost, Effect, Estimate, Near, Rule, over_seeds
from .sweeps import runs_of, sweep_alone


SOURCE = "twelve_loops"
SIZE = "width 96, 3 layers, 120 steps of 1,024 tokens"
OTHERS = ("lt", "lt_input", "lt_attention", "flt_residual")
NAMES = {"lt": "LT", "lt_input": "LT_i", "lt_attention": "LT_ai", "flt": "FLT", "flt_residual": "FLT_res"}
BITS = {  # bits per byte of the small models at 3, 6 and 9 loops in table 1; LT_ai collapsed at 6
    "lt": (1.054, 1.067, 1.115),
    "lt_input": (1.043, 1.042, 1.044),
    "lt_attention": (1.046, math.nan, 1.047),
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


def state_ratio(first: dict, second: dict, loop: int = 12) -> float:
    """Logarithm to base 10, of the norms after a loop."""
    return math.log10(first["residual_norm_by_loop"][loop - 1] / second["residual_norm_by_loop"][loop - 1])


def grown(run: dict) -> float:
    """Logarithm to base 10, of the norm after the last loop over that after the first."""
    return math.log10(run["residual_norm_by_loop"][-1] / run["residual_norm_by_loop"][0])


def swing(run: dict) -> float:
    """Logarithm to base 10, of the largest gradient of the first MLP over the least, after the first step."""
    return decades([norm for step, norm in run["first_mlp_gradient_norm_by_step"].items() if int(step)])


def decades(norms: list[float]) -> float:
    return math.log10(max(norms) / min(norms))


WATCHED = {"the head": "lm_head", "the middle MLP": "core.1.mlp", "the middle attention": "core.1.self_attn"}


def read_gradients(folder: Path) -> dict | None:
    """Of every run, norms of gradients at the steps where they were measured."""
    found = runs_of(folder)
    if found is None:
        return None
    for run in found["runs"]:
        records = read_metrics(folder / run["name"] / "metrics.jsonl")
        norms = {block: [record.get(f"gradient_norm/{block}") for record in records] for block in WATCHED.values()}
        run["gradient_norms"] = {block: [norm for norm in each if norm is not None] for block, each in norms.items()}
    return found


def swing_of(content: dict, system: str, block: str) -> float:
    """As `swing`, of one block."""
    run = next(run for run in content["runs"] if run["model.preset"] == system)
    return decades(run["gradient_norms"][block][1:])


def gradient_claims() -> list[Claim]:
    return [
        Claim(
            "figure 7",
            f"gradients of {name} swing more in LT than in FLT with 12 loops",
            "log10 of the largest over the least during training: LT less FLT",
            SIZE,
            "claims/gradients",
            each_seed(lambda content, block=block: swing_of(content, "lt", block) - swing_of(content, "flt", block)),
            Effect(),
        )
        for name, block in WATCHED.items()
    ]


def of_runs(number: Callable[[dict], float], system: str, loops: int = 12) -> Callable[[dict], Estimate]:
    return lambda content: over_seeds(number(run) for run in runs_at(content, system, loops).values())


def lost_at(fewer: int, more: int, run: dict) -> float:
    """Loss after fewer loops less that after more."""
    return run["loss_at"][str(fewer)] - run["loss_at"][str(more)]


def collapsed_of_all(content: dict, system: str) -> Estimate:
    """Share of the runs at 3 to 12 loops that collapse, for each seed."""
    by_seed: dict[int, list[float]] = {}
    for loops in (3, 6, 9, 12):
        for seed, run in runs_at(content, system, loops).items():
            by_seed.setdefault(seed, []).append(float(run["collapsed"]))
    return over_seeds(fmean(found) for found in by_seed.values())


def percent(system: str, loops: int, other: str, other_loops: int) -> float:
    at = {3: 0, 6: 1, 9: 2}
    return 100 * (BITS[system][at[loops]] / BITS[other][at[other_loops]] - 1)


def bits_claim(says: str, number: str, first: tuple[str, int], second: tuple[str, int]) -> Claim:
    """That the first of two systems at their loops has so much the greater loss."""
    rule = Effect(percent(*first, *second))
    return Claim("table 1", says, number, SIZE, SOURCE, between(excess, first, second), rule)


def figure_claims() -> list[Claim]:
    """Figures 2, 5 and 6, and the collapses of table 1."""

    def claim(where: str, says: str, number: str, read: Callable[[dict], Estimate], rule: Rule) -> Claim:
        return Claim(where, says, number, SIZE, SOURCE, read, rule)

    return [
        claim("figure 2", "LT's loss with 9 loops is above that with 6", "loss of LT at 9 over that at 6, %",
              between(excess, ("lt", 9), ("lt", 6)), Effect()),
        claim("figure 2", "LT's gradients of the first MLP swing more than FLT's with 12 loops",
              "log10 of the largest over the least during training: LT less FLT",
              between(lambda first, second: swing(first) - swing(second), ("lt", 12), ("flt", 12)), Effect()),
        *(
            claim("figure 6", f"with 12 loops LT's state is larger than FLT's after loop {loop}",
                  "log10 of the ratio of the norms",
                  between(partial(state_ratio, loop=loop), ("lt", 12), ("flt", 12)), Effect())
            for loop in (6, 9)
        ),
        claim("figure 6", "LT's state grows from loop to loop", "log10 of the norm after 12 loops over that after 1",
              of_runs(grown, "lt"), Effect()),
        claim("figure 6", "FLT's stays", "log10 of the norm after 12 loops over that after 1",
              of_runs(grown, "flt"), Near(0.0, 0.15)),
        *(
            claim("figure 5", f"FLT trained with {trained} loops gains from the loops after the third",
                  f"loss after 3 loops less that after {trained}",
                  of_runs(partial(lost_at, 3, trained), "flt", trained), Effect())
            for trained in (9, 12)
        ),
        claim("figure 5", "FLT trained with 3 loops gains nothing from more",
              "loss after 3 loops less that after 12", of_runs(partial(lost_at, 3, 12), "flt", 3), AtMost(0.0)),
        *(
            claim("table 1", f"of 3, 6, 9 and 12 loops {NAMES[system]} collapses at {said}",
                  "share of the runs that collapse", partial(collapsed_of_all, system=system), rule)
            for system, said, rule in (("lt", "one (small, figure 4)", Near(0.25, 0.1)),
                                       ("flt", "none", AtMost(0.0)))
        ),
        *(
            bits_claim(f"at {k} loops {NAMES[system]} has {percent(system, k, 'flt', k):.1f} % more bits per byte "
                       "than FLT, small", f"loss of {NAMES[system]} over that of FLT, {k} loops, %",
                       (system, k), ("flt", k))
            for system, k in (("lt", 3), ("lt", 6), ("lt_input", 6), ("lt_attention", 3), ("lt_attention", 9))
        ),
    ]  # fmt: skip


# table 2


def excess_over_full(variant: str):
    """In percent; infinite where it collapses."""

    def read(content: dict) -> float:
        losses = {run["name"]: loss_of(run) for run in content["runs"]}
        return 100 * (losses[variant] / losses["full"] - 1)

    return each_seed(read)


def variant_claims() -> list[Claim]:
    names = {"grouped": "grouped queries", "latent": "latent attention", "windows": "sliding windows"}
    return [
        Claim(
            "table 2",
            f"FLT with {name} trains as well at 12 loops: at most 1.0 % more bits per byte",
            "loss over that of full attention, %",
            SIZE,
            "claims/attention",
            excess_over_full(variant),
            AtMost(1.0),
        )
        for variant, name in names.items()
    ]


def charts(content: dict) -> list[Chart]:
    ours = []
    for i, (system, name) in enumerate(NAMES.items()):
        points = [(k, fmean(run["loss"] for run in runs_at(content, system, k).values())) for k in (3, 6, 9, 12)]
        ours.append(Line(name, points, f"c{i}"))
    deeper = [
        Line(f"trained with {k}", [(n, fmean(run["loss_at"][str(n)] for run in runs_at(content, "flt", k).values()))
                                   for n in (1, 3, 6, 9, 12)], ordered(i, 4))
        for i, k in enumerate((3, 6, 9, 12))
    ]  # fmt: skip
    norms = [
        Line(NAMES[system], [(k + 1, fmean(run["residual_norm_by_loop"][k] for run in runs_at(content, system, 12)
                                           .values())) for k in range(12)], f"c{i}")
        for i, system in enumerate(NAMES)
    ]  # fmt: skip
    colors = {system: f"c{i}" for i, system in enumerate(NAMES)}
    paper = [
        Line(NAMES[system], [(k, value) for k, value in zip((3, 6, 9), bits) if value == value], colors[system])
        for system, bits in BITS.items()
    ]
    levels = {"frequencies of tokens": content["loss_of_word_frequencies"]}
    return [
        Chart("Ours: loss over trained loops", "loops", "loss", ours, levels=levels, x_ticks=[3, 6, 9, 12]),
        Chart("FLT: loss after other numbers of loops", "loops", "loss", deeper, x_ticks=[1, 3, 6, 9, 12]),
        Chart("Norm of the state, trained with 12 loops", "loops", "norm", norms, log_y=True, whole_x=True),
        Chart("The paper's small models", "loops", "bits per byte", paper, x_ticks=[3, 6, 9]),
    ]


FULLY_LOOPED = Paper(
    "Simply Stabilizing the Loop via Fully Looped Transformer",
    [
        Measurement("attention", sweep_alone("attention"), runs_of, SIX_SEEDS),
        Measurement("gradients", sweep_alone("gradients"), read_gradients, SIX_SEEDS),
    ],
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
        *figure_claims(),
        *variant_claims(),
        Beyond(
            "table 1",
            "FLT has the best average accuracy on six tasks at 9 loops, 41.72, base",
            "models of this size and training answer none of the six tasks above chance",
        ),
        *gradient_claims(),
    ],
    [Figure(SOURCE, charts)],
)
