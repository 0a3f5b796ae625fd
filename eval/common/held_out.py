"""Text that a trained model has not learned from: the validation split of its training run."""

from pathlib import Path

import numpy as np
import torch

from looped_eval.common.model_folder import training_run
from looped_recipes.data.packing import PackedRows
from looped_recipes.data.shards import Prepared, prepare
from looped_recipes.settings.recipe import DataConfig, RecipeError, recipe_of_run


class HeldOutError(ValueError):
    """Raised if a model's held-out text is unknown, cannot be read, or is too short."""


ADVICE = "name a text that it was not trained on"


def own_run(target: str, tokenizer: str | None, advice: str = ADVICE) -> Path:
    """Return the training run of a model, which records the held-out text. tokenizer: another one, if it is named."""
    run = training_run(target)
    if run is None:
        raise HeldOutError(f"{target!r} is in no training run, so what it was trained on is not known: {advice}")
    if tokenizer is not None:
        raise HeldOutError(f"what {run} held out is read with its own tokenizer: leave out --tokenizer, or {advice}")
    return run


def run_data(run: Path) -> DataConfig:
    """Return the data settings that the run was trained and validated with."""
    path = run / "recipe.yaml"
    if not path.is_file():
        raise HeldOutError(f"{run} holds no recipe.yaml, so what this model was trained on is not known: {ADVICE}")
    return recipe_of_run(run).data


def prepared_data(run: Path, data: DataConfig) -> Prepared:
    """Return the run's data; its shards are made again if they are missing."""
    try:
        return prepare(data)
    except RecipeError as error:
        raise HeldOutError(
            f"what {run} held out cannot be read ({error}): bring that text back, or {ADVICE}"
        ) from error


def held_out_rows(run: Path, count: int, length: int, seed: int | None = None) -> tuple[torch.Tensor, str]:
    """Return [count, length] tokens of the validation split, no token twice, and a name of the text.

    With a seed, rows are drawn at random; without, they are taken from the beginning. Start tokens that the model has
    not learned to predict are removed, so that every token is a target: for long documents only, which hardly need
    them. The claims were measured on these rows; `batch_as_trained` keeps start tokens.
    """
    data = run_data(run)
    rows = prepared_data(run, data).validation
    stream = stream_of(rows)
    if not rows.learn_start:
        stream = stream[stream != rows.start]
    return cut(stream, length, length, count, seed, count, run), name_of(run, data)


def rows_as_trained(run: Path, count: int, length: int, seed: int, least: int) -> tuple[torch.Tensor, int | None, str]:
    """Return [count, length] tokens of the validation split with their start tokens, no target twice, the token that
    is no target because the model has not learned to predict it, and a name of the text.

    Rows as long as those of the run begin where its validation cuts them, unless these overlap in more than a token.
    """
    data = run_data(run)
    rows = prepared_data(run, data).validation
    step = max(rows.stride, length - 1) if length == rows.sequence_length else length
    found = cut(stream_of(rows), length, step, count, seed, least, run)
    return found, None if rows.learn_start else rows.start, name_of(run, data)


def batch_as_trained(run: Path, count: int, length: int) -> tuple[dict[str, torch.Tensor], str]:
    """Return the first rows of the validation split as training reads its rows, with labels of -100 at start tokens
    that are not learned and, with document masking, position_ids; and a name of the text."""
    data = run_data(run)
    rows = prepared_data(run, data).validation.of_length(length)
    if len(rows) < count:
        raise too_short(run, rows.num_tokens, count, length)
    return rows.batch(range(count)), name_of(run, data)


def name_of(run: Path, data: DataConfig) -> str:
    return f"validation split of {run} ({data.validation_source or data.source})"


def too_short(run: Path, tokens: int, rows: int, length: int) -> HeldOutError:
    return HeldOutError(
        f"the validation split of {run} holds {tokens} tokens, fewer than {rows} rows of {length}: ask for fewer or "
        "shorter rows (--length), or name another text"
    )


def stream_of(rows: PackedRows) -> np.ndarray:
    return np.concatenate([np.asarray(shard, dtype=np.int64) for shard in rows.shards])


def cut(
    stream: np.ndarray, length: int, step: int, count: int, seed: int | None, least: int, run: Path
) -> torch.Tensor:
    """Return [count, length] tokens, rows of which one begins every `step` tokens."""
    available = max(0, (len(stream) - length) // step + 1)
    if available < least:
        raise too_short(run, len(stream), least, length)
    count = min(count, available)
    order = torch.arange(count)
    if seed is not None:
        order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:count]
    return torch.from_numpy(stream).unfold(0, length, step)[order]
