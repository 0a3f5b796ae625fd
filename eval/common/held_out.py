"""Text that a trained model has not learned from: the validation split of its own run."""

from pathlib import Path

import numpy as np
import torch

from looped_recipes.data.shards import Prepared, prepare
from looped_recipes.settings.recipe import DataConfig, RecipeError, recipe_of_run


class HeldOutError(ValueError):
    """A model of which it is not known what it was trained on."""


ADVICE = "name a text that it was not trained on"


def run_data(run: Path) -> DataConfig:
    """What the run was trained and validated on."""
    path = run / "recipe.yaml"
    if not path.is_file():
        raise HeldOutError(f"{run} holds no recipe.yaml, so what this model was trained on is not known: {ADVICE}")
    return recipe_of_run(run).data


def prepared_data(run: Path, data: DataConfig) -> Prepared:
    """The run's data, prepared again if its shards are gone."""
    try:
        return prepare(data)
    except RecipeError as error:
        raise HeldOutError(
            f"what {run} held out cannot be read ({error}): bring that text back, or {ADVICE}"
        ) from error


def held_out_rows(
    run: Path, count: int, length: int, seed: int | None = None, least: int | None = None
) -> tuple[torch.Tensor, str]:
    """[count, length] tokens of the validation split, no token twice, and a name for what was read.

    Rows are drawn at random with a seed, and else taken from the beginning. least: how many rows are enough where the
    split holds fewer than `count`. Start tokens that no model has learned to predict are left out, so that documents
    are joined by their end tokens.
    """
    data = run_data(run)
    rows = prepared_data(run, data).validation
    stream = np.concatenate([np.asarray(shard, dtype=np.int64) for shard in rows.shards])
    if not rows.learn_start:
        stream = stream[stream != rows.start]
    available = len(stream) // length
    least = count if least is None else least
    if available < least:
        raise HeldOutError(
            f"the validation split of {run} holds {len(stream)} tokens, fewer than {least} rows of {length}: ask for "
            "fewer or shorter rows, or name another text"
        )
    count = min(count, available)
    order = torch.arange(count)
    if seed is not None:
        order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:count]
    found = torch.from_numpy(stream[: available * length]).view(available, length)[order]
    return found, f"validation split of {run} ({data.validation_source or data.source})"
