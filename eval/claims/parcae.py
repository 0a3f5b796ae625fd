"""Parcae: Scaling Laws for Stable Looped Language Models."""

import math
from statistics import fmean

from looped_recipes.common.chart import Bars, Chart, Line, on_one_scale

from .definition import LARGER, NO_CORE, NO_SIX_TASKS, SIX_SEEDS, Beyond, Claim, Figure, Measurement, Paper, each_seed
from .parcae_depths import DEPTH_MEASUREMENTS, gradient_charts, gradient_claims, sampling_charts, sampling_claims
from .parcae_laws import LAW_MEASUREMENTS, law_charts, law_claims, size_charts, size_claims
from .parcae_parts import PART_MEASUREMENTS, part_charts, part_claims, rdm_charts, rdm_claims
from .rules import AtLeast, AtMost, Effect, Estimate
from .sweeps import commands_of, has_trained, read_with_frequencies


SIZE = "width 96, 1 + 1 + 1 layers, mean depth 8, English text"
FIVE = (1e-3, 3e-3, 1e-2, 2e-2, 3e-2)  # rates that stand for the five of table 2
RATES = f"{SIZE}, 100 steps, rates from 1e-3 to 3e-2"
System = tuple[str, str, bool]  # block norm, injection, whether prelude norm and C are there
BASE, NORMED = ("pre", "concat", False), ("residual_sandwich", "concat", False)
PARCAE, DIAGONAL = ("pre", "diagonal", True), ("pre", "diagonal", False)
NAMES = {
    BASE: "pre-norm RDM",
    NORMED: "RDM, normed residual",
    PARCAE: "Parcae",
    DIAGONAL: "Parcae without prelude norm and C",
}
PAPER_RATES = {"pre-norm RDM": 1.0, "RDM, normed residual": 2.0, "Parcae": 5.0}  # how many of table 2's 5 rates train
HIGHEST = {BASE: 2e-4, NORMED: 4e-4, PARCAE: 1e-3}  # highest rates that train in table 2, where 1e-3 is the last


# table 2 and figure 3


def system_of(run: dict) -> System:
    return run["model.block_norm"], run["model.injection"], run.get("model.prelude_norm", False)


def of_system(content: dict, system: System) -> list[dict]:
    return [run for run in content["runs"] if system_of(run) == system]


def trained_rates(content: dict, system: System) -> int:
    """Return how many of the five rates train."""
    runs = [run for run in of_system(content, system) if run["optimizer.lr"] in FIVE]
    return sum(has_trained(run, content) for run in runs)


def limit_of_rates(content: dict, system: System) -> tuple[float, float] | None:
    """Return log2 of the highest rate at which a system trains, and of the next of the grid: its limit lies between.
    None if it trains at no rate."""
    runs = of_system(content, system)
    highest = max((run["optimizer.lr"] for run in runs if has_trained(run, content)), default=None)
    if highest is None:
        return None
    beyond = min((run["optimizer.lr"] for run in runs if run["optimizer.lr"] > highest), default=math.inf)
    return math.log2(highest), math.log2(beyond)


def octaves_above(content: dict, system: System) -> Estimate | None:
    """Estimate the octaves from the limit of this system to that of Parcae. The interval holds what the
    grid leaves open in every seed; it counts no other seeds."""
    limits = [(limit_of_rates(seed, PARCAE), limit_of_rates(seed, system)) for seed in content["seeds"].values()]
    if any(ours is None or other is None for ours, other in limits):
        return None
    low = min(ours[0] - other[1] for ours, other in limits)
    high = max(ours[1] - other[0] for ours, other in limits)
    return Estimate(fmean(ours[0] - other[0] for ours, other in limits), low, high, len(limits))


def largest_radius(content: dict) -> float | None:
    """Return the largest radius of diagonal injection; None where a run ended before its radius was measured."""
    runs = of_system(content, PARCAE) + of_system(content, DIAGONAL)
    largest = max(run.get("spectral_radius") or math.inf for run in runs)
    return largest if math.isfinite(largest) else None


def radius_of_trained(content: dict) -> float | None:
    """Return the largest radius, at the last measurement, of the pre-norm runs that trained."""
    radii = [run["spectral_radius"] for run in of_system(content, BASE) if has_trained(run, content)]
    return max(radii, default=None)


def radius_beyond_one(content: dict) -> float | None:
    """Return the least radius, at the last measurement, of the pre-norm runs that did not train, minus 1."""
    radii = [run.get("spectral_radius") for run in of_system(content, BASE) if not has_trained(run, content)]
    known = [radius - 1 for radius in radii if radius is not None]
    return min(known) if known else None


def rates_charts(content: dict) -> list:
    lines = []
    for i, (system, name) in enumerate(NAMES.items()):
        by_rate: dict[float, list[float]] = {}
        for found in content["seeds"].values():
            for run in of_system(found, system):
                by_rate.setdefault(run["optimizer.lr"], []).append(run["loss"] or math.nan)
        lines.append(Line(name, [(rate, fmean(losses)) for rate, losses in by_rate.items()], f"c{i}"))
    without = fmean(found["loss_of_frequencies"] for found in content["seeds"].values())
    title = "Ours: loss after 100 steps over learning rates"
    losses = Chart(title, "learning rate", "loss", lines, log_x=True, levels={"frequencies of tokens": without})
    ours = {
        name: fmean(trained_rates(found, system) for found in content["seeds"].values())
        for system, name in NAMES.items()
    }
    whose = {"Ours": ours, "The paper's": PAPER_RATES}
    return [
        losses,
        *on_one_scale([Bars(f"{who}: rates that train, of five", "rates", of) for who, of in whose.items()]),
    ]


def rate_claims() -> list[Claim]:
    def claim(where: str, says: str, number: str, read, rule, by_construction: bool = False) -> Claim:
        return Claim(where, says, number, RATES, "claims/rates", each_seed(read), rule, by_construction)

    def octaves_claim(system: System, name: str, times: str) -> Claim:
        rates = f"{HIGHEST[PARCAE]:g} and more against {HIGHEST[system]:g}"
        return Claim("table 2", f"Parcae trains at rates at least {times} times as high as {name} does, {rates}",
                     "log2 of the highest rate that trains: Parcae, with a depth for each sequence, over "
                     f"{name}, with one depth a step; from what the grid of rates leaves open in any seed", RATES,
                     "claims/rates", lambda content: octaves_above(content, system),
                     AtLeast(round(math.log2(HIGHEST[PARCAE] / HIGHEST[system]), 2)))  # fmt: skip

    return [
        octaves_claim(BASE, "pre-norm RDM", "5"),
        octaves_claim(NORMED, "RDM with residual normalisation", "2.5"),
        claim("figure 3", "runs of pre-norm RDM that diverge learn a spectral radius above 1",
              "radius less 1, the least of the runs that did not train", radius_beyond_one, Effect()),
        claim("figure 3", "runs of pre-norm RDM that converge keep a spectral radius below 1",
              "the largest radius of the runs that trained", radius_of_trained, AtMost(1.0)),
        claim("table 1", "the spectral radius of diagonal injection stays below 1",
              "the largest radius of all runs, whether they trained or not", largest_radius, AtMost(1.0), True),
    ]  # fmt: skip


PARCAE_PAPER = Paper(
    "Parcae: Scaling Laws for Stable Looped Language Models",
    [
        Measurement("rates", commands_of("rates", "frequencies"), read_with_frequencies, SIX_SEEDS),
        *PART_MEASUREMENTS,
        *DEPTH_MEASUREMENTS,
        *LAW_MEASUREMENTS,
    ],
    [
        *rate_claims(),
        *rdm_claims(),
        *part_claims(),
        *sampling_claims(),
        *gradient_claims(),
        *size_claims(),
        *law_claims(),
        Beyond(
            "abstract, table 3",
            "at 350M Parcae has 6.2 % less perplexity than an RDM (the abstract: 6.3 %), and 9.1 % less on WikiText",
            LARGER,
        ),
        Beyond("table 3", "and it answers up to 1.8 points more of six tasks, 46.83 and 45.03 at 100M", NO_SIX_TASKS),
        Beyond(
            "table 4",
            "a depth for each sequence raises CORE by 9.6 points at 1 loop, 2.4 at 4 and 0.8 at 8, and the prelude "
            "norm changes it by 0.1 at most",
            NO_CORE,
        ),
        Beyond(
            "table 5",
            "at 370M, 770M and 1.3B Parcae has 8.2, 4.5 and 4.4 % less perplexity than a Transformer",
            LARGER,
        ),
        Beyond(
            "table 5",
            "on LAMBADA its perplexity is 36.7 % less at 140M, 80.64 and 127.39, and 11.9 to 19.7 % less at larger "
            "sizes",
            "its passages are longer than the 64 tokens that these models see at a time",
        ),
        Beyond(
            "table 5",
            "a Transformer of its size has up to 2.99 points less of CORE and 1.18 of CORE-extended, and Parcae gets "
            "23 to 88 % and 30 to 58 % of the way to a Transformer of twice its size",
            NO_CORE,
        ),
        Beyond(
            "table 6",
            "at the same operations the best depth gives 1.2 to 2.0 points more of CORE than no loops",
            NO_CORE,
        ),
        Beyond(
            "table 8",
            "at 350M a depth for each sequence lowers the loss by 2.24, 0.20, 0.03 and 0.01 nats at 1, 4, 8 and 16 "
            "loops",
            LARGER,
        ),
        Beyond(
            "section 5.2, tables 11 to 13",
            "the laws of 370M: exponents of 0.775 and 0.448, held-out losses to 0.8 %, an exponential over loops "
            "nearer than the other forms, and its floor to 0.05 %",
            LARGER,
        ),
        Beyond(
            "appendix G",
            "a depth for each sequence takes 1.8 % more time in training than one for the micro-batch",
            "a time of the authors' code and GPUs, and two processor cores tell nothing of it",
        ),
        Beyond(
            "appendix J, figures 17 to 22",
            "without the prelude norm the state explodes after 150,000 steps: injected preludes have large norms, "
            "while A, B and what C does stay small",
            "seen in a model of 1.3 billion parameters only; smaller ones were stable without that norm",
        ),
    ],
    [
        Figure("claims/rates", rates_charts),
        Figure("claims/against_rdm", rdm_charts),
        Figure("claims/parts", part_charts),
        Figure("claims/sampling", sampling_charts),
        Figure("claims/gradient_loops", gradient_charts),
        Figure("claims/epoch_sizes", size_charts),
        Figure("claims/isoflop", law_charts),
        Figure("claims/isoflop_long", law_charts),
    ],
)
