"""Measurements made by a function, not by a training. Each function gets a seed and the folder of that seed."""

import json
from collections.abc import Callable
from pathlib import Path

from .after_training import after_training
from .answers import TASKS, answers
from .definition import MADE_BY, Measurement, Setting
from .frequencies import loss_of_frequencies
from .growth import cosines, growth
from .laws import laws
from .probes import probes
from .theorems import theorems


RESULT = "{}.json"
SYSTEMS = ("looped", "as_many_parameters", "as_many_operations")


def trained_in(folder: Path) -> dict[str, Path]:
    """Return the finished runs of a sweep by name."""
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/final"))}


FUNCTIONS: dict[str, Callable[[int, Path], dict]] = {
    "growth": lambda seed, _: growth(seed),
    "cosines": lambda seed, _: cosines(seed),
    "theorems": lambda seed, _: theorems(seed),
    "frequencies": lambda _, folder: {"loss": loss_of_frequencies(next(folder.glob("*/recipe.yaml")).parent)},
    "probes": lambda _, folder: probes(trained_in(folder)),
    "laws": lambda _, folder: laws(folder),
    "after_training": lambda _, folder: after_training(trained_in(folder)),
    **{task: lambda _, folder, task=task: answers(folder, task, SYSTEMS) for task in TASKS},
}


def by_function(name: str, folder: Path, seed: int) -> list[str]:
    """Return the command that runs one function."""
    return ["looped_eval.claims", "measure", str(folder), "--only", name, "--seed", str(seed)]


def function(name: str, seeds: int = 3) -> Measurement:
    """Return a measurement that consists of one function."""

    def commands(setting: Setting, seed: int) -> list[list[str]]:
        return [by_function(name, setting.of(name, seed), seed)]

    return Measurement(name, commands, result_of(name), tuple(range(seeds)))


def result_of(name: str) -> Callable[[Path], dict | None]:
    """Return a function that reads what the function `name` wrote into a folder; None where nothing is there."""

    def read(folder: Path) -> dict | None:
        path = folder / RESULT.format(name)
        if not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        made_by = {key: content.pop(key) for key in MADE_BY}
        return {**content, "made_by": made_by}

    return read
