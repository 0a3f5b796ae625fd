"""Check the section `model` of a recipe, which may hold the fields of LoopedConfig that have an effect in training.

Sizes are checked before a config is made, so that a typing error costs no memory and no time.
"""

import dataclasses

from transformers.modeling_rope_utils import RopeParameters

from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.config_layers import LAYER_TYPES
from modeling_looped.foreign_names import FIELD_OF, meant

from .ranges import MOST_DEPTH
from .sections import RecipeError
from .yaml_files import refuse_unknown, shortly


LARGEST_NUMBER = 1e9  # in any field
MOST_LAYERS = 512
MOST_SLOTS = 2**14  # slots of keys and values, layers times loops: this many are still created within a second
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**16,
    "max_position_embeddings": 2**24,
    "num_prelude_layers": MOST_LAYERS,
    "num_core_layers": MOST_LAYERS,
    "num_coda_layers": MOST_LAYERS,
    "num_loops": MOST_DEPTH,
    "core_hidden_size": 2**17,
    "core_intermediate_size": 2**20,
    "core_num_attention_heads": 2**14,
    "num_readout_alphas": MOST_DEPTH,
    "loop_lora_rank": 2**17,
    "num_loop_parameters": MOST_DEPTH,
    "kv_latent_size": 2**17,
    "sliding_window": 2**24,
}
FIELDS = [field.name for field in dataclasses.fields(LoopedConfig) if field.name != "trained_num_loops"]
WHOLE_NUMBERS = [field.name for field in dataclasses.fields(LoopedConfig) if field.type in (int, int | None)]
OWN_FIELDS = [name for name in LoopedConfig.__annotations__ if name != "format_version"]
OF_OTHER_USES = ("use_cache", "classifier_dropout")  # fields that training does not read
SET_BY_TOKENIZER = ("pad_token_id", "bos_token_id", "eos_token_id")


def has_rotary_layer(config: LoopedConfig) -> bool:
    return any(kind is not None for kinds in config.section_ropes() for kind in kinds)


def has_weighted_norm(config: LoopedConfig) -> bool:
    """Return whether any norm has a weight: those of blocks (norm_affine), or those of queries and keys (qk_norm)."""
    return config.norm_affine or config.qk_norm in ("learned", "all_heads")


# fields that act only under a condition on the rest of the config: the condition in words, and as a function
CONDITIONS = {
    "residual_scale": ("a residual_scaling", lambda c: c.residual_scaling != "none"),
    "residual_reference_layers": ("residual_scaling 'factored'", lambda c: c.residual_scaling == "factored"),
    "residual_depth": ("a residual_scaling", lambda c: c.residual_scaling != "none"),
    "state_init_std": ("state_init 'normal'", lambda c: c.state_init == "normal"),
    "readout_alpha": ("readout_norm 'alpha' or 'final_alpha'", lambda c: "alpha" in c.readout_norm),
    "readout_alpha_learned": ("readout_norm 'alpha' or 'final_alpha'", lambda c: "alpha" in c.readout_norm),
    "num_readout_alphas": ("readout_norm 'alpha' or 'final_alpha'", lambda c: "alpha" in c.readout_norm),
    "exit_entropy_weight": ("a loop_loss 'exit_weighted' or alike", lambda c: c.exit_gate != "none"),
    "loop_norms": ("norm_affine, or a qk_norm with weights", has_weighted_norm),
    "num_loop_parameters": (
        "a loop_lora_rank, loop_norms, or loop_embedding 'learned'",
        lambda c: c.has_sets_in_core or c.loop_embedding == "learned",
    ),
    "scale_anchor_target": ("a scale_anchor", lambda c: c.scale_anchor > 0),
    "residual_dropout_on": ("a residual_dropout", lambda c: c.residual_dropout > 0),
    "rope_parameters": ("position_embedding 'rope'", lambda c: c.position_embedding == "rope"),
    "rope_pattern": (
        "position_embedding 'rope' and a layer without rotary positions",
        lambda c: c.position_embedding == "rope" and any(None in kinds for kinds in c.section_ropes()),
    ),
    "rope_rounding": ("position_embedding 'rope' and a layer that has them", has_rotary_layer),
    "norm_offset": ("an RMS norm with a weight", has_weighted_norm),
    "norm_rounding": ("an RMS norm with a weight", has_weighted_norm),
    "round_embedding_scale": ("an embedding_scale", lambda c: c.embedding_scale != 1),
    "round_logit_softcap": ("a logit_softcap", lambda c: c.logit_softcap is not None),
    "window_pattern": (
        "a layer that slides, which the last never does unless the pattern has a letter for each layer",
        lambda c: any("sliding_attention" in types for types in c.section_layer_types()),
    ),
}


def refuse_unknown_fields(fields: dict, where: str, added: tuple[str, ...] = ()):
    """added: names of the fields that a class of the user's own adds."""
    known = [*FIELDS, "preset", *added]
    for key in fields:
        if key not in known and (advice := meant(str(key), known, FIELD_OF)):
            raise RecipeError(f"{where}: unknown key in model: {shortly(key)}; did you mean {advice!r}?")
    refuse_unknown(fields, known, where, "key in model", [*OWN_FIELDS, "preset", *added])


def check_added_fields(fields: dict, model_class: type[LoopedForCausalLM]):
    """Refuse fields that neither the config nor the class of the user's own has, and values of another type than that
    of its default."""
    added = model_class.added_fields
    refuse_unknown_fields(fields, f"the recipe of a {model_class.__name__}", tuple(added))
    for name in added.keys() & fields.keys():
        value, default = fields[name], added[name]
        check_value(name, value, f"the recipe of a {model_class.__name__}")
        fits = type(value) is type(default) or isinstance(default, float) and type(value) is int
        if default is not None and not fits:
            raise RecipeError(
                f"model.{name}={shortly(value)} must be of the type {type(default).__name__}, as its default "
                f"{default!r} in {model_class.__name__}.added_fields"
            )


def check_model_fields(fields: dict, where: str):
    for name, value in fields.items():
        refuse_foreign(name, where)
        if name in LARGEST and isinstance(value, (int, float)) and not value <= LARGEST[name]:
            raise RecipeError(f"{where}: model.{name} must be at most {LARGEST[name]}, got {shortly(value)}")
        check_value(name, value, where)
    preset = fields.get("preset")
    if preset is not None and not isinstance(preset, str):
        raise RecipeError(
            f"{where}: model.preset must be one of {', '.join(LoopedConfig.preset_names())}, got {preset!r}"
        )
    if fields.get("rope_parameters") is not None:
        check_rope(fields["rope_parameters"], where)


def check_value(name: str, value, where: str):
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST_NUMBER:  # NaN fails this too
        raise RecipeError(
            f"{where}: model.{name} must be a number of at most {LARGEST_NUMBER:g}, got {shortly(value)}"
        )
    if isinstance(value, str) and len(value) > 2 * MOST_LAYERS:
        raise RecipeError(f"{where}: model.{name} is longer than any name or pattern, got {shortly(value)}")


def refuse_foreign(name: str, where: str):
    """Refuse a field of the config that a recipe cannot set."""
    if name in SET_BY_TOKENIZER:
        raise RecipeError(f"{where}: model.{name} would have no effect, the tokenizer says it: leave it out")
    if name in OF_OTHER_USES or name not in (*OWN_FIELDS, "preset"):
        raise RecipeError(
            f"{where}: model.{name} does nothing in a recipe: leave it out, and set it in the saved model"
        )


def check_rope(parameters, where: str):
    if not isinstance(parameters, dict):
        raise RecipeError(
            f"{where}: model.rope_parameters must hold key: value pairs such as rope_theta: 10000.0, got "
            f"{shortly(parameters)}"
        )
    known = list(RopeParameters.__annotations__)
    for name, value in parameters.items():
        if name in LAYER_TYPES.values():
            check_rope(value, f"{where}, rope_parameters of {name}")
            continue
        refuse_unknown([name], known, where, "key in model.rope_parameters")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        numbers = value if isinstance(value, list) else [value] if is_number else []
        if not all(isinstance(one, (int, float)) and 0 < one < 1e30 for one in numbers):
            raise RecipeError(
                f"{where}: model.rope_parameters.{name} must be above 0 and finite, got {shortly(value)}"
            )
        if not is_number and name not in ("rope_type", "short_factor", "long_factor", "truncate", "mrope_section"):
            raise RecipeError(f"{where}: model.rope_parameters.{name} must be a number, got {shortly(value)}")


def check_model(given: dict, config: LoopedConfig):
    """Refuse a model that is too large as a whole, and fields of the recipe that have no effect in its config."""
    slots = config.num_prelude_layers + config.num_coda_layers + config.num_core_layers * config.num_loops
    if config.num_layers > MOST_LAYERS or slots > MOST_SLOTS:
        raise RecipeError(
            f"section 'model': {config.num_layers} layers and {config.num_loops} loops are more than the "
            f"{MOST_LAYERS} layers, or the {MOST_SLOTS} layers times loops, that a model may have"
        )
    for name, (needed, applies) in CONDITIONS.items():
        value, default = given.get(name), getattr(LoopedConfig, name, None)
        if value is not None and value != default and not applies(config):
            raise RecipeError(
                f"section 'model': {name}={shortly(value)} would have no effect without {needed}: leave it out"
            )
    for name in ("window_pattern", "rope_pattern"):
        pattern = given.get(name)
        if pattern is not None and len(pattern) > config.num_layers:
            raise RecipeError(
                f"section 'model': {name}={pattern!r} has {len(pattern)} letters for {config.num_layers} layers: "
                "leave out what no layer takes"
            )
    if given.get("rope_parameters") is not None and config.rope_kinds():
        types = sorted(set(sum(config.section_layer_types(), [])))
        if len(types) < 2:
            raise RecipeError(
                f"section 'model': all layers are of the type {types[0]}: pass one flat dict as rope_parameters, "
                f"instead of one for each of {', '.join(config.rope_kinds())}"
            )
