"""The folder that `from_pretrained` opens."""

import contextlib
import copy
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from looped_recipes.common.checksums import write_checksums
from looped_recipes.common.files import remove, sync, sync_all

from .distributed import bare, to_shards
from .finite import Divergence, first_nonfinite
from .saving import CheckpointError, on_main_process


def export_model(
    path: str | Path, model: nn.Module, tokenizer=None, *, dtype: torch.dtype | None = None, readme: str | None = None
) -> Path:
    """A folder that `from_pretrained` opens, written by the main process. Every process calls it.

    dtype: of the saved weights; by default as they are trained. readme: text of the model card.
    """
    path = Path(path)
    to_shards(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    on_main_process(lambda: write_export(path, bare(model), state, tokenizer, dtype, readme), path)
    return path


def write_export(path: Path, model: nn.Module, state: dict, tokenizer, dtype, readme):
    bad = first_nonfinite(state.items())
    if bad is not None:
        raise Divergence(f"the weight {bad} is not finite: {path} is not written, and what was there before is kept")
    if path.exists() and not (path / "config.json").exists() and any(path.iterdir()):
        raise CheckpointError(f"{path} exists and is not a saved model: it is not overwritten, choose another folder")
    # a new model, because the class of a sharded one is not that of its config
    model_class = next(part for part in type(model).__mro__ if not issubclass(part, FSDPModule))
    config = copy.deepcopy(model.config)
    config.trained_num_loops = model.trained_depth
    with torch.device("meta"):
        whole = model_class(config)
    whole.load_state_dict(
        {key: value if dtype is None else value.to(dtype) for key, value in state.items()}, assign=True
    )
    whole.tie_weights()
    whole.generation_config = model.generation_config
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, replaced = (path.parent / f".{path.name}.{suffix}" for suffix in ("saving", "replaced"))
    for leftover in (temporary, replaced):
        remove(leftover)
    whole.save_pretrained(temporary)
    if tokenizer is not None:
        tokenizer.save_pretrained(temporary)
    if readme is not None:
        (temporary / "README.md").write_text(readme)
    write_checksums(temporary)
    sync_all(temporary)
    if path.exists():
        os.rename(path, replaced)
    os.rename(temporary, path)
    sync(path.parent)
    with contextlib.suppress(OSError):  # then it goes at the next export
        remove(replaced)
