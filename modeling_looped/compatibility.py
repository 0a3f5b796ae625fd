"""Parts of transformers that a later version may remove, each with a substitute.

A copy of this code lies beside every saved model and meets versions of transformers that are newer than it: an import
must not fail for a name that one pass in a thousand needs. Such names are looked up here, each with a substitute, or
with an error that is raised when the name is used.
"""

import functools
import importlib
import warnings
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.generation import GenerationMixin
from transformers.integrations.sdpa_attention import repeat_kv
from typing_extensions import Unpack

from .tensors import wide_dtype


def look_up(module: str, name: str, default: Any = None) -> Any:
    """Return `name` of `module`, or the default if the name or the module does not exist."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return default


# the name under which this transformers passes and returns the cache: "cache" from 5.24 on. Models here accept both
CACHE = (
    "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
)
# The cache of transformers' continuous batching, in which a row holds tokens of many requests. Before 5.24 the
# attention kernel wrote keys and values into it; since then the model does.
PagedAttentionCache = look_up("transformers.generation.continuous_batching.cache", "PagedAttentionCache", ())
KERNELS_FILL_PAGES = CACHE != "cache"
# The annotation of a forward's `**kwargs`, from which transformers reads whether it can be asked for attentions. A
# type checker refuses names in it that are arguments of their own here, such as position_ids.
OtherArguments = Any if TYPE_CHECKING else Unpack[look_up("transformers.utils", "TransformersKwargs", dict)]


def at_one_commit(path, kwargs: dict) -> dict:
    """Return the arguments of loading with what their revision is now, of which transformers from 5.24 on asks the Hub
    once in every method that reads files, unless it is given."""
    resolve = look_up("transformers.utils.hub", "resolve_revision", lambda path, revision, **where: revision)
    where = {name: kwargs[name] for name in ("token", "local_files_only", "cache_dir") if kwargs.get(name) is not None}
    revision = resolve(path, kwargs.get("revision"), **where)
    return kwargs if revision is None else {**kwargs, "revision": revision}


def one_cache(cache, past_key_values):
    """Return the cache that a call passes under either name. PEFT passes its prefix beside an empty cache."""
    if cache is not None and past_key_values is not None:
        is_prefix = cache.get_seq_length() == 0 < past_key_values.get_seq_length()
        if cache is not past_key_values and not is_prefix:
            raise ValueError(
                "cache and past_key_values are two names for the same argument, and both are given: pass one"
            )
        return past_key_values
    if past_key_values is not None and CACHE == "cache" and not torch.compiler.is_compiling():
        message = "`past_key_values` is deprecated: transformers calls it `cache` since 5.24"
        warnings.warn(message, FutureWarning, stacklevel=3)  # as transformers' own models do
    return past_key_values if cache is None else cache


def named_cache(cache) -> dict[str, Any]:
    """Return the cache as a keyword argument for transformers' output classes."""
    return {CACHE: cache}


class Missing(nn.Module):
    """Substitute for a class that this transformers lacks: making or running one raises an ImportError."""

    gone = ""

    def __init__(self, *args, **kwargs):
        self.forward()

    def forward(self, *args, **kwargs):
        raise ImportError(
            f"transformers {transformers.__version__} has no {self.gone}, which this part of a looped model needs: "
            "use an older transformers, or a newer modeling_looped"
        )


def class_or_missing(module: str, name: str) -> Any:
    """Return a class to inherit from: that of transformers, or a `Missing` one."""
    return look_up(module, name) or type(name, (Missing,), {"gone": name})


def config_defaults(forward):
    """Wrap `forward` so that arguments that are None take the config's value; the substitute handles `use_cache`."""
    if decorate := look_up("transformers.utils.generic", "merge_with_config_defaults"):
        return decorate(forward)

    @functools.wraps(forward)
    def wrapper(self, *args, use_cache=None, **kwargs):
        return forward(self, *args, use_cache=self.config.use_cache if use_cache is None else use_cache, **kwargs)

    return wrapper


def captured(forward):
    """Wrap `forward` so that outputs of layers are recorded on request; the substitute refuses such requests."""
    if decorate := look_up("transformers.utils.output_capturing", "capture_outputs"):
        return decorate(forward)

    @functools.wraps(forward)
    def wrapper(self, *args, return_dict=None, **kwargs):
        asked = [name for name in ("output_hidden_states", "output_attentions") if kwargs.pop(name, None)]
        if asked:
            raise ImportError(
                f"transformers {transformers.__version__} has no capture_outputs, so {' and '.join(asked)} cannot be "
                "recorded: use an older transformers, or output_loop_hidden_states"
            )
        return forward(self, *args, **kwargs)

    return wrapper


def tuples_on_request(forward):
    """Wrap `forward` so that it returns a tuple with return_dict=False."""
    if decorate := look_up("transformers.utils", "can_return_tuple"):
        return decorate(forward)

    @functools.wraps(forward)
    def wrapper(self, *args, return_dict=None, **kwargs):
        outputs = forward(self, *args, **kwargs)
        return outputs.to_tuple() if return_dict is False else outputs

    return wrapper


def recorded_states() -> list[list]:
    """Return the lists in which transformers is recording outputs of layers; empty if it records none."""
    collector = (
        None if torch.compiler.is_compiling() else look_up("transformers.utils.output_capturing", "_active_collector")
    )
    collected = (collector.get() if collector is not None else None) or {}
    return [states for states in collected.values() if isinstance(states, list)]


def eager_attention(
    module, query, key, value, attention_mask, scaling: float, dropout: float = 0.0, softcap=None, **kwargs
):
    """Compute softmax(q k^T) v by its definition, as transformers' Llama; a softcap on the scores is as in Gemma 2."""
    key, value = (repeat_kv(states, module.num_key_value_groups) for states in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=wide_dtype(scores)).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


LLAMA = "transformers.models.llama.modeling_llama"
RotaryEmbedding = class_or_missing(LLAMA, "LlamaRotaryEmbedding")
