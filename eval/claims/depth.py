"""Claims on the use of depth: a looped model beside plain ones, at equal parameters and at equal operations."""

from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import NamedTuple

from looped_recipes.common.chart import Chart, Line

from .answers import TASKS
from .definition import SIX_SEEDS, Claim, Figure, Measurement, Paper, Setting, each_seed
from .functions import SYSTEMS, by_function, result_of
from .rules import AtMost, Effect
from .sweeps import by_sweep


LOOPED, SAME_PARAMETERS, SAME_OPERATIONS = SYSTEMS
NAMES = {
    LOOPED: "one layer, four loops",
    SAME_PARAMETERS: "one layer, one loop",
    SAME_OPERATIONS: "four layers, one loop",
}
MATCHES = 0.05  # share of the questions; systems match if the better one answers at most this many more


class Training(NamedTuple):
    text: list[str]  # settings of the generated text
    length: int  # tokens of a row, which holds one document
    rows: int  # per step
    steps: int = 600
    model: tuple[str, ...] = ()  # settings shared by the three systems
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def size(self) -> str:
        return f"one layer of width 128, 4 loops, {self.steps} steps"

    @property
    def settings(self) -> list[str]:
        rows = [f"training.rows_per_step={self.rows}", f"training.micro_batch_size={self.rows}"]
        steps = f"training.steps={self.steps}"
        return [f"data.sequence_length={self.length}", steps, "data.packing=best_fit", *rows, *self.model]


# only their positions in the text tell places and swaps apart, and rotary positions alone do not show these
BY_PLACE = ("model.position_embedding=learned",)
LOW_RATES = ("optimizer.muon_lr=0.005", "optimizer.lr=1.0e-3")  # at higher rates four layers do not begin to learn
TRAININGS = {
    "p_hop": Training(["hops=4"], 35, 96, seeds=SIX_SEEDS),
    "permutation": Training(["swaps=4", "symbols=5", "questions=5"], 23, 128, 1200, BY_PLACE, SIX_SEEDS),
    "addition": Training(["digits=8"], 29, 112, 1200, LOW_RATES, SIX_SEEDS),  # of 4 digits one loop answers nearly all
    "row": Training(["moves=3"], 34, 128, 1800, (*BY_PLACE, *LOW_RATES)),
}
DOCUMENTS = 200_000


def commands_of(task: str):
    def commands(setting: Setting, seed: int) -> list[list[str]]:
        folder, text = setting.of(task, seed), setting.folder / "text" / f"{task}.jsonl"
        generate = ["looped_eval.tasks.generate", task, *TRAININGS[task].text]
        generate += ["--documents", str(DOCUMENTS), "--output", str(text)]
        train = [*by_sweep("depth", folder, str(text), seed), *TRAININGS[task].settings]
        ask = by_function(task, folder, seed)
        return [train, ask] if text.is_file() else [generate, train, ask]

    return commands


def at_last(content: dict, system: str, level: int) -> float:
    """Return the share of right answers at the trained depth."""
    return content["systems"][system][str(level)]["accuracy"][-1]


def exit_loops(content: dict, level: int) -> float:
    return content["systems"][LOOPED][str(level)]["exit_loops"]


def claims_of(task: str) -> list[Claim]:
    harder, levels, _ = TASKS[task]
    name, source, last, size = task.replace("_", "-"), f"claims/{task}", levels[-1], TRAININGS[task].size

    def better_than(system: str, content: dict) -> float:
        return at_last(content, LOOPED, last) - at_last(content, system, last)

    claims = [
        Claim(
            f"{name}, equal parameters",
            "the same layer answers more questions after four loops than after one",
            f"right answers to {last} {harder}: four loops less one",
            size,
            source,
            each_seed(partial(better_than, SAME_PARAMETERS)),
            Effect(),
        ),
        Claim(
            f"{name}, equal operations",
            "four layers of their own, with four times the parameters, answer hardly more than four loops of one",
            f"right answers to {last} {harder}: four layers less four loops",
            size,
            source,
            each_seed(lambda content: -better_than(SAME_OPERATIONS, content)),
            AtMost(MATCHES),
        ),
    ]
    if len(levels) == 1:
        return claims
    exits = Claim(
        f"{name}, exits",
        "harder questions take more loops",
        f"loops until every word is 90 % sure: {last} {harder} less {levels[0]}",
        size,
        source,
        each_seed(lambda content: exit_loops(content, last) - exit_loops(content, levels[0])),
        Effect(),
    )
    return [*claims, exits]


def mean(content: dict, number: Callable[[dict], float]) -> float:
    return fmean(map(number, content["seeds"].values()))


def charts_of(task: str) -> Callable[[dict], list[Chart]]:
    return partial(by_difficulty if len(TASKS[task][1]) > 1 else by_loops, task)


def by_difficulty(task: str, content: dict) -> list[Chart]:
    harder, levels, _ = TASKS[task]
    right = [
        Line(name, [(level, mean(content, partial(at_last, system=system, level=level))) for level in levels], f"c{i}")
        for i, (system, name) in enumerate(NAMES.items())
    ]
    stops = [(level, mean(content, partial(exit_loops, level=level))) for level in levels]
    return [
        Chart(f"{task}: right answers", harder, "share right", right, whole_x=True, ends=(0, 1)),
        Chart(f"{task}: loops until 90 % sure", harder, "loops", [Line("", stops)], whole_x=True),
    ]


def by_loops(task: str, content: dict) -> list[Chart]:
    harder, (level,), _ = TASKS[task]
    after = zip(*(found["systems"][LOOPED][str(level)]["accuracy"] for found in content["seeds"].values()))
    looped = Line(NAMES[LOOPED], [(k, fmean(values)) for k, values in enumerate(after, start=1)])
    plain = {NAMES[name]: mean(content, partial(at_last, system=name, level=level)) for name in SYSTEMS[1:]}
    title = f"{task}: right answers to {level} {harder}"
    return [Chart(title, "loops", "share right", [looped], levels=plain, whole_x=True)]


DEPTH = Paper(
    "What depth is good for, which no paper claims by these numbers",
    [Measurement(task, commands_of(task), result_of(task), TRAININGS[task].seeds) for task in TASKS],
    [claim for task in TASKS for claim in claims_of(task)],
    [Figure(f"claims/{task}", charts_of(task)) for task in TASKS],
    is_published=False,
)
