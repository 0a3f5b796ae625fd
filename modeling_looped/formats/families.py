"""The dense families of transformers in the fields of `LoopedConfig`: what one of their layers is as a block of ours.

A family gives everything but depth. What differs from layer to layer is given for every dense layer, under two keys
that are not fields, so that a caller who leaves layers out can pick:

    layer_windows   a letter per layer, L full or S sliding, or None where no layer slides
    layer_ropes     a letter per layer, R rotary or N without positions, or None where all are rotary

Trunks have the same names (`model.embed_tokens`, `model.norm`, `lm_head`), and so do most parts of a layer;
`renames` maps the other ones.
"""

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from transformers.configuration_utils import PreTrainedConfig


class Family(NamedTuple):
    """fields: of a dense config, those of ours, and the two keys above. renames: inside a layer, theirs to ours."""

    fields: Callable[[Any], dict[str, Any]]
    renames: dict[str, str]


# fields that mean the same here
SAME = """
    vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads max_position_embeddings
    rms_norm_eps tie_word_embeddings attention_dropout initializer_range use_cache pad_token_id bos_token_id
    eos_token_id
""".split()
# what a caller reads (depth), what is derived of others, and what no dense layer reads
ELSEWHERE = """
    num_hidden_layers head_dim hidden_act rope_parameters layer_types pretraining_tp max_window_layers
    use_sliding_window sliding_window
""".split()
LETTERS = {"full_attention": "L", "sliding_attention": "S"}


def family_of(config) -> Family:
    """The entry of a dense config."""
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model_type!r} is not a dense family that can be looped: choose one of "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def refuse(config, reasons: list[str]):
    if reasons:
        raise ValueError(f"this {config.model_type} model has what LoopedConfig cannot express: {'; '.join(reasons)}")


def unread(config, read: set[str]) -> list[str]:
    """Fields of the config's own class that no entry here reads, and that are set to what is not their default."""
    own = {field.name for field in fields(type(config))} - {field.name for field in fields(PreTrainedConfig)} - read
    usual = type(config)()
    return [
        f"{name}={getattr(config, name)!r}" for name in sorted(own) if getattr(config, name) != getattr(usual, name)
    ]


def shared_fields(config, read: tuple[str, ...] = ()) -> dict[str, Any]:
    """What all families have, after a look at whether there is anything else. read: fields that the family reads."""
    refuse(config, unread(config, {*SAME, *ELSEWHERE, *read}))
    return {
        **{name: getattr(config, name) for name in SAME},
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_act": config.hidden_act,
        "rope_parameters": copy.deepcopy(config.rope_parameters),
        "mlp_gated": True,
        "sliding_window": None,
        "layer_windows": None,
        "layer_ropes": None,
    }


def windows(config) -> dict[str, Any]:
    """Of a family that lists the attention type of every layer."""
    types = config.layer_types
    others = sorted(set(types) - set(LETTERS))
    refuse(config, [f"layer_types with {', '.join(others)}"] if others else [])
    if "sliding_attention" not in types:
        return {}
    refuse(
        config,
        [] if config.sliding_window else [f"layer_types that slide, with sliding_window={config.sliding_window}"],
    )
    return {"sliding_window": config.sliding_window, "layer_windows": "".join(LETTERS[kind] for kind in types)}


def llama(config) -> dict[str, Any]:
    reasons = [f"{name}=True" for name in ("attention_bias", "mlp_bias") if getattr(config, name)]
    refuse(config, reasons)
    return shared_fields(config, ("attention_bias", "mlp_bias"))


def mistral(config) -> dict[str, Any]:
    """Every layer slides, or none does."""
    if config.sliding_window is None:
        return shared_fields(config)
    every = {"sliding_window": config.sliding_window, "layer_windows": "S" * config.num_hidden_layers}
    return {**shared_fields(config), **every}


def qwen2(config) -> dict[str, Any]:
    return {**shared_fields(config), **windows(config), "attention_bias": "qkv"}


def qwen3(config) -> dict[str, Any]:
    refuse(config, ["attention_bias=True"] if config.attention_bias else [])
    return {**shared_fields(config, ("attention_bias",)), **windows(config), "qk_norm": "learned"}


FAMILIES = {
    "llama": Family(llama, {}),
    "mistral": Family(mistral, {}),
    "qwen2": Family(qwen2, {}),
    "qwen3": Family(qwen3, {}),
}
