"""What all models of the family share: what they support, loading, saving, initial weights, resizing."""

import contextlib
import copy
import shutil
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from transformers.modeling_utils import PreTrainedModel

from .checks import FIELDS_OF_BUILDING, check_softcap, warn_of_changes
from .clients import register_with_peft, register_with_trainer
from .configuration_looped import LoopedConfig
from .initialization import init_module
from .layers import LoopedAttention, LoopedBlock
from .loading import StrictLoadingMixin
from .serving_engines import check_for_engine
from .tensors import at_least_fp32


ARGUMENTS_OF_SAVING = signature(PreTrainedModel.save_pretrained)  # read here, as others may wrap the method later


class LoopedPreTrainedModel(StrictLoadingMixin, PreTrainedModel):
    config: LoopedConfig
    config_class = LoopedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LoopedBlock"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": LoopedBlock, "attentions": LoopedAttention}

    def __init__(self, config, *args, **kwargs):
        config.validate()  # fields may have been assigned since the config was made
        register_with_peft(config.model_type)
        register_with_trainer(config.model_type)
        super().__init__(config, *args, **kwargs)
        check_for_engine(self.config)
        self.trained_depth = config.trained_depth  # fixed here: later changes of the config do not change it
        self.built_with = {name: copy.copy(getattr(config, name)) for name in FIELDS_OF_BUILDING}

    def post_init(self):
        """Called again by subclasses, which may have put one layer, or one parameter, in several places."""
        of_config = (self._tied_weights_keys or {}) if self.config.tie_word_embeddings else {}
        self.tied_by_subclass = {name: first for name, first in shared_parameters(self) if name not in of_config}
        super().post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        """Return what is tied, further name: first name. What subclasses tie is, whatever tie_word_embeddings says."""
        return {**super().get_expanded_tied_weights_keys(all_submodels), **self.tied_by_subclass}

    def _sdpa_can_dispatch(self, *args, **kwargs) -> bool:
        """Called by transformers. If this raises, transformers uses eager attention, unless sdpa was asked for."""
        check_softcap(self.config.attention_softcap, "sdpa")
        return super()._sdpa_can_dispatch(*args, **kwargs)

    def set_use_kernels(self, use_kernels, *args, **kwargs):
        if use_kernels:
            raise ValueError(
                f"use_kernels={use_kernels} replaces layers that the kernels hub knows by name, of which this model "
                "has none: leave it out (for attention, attn_implementation takes a kernel)"
            )
        super().set_use_kernels(use_kernels, *args, **kwargs)

    def save_pretrained(self, *args, **kwargs) -> None:
        warn_of_changes(
            self.config, self.built_with, ", but what is opened from the saved folder will follow the config"
        )
        before, self.config.trained_num_loops = self.config.trained_num_loops, self.trained_depth
        tied = self._tied_weights_keys
        self._tied_weights_keys = {**(tied or {}), **self.tied_by_subclass}  # each is saved once
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            self.config.trained_num_loops = before
            self._tied_weights_keys = tied
        call = ARGUMENTS_OF_SAVING.bind(self, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        has_other_files = getattr(self, "_hf_peft_config_loaded", False) or given["distributed_checkpoint"]
        if self.should_save_on_this_rank(given["is_main_process"]) and not has_other_files:
            remove_older_weights(Path(given["save_directory"]), given["variant"])
            share_weights(Path(given["save_directory"]))

    def _init_weights(self, module):
        if not init_module(module, self.config):
            super()._init_weights(module)

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """Resize embeddings and head as transformers does, and the value tables, which have a row per token too.

        New rows of the value tables are the mean of the old ones, so that resizing the model again gives the same
        rows: PEFT saves the resized embeddings and head, but not the value tables.
        """
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for table in cast(Any, self.base_model).value_embeds.values():
            is_trained, before = table.weight.requires_grad, table.num_embeddings
            self._get_resized_embeddings(table, embeddings.num_embeddings, mean_resizing=False)
            with torch.no_grad():
                table.weight[before:] = at_least_fp32(table.weight[:before]).mean(0).to(table.weight.dtype)
            table.requires_grad_(is_trained)
        return embeddings


def shared_parameters(model) -> Iterator[tuple[str, str]]:
    """Yield every further name of a parameter, and its first name."""
    first = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            yield name, first[parameter]


def remove_older_weights(folder: Path, variant: str | None):
    """Remove the file of weights that an earlier save left beside these shards, or the index beside this file.
    transformers removes older shards alone, and would open the file, whichever is newer."""
    of_variant = f".{variant}" if variant else ""
    is_sharded = any(folder.glob(f"model{of_variant}-?????-of-?????.safetensors"))
    older = f"model{of_variant}.safetensors" if is_sharded else f"model.safetensors.index{of_variant}.json"
    if folder.is_dir():
        (folder / older).unlink(missing_ok=True)


def share_weights(folder: Path):
    """Give the weights the mode of config.json, which follows the umask. safetensors 0.8.0 makes files for their owner
    alone, whatever the umask."""
    for file in folder.glob("model*.safetensors"):
        with contextlib.suppress(OSError):  # a disk without modes
            shutil.copymode(folder / "config.json", file)
