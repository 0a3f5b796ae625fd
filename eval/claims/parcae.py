"""Parcae: Scaling Laws for Stable Looped Language Models."""

import math
from pathlib import Path
from statistics import fmean

from looped_recipes.common.chart import Bars, Chart, Line, on_one_scale
from looped_recipes.common.metrics import read_metrics
from looped_recipes.common.words import counted

from .definition import Claim, Figure, Measurement, Paper, Setting, each_seed, loss_of
from .functions import by_function, result_of
from .parcae_laws import LAW_MEASUREMENTS, law_charts, law_claims, size_charts, size_claims
from .rules import AtMost, Effect
from .sweeps import by_sweep, runs_of, sweep_alone


SIZE = "width 96, 1 + 1 + 1 layers, mean depth 8, English text"
BASE, NORMED, PARCAE = ("pre", "concat"), ("residual_sandwich", "concat"), ("pre", "diagonal")
NAMES = {BASE: "pre-norm RDM", NORMED: "RDM, normed residual", PARCAE: "Parcae"}
PAPER_RATES = dict(zip(NAMES.values(), (1.0, 2.0, 5.0)))  # that train, of five, in table 2
BETTER_THAN_FREQUENCIES = 0.1  # nats, from which on a run counts as trained
SPIKE = 0.5  # nats above the mean of the ten steps before


# table 2 and figure 3


def rates_of(setting: Setting, seed: int) -> list[list[str]]:
    folder = setting.of("rates", seed)
    return [by_sweep("rates", folder, setting.text, seed), by_function("frequencies", folder, seed)]


def read_rates(folder: Path) -> dict | None:
    found, without = runs_of(folder), result_of("frequencies")(folder)
    return found and without and {**found, "loss_of_frequencies": without["loss"]}


def of_system(content: dict, system: tuple[str, str]) -> list[dict]:
    return [run for run in content["runs"] if (run["model.block_norm"], run["model.injection"]) == system]


def has_trained(run: dict, content: dict) -> bool:
    return run["loss"] is not None and run["loss"] < content["loss_of_frequencies"] - BETTER_THAN_FREQUENCIES


def trained_rates(content: dict, system: tuple[str, str]) -> int:
    return sum(has_trained(run, content) for run in of_system(content, system))


def more_rates(than: tuple[str, str]):
    return each_seed(lambda content: trained_rates(content, PARCAE) - trained_rates(content, than))


def largest_radius(content: dict) -> float | None:
    """None where a run ended before it was measured."""
    largest = max(run.get("spectral_radius") or math.inf for run in of_system(content, PARCAE))
    return largest if math.isfinite(largest) else None


def radius_beyond_one(content: dict) -> float | None:
    """Of the pre-norm runs that did not train, the least; at their last measurement."""
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


def gain_at_a_high_rate(content: dict) -> float:
    """What concat injection loses at a rate of 1e-2."""
    concat, diagonal = (
        next(loss_of(run) for run in of_system(content, system) if run["optimizer.lr"] == 0.01)
        for system in (BASE, PARCAE)
    )
    return concat - diagonal


# table 8 and figure 10


def spikes(run: Path) -> int:
    losses = [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    return sum(losses[i] > fmean(losses[i - 10 : i]) + SPIKE for i in range(10, len(losses)))


def read_sampling(folder: Path) -> dict | None:
    found = runs_of(folder)
    return found and {**found, "spikes": {run["name"]: spikes(folder / run["name"]) for run in found["runs"]}}


def loss_at(content: dict, per: str, depth: int) -> float:
    """Infinite where the run diverged."""
    run = next(run for run in content["runs"] if run["depth.per"] == per)
    return math.inf if run["loss"] is None else run["loss_at"].get(str(depth)) or math.inf


def gained_at(depth: int):
    return each_seed(lambda content: loss_at(content, "batch", depth) - loss_at(content, "sequence", depth))


PAPER_LOSSES = {  # perplexities of the 100M models at 1, 4, 8 and 16 loops
    "batch": (300.32, 36.75, 16.65, 13.81),
    "sequence": (70.47, 17.15, 14.08, 13.59),
}


def sampling_charts(content: dict) -> list[Chart]:
    depths, seeds = (1, 4, 8, 16), content["seeds"].values()
    ours = [[(k, fmean(loss_at(found, per, k) for found in seeds)) for k in depths] for per in PAPER_LOSSES]
    paper = [[(k, math.log(value)) for k, value in zip(depths, values)] for values in PAPER_LOSSES.values()]
    return [
        Chart(title, "loops", "loss", [Line("one depth a step", one, "c0"), Line("for each sequence", other, "c1")])
        for title, (one, other) in (("Ours: loss over depth", ours), ("The paper's: 100M", paper))
    ]


PARCAE_PAPER = Paper(
    "Parcae: Scaling Laws for Stable Looped Language Models",
    [
        Measurement("rates", rates_of, read_rates),
        Measurement("sampling", sweep_alone("sampling"), read_sampling),
        *LAW_MEASUREMENTS,
    ],
    [
        Claim(
            "table 2",
            "Parcae trains at 5 of 5 learning rates, pre-norm RDM at 1",
            "rates that train, of five: Parcae less pre-norm RDM",
            f"{SIZE}, 100 steps, rates 1e-3 to 3e-2",
            "claims/rates",
            more_rates(BASE),
            Effect(4),
        ),
        Claim(
            "table 2",
            "Parcae trains at 5 of 5 learning rates, RDM with residual normalisation at 2",
            "rates that train, of five: Parcae less RDM with residual normalisation",
            f"{SIZE}, 100 steps, rates 1e-3 to 3e-2",
            "claims/rates",
            more_rates(NORMED),
            Effect(3),
        ),
        Claim(
            "figure 3",
            "runs of pre-norm RDM that diverge learn a spectral radius above 1",
            "radius less 1, the least of the runs that did not train",
            f"{SIZE}, 100 steps",
            "claims/rates",
            each_seed(radius_beyond_one),
            Effect(),
        ),
        Claim(
            "table 1",
            "Parcae's spectral radius stays below 1",
            "largest radius over five rates",
            f"{SIZE}, 100 steps",
            "claims/rates",
            each_seed(largest_radius),
            AtMost(1.0),
        ),
        Claim(
            "table 2",
            "at a rate where diagonal injection trains, concat injection does not",
            "loss of concat injection less that of diagonal, rate 1e-2",
            f"{SIZE}, 100 steps",
            "claims/rates",
            each_seed(gain_at_a_high_rate),
            Effect(),
        ),
        *(
            Claim(
                "table 8",
                f"a depth for each sequence instead of the step lowers the loss at {counted(k, 'loop')}",
                f"loss at {k}: one depth a step less one for each sequence (the paper's 100M)",
                f"{SIZE}, 300 steps",
                "claims/sampling",
                gained_at(k),
                Effect(math.log(PAPER_LOSSES["batch"][i] / PAPER_LOSSES["sequence"][i])),
            )
            for i, k in ((0, 1), (2, 8))
        ),
        Claim(
            "figure 10",
            "a depth for each sequence leaves out the spikes of the loss",
            f"steps with a loss {SPIKE} above the ten before: one depth a step less one for each sequence",
            f"{SIZE}, 300 steps",
            "claims/sampling",
            each_seed(lambda content: content["spikes"]["per=batch"] - content["spikes"]["per=sequence"]),
            Effect(),
        ),
        *size_claims(),
        *law_claims(),
    ],
    [
        Figure("claims/rates", rates_charts),
        Figure("claims/sampling", sampling_charts),
        Figure("claims/sizes", size_charts),
        Figure("claims/isoflop", law_charts),
    ],
)
