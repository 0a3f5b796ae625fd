# Copyright 2026 The Looped authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The configuration of a looped language model: every axis of the published systems is one field."""

from collections.abc import Collection
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict, validated_field
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from .compatibility import at_one_commit
from .config_errors import LoopedConfigError, raise_value_errors
from .config_layers import DerivedFields, with_rope_kept
from .config_plans import fsdp_plan, tensor_parallel_plan
from .config_relations import check_first, check_relations
from .foreign_names import (
    ARGUMENTS_OF_LOADING,
    ARGUMENTS_OF_TOKENIZERS,
    FIELD_OF,
    GENERATION_FIELDS,
    KEYS_OF_TOOLS,
    SPELLINGS_OF_EPS,
    meant,
)
from .package_only import OF_PACKAGE
from .presets import PRESETS, preset_fields


logger = logging.get_logger(__name__)

NOT_READ = "only a model class of your own would read it"
FORMAT_VERSION = 2
LAST_OF_TRANSFORMERS: Any = PreTrainedConfig.__mro__[-2]  # `super()` of it passes over all classes of transformers
# for each readout_norm, what the head reads below the trained depth, and at or above it
READOUTS = {
    "rmsnorm": ("norm", "norm"),
    "layernorm": ("norm", "norm"),
    "taper": ("norm", "norm"),
    "alpha": ("alpha", "alpha"),
    "none": ("raw", "raw"),
    "final_only": ("raw", "norm"),
    "final_raw": ("norm", "raw"),
    "final_alpha": ("norm", "alpha"),
}


def check_format_version(version: int):
    if version != FORMAT_VERSION:
        raise ValueError(
            f"this config has format_version={version}, but the installed modeling_looped reads {FORMAT_VERSION}. "
            "Upgrade modeling_looped, or, in a process that does not import it, pass trust_remote_code=True."
        )


@raise_value_errors
@strict
class LoopedConfig(DerivedFields):
    r"""
    Configuration of the Looped family: a decoder whose core layers are applied `num_loops` times.

    ```
    e   = prelude_norm( prelude( embedding_scale * embed(ids) ) )
    h_0 = e | 0 | truncated normal                                # state_init
    for t in 0..K-1:                                              # K = num_loops, chosen at run time
        x = inject(h_t, e)                                        # injection; loop_embedding is added here
        for block in core: x = block(x, h_t)
        H_{t+1} = x                                               # what every readout sees; see loop_change_gate
        h_{t+1} = damping * inter_loop_norm(H_{t+1})              # what the next loop starts from
    logits after loop k:  lm_head( readout_norm( coda( coda_input(H_k) ) ) )
    ```

    Sizes
        vocab_size, hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim,
            max_position_embeddings (`int`): as in Llama, of embedding, prelude and coda, and of the core where it has
            none of its own.
    Depth
        num_prelude_layers, num_core_layers, num_coda_layers (`int`): unique layers before, inside and after the loop.
        num_loops (`int`): loops of a pass that asks for no other depth.
        trained_num_loops (`int`, *optional*): loops in training, where that is not `num_loops`. Saving writes it, so
            that a loaded model keeps its scale and readouts whatever `num_loops` is set to; see `trained_depth`.
        residual_scaling: factor eps on what a block adds to the stream. With n = trained_depth in the core and 1
            outside, L unique layers and lambda = `residual_scale`: "none" 1, "sqrt" lambda/sqrt(n), "linear" lambda/n,
            "factored" lambda/(n sqrt(L/residual_reference_layers)).
        residual_depth: "trained" takes n from training at any depth, "run" from the depth that is run.
    The loop
        injection: "none"; "add" h + e; "concat" W[h; e]; "diagonal" (a stable linear recurrence, Parcae);
            "residual_all" (h is added before every layer of a stream that restarts at e); "attention_first" and
            "attention_all" (the first, or every, core layer of such a stream takes its queries from h).
        injection_norm: a norm on the stream wherever state and input have been added or mixed: norm(h + e) at the
            start of a loop (LT_i), norm(x + h) before every layer with "residual_all" (FLT_res).
        state_init: h_0 is the "embedding" e, "zeros", or "normal": noise of `state_init_std` that the training loop
            passes as `initial_state`; without one it is zeros, so nothing in the model is random in eval.
        inter_loop_norm: "none", "own", or "shared" with the readout (Ouro). loop_damping: a learned factor below 1.
        loop_change_gate: from the second loop on H_{t+1} = h_t + g (x - h_t), with a learned g per channel, 0 at the
            start: without a norm or damping between loops a new model is then the same function at every depth.
        core_hidden_size, core_intermediate_size, core_num_attention_heads: sizes of the state and the core's blocks,
            where they are not those of embedding, prelude and coda (d_h of Parcae); head_dim is the same everywhere.
        loop_lora_rank (`int`, *optional*): rank of what each loop adds to the core's linear layers, W x + B_t A_t x
            (relaxed recursion, Bae et al.), and to their biases. This is not an adapter: LoRA of PEFT, on W, is shared
            by all loops. Under tensor parallelism the core's matrices stay whole.
        loop_norms: the norms of the core's blocks have weights of their own in each loop.
        loop_embedding: what says to the core which loop it is, added to the stream at the start of each, after the
            injection: "none"; "learned" (a vector per loop, zero at first); "sinusoidal" (fixed, of t, amplitude 1);
            "time" (an MLP of t/K and 1/K, zero at first). "modulation" is the latter as factors on what each branch of
            the core reads and adds, 1 at first (LoopFormer, whose branches start at 0). Both of these follow the depth
            K of the run, so the first k loops of a deeper run are not a run of k loops, as with residual_depth "run".
        num_loop_parameters (`int`, *optional*): sets of what loops have of their own; deeper loops take the last. By
            default `trained_depth`; saved with the model, whatever its depths are set to.
        key_value_interval, num_key_value_loops (`int`, `int`, *optional*): the core computes keys and values only at
            every n-th loop, and in at most `num_key_value_loops` loops. All other loops attend to those of the last
            loop that computed them, and have no cache slots. Training still runs all tokens at once. One loop is
            recursive key/value sharing (Mixture-of-Recursions).
    Readouts
        readout_norm: "rmsnorm", "layernorm" or "none" (raw). "final_only" is raw below `trained_depth` and normed
            from there on, "final_raw" normed below and raw from there on. "alpha" reads x (s_ref / rms x)^(1 - alpha),
            "final_alpha" an RMSNorm below `trained_depth`. "taper" is an RMSNorm that training takes away, see
            `training.taper_start` of recipes. Norms between loops, gates and codas that read the readout's norm read
            it at every depth; "alpha" and "none" have no norm to share.
        readout_alpha, readout_alpha_learned (`float`, `bool`): alpha, as it starts or fixed. num_readout_alphas: alpha
            and s_ref, which is always learned, are the k-th at loop k, and the last at all deeper ones.
        coda_input: what enters the coda: H ("none"), its readout norm ("norm", Huginn), or C·H ("linear", Parcae).
        exit_gate: "none", "raw" (reads H) or "normed" (reads its readout norm); gives a distribution over exits.
        loop_loss: "terminal"; "per_loop" (mean over loops); "last_third" (mean over the loops from floor(2K/3) on);
            "exit_weighted" (expected loss under the gate, minus `exit_entropy_weight` times its entropy);
            "exit_weighted_logits" (loss of the expected logits); "gate" (trains the gate alone).
        logit_softcap: logits are cap * tanh(logits / cap), computed in at least fp32, or with `round_logit_softcap`
            rounded to their own dtype at every step (Gemma 2).
        norm_penalty, scale_anchor, latent_loss, latent_anchor (`float`): weights of losses that see the scale of
            states, see losses_of_states.py: mean of H_k^2; distance of each row's RMS to `scale_anchor_target`; each
            loop's step against the way that is left to the embedding of the next token; distance of H_K to it.
    Blocks
        block_norm: "pre" x += f(norm x); "post" x += norm(f(x)) (OLMo 2); "branch_sandwich" x += norm(f(norm x));
            "residual_sandwich" x = norm(x + f(norm x)). norm_affine: whether norms carry weights.
        norm_offset (`float`): RMS norms multiply by weight + offset (Gemma: 1). norm_rounding: where a normed value is
            rounded to the dtype of the stream, "after_weight" or "before_weight" (Llama).
        kv_latent_size: rank of multi-head latent attention. window_pattern: letters L (full) and S (sliding window of
            `sliding_window`, by default a quarter of the context). One letter per layer is taken as written; a
            pattern of another length is tiled over the layers, the last always L. A `sliding_window` without a
            pattern is that of all layers.
        attention_softcap: scores are cap * tanh(scores / cap), which takes attention eager, flex or flash (Gemma 2).
            attention_scale: what scores are multiplied by, by default head_dim^-0.5.
        qk_norm: "none", "learned" (per head, before RoPE), "all_heads" (learned, over all heads together, before
            RoPE: OLMo 2) or "free" (no parameters, after RoPE). attention_bias: "none", "qk", "qkv", "qkvo".
        position_embedding: "rope" or "learned". rope_parameters: one dict for all layers, or one for each layer type:
            {"full_attention": {...}, "sliding_attention": {...}}. Where they replace those of a preset or a saved
            model, rope_theta and original_max_position_embeddings stay as they were unless they are given, so that
            {"rope_type": "yarn", "factor": 4.0} makes a context longer. rope_pattern: letters R (rotary) and N (no
            positions), tiled over the layers. rope_rounding: whether cos and sin are rounded to the dtype of the
            stream ("tables"), or only what has been rotated ("rotated", OLMo 2).
        residual_dropout_on: the branches that `residual_dropout` drops before they join the stream: "both",
            "attention" or "mlp".
        hidden_act, mlp_gated, mlp_activation_scale: the MLP is down(scale * act(gate x) * up x) or
            down(scale * act(up x)). mlp_bias: whether its matrices have biases.
        rms_norm_eps (`float`): added to the mean square in norms, but for qk_norm="free", whose norms add 2^-23.
        use_cache: as in transformers.
        attention_dropout, residual_dropout, embedding_dropout, classifier_dropout (`float`): of attention's weights,
            of branches, of embeddings, and of classification heads.
        value_embeddings: gated token embeddings added to the values of every other layer (Parcae).
        embedding_scale: what embeddings are multiplied by; round_embedding_scale: after it was rounded to the dtype
            of the embeddings (Gemma).
        init_scheme: "normal", "scaled_zero" (Parcae), "takase" (Huginn), "zero_output" (FLT), "torch" (the defaults
            of nn.Linear and nn.Embedding, the readout paper's). initializer_range: the standard deviation of "normal",
            cut at three of them.
        tie_word_embeddings: the head is the embedding. pad_token_id, bos_token_id, eos_token_id: as in transformers.

    `num_hidden_layers` is derived: the number of key/value slots, `P + Q + C * num_loops` (of the loops, those that
    compute keys and values), which is what caches and serving engines take it for.

    ```python
    >>> from modeling_looped import LoopedConfig, LoopedForCausalLM
    >>> model = LoopedForCausalLM(LoopedConfig.from_preset("flt", num_core_layers=6))
    ```
    """

    model_type = "looped"
    _auto_class = "AutoConfig"  # saving copies this file and what it imports; in the package it is None
    attribute_map = {  # the names that engines and trainers use
        "final_logit_softcapping": "logit_softcap",
        "attn_logit_softcapping": "attention_softcap",
    }
    keys_to_ignore_at_inference = ["cache", "past_key_values", "loop_losses", "loop_token_losses"]

    # the first field, so that a newer format is reported before its unknown values
    format_version: int = validated_field(check_format_version, default=FORMAT_VERSION)

    # sizes
    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048

    # depth
    num_prelude_layers: int = 0
    num_core_layers: int = 6
    num_coda_layers: int = 0
    num_loops: int = 4
    trained_num_loops: int | None = None
    residual_scaling: Literal["none", "sqrt", "linear", "factored"] = "none"
    residual_scale: int | float = 1.0
    residual_reference_layers: int | float = 1
    residual_depth: Literal["trained", "run"] = "trained"

    # the loop
    injection: Literal["none", "add", "concat", "diagonal", "residual_all", "attention_first", "attention_all"] = (
        "none"
    )
    injection_norm: bool = False
    state_init: Literal["embedding", "zeros", "normal"] = "embedding"
    state_init_std: int | float | None = None
    prelude_norm: bool = False
    inter_loop_norm: Literal["none", "own", "shared"] = "none"
    loop_damping: bool = False
    loop_change_gate: bool = False
    core_hidden_size: int | None = None
    core_intermediate_size: int | None = None
    core_num_attention_heads: int | None = None
    loop_lora_rank: int | None = None
    loop_norms: bool = False
    loop_embedding: Literal["none", "learned", "sinusoidal", "time", "modulation"] = "none"
    num_loop_parameters: int | None = None
    key_value_interval: int = 1
    num_key_value_loops: int | None = None

    # readouts and losses
    readout_norm: Literal[
        "rmsnorm", "layernorm", "none", "final_only", "final_raw", "alpha", "final_alpha", "taper"
    ] = "rmsnorm"
    readout_alpha: int | float = 0.5
    readout_alpha_learned: bool = True
    num_readout_alphas: int = 1
    coda_input: Literal["none", "norm", "linear"] = "none"
    exit_gate: Literal["none", "raw", "normed"] = "none"
    loop_loss: Literal["terminal", "per_loop", "last_third", "exit_weighted", "exit_weighted_logits", "gate"] = (
        "terminal"
    )
    exit_entropy_weight: int | float = 0.1
    norm_penalty: int | float = 0.0
    scale_anchor: int | float = 0.0
    scale_anchor_target: int | float = 1.0
    latent_loss: int | float = 0.0
    latent_anchor: int | float = 0.0
    logit_softcap: int | float | None = None
    round_logit_softcap: bool = False

    # blocks
    block_norm: Literal["pre", "post", "branch_sandwich", "residual_sandwich"] = "pre"
    norm_affine: bool = True
    norm_offset: int | float = 0.0
    norm_rounding: Literal["after_weight", "before_weight"] = "after_weight"
    rms_norm_eps: int | float = 1e-6
    kv_latent_size: int | None = None
    window_pattern: str | None = None
    sliding_window: int | None = None
    attention_softcap: int | float | None = None
    attention_scale: int | float | None = None
    qk_norm: Literal["none", "learned", "all_heads", "free"] = "none"
    attention_bias: Literal["none", "qk", "qkv", "qkvo"] = "none"
    position_embedding: Literal["rope", "learned"] = "rope"
    rope_parameters: dict | None = None
    rope_pattern: str | None = None
    rope_rounding: Literal["tables", "rotated"] = "tables"
    hidden_act: str = "silu"
    mlp_gated: bool = True
    mlp_activation_scale: int | float = 1.0
    mlp_bias: bool = False
    value_embeddings: bool = False

    # embeddings, dropout, initialisation
    embedding_scale: int | float = 1.0
    round_embedding_scale: bool = False
    tie_word_embeddings: bool = False
    attention_dropout: int | float = 0.0
    residual_dropout: int | float = 0.0
    residual_dropout_on: Literal["both", "attention", "mlp"] = "both"
    embedding_dropout: int | float = 0.0
    classifier_dropout: int | float | None = None
    init_scheme: Literal["normal", "scaled_zero", "takase", "zero_output", "torch"] = "normal"
    initializer_range: int | float = 0.02

    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, num_hidden_layers: int | None = None, layer_types: list[str] | None = None, **kwargs):
        if "preset" in kwargs:
            preset = kwargs["preset"]
            raise LoopedConfigError(f"preset={preset!r} is no field: call LoopedConfig.from_preset({preset!r}, ...)")
        if all(name.startswith("Looped") for name in self.architectures or ()):
            self._check_names(kwargs, NOT_READ)
        else:  # saved by a class that may add fields
            self._refuse_misnamed(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        check_first(self)
        if self.sliding_window is None and self.window_pattern is not None:
            self.sliding_window = self.max_position_embeddings // 4
        # transformers declares these for the class; here each config has its own: plans name the layers that exist
        self.base_model_tp_plan = tensor_parallel_plan(self)  # pyrefly: ignore[read-only]
        self.base_model_fsdp_plan = fsdp_plan(self)  # pyrefly: ignore[read-only]
        super().__post_init__(**kwargs)
        # a file may still have the number of slots at its trained depth, if only its num_loops was edited
        if num_hidden_layers is not None and num_hidden_layers != self.num_slots(self.trained_depth):
            self.num_hidden_layers = num_hidden_layers
        if layer_types is not None:
            self.layer_types = layer_types

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "LoopedConfig":
        """Return the config of a published system, e.g. `from_preset("flt", num_core_layers=6)`; `overrides` win.

        `preset_names()` lists the systems, and presets.py has their fields. Some sizes follow from others, as the
        number of heads from the width, or in "flt" and the four beside it the width from the number of layers.
        """
        return cls(**preset_fields(name, overrides))

    @staticmethod
    def preset_names() -> list[str]:
        return sorted(PRESETS)

    @classmethod
    def _refuse_misnamed(cls, given: dict[str, Any]) -> dict[str, str | None]:
        """Refuse keys that stand for a field. Return the other keys that no tool is known to write, with advice."""
        known = [*(field.name for field in fields(cls)), *cls.attribute_map]
        unknown: dict[str, str | None] = {}
        for key in given:
            if key in known or hasattr(PreTrainedConfig, key):
                continue
            advice = meant(key, known, FIELD_OF)
            if advice and key not in SPELLINGS_OF_EPS and key not in KEYS_OF_TOOLS:
                raise LoopedConfigError(f"LoopedConfig has no field `{key}`; did you mean `{advice}`?")
            if isinstance(getattr(cls, key, None), property):
                raise LoopedConfigError(f"{key}={given[key]!r} cannot be set: it is derived from other fields")
            if not (key.startswith("_") or key in KEYS_OF_TOOLS or key in GENERATION_FIELDS):
                unknown[key] = advice
        return unknown

    @classmethod
    def check_added(cls, names: Collection[str], owner: str):
        """Refuse names of fields that a model class adds, where they mean something already."""
        for name in names:
            try:
                taken = name in GENERATION_FIELDS or hasattr(cls, name) or not cls._refuse_misnamed({name: None})
            except LoopedConfigError:
                taken = True
            if taken:
                raise LoopedConfigError(
                    f"{owner}.added_fields has {name!r}, which already means something in a config or in that of "
                    "generation: choose another name"
                )

    @classmethod
    def _check_names(cls, given: dict[str, Any], consequence: str):
        """Refuse keys that stand for a field, and warn of other unknown keys. consequence: the end of the warning."""
        for key, advice in cls._refuse_misnamed(given).items():
            if given[key] is not None:
                hint = f" Did you mean `{advice}`?" if advice else ""
                logger.warning_once(f"LoopedConfig has no field `{key}`, so {consequence}.{hint}")

    def __getattribute__(self, name: str) -> Any:
        """As transformers reads a field, in a third of the time: a pass reads 200 of them, a new model 1,600."""
        plain = super(LAST_OF_TRANSFORMERS, self).__getattribute__
        if "_heterogeneity_spec" in plain("__dict__"):  # of `per_layer_config`
            return super().__getattribute__(name)
        return plain(type(self).attribute_map.get(name, name))

    def __setattr__(self, name: str, value: Any):
        if name in FIELD_OF or not (name.startswith("_") or hasattr(type(self), name)):
            if name in SPELLINGS_OF_EPS:
                self._check_names({name: value}, NOT_READ)
            else:  # no warning: tools store attributes of their own in a config
                self._refuse_misnamed({name: value})
        super().__setattr__(name, value)

    @property
    def has_readout_norm(self) -> bool:
        return "norm" in READOUTS[self.readout_norm]

    @property
    def learns_alpha(self) -> bool:
        return self.readout_alpha_learned and "alpha" in READOUTS[self.readout_norm]

    @property
    def state_losses(self) -> dict[str, float]:
        """Weights of the losses that read states; only those that are not 0."""
        names = ("norm_penalty", "scale_anchor", "latent_loss", "latent_anchor")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Return the content of config.json as fields of this class, also for the layout of a published model."""
        kwargs = at_one_commit(pretrained_model_name_or_path, kwargs)
        where = dict(kwargs)
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if "config" in OF_PACKAGE and config_dict and where.get("gguf_file") is None:
            config_dict = OF_PACKAGE["config"](config_dict, pretrained_model_name_or_path, where)
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Make a config. A `num_loops` passed as an argument is the depth to run and also wins over one in a saved
        generation config; the saved `num_loops` is that of training. Older folders have no `trained_num_loops`."""
        if config_dict.get("trained_num_loops") is None and config_dict.get("num_loops") is not None:
            config_dict = {**config_dict, "trained_num_loops": config_dict["num_loops"]}
        if kwargs.get("return_unused_kwargs"):  # the caller gets the unused arguments back
            cls._refuse_misnamed(kwargs)
        else:
            of_others = ARGUMENTS_OF_TOKENIZERS | ARGUMENTS_OF_LOADING
            own = {name: value for name, value in kwargs.items() if name not in of_others}
            cls._check_names(own, "it is passed over")
        names = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
        changes = {name: kwargs.pop(name) for name in names if name in kwargs}
        made = super().from_dict(config_dict, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        config.update(changes)
        if "num_loops" in kwargs:
            config._num_loops_asked_for = True
        return made

    def update(self, config_dict: dict[str, Any]):
        """Set fields, as serving engines do with a loaded config; a `num_loops` among them counts as requested."""
        super().update(with_rope_kept(config_dict, vars(self)))
        self.standardize_rope_params()
        if "num_loops" in config_dict:
            self._num_loops_asked_for = True

    def to_dict(self) -> dict[str, Any]:
        derived = {"num_hidden_layers": self.num_hidden_layers, "trained_num_loops": self.trained_depth}
        if self.has_sets_in_core or self.loop_embedding == "learned":
            derived["num_loop_parameters"] = self.num_loop_sets
        fields = {**super().to_dict(), **derived}
        fields.pop("_num_loops_asked_for", None)
        return fields

    def save_pretrained(self, save_directory: str | PathLike, push_to_hub: bool = False, **kwargs):
        """Save config.json with the code, so that the folder also opens where this package is not installed."""
        from .auto_classes import auto_map

        is_own = type(self) is LoopedConfig  # a subclass has models of its own
        if is_own:
            ours, given = auto_map(), getattr(self, "auto_map", None) or {}
            # keep registered classes that are not of this package; replace entries for its classes from other folders
            names = {path.rpartition(".")[2] for path in ours.values()}
            self.auto_map = ours | {auto: path for auto, path in given.items() if path.rpartition(".")[2] not in names}
        if not is_own or "code" not in OF_PACKAGE:
            return super().save_pretrained(save_directory, push_to_hub, **kwargs)
        super().save_pretrained(save_directory)
        OF_PACKAGE["code"](save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def __init_subclass__(cls, **kwargs):
        # saving copies the file of a class only if the class itself sets this, as `register_for_auto_class` does
        cls._auto_class = vars(cls).get("_auto_class")
        super().__init_subclass__(**kwargs)

    def validate_architecture(self):
        check_relations(self)


__all__ = ["LoopedConfig", "LoopedConfigError"]
