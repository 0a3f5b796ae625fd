"""Looped models made from dense ones: the dense layers become prelude, core and coda; some may be left out or tied.

With copied layers (core_init="copy"), at one loop the looped model equals the dense one, bit for bit if no layer was
left out, with every `injection`:

    none, residual_all, attention_first, attention_all    act from the second loop on, or not at all
    concat      W = [0 | I]: the loop starts from the input, and learns how much to take from the state
    add         from a state of zeros
    diagonal    from a state of zeros, with B = I and a step of 1

With "concat" they are equal at every depth, and so they are with any injection if `loop_change_gate` is set.

With tied layers each loop stands for dense layers of its own. With injection="none", `loop_norms` and deltas of full
rank the model equals the dense one at its own number of loops; with another injection at none.
"""

import copy
import dataclasses
import math
import re
from os import PathLike
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from ..causal_lm import LoopedForCausalLM
from ..config_layers import with_rope_kept
from ..config_relations import MOST_LAYERS
from ..configuration_looped import LoopedConfig
from ..loading import FILLED, misfits_of
from ..tensors import wide_dtype
from .families import Family, family_of
from .layer_choice import SECTIONS, LayerChoice, choose_layers
from .relaxed import set_loop_residuals


# fields that cannot be chosen, because the dense model's weights determine them
OF_DENSE_MODELS = frozenset(
    """
    vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim core_hidden_size
    core_intermediate_size core_num_attention_heads block_norm norm_affine norm_offset norm_rounding rms_norm_eps
    kv_latent_size window_pattern sliding_window qk_norm attention_bias attention_scale attention_softcap
    position_embedding rope_pattern hidden_act mlp_gated mlp_bias mlp_activation_scale embedding_scale logit_softcap
    """.split()
)
LAYER = r"model\.layers\.(\d+)\.(.+)"
OF_LOADING = frozenset("revision token cache_dir local_files_only force_download subfolder".split())
# new parameters that start as zero or one, or as one of two factors of which the other is zero
NEUTRAL = r"\.(change_gate|loop_deltas|loop_embedding|modulation)\.|norm\.\w+$"
FRESH_STATE = ("add", "diagonal")  # injections that pass the input on unchanged if the state is zero


class Start(NamedTuple):
    """The plan of a looped model, known before any weight is read."""

    family: Family
    choice: LayerChoice
    plain: LoopedConfig  # of a model with the dense layers alone: one loop, no injection
    config: LoopedConfig


def from_dense(
    cls,
    source: str | PathLike | PreTrainedModel,
    *,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    **options: Any,
) -> LoopedForCausalLM:
    """Make a looped model of a dense one: a folder, a name, or a model of transformers, which is not changed.

    options: arguments of `start_from_dense`, of loading such as `revision`, and `added_fields` of the class.
    """
    if not issubclass(cls, LoopedForCausalLM):
        raise ValueError(f"from_dense makes a LoopedForCausalLM, not a {cls.__name__}; save it and open that folder")
    loading = {name: options.pop(name) for name in OF_LOADING & options.keys()}
    given, path = (source, "") if isinstance(source, PreTrainedModel) else (None, source)
    dense_config = opened(AutoConfig, path, loading) if given is None else given.config
    added = {name: options.pop(name) for name in cls.added_fields.keys() & options.keys()}
    start = start_from_dense(dense_config, **options)
    for name, value in added.items():
        setattr(start.config, name, value)

    dense = given
    if dense is None:
        dense = opened_model(path, dense_config, {**loading, **({} if dtype is None else {"dtype": dtype})})
    layers = layers_of(dense, start.family)
    state = looped_state(dense, layers, start, clones=given is not None)
    wanted = check_state(start, state)
    state |= weights_of_injection(start.config, dense.dtype)
    has_residuals = start.config.has_sets_in_core and start.choice.tied is not None
    per_loop = weights_by_loop(layers, start.choice) if has_residuals else None
    to_dtype, device, generation_config = dtype or dense.dtype, dense.device, copy.deepcopy(dense.generation_config)
    del dense, layers  # this frees the layers that are left out

    attention: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    new = wanted.keys() - state.keys()
    before = FILLED.set([name for name in new if re.search(NEUTRAL, name)])
    try:
        model: Any = cls.from_pretrained(None, config=start.config, state_dict=state, dtype=to_dtype, **attention)
    finally:
        FILLED.reset(before)
    model.config._name_or_path = model.name_or_path = ""  # from no folder; transformers would write "None"
    if per_loop is not None:
        set_loop_residuals(model, per_loop)
    if generation_config is not None:
        model.generation_config = generation_config
    return model if given is None else model.to(device)


SIZES_THAT_DO_NOT_FIT = (StrictDataclassError, RuntimeError, MemoryError, TypeError, ArithmeticError)


def opened(loader, path, loading: dict):
    try:
        return loader.from_pretrained(path, **loading)
    except SIZES_THAT_DO_NOT_FIT as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{path} does not open as a dense model ({said}): check that its config.json belongs to its weights"
        ) from error


class RefusesBeforeItFills:
    """Mixin for a dense model's class that refuses tensors that do not fit before transformers fills in missing ones:
    at the sizes of an absurd config.json filling takes minutes, or more memory than there is."""

    @classmethod
    def _finalize_model_loading(cls, model, load_config, loading_info):
        missing = loading_info.missing_keys - model.all_tied_weights_keys.keys()
        if missing or loading_info.mismatched_keys:
            path = load_config.pretrained_model_name_or_path
            refuse_folder(path, missing, loading_info.unexpected_keys, loading_info.mismatched_keys)
        of_transformers: Any = super()
        return of_transformers._finalize_model_loading(model, load_config, loading_info)


def opened_model(path, config: PreTrainedConfig, loading: dict) -> PreTrainedModel:
    """Open a dense model; refuse missing, unknown and misshapen weights: transformers would fill in missing ones."""
    dense_class = AutoModelForCausalLM._model_mapping[type(config)]
    refuses = type(dense_class.__name__, (RefusesBeforeItFills, dense_class), {"__module__": dense_class.__module__})
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # the error below names the sizes
    model, info = opened(refuses, path, {**loading, **report})
    refuse_folder(path, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    return model


def refuse_folder(path, missing, unexpected, mismatched):
    if said := misfits_of(missing, unexpected, mismatched):
        raise ValueError(f"the checkpoint {path} does not fit its config.json. Tensors {said}")


def start_from_dense(
    dense_config: PreTrainedConfig,
    *,
    num_prelude_layers: int | None = None,
    num_core_layers: int | None = None,
    num_coda_layers: int | None = None,
    num_loops: int | None = None,
    layers: list[int] | dict[str, list[int]] | None = None,
    core_init: str = "copy",
    injection: str = "none",
    **overrides: Any,
) -> Start:
    """Plan a looped model. By default every dense layer is kept, and all are in the core.

    layers: the dense layers to keep, counted from 0: a list, which the counts divide, or a list for each section.
    core_init: "copy" copies the dense layers of the core one by one. The others make `num_core_layers` layers from
        `num_core_layers * num_loops` dense ones (relaxed recursion): "lower" takes the first ones, "stepwise" evenly
        spaced ones with the first and the last, "average" the mean of those that all loops would run at one place.
        With a loop_lora_rank, each loop adds the difference of its dense layers from these, as far as the rank allows;
        dense layers at one place that differ in sliding window or rotary positions are refused.
    num_loops: by default 1, or the number of dense layers in the core divided by `num_core_layers`.
    overrides: other fields of LoopedConfig. Those that act before the second loop (prelude_norm, injection_norm,
        residual_scaling, another readout_norm) change the model's function from the start.
    """
    family = family_of(dense_config)
    if dense_config.num_hidden_layers > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be at most {MOST_LAYERS}, got {dense_config.num_hidden_layers}")
    fields: dict[str, Any] = family.fields(dense_config)
    if getattr(dense_config, "quantization_config", None) is not None:
        raise ValueError("the dense weights are quantized: start from those before, and quantize the looped model")
    counts = num_prelude_layers, num_core_layers, num_coda_layers
    choice = choose_layers(dense_config.num_hidden_layers, *counts, num_loops, layers, core_init)
    letters = {"sliding window": fields.pop("layer_windows"), "rotary positions": fields.pop("layer_ropes")}
    fields |= fields_of_layers(choice, *letters.values())
    plain = LoopedConfig(**fields, num_loops=1)
    config = looped_config(plain, fields, choice.num_loops, injection, overrides)
    if choice.tied is not None:
        check_all_loops_count(config, core_init)
        for what, of_dense in letters.items():
            if of_dense is not None and config.has_sets_in_core:
                choice.check_loops(of_dense, what)
    return Start(family, choice, plain, config)


def check_all_loops_count(config: LoopedConfig, core_init: str):
    """Refuse tied layers if, by the first weights, all loops but one, and so their dense layers, have no effect."""
    part = None
    if config.injection == "concat":
        part = "injection='concat' starts every loop from the input alone, so only the last loop"
    elif config.loop_change_gate:
        part = "loop_change_gate=True starts without any change after the first loop, so only that"
    if part is not None and config.num_loops > 1:
        raise ValueError(
            f"with core_init={core_init!r} each of the num_loops={config.num_loops} loops stands for dense layers of "
            f"its own, but {part} would have an effect: use injection='none' without loop_change_gate, or "
            "core_init='copy'"
        )


def fields_of_layers(choice: LayerChoice, windows: str | None, ropes: str | None) -> dict[str, Any]:
    """Return the fields that count layers, and those that have a letter for each layer."""
    fields: dict[str, Any] = {f"num_{name}_layers": len(choice.sources[name]) for name in SECTIONS}
    if windows is not None:
        letters = choice.letters(windows, "sliding window")
        if set(letters) == {"L"}:
            fields["sliding_window"] = None
        elif set(letters) != {"S"}:  # a window without a pattern applies to all layers
            fields["window_pattern"] = letters
    if ropes is not None:
        letters = choice.letters(ropes, "rotary positions")
        if set(letters) != {"R"}:
            fields["rope_pattern"] = letters
    return fields


def looped_config(plain: LoopedConfig, fields: dict, num_loops: int, injection: str, overrides: dict) -> LoopedConfig:
    for name in OF_DENSE_MODELS & overrides.keys():
        if overrides[name] != getattr(plain, name, None):
            raise ValueError(
                f"{name}={overrides[name]!r} cannot be chosen: the dense model's weights have "
                f"{name}={getattr(plain, name, None)!r}. Leave it out"
            )
    if overrides.get("tie_word_embeddings") and not plain.tie_word_embeddings:
        raise ValueError("tie_word_embeddings=True would drop the dense model's head, which is not tied: leave it out")
    if injection in FRESH_STATE:
        overrides = {"state_init": "zeros", **overrides}
        if overrides["state_init"] == "embedding":
            raise ValueError(
                f"injection={injection!r} with state_init='embedding' would add the input to itself in the first "
                "loop, which the dense layers never saw: use state_init='zeros' or 'normal'"
            )
    overrides = with_rope_kept(overrides, fields)
    unknown = [name for name in overrides if name not in {field.name for field in dataclasses.fields(LoopedConfig)}]
    given: dict[str, Any] = {**fields, "num_loops": num_loops, "injection": injection, **overrides}
    config = LoopedConfig(**given)  # its error says what a foreign name stands for here
    if unknown:
        raise ValueError(
            f"from_dense has no argument {', '.join(unknown)}: it takes fields of LoopedConfig, and of loading "
            f"{', '.join(sorted(OF_LOADING))}"
        )
    return config


def layers_of(dense: PreTrainedModel, family: Family) -> dict[int, dict[str, torch.Tensor]]:
    """Return the tensors of every dense layer, under the names of this package."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in dense.state_dict().items():
        if inside := re.fullmatch(LAYER, name):
            layers.setdefault(int(inside[1]), {})[family.renamed(inside[2])] = tensor
    return layers


def looped_state(dense: PreTrainedModel, layers: dict, start: Start, clones: bool) -> dict[str, torch.Tensor]:
    """Return the dense weights under the names of this package. clones: copy them, else share memory."""
    state = {
        name: tensor.clone() if clones else tensor
        for name, tensor in dense.state_dict().items()
        if not re.fullmatch(LAYER, name)
    }
    for section in SECTIONS:
        for i, sources in enumerate(start.choice.sources[section]):
            for name in layers[sources[0]]:
                tensors = [layers[layer][name] for layer in sources]
                one = tensors[0].clone() if clones and len(tensors) == 1 else mean(tensors)
                state[f"model.{section}.{i}.{name}"] = one
    if start.config.tie_word_embeddings:
        head = state.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, state["model.embed_tokens.weight"]):
            raise ValueError(
                "the dense model's config says tie_word_embeddings=True, but its embedding and its head differ: pass "
                "tie_word_embeddings=False to keep both"
            )
    elif start.plain.tie_word_embeddings:
        state["lm_head.weight"] = state["lm_head.weight"].clone()
    return state


def weights_by_loop(layers: dict, choice: LayerChoice) -> list[dict[str, torch.Tensor]]:
    """Return, for each loop of tied layers, the dense weights that it stands for, by their names inside the core."""
    assert choice.tied is not None
    size = len(choice.sources["core"])
    passes = [choice.tied[first : first + size] for first in range(0, len(choice.tied), size)]
    return [
        {f"{i}.{name}": tensor for i, layer in enumerate(each) for name, tensor in layers[layer].items()}
        for each in passes
    ]


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean, computed in at least fp32."""
    if len(tensors) == 1:
        return tensors[0]
    wide = wide_dtype(tensors[0])
    total = tensors[0].to(wide, copy=True)
    for tensor in tensors[1:]:
        total += tensor.to(wide)
    return (total / len(tensors)).to(tensors[0].dtype)


def weights_of_injection(config: LoopedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return injection weights with which the input enters the core unchanged."""
    if config.injection == "concat":  # of [h; e]
        identity = torch.eye(config.hidden_size, dtype=dtype)
        return {"model.injection.proj.weight": torch.cat([torch.zeros_like(identity), identity], dim=1)}
    if config.injection == "diagonal":  # softplus(ln(e - 1)) is 1
        return {
            "model.injection.input_proj.weight": torch.eye(config.hidden_size, dtype=dtype),
            "model.injection.dt_bias": torch.full((config.state_size,), math.log(math.e - 1), dtype=dtype),
            "model.injection.log_rate": torch.zeros(config.state_size, dtype=dtype),
        }
    return {}


def shapes_of(config: LoopedConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model: Any = LoopedForCausalLM(config)  # pyrefly: ignore[bad-instantiation]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def check_state(start: Start, state: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Check that every dense weight has a place, and that none is missing of a model with the dense layers alone. A
    weight that each loop has separately starts as a copy of the dense one in all loops. Return the shapes of
    the looped model."""
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    plain = copy.deepcopy(start.plain)
    plain.tie_word_embeddings = start.config.tie_word_embeddings
    expected, wanted = shapes_of(plain), shapes_of(start.config)
    for name in found.keys() & wanted.keys():
        if wanted[name][1:] == found[name] == state[name].shape:
            state[name] = state[name].expand(wanted[name]).clone()
            found[name] = wanted[name]
    both = found.keys() & wanted.keys()
    mismatched = [(name, found[name], wanted[name]) for name in both if found[name] != wanted[name]]
    if said := misfits_of(expected.keys() - found.keys(), found.keys() - wanted.keys(), mismatched):
        raise ValueError(f"the dense model does not fit the looped one. Tensors {said}")
    return wanted
