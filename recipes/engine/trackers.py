"""Trackers of accelerate, which get what metrics.jsonl gets."""

import uuid
from pathlib import Path

from looped_recipes.common.errors import CommandError, first_line
from looped_recipes.common.metrics import read_metrics
from looped_recipes.settings.recipe import Recipe


def name_of_run(provenance: Path) -> str:
    """Return the name under which trackers know a run, from its launches; a new one for a run without launches."""
    names = (launch["run"] for launch in read_metrics(provenance) if "run" in launch)
    return next(names, f"{provenance.absolute().parent.name}-{uuid.uuid4().hex[:8]}")


def start_trackers(accelerator, recipe: Recipe, step: int, name: str):
    """Start the trackers on the main process; a run that goes on goes on in its own run there."""
    arguments = {
        "tensorboard": {"purge_step": step},  # drops what was logged after the checkpoint
        "wandb": {"id": name.rpartition("-")[2], "name": name, "resume": "allow"},
        "trackio": {"name": name, "resume": "allow"},
    }
    try:
        accelerator.init_trackers(recipe.logging.project, flat(recipe.to_dict()), init_kwargs=arguments)
    except Exception as error:  # of many kinds: no login, no connection, no room
        reason = first_line(error).rstrip(".")
        raise CommandError(
            f"logging.trackers={recipe.logging.trackers} can not start: {reason}; set the tracker up, or leave it out "
            "(metrics.jsonl holds all that it gets)"
        ) from error


def flat(nested: dict, prefix: str = "") -> dict:
    result = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[prefix + key] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return result
