"""Checks that fields of a config fit together; @strict checks types and single values. Errors quote the values."""

from math import isfinite

from transformers.activations import ACT2FN

from .compatibility import look_up
from .config_errors import LoopedConfigError
from .config_layers import LAYER_TYPES, SHARED_ROPE


LOSSES_OF_GATES = ("exit_weighted", "exit_weighted_logits", "gate")  # values of loop_loss that read the exit gate
MOST_LAYERS, LARGEST_SIZE = 10**4, 10**9  # far above any model; larger ones would take hours to build, or overflow


def check_relations(config):
    check_sizes(config)
    check_first(config)
    check_attention(config)
    check_loop(config)
    check_readout(config)


def check_sizes(config):
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                 "head_dim", "max_position_embeddings", "num_core_layers", "num_loops",
                 "num_readout_alphas"):  # fmt: skip
        value = getattr(config, name)
        if value is None or value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name in ("trained_num_loops", "core_hidden_size", "core_intermediate_size", "core_num_attention_heads",
                 "loop_lora_rank", "num_loop_parameters", "num_key_value_loops"):  # fmt: skip
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name in ("num_prelude_layers", "num_coda_layers", "norm_penalty", "scale_anchor", "scale_anchor_target",
                  "latent_loss", "latent_anchor", "exit_entropy_weight"):  # fmt: skip
        if not 0 <= getattr(config, name) < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, got {getattr(config, name)}")
    for name in ("residual_scale", "residual_reference_layers", "rms_norm_eps", "logit_softcap", "state_init_std",
                 "embedding_scale", "mlp_activation_scale", "kv_latent_size", "initializer_range",
                 "attention_softcap", "attention_scale"):  # fmt: skip
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if not abs(config.norm_offset) < float("inf"):
        raise ValueError(f"norm_offset must be finite, got {config.norm_offset}")
    for name in ("attention_dropout", "residual_dropout", "embedding_dropout", "classifier_dropout"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {value}")
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        raise ValueError(f"pad_token_id={config.pad_token_id} is not a token below vocab_size={config.vocab_size}")
    if config.hidden_act not in ACT2FN:
        raise ValueError(
            f"hidden_act={config.hidden_act!r} is not an activation of transformers; e.g. silu, relu2, gelu"
        )


def check_first(config):
    """The checks that come first, before transformers reads what is derived from these fields."""
    if config.key_value_interval < 1:  # `layer_types` divides by it
        raise LoopedConfigError(f"key_value_interval must be at least 1, got {config.key_value_interval}")
    largest = dict.fromkeys(("num_prelude_layers", "num_core_layers", "num_coda_layers"), MOST_LAYERS)
    largest |= dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "core_hidden_size",
         "core_intermediate_size", "kv_latent_size", "loop_lora_rank", "num_loop_parameters",
         "max_position_embeddings", "num_readout_alphas", "core_num_attention_heads"), LARGEST_SIZE
    )  # fmt: skip
    for name, most in largest.items():
        if (getattr(config, name) or 0) > most:
            raise LoopedConfigError(f"{name} must be at most {most}, got {getattr(config, name)}")
    if config.num_attention_heads * (config.head_dim or 0) > LARGEST_SIZE:
        raise LoopedConfigError(
            f"num_attention_heads={config.num_attention_heads} times head_dim={config.head_dim} must be at most "
            f"{LARGEST_SIZE}"
        )


def check_attention(config):
    assert config.head_dim is not None and config.num_key_value_heads is not None  # see check_sizes
    if config.head_dim * config.num_attention_heads != config.hidden_size and (
        config.hidden_size % config.num_attention_heads != 0
    ):
        raise ValueError(
            f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={config.num_attention_heads}; "
            "change one of them"
        )
    if config.num_attention_heads % config.num_key_value_heads != 0:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}; every key/value head serves equally many query heads"
        )
    core_heads, group = config.core_num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    if core_heads is not None and core_heads % group != 0:
        raise ValueError(
            f"core_num_attention_heads={core_heads} is not a multiple of the {group} query heads that share a "
            f"key/value head (num_attention_heads={config.num_attention_heads}, "
            f"num_key_value_heads={config.num_key_value_heads})"
        )
    if config.position_embedding == "rope" and config.head_dim % 2 != 0:
        raise ValueError(
            f"head_dim={config.head_dim} must be even for rotary positions; use position_embedding='learned'"
        )
    if config.window_pattern is not None and (not config.window_pattern or set(config.window_pattern) - set("SL")):
        raise ValueError(f"window_pattern={config.window_pattern!r} must be a non-empty string of the letters S and L")
    if config.has_windows and (config.sliding_window is None or config.sliding_window < 2):
        # the caches of transformers cannot hold 0 tokens
        raise ValueError(
            f"sliding_window={config.sliding_window} must be at least 2, or None beside window_pattern=None; with a "
            f"pattern it is by default a quarter of max_position_embeddings={config.max_position_embeddings}"
        )
    check_rope_type(config)


def check_rope_type(config):
    if config.rope_pattern is not None and (not config.rope_pattern or set(config.rope_pattern) - set("RN")):
        raise ValueError(f"rope_pattern={config.rope_pattern!r} must be a non-empty string of the letters R and N")
    parameters, kinds = config.rope_parameters or {}, config.rope_kinds()
    nested = [key for key, value in parameters.items() if isinstance(value, dict)]
    missing = sorted({kind for section in config.section_ropes() for kind in section if kind} - {*kinds, SHARED_ROPE})
    # beside the dicts of layer types, other keys are not read
    if set(nested) - set(kinds) or (kinds and (missing or set(parameters) - set(kinds))):
        raise ValueError(
            f"rope_parameters has the keys {', '.join(parameters)}: pass one flat dict for all layers such as "
            "{'rope_type': 'default', 'rope_theta': 10000.0}, or one such dict under each of "
            f"{', '.join(missing or LAYER_TYPES.values())}"
        )
    for one in [parameters[kind] for kind in kinds] or [parameters]:
        for name, value in one.items():
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if not all(isfinite(each) for each in numbers if isinstance(each, float)):
                raise ValueError(f"rope_parameters has {name}={value}, which must be finite")
            if name == "rope_theta" and isinstance(value, (int, float)) and value <= 0:
                raise ValueError(f"rope_parameters has rope_theta={value}, which must be above 0")
        rope_type = one.get("rope_type", "default")
        known = look_up("transformers.modeling_rope_utils", "ROPE_INIT_FUNCTIONS", [rope_type])
        if rope_type != "default" and rope_type not in known:
            raise ValueError(
                f"rope_type={rope_type!r} is not one of transformers': default, {', '.join(sorted(known))}"
            )
        scales_each = rope_type == "longrope" and config.position_embedding == "rope"
        for name in ("short_factor", "long_factor") if scales_each else ():
            if isinstance(factors := one.get(name), (list, tuple)) and len(factors) != config.head_dim // 2:
                raise ValueError(
                    f"rope_parameters has {len(factors)} numbers in {name}, but a head of head_dim={config.head_dim} "
                    f"is rotated at {config.head_dim // 2} frequencies: give one for each"
                )
        if (part := one.get("partial_rotary_factor")) not in (None, 1) and rope_type != "proportional":
            raise ValueError(
                f"partial_rotary_factor={part} goes with rope_type='proportional', and not with {rope_type!r}, which "
                "here rotates the whole head: leave it out"
            )
        if config.position_embedding == "rope" and one.get("rope_theta") is None:
            raise ValueError(f"rope_parameters={one} has no rope_theta: add that of the weights, by default 10000.0")


def check_loop(config):
    if config.injection in ("residual_all", "attention_first", "attention_all") and config.state_init != "embedding":
        raise ValueError(
            f"injection={config.injection!r} restarts the stream at the embedding in every loop, so its first state "
            f"is the embedding too: state_init must be 'embedding', got {config.state_init!r}"
        )
    if config.injection == "none" and config.state_init != "embedding":
        raise ValueError(
            f"with injection='none' and state_init={config.state_init!r} the input never reaches the loop: set "
            "state_init to 'embedding', or choose an injection"
        )
    check_state_size(config)
    if config.injection_norm and config.injection in ("none", "attention_first", "attention_all"):
        raise ValueError(
            "injection_norm is a norm on the sum of state and input, but with "
            f"injection={config.injection!r} they are never added: set injection to 'add', 'concat', 'diagonal' or "
            "'residual_all', or injection_norm to False"
        )
    if config.reads_run_depth and (
        config.loop_loss != "terminal" or config.exit_gate != "none" or config.state_losses
    ):
        other = "residual_depth 'trained'" if config.residual_depth == "run" else "loop_embedding 'sinusoidal'"
        raise ValueError(
            f"with {config.reads_run_depth} the first k loops of a deeper run are not a run of depth k, so there is "
            f"nothing to read between loops: loop_loss={config.loop_loss!r}, exit_gate={config.exit_gate!r} and "
            f"{shown_state_losses(config)} must be 'terminal', 'none' and 0, or {other}"
        )


def check_state_size(config):
    """Refuse settings that need a state as wide as the input; any other connects to it through learned maps only."""
    if config.state_size == config.hidden_size:
        return
    wanted = {
        "injection": ("concat", "diagonal"),
        "state_init": ("zeros", "normal"),
        "coda_input": ("linear",),
        "inter_loop_norm": ("none", "own"),
        "exit_gate": ("none", "raw"),
        "latent_loss": (0,),
        "latent_anchor": (0,),
    }
    for name, values in wanted.items():
        if getattr(config, name) not in values:
            raise ValueError(
                f"a state of core_hidden_size={config.core_hidden_size} beside hidden_size={config.hidden_size} needs "
                f"{name} to be {' or '.join(map(repr, values))}, got {getattr(config, name)!r}"
            )


def check_readout(config):
    no_norm = not config.has_readout_norm
    if config.inter_loop_norm == "shared" and no_norm:
        raise ValueError(
            f"inter_loop_norm='shared' is the readout norm at every loop, but readout_norm={config.readout_norm!r} "
            "has none; use 'rmsnorm', 'layernorm', 'final_only' or 'final_raw', or inter_loop_norm='own'"
        )
    if config.coda_input == "norm" and (no_norm or config.num_coda_layers == 0):
        raise ValueError(
            "coda_input='norm' applies the readout norm before the coda: it needs a readout_norm and coda layers, "
            f"got readout_norm={config.readout_norm!r} and num_coda_layers={config.num_coda_layers}"
        )
    if config.exit_gate == "normed" and no_norm:
        raise ValueError(
            f"exit_gate='normed' reads the readout norm, but readout_norm={config.readout_norm!r} has none; use "
            "exit_gate='raw'"
        )
    if config.loop_loss in LOSSES_OF_GATES and config.exit_gate == "none":
        raise ValueError(f"loop_loss={config.loop_loss!r} needs an exit gate: set exit_gate to 'raw' or 'normed'")
    if config.loop_loss == "gate" and config.state_losses:
        raise ValueError(
            f"loop_loss='gate' trains the gate alone, so {shown_state_losses(config)} has nothing to act on; set "
            "it to 0"
        )
    if not 0 <= config.readout_alpha <= 1:
        raise ValueError(f"readout_alpha must lie in [0, 1], got {config.readout_alpha}")
    if config.learns_alpha and config.readout_alpha in (0, 1):
        raise ValueError(
            f"a learned alpha is sigmoid(a) and cannot start at readout_alpha={config.readout_alpha}: start between "
            "0 and 1, or fix it with readout_alpha_learned=False"
        )


def shown_state_losses(config) -> str:
    return ", ".join(f"{name}={weight}" for name, weight in config.state_losses.items()) or "norm_penalty=0"
