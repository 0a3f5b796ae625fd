"""Measurements that are sweeps of recipes/claims, one for each seed."""

import json
from collections.abc import Callable
from pathlib import Path

from looped_recipes.common.files import lines_of
from looped_recipes.common.metrics import last_validation

from .definition import BETTER_THAN_FREQUENCIES, MADE_BY, Setting, loss_of
from .functions import by_function, result_of


KEPT = ("spectral_radius", "residual_norm/", "state_norm/")


def by_sweep(sweep: str, folder: Path, text: str, seed: int) -> list[str]:
    """Return the command that runs the sweep."""
    settings = [f"data.source={text}", f"training.seed={seed}", f"training.output_dir={folder}"]
    return ["looped_recipes.sweep", f"claims/{sweep}.sweep.yaml", *settings]


def commands_of(sweep: str, *functions: str, name: str | None = None) -> Callable[[Setting, int], list[list[str]]]:
    """Return the commands of a measurement: a sweep, then functions that read its folder.

    name: name of the measurement, if it differs from that of the sweep.
    """

    def commands(setting: Setting, seed: int) -> list[list[str]]:
        folder = setting.of(name or sweep, seed)
        return [by_sweep(sweep, folder, setting.text, seed), *(by_function(each, folder, seed) for each in functions)]

    return commands


def runs_of(folder: Path) -> dict | None:
    """Return every run with its settings, losses over depth, norms and radius; None until all runs have ended."""
    path = folder / "results.jsonl"
    if not path.is_file():
        return None
    lines = [json.loads(line) for line in lines_of(path)]
    made_by = {key: lines[-1][key] for key in MADE_BY}
    return {"runs": [shortened(line) for line in lines], "made_by": made_by}


def shortened(line: dict) -> dict:
    metrics = line.get("metrics", {})
    settings = {key: value for key, value in line.items() if "." in key}
    found = {"name": line["name"], **settings, "loss": line["loss"]}
    if "diverged" in line:
        found["diverged"] = line["diverged"]
    loss_at = {str(depth): loss for depth, loss in last_validation([metrics], "loss").items()}
    return {**found, "loss_at": loss_at, **{key: value for key, value in metrics.items() if key.startswith(KEPT)}}


def read_with_frequencies(folder: Path) -> dict | None:
    """Return the runs of a sweep and the loss of the token frequencies of their text; None until both are there."""
    found, without = runs_of(folder), result_of("frequencies")(folder)
    return found and without and {**found, "loss_of_frequencies": without["loss"]}


def has_trained(run: dict, content: dict) -> bool:
    return loss_of(run) < content["loss_of_frequencies"] - BETTER_THAN_FREQUENCIES
