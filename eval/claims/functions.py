"""Measurements made by a function, not by a training. Each function gets a seed and the folder of that seed."""

import json
from collections.abc import Callable
from pathlib import Path

from .definition import MADE_BY, Measurement, Setting


RESULT = "{}.json"
SYSTEMS = ("looped", "as_many_parameters", "as_many_operations")


def growth(seed: int, folder: Path) -> dict:
    from .growth import growth

    return growth(seed)


def cosines(seed: int, folder: Path) -> dict:
    from .growth import cosines

    return cosines(seed)


def theorems(seed: int, folder: Path) -> dict:
    from .theorems import theorems

    return theorems(seed)


def frequencies(seed: int, folder: Path) -> dict:
    from .frequencies import loss_of_frequencies

    return {"loss": loss_of_frequencies(next(folder.glob("*/recipe.yaml")).parent)}


def trained_in(folder: Path) -> dict[str, Path]:
    """Return the finished runs of a sweep by name."""
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/final"))}


def probes(seed: int, folder: Path) -> dict:
    from .probes import probes

    return probes(trained_in(folder))


def laws(seed: int, folder: Path) -> dict:
    from .laws import laws

    return laws(folder)


def after_training(seed: int, folder: Path) -> dict:
    from .after_training import after_training

    return after_training(trained_in(folder))


def answers_of(task: str) -> Callable[[int, Path], dict]:
    def measure(seed: int, folder: Path) -> dict:
        from .answers import answers

        return answers(folder, task, SYSTEMS)

    return measure


FUNCTIONS: dict[str, Callable[[int, Path], dict]] = {
    "growth": growth,
    "cosines": cosines,
    "theorems": theorems,
    "frequencies": frequencies,
    "probes": probes,
    "laws": laws,
    "after_training": after_training,
    **{task: answers_of(task) for task in ("p_hop", "permutation", "addition", "row")},
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
