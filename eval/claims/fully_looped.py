"""Simply Stabilizing the Loop via Fully Looped Transformer.

Where the paper states a claim for both of its model sizes, ours is compared with the small one (table 1, figures 2, 6
and 7).
"""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from looped_recipes.common.chart import Chart, Line, ordered
from looped_recipes.common.intervals import over_seeds
from looped_recipes.common.metrics import read_metrics, series

from .definition import (
    LARGER,
    NO_CORE,
    NO_SIX_TASKS,
    SIX_SEEDS,
    Beyond,
    Claim,
    Figure,
    Measurement,
    Paper,
    each_seed,
    loss_of,
    losses_by_name,
)
from .rules import SELDOM, AtMost, Differs, Effect, Estimate, Near, Rule, share
from .sweeps import commands_of, has_trained, read_with_frequencies, runs_of


SYSTEMS = "claims/twelve_loops"  # all five systems with 3, 6, 9 and 12 loops
WITH_GRADIENTS = "claims/gradients"  # LT and FLT with 12 loops, six seeds
SIZE = "width 96, 3 layers, 120 steps of 1,024 tokens"
NAMES = {"lt": "LT", "lt_input": "LT_i", "lt_attention": "LT_ai", "flt": "FLT", "flt_residual": "FLT_res"}
BITS = {  # bits per byte of the small models at 3, 6 and 9 loops in table 1; LT_ai collapsed at 6
    "lt": (1.054, 1.067, 1.115),
    "lt_input": (1.043, 1.042, 1.044),
    "lt_attention": (1.046, math.nan, 1.047),
    "flt": (1.044, 1.039, 1.040),
}
LEAST_CHANGE = 0.001  # nats; loops count as unused if they change every loss by less


def run_at(found: dict, system: str, loops: int = 12) -> dict:
    """Return one run of a seed. Runs without the setting (those of figure 7) have twelve loops."""
    return next(
        run for run in found["runs"] if run["model.preset"] == system and run.get("model.num_loops", 12) == loops
    )


def runs_at(content: dict, system: str, loops: int) -> list[dict]:
    """Return this run of every seed."""
    return [run_at(found, system, loops) for found in content["seeds"].values()]


def between(number: Callable[[dict, dict], float], *pair: tuple[str, int]) -> Callable[[dict], Estimate | None]:
    """Return a function that estimates a number of two runs of the same seed."""
    return each_seed(lambda found: number(*(run_at(found, *one) for one in pair)))


def share_of_runs(trained: bool, systems: tuple[str, ...], loops: tuple[int, ...]) -> Callable[[dict], Estimate]:
    """Return a function that gives the share of runs that train (or do not), over all seeds, systems and loops."""

    def read(content: dict) -> Estimate:
        found = [
            has_trained(run_at(of_seed, system, k), of_seed)
            for of_seed in content["seeds"].values()
            for system in systems
            for k in loops
        ]
        return share(found.count(trained), len(found))

    return read


def excess(first: dict, second: dict) -> float:
    """Return by how many percent the loss of the first run is above that of the second."""
    return 100 * (loss_of(first) / loss_of(second) - 1)


WATCHED = {"the head": "lm_head", "the middle MLP": "core.1.mlp", "the middle attention": "core.1.self_attn"}
FIRST_MLP = "core.0.mlp"
BLOCKS = (*WATCHED.values(), FIRST_MLP)


def swing(run: dict, block: str) -> float:
    """Return log10 of the ratio of a block's largest gradient norm to its least, without the first measurement; NaN if
    the run diverged before another."""
    norms = run["gradient_norms"][block][1:]
    return math.log10(max(norms) / min(norms)) if norms else math.nan


def swings_more(system: str, block: str) -> Callable[[dict], Estimate | None]:
    """Return a function that gives by how much gradients swing more in a system than in FLT, both with 12 loops."""
    return between(lambda first, second: swing(first, block) - swing(second, block), (system, 12), ("flt", 12))


def with_gradients(read: Callable[[Path], dict | None]) -> Callable[[Path], dict | None]:
    """Return `read` extended by the gradient norms of every run, at the steps where they were measured."""

    def read_both(folder: Path) -> dict | None:
        found = read(folder)
        for run in found["runs"] if found is not None else ():
            records = read_metrics(folder / run["name"] / "metrics.jsonl")
            run["gradient_norms"] = {name: series(records, f"gradient_norm/{name}") for name in BLOCKS}
        return found

    return read_both


def state(content: dict, system: str, loop: int) -> float:
    """Return log10 of the norm of the state after a loop; NaN if the run diverged before it was measured."""
    return math.log10(norm_after(run_at(content, system), loop))


def norm_after(run: dict, loop: int) -> float:
    return run.get(f"residual_norm/loop_{loop}", math.nan)


def loss_after(run: dict, loops: int) -> float:
    """Return the final loss after so many loops, infinite if the run diverged."""
    return run["loss_at"].get(str(loops), math.inf)


def larger_state(content: dict, loops: tuple[int, ...]) -> float:
    """Return log10 of the norm of LT's state over that of FLT's, as a mean over these loops."""
    return fmean(state(content, "lt", loop) - state(content, "flt", loop) for loop in loops)


def state_claims() -> list[Claim]:
    """Figures 2, 3 and 6."""

    def claim(where: str, says: str, number: str, read: Callable[[dict], float], rule: Rule) -> Claim:
        return Claim(where, says, number, f"{SIZE}, 12 loops", WITH_GRADIENTS, each_seed(read), rule)

    return [
        claim("figures 2 and 3", "LT's state is larger than FLT's after the first loop",
              "log10 of the ratio of the norms", lambda c: larger_state(c, (1,)), Effect()),
        claim("figure 6", "LT's state is larger than FLT's after loops 6, 9 and 12",
              "log10 of the ratio of the norms, mean of the three", lambda c: larger_state(c, (6, 9, 12)), Effect()),
        claim("figure 6", "LT's state becomes larger over later loops",
              "log10 of LT's norm after loop 12 over that after loop 3; LT norms its state after every loop",
              lambda c: state(c, "lt", 12) - state(c, "lt", 3), Effect()),
        claim("figure 6", "FLT's state stays", "log10 of the norm after loop 12 over that after loop 1",
              lambda c: state(c, "flt", 12) - state(c, "flt", 1), Near(0.0, 0.15)),
        Claim("figure 3", "FLT_res's state is smaller than LT's after the first loop",
              "log10 of LT's norm over that of FLT_res", f"{SIZE}, 12 loops", SYSTEMS,
              each_seed(lambda c: state(c, "lt", 1) - state(c, "flt_residual", 1)), Effect()),
    ]  # fmt: skip


def gradient_claims() -> list[Claim]:
    return [
        Claim(
            "figure 7",
            f"gradients of {name} swing more in LT than in FLT",
            "log10 of the largest over the least during training: LT less FLT",
            f"{SIZE}, 12 loops",
            WITH_GRADIENTS,
            swings_more("lt", block),
            Effect(),
        )
        for name, block in WATCHED.items()
    ]


def gained(between_loops: dict[int, tuple[int, int]], least: float = 0.0) -> Callable[[dict], Estimate | None]:
    """Return a function that gives how much FLT's loss falls from one number of loops to another.

    between_loops: trained loops -> (fewer, more) loops of the evaluation. The result is the mean over the trained
    loops; None if no run changes by `least`.
    """

    def read(content: dict) -> Estimate | None:
        of_seeds = []
        for found in content["seeds"].values():
            runs = {trained: run_at(found, "flt", trained) for trained in between_loops}
            gains = [
                loss_after(runs[k], fewer) - loss_after(runs[k], more) for k, (fewer, more) in between_loops.items()
            ]
            of_seeds += [] if math.isnan(fmean(gains)) else [gains]  # where a run diverged
        if all(abs(gain) < least for gains in of_seeds for gain in gains):
            return None
        return over_seeds(map(fmean, of_seeds))

    return read


def percent(system: str, loops: int, other: str, other_loops: int) -> float:
    at = {3: 0, 6: 1, 9: 2}
    return 100 * (BITS[system][at[loops]] / BITS[other][at[other_loops]] - 1)


def bits_claim(says: str, number: str, first: tuple[str, int], second: tuple[str, int]) -> Claim:
    """Claim that the first (system, loops) has a greater loss than the second, by as much as in table 1."""
    rule = Effect(percent(*first, *second))
    return Claim("table 1", says, number, SIZE, SYSTEMS, between(excess, first, second), rule)


def bits_claims() -> list[Claim]:
    """Compare every cell of table 1 (small size) with that of FLT, and LT and FLT over loops."""
    cells = [(system, k) for system, of in BITS.items() if system != "flt" for k, bits in zip((3, 6, 9), of)
             if not math.isnan(bits)]  # fmt: skip
    pairs = [((system, k), ("flt", k)) for system, k in cells]
    pairs = [(one, other) if percent(*one, *other) > 0 else (other, one) for one, other in pairs]
    return [
        bits_claim("LT gets worse with loops: 5.8 % more bits per byte at 9 than at 3, small",
                   "loss of LT at 9 over that at 3, %", ("lt", 9), ("lt", 3)),
        bits_claim("FLT gains from loops: 0.4 % fewer bits per byte at 9 than at 3, small",
                   "loss of FLT at 3 over that at 9, %", ("flt", 3), ("flt", 9)),
        *(
            bits_claim(f"at {k} loops {NAMES[one]} has {percent(one, k, other, k):.1f} % more bits per byte than "
                       f"{NAMES[other]}, small", f"loss of {NAMES[one]} over that of {NAMES[other]}, {k} loops, %",
                       (one, k), (other, k))
            for (one, k), (other, _) in pairs
        ),
    ]  # fmt: skip


def collapse_claims() -> list[Claim]:
    def claim(where: str, says: str, collapsed: bool, systems: tuple[str, ...], loops: tuple[int, ...]) -> Claim:
        """A claim about systems of which all runs collapsed in the paper, or none."""
        number = "that train" if collapsed else "that collapse"
        read = share_of_runs(collapsed, systems, loops)
        return Claim(where, says, f"share of the runs {number}", SIZE, SYSTEMS, read, SELDOM)

    return [
        claim("figure 2", "with 12 loops LT collapses, 6 layers", True, ("lt",), (12,)),
        claim("figure 4", "with 12 loops LT_i and LT_ai collapse too, base size", True,
              ("lt_input", "lt_attention"), (12,)),
        claim("section 5.1, figure 3", "FLT_res collapses at various numbers of loops, as at 12", True,
              ("flt_residual",), (12,)),
        claim("table 1, figures 2 and 4", "FLT trains with 3, 6, 9 and 12 loops, small and base size", False,
              ("flt",), (3, 6, 9, 12)),
        claim("table 1", "LT trains with 3, 6 and 9 loops, small", False, ("lt",), (3, 6, 9)),
        claim("table 1", "with 6 loops LT_ai collapses, small", True, ("lt_attention",), (6,)),
    ]  # fmt: skip


def training_claims() -> list[Claim]:
    """Figures 2 and 3, without the claims on the state."""

    def claim(where: str, says: str, number: str, read: Callable[[dict], Estimate]) -> Claim:
        return Claim(where, says, number, SIZE, SYSTEMS, read, Effect())

    swings = "log10 of the largest over the least during training"
    return [
        claim("figure 2", "LT's loss with 9 loops is above that with 6", "loss of LT at 9 over that at 6, %",
              between(excess, ("lt", 9), ("lt", 6))),
        claim("figures 2 and 3", "with 12 loops LT's gradients of the first MLP swing more than FLT's",
              f"{swings}: LT less FLT", swings_more("lt", FIRST_MLP)),
        claim("figure 3", "FLT_res's gradients of the first MLP swing more than FLT's",
              f"{swings}, 12 loops: FLT_res less FLT", swings_more("flt_residual", FIRST_MLP)),
    ]  # fmt: skip


def budget_claims() -> list[Claim]:
    """Figure 5. Losses replace its accuracies, because models of this size do not reach such accuracies."""

    def claim(says: str, number: str, read: Callable[[dict], Estimate | None], rule: Rule) -> Claim:
        unused = f"loops beyond the third change the loss by less than {LEAST_CHANGE:g} nats in every run"
        return Claim("figure 5", says, number, SIZE, SYSTEMS, read, rule, absent=unused)

    return [
        claim("FLT trained with 9 or 12 loops gains from loops", "loss after 1 loop less that after all",
              gained({9: (1, 9), 12: (1, 12)}), Effect()),
        claim("FLT trained with 9 or 12 loops gains from loops after the third",
              "loss after 3 loops less that after all", gained({9: (3, 9), 12: (3, 12)}, LEAST_CHANGE), Effect()),
        claim("with more loops than FLT is trained with its performance begins to fluctuate",
              "loss after as many loops as trained, 3, 6 or 9, less that after 12",
              gained({k: (k, 12) for k in (3, 6, 9)}, LEAST_CHANGE), Differs()),
    ]  # fmt: skip


# table 2


def excess_over_full(variant: str):
    """Return a function that gives the loss of a variant over that of the full model, in percent; infinite where the
    variant collapses."""

    def read(content: dict) -> float:
        losses = losses_by_name(content)
        return 100 * (losses[variant] / losses["full"] - 1)

    return each_seed(read)


def variant_claims() -> list[Claim]:
    names = {"grouped": "grouped queries", "latent": "latent attention", "windows": "sliding windows"}
    return [
        Claim(
            "table 2",
            f"FLT with {name} trains as well at 12 loops: at most 1.0 % more bits per byte, base size",
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
        points = [(k, fmean(map(loss_of, runs_at(content, system, k)))) for k in (3, 6, 9, 12)]
        ours.append(Line(name, points, f"c{i}"))
    deeper = [
        Line(f"trained with {k}", [(n, fmean(loss_after(run, n) for run in runs_at(content, "flt", k)))
                                   for n in (1, 3, 6, 9, 12)], ordered(i, 4))
        for i, k in enumerate((3, 6, 9, 12))
    ]  # fmt: skip
    norms = [
        Line(NAMES[system], [(k, fmean(norm_after(run, k) for run in runs_at(content, system, 12)))
                             for k in range(1, 13)], f"c{i}")
        for i, system in enumerate(NAMES)
    ]  # fmt: skip
    colors = {system: f"c{i}" for i, system in enumerate(NAMES)}
    paper = [
        Line(NAMES[system], [(k, value) for k, value in zip((3, 6, 9), bits) if value == value], colors[system])
        for system, bits in BITS.items()
    ]
    levels = {"frequencies of tokens": fmean(found["loss_of_frequencies"] for found in content["seeds"].values())}
    return [
        Chart("Ours: loss over trained loops", "loops", "loss", ours, levels=levels, x_ticks=[3, 6, 9, 12]),
        Chart("FLT: loss after other numbers of loops", "loops", "loss", deeper, x_ticks=[1, 3, 6, 9, 12]),
        Chart("Norm of the state, trained with 12 loops", "loops", "norm", norms, log_y=True, whole_x=True),
        Chart("The paper's small models", "loops", "bits per byte", paper, x_ticks=[3, 6, 9]),
    ]


FULLY_LOOPED = Paper(
    "Simply Stabilizing the Loop via Fully Looped Transformer",
    [
        Measurement("attention", commands_of("attention"), runs_of, SIX_SEEDS),
        Measurement("gradients", commands_of("gradients"), with_gradients(runs_of), SIX_SEEDS),
        Measurement(
            "twelve_loops",
            commands_of("twelve_loops", "frequencies"),
            with_gradients(read_with_frequencies),
            SIX_SEEDS,
        ),
    ],
    [
        *collapse_claims(),
        *bits_claims(),
        *training_claims(),
        *state_claims(),
        *gradient_claims(),
        *budget_claims(),
        *variant_claims(),
        Beyond(
            "table 1",
            "FLT's perplexity on WikiText-2 falls from 40.47 to 38.44 from 3 to 9 loops, base",
            "models of this size and training gain next to nothing from loops beyond the third (figure 5)",
        ),
        Beyond(
            "tables 1 and 2",
            "the other perplexities on WikiText-2: LT's rises from 67.80 to 78.79 from 3 to 9 loops, small, and from "
            "43.12 to 51.38 from 3 to 6, base; FLT with 12 loops has 41.12, and 38.76 to 39.68 with other attention",
            "of another text than that of the training; on that the same systems are compared above",
        ),
        Beyond(
            "table 1",
            "base size: from 3 to 9 loops FLT's bits per byte fall from 0.898 to 0.892 and LT_i's and LT_ai's stay "
            "at 0.899 to 0.901; LT's rise from 0.905 to 0.947 from 3 to 6, and at 9 it collapses",
            LARGER,
        ),
        Beyond(
            "abstract, table 1",
            "FLT has the best average accuracy on six tasks at 9 loops, 41.72, base, and at 6 loops 13.2 % more than "
            "LT, 41.38 and 36.56; LT's falls from 40.52 to 36.56 from 3 to 6 loops, base, and from 32.57 to 30.22 "
            "from 3 to 9, small",
            NO_SIX_TASKS,
        ),
        Beyond(
            "tables 1 and 2, figure 8",
            "from 3 to 9 loops FLT's CORE rises from 15.37 to 16.16, base, and from 5.72 to 6.94, small; LT's falls "
            "from 8.13 to 4.67, small, and from 16.13 to 11.43 from 3 to 6, base; FLT with 12 loops has 15.58 to "
            "16.24 whatever its attention",
            NO_CORE,
        ),
    ],
    [Figure(SYSTEMS, charts)],
)
