"""Export a trained model or a checkpoint as a folder that `from_pretrained` opens."""

import contextlib
import copy
import os
import shutil
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from looped_recipes.common.checksums import (
    Damaged,
    change_of_folder,
    changes_of,
    is_edit,
    listed_in,
    renew_checksum,
    write_checksums,
)
from looped_recipes.common.files import is_foreign, remove, save_pretrained, sync, sync_all
from looped_recipes.settings.model_file import write_code
from looped_recipes.settings.recipe import recipe_of_run
from modeling_looped import LoopedConfig

from .checkpoint import TOKENIZER, load_weights, read_marker
from .distributed import bare, to_shards
from .finite import Divergence, first_nonfinite
from .publish import model_card
from .resume import CODE, checksum_of_code
from .saving import CheckpointError, on_main_process


def export_model(path: str | Path, model: nn.Module, tokenizer=None, *, readme: str | None = None) -> Path:
    """Write a folder that `from_pretrained` opens, on the main process. Every process calls it.

    readme: text of the model card.
    """
    path = Path(path)
    to_shards(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    on_main_process(lambda: write_export(path, bare(model), state, tokenizer, readme), path)
    return path


def export_checkpoint(run: Path, checkpoint: Path, path: Path, trust_remote_code: bool):
    """Export the model of a complete checkpoint of `run`, on any machine: nothing that a launch needs is required.

    trust_remote_code: run the code that the recipe of the run names as training.model_file.
    """
    refuse_foreign(path)
    if (changed := change_of_export(path)) is not None:
        raise CheckpointError(
            f"{path} is not as it was exported ({changed}): it is not overwritten, choose another folder"
        )
    recipe, marker = recipe_of_run(run), read_marker(checkpoint)
    trained, now = marker["config"].get(CODE), checksum_of_code(recipe)
    if trained != now:
        raise CheckpointError(
            f"training.model_file={recipe.training.model_file!r} is not the code that {run} was trained with (its "
            f"checksum was {trained}, is {now}): bring that back"
        )
    if recipe.training.model_file is not None and not trust_remote_code:
        raise CheckpointError(
            f"{run} was trained with a class of training.model_file={recipe.training.model_file!r}, whose code would "
            "be run here: read it, and allow it with --trust-remote-code"
        )
    with torch.device("meta"):
        model = recipe.model_class(LoopedConfig.from_dict(marker["config"]["model"]))
    model.generation_config = GenerationConfig.from_dict(marker["generation"])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / TOKENIZER)
    card = model_card(recipe, model.config, run / "metrics.jsonl", path, marker["step"])
    state = load_weights(checkpoint)
    on_main_process(lambda: write_export(path, model, state, tokenizer, card), path)


def write_export(path: Path, model: nn.Module, state: dict, tokenizer, readme):
    bad = first_nonfinite(state.items())
    if bad is not None:
        raise Divergence(f"the weight {bad} is not finite: {path} is not written, and what was there before is kept")
    refuse_foreign(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, replaced = (path.parent / f".{path.name}.{suffix}" for suffix in ("saving", "replaced"))
    if replaced.exists() and not path.exists():  # killed between the two renames
        os.rename(replaced, path)
    for leftover in (temporary, replaced):
        remove(leftover)
    try:
        write_folder(temporary, model, state, tokenizer, readme)
    except Exception:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise
    changed, same_weights = change_of_export(path), weights_of(path) == weights_of(temporary)
    if changed is not None and same_weights and is_only_edited(path):
        renew_checksum(path, GENERATION_CONFIG_NAME)  # it may have been given exits
        remove(temporary)
        return
    if changed is not None:
        replaced = next(name for n in count(1) if not (name := path.with_name(f"{path.name}.changed-{n}")).exists())
        print(f"{path} is not as it was exported ({changed}): it is kept as {replaced}, and exported again")
    if same_weights and (path / GENERATION_CONFIG_NAME).is_file():
        # it may contain exit settings that `looped halting --write` found for the same weights
        shutil.copyfile(path / GENERATION_CONFIG_NAME, temporary / GENERATION_CONFIG_NAME)
        renew_checksum(temporary, GENERATION_CONFIG_NAME)
    sync_all(temporary)
    if path.exists():
        os.rename(path, replaced)
    os.rename(temporary, path)
    sync(path.parent)
    if changed is None:
        with contextlib.suppress(OSError):  # in that case the next export removes it
            remove(replaced)


def write_folder(folder: Path, model: nn.Module, state: dict, tokenizer, readme):
    # a new model, because FSDP changes the class of a sharded model
    model_class = next(part for part in type(model).__mro__ if not issubclass(part, FSDPModule))
    config = copy.deepcopy(model.config)
    config.trained_num_loops = model.trained_depth
    with torch.device("meta"):
        whole = model_class(config)
    whole.load_state_dict(state, assign=True)
    whole.tie_weights()
    whole.generation_config = model.generation_config
    # transformers checks only what has changed since it was loaded; a run adds at most a token at which to stop
    whole.generation_config._original_object_hash = hash(whole.generation_config)
    save_pretrained(whole, folder)
    write_code(whole, folder)
    if tokenizer is not None:
        save_pretrained(tokenizer, folder)
    if readme is not None:
        (folder / "README.md").write_text(readme, encoding="utf-8")
    write_checksums(folder)


def refuse_foreign(path: Path):
    if is_foreign(path):
        raise CheckpointError(
            f"{path} exists and is not a saved model of this package: it is not overwritten, choose another folder"
        )


def change_of_export(path: Path) -> str | None:
    """Describe how a saved model differs from what was exported; None if it does not, or nothing is there."""
    return change_of_folder(path) if path.is_dir() and any(path.iterdir()) else None


def is_only_edited(path: Path) -> bool:
    """Return whether a changed export is whole, apart from what its user has edited or added."""
    return all(is_edit(path, name) for name, _ in changes_of(path))


def weights_of(folder: Path) -> dict[str, str] | None:
    """Return the stored checksums of a saved model's weights; None if there are none."""
    try:
        return {name: saved for name, (_, saved) in listed_in(folder).items() if name.endswith(".safetensors")} or None
    except Damaged:
        return None
