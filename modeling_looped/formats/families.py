"""The dense families of transformers in the fields of `LoopedConfig`, so that a block computes one of their layers.

A family sets all fields except those of depth. Settings that differ from layer to layer are listed for every dense
layer, under two keys that are not fields, so that a caller who leaves layers out can pick letters:

    layer_windows   a letter per layer, L full or S sliding, or None where no layer slides
    layer_ropes     a letter per layer, R rotary or N without positions, or None where all are rotary

The letters of the layers that are kept form a `window_pattern` and a `rope_pattern`. The trunk has the same names
(`model.embed_tokens`, `model.norm`, `lm_head`), and so have most parts of a layer; `renames` maps the other parts.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, NamedTuple

from transformers.configuration_utils import PreTrainedConfig

from ..config_layers import LAYER_TYPES


class Family(NamedTuple):
    """fields: maps a dense config to fields of LoopedConfig and the two keys above. renames: maps the first part of a
    name inside a layer to the name here; all at once, since some names swap places."""

    fields: Callable[[Any], dict[str, Any]]
    renames: dict[str, str]

    def renamed(self, name: str) -> str:
        """Return the name here of a tensor inside a layer, such as "pre_feedforward_layernorm.weight"."""
        first, dot, rest = name.partition(".")
        return self.renames.get(first, first) + dot + rest


# fields that mean the same here
SAME = """
    vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads max_position_embeddings
    rms_norm_eps tie_word_embeddings attention_dropout initializer_range use_cache pad_token_id bos_token_id
    eos_token_id
""".split()
# fields that all families read under another name or through other fields, that callers read, or that no layer reads
ELSEWHERE = """
    num_hidden_layers head_dim hidden_act hidden_activation rope_parameters layer_types sliding_window
    use_sliding_window max_window_layers attention_bias pretraining_tp
""".split()
# Llama rounds x before it is multiplied by the weight; Gemma multiplies by 1 + w and rounds afterwards
LLAMA_NORMS = {"norm_rounding": "before_weight"}
GEMMA_NORMS = {"norm_offset": 1.0}
# renames of layers with norms on both sides of a branch, and of layers with norms behind branches
SANDWICH = {
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
POST = {"post_attention_layernorm": "attention_output_norm", "post_feedforward_layernorm": "mlp_output_norm"}


def family_of(config) -> Family:
    """Return the family of a dense config."""
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model_type!r} is not a dense family that can be looped: choose one of "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def refuse(config, reasons: Iterable[str]):
    if reasons := list(reasons):
        raise ValueError(f"this {config.model_type} model has what LoopedConfig cannot express: {'; '.join(reasons)}")


def own_fields(config) -> set[str]:
    """Return the fields of the config's own class: a config.json may have others, which no layer reads."""
    return {field.name for field in fields(type(config))} - {field.name for field in fields(PreTrainedConfig)}


def unread(config, read: set[str]) -> list[str]:
    """List the fields of the config's own class that no family reads and whose values differ from the defaults."""
    own = own_fields(config) - read
    usual = type(config)()
    return [
        f"{name}={getattr(config, name)!r}" for name in sorted(own) if getattr(config, name) != getattr(usual, name)
    ]


def shared_fields(config, *read: str) -> dict[str, Any]:
    """Return the fields common to all families; refuse other settings. read: further fields that the family reads."""
    refuse(config, unread(config, {*SAME, *ELSEWHERE, *read}))
    has_biases = "attention_bias" in own_fields(config) and config.attention_bias
    return {
        **{name: getattr(config, name) for name in SAME},
        "pad_token_id": None if config.pad_token_id == -1 else config.pad_token_id,  # -1 in the first Llamas: none
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_act": config.hidden_activation if "hidden_activation" in own_fields(config) else config.hidden_act,
        "rope_parameters": copy.deepcopy(config.rope_parameters),
        "attention_bias": "qkvo" if has_biases else "none",
        "mlp_gated": True,
        "sliding_window": None,
        "layer_windows": None,
        "layer_ropes": None,
    }


def windows(config) -> dict[str, Any]:
    """Return the fields of windows, for a family that lists the attention type of every layer."""
    letters = {layer_type: letter for letter, layer_type in LAYER_TYPES.items()}
    types, window = config.layer_types, config.sliding_window
    refuse(config, [f"layer_types={others}" for others in [sorted(set(types) - set(letters))] if others])
    if "sliding_attention" not in types:
        return {}
    switched_off = not getattr(config, "use_sliding_window", True)
    refuse(config, ["layer_types that slide, with use_sliding_window=False"] if switched_off else [])
    refuse(config, [] if window else [f"layer_types that slide, with sliding_window={window}"])
    return {"sliding_window": window, "layer_windows": "".join(letters[layer_type] for layer_type in types)}


def llama(config) -> dict[str, Any]:
    return {**shared_fields(config, "mlp_bias"), **LLAMA_NORMS, "mlp_bias": config.mlp_bias}


def mistral(config) -> dict[str, Any]:
    """Either all layers have a sliding window, or none has."""
    types = set(getattr(config, "layer_types", None) or ())
    refuse(config, [f"layer_types={sorted(types)}"] if len(types) > 1 else [])
    window, every = config.sliding_window, "S" * config.num_hidden_layers
    slides = {} if window is None else {"sliding_window": window, "layer_windows": every}
    return {**shared_fields(config), **LLAMA_NORMS, **slides}


def qwen2(config) -> dict[str, Any]:
    return {**shared_fields(config), **LLAMA_NORMS, **windows(config), "attention_bias": "qkv"}


def qwen3(config) -> dict[str, Any]:
    return {**shared_fields(config), **LLAMA_NORMS, **windows(config), "qk_norm": "learned"}


def smollm3(config) -> dict[str, Any]:
    ropes = "".join("R" if rotary else "N" for rotary in config.no_rope_layers[: config.num_hidden_layers])
    return {
        **shared_fields(config, "mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
        **LLAMA_NORMS,
        **windows(config),
        "mlp_bias": config.mlp_bias,
        "layer_ropes": ropes if "N" in ropes else None,
    }


def olmo2(config) -> dict[str, Any]:
    return {**shared_fields(config), "block_norm": "post", "qk_norm": "all_heads", "rope_rounding": "rotated"}


def olmo3(config) -> dict[str, Any]:
    return {**olmo2(config), **windows(config)}


def gemma(config, *read: str) -> dict[str, Any]:
    two_way = getattr(config, "use_bidirectional_attention", None)
    refuse(config, [f"use_bidirectional_attention={two_way}"] if two_way else [])
    return {
        **shared_fields(config, "use_bidirectional_attention", *read),
        **GEMMA_NORMS,
        "embedding_scale": config.hidden_size**0.5,
        "round_embedding_scale": True,
    }


def gemma2(config) -> dict[str, Any]:
    return {
        **gemma(config, "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"),
        **windows(config),
        "block_norm": "branch_sandwich",
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
        "round_logit_softcap": True,
    }


def gemma3_text(config) -> dict[str, Any]:
    """transformers' Gemma 3 has a field for a softcap on scores, and does not read it."""
    softcap = config.attn_logit_softcapping
    refuse(config, [f"attn_logit_softcapping={softcap}"] if softcap else [])
    return {**gemma2(config), "qk_norm": "learned"}


FAMILIES = {
    "llama": Family(llama, {}),
    "mistral": Family(mistral, {}),
    "qwen2": Family(qwen2, {}),
    "qwen3": Family(qwen3, {}),
    "smollm3": Family(smollm3, {}),
    "olmo2": Family(olmo2, POST),
    "olmo3": Family(olmo3, POST),
    "gemma": Family(gemma, {}),
    "gemma2": Family(gemma2, SANDWICH),
    "gemma3_text": Family(gemma3_text, SANDWICH),
}
