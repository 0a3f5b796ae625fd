"""The published systems as settings of one config.

A preset is a small dict of `LoopedConfig` fields. Sizes that a paper varies are given for its smallest model; pass
others as overrides. A value may be a function of the other fields, for the few that follow from the width.
"""

from copy import deepcopy
from math import sqrt

from .config_layers import with_rope_kept


def _heads_of(size: int):
    """Return a function of the other fields: as many heads of this size as the width has room for."""
    return lambda f: max(1, f["hidden_size"] // size)


_FLT_BLOCK = {
    # as in the public code: norms without parameters, on the embedding before the first layer (LT_i has one on the sum
    # of embedding and state instead) and on the state after every loop; the head reads the latter too
    "inter_loop_norm": "shared",
    "rms_norm_eps": 2.0**-23,
    # d = 64 * layers, and ceil(d / 128) heads: of width 128 where that divides d
    "vocab_size": 151680,
    "hidden_size": lambda f: 64 * f["num_core_layers"],
    "intermediate_size": lambda f: 4 * f["hidden_size"],
    "num_attention_heads": lambda f: -(-f["hidden_size"] // 128),
    "num_core_layers": 6,
    "num_loops": 12,
    "max_position_embeddings": 1024,
    "hidden_act": "relu2",
    "mlp_gated": False,
    "norm_affine": False,
    "qk_norm": "free",
    "logit_softcap": 15.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "init_scheme": "zero_output",
}

_HUGINN_BLOCK = {
    "vocab_size": 65536,
    "state_init": "normal",
    "injection": "concat",
    "block_norm": "residual_sandwich",
    "coda_input": "norm",
    "embedding_scale": lambda f: sqrt(abs(f["hidden_size"])),  # a negative width is refused later
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "init_scheme": "takase",
}

_READOUT = {
    # the 44M model of the readout paper; 129M: hidden_size 768, 12 layers, 12 heads
    "vocab_size": 20000,
    "hidden_size": 512,
    "intermediate_size": lambda f: 4 * f["hidden_size"],
    "num_attention_heads": _heads_of(64),
    "num_core_layers": 8,
    "num_loops": 4,
    "max_position_embeddings": 256,
    "position_embedding": "learned",
    "tie_word_embeddings": True,
    "attention_dropout": 0.1,
    "residual_dropout": 0.1,
    "residual_dropout_on": "mlp",
    "embedding_dropout": 0.1,
}

_OURO = {
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": _heads_of(128),
    "num_core_layers": 24,
    "num_loops": 4,
    "max_position_embeddings": 4096,
    "block_norm": "branch_sandwich",
    "inter_loop_norm": "shared",
    "exit_gate": "normed",
    "loop_loss": "exit_weighted",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}

PRESETS = {
    # Fully Looped Transformer and its baselines
    "lt": {**_FLT_BLOCK, "prelude_norm": True},
    # zeros: the input counts once at t = 0
    "lt_input": {**_FLT_BLOCK, "injection": "add", "injection_norm": True, "state_init": "zeros"},
    "lt_attention": {**_FLT_BLOCK, "prelude_norm": True, "injection": "attention_first"},
    "flt": {**_FLT_BLOCK, "prelude_norm": True, "injection": "attention_all"},
    "flt_residual": {**_FLT_BLOCK, "prelude_norm": True, "injection": "residual_all", "injection_norm": True},
    # recurrent-depth models
    "huginn": {
        **_HUGINN_BLOCK,
        "hidden_size": 5280,
        "intermediate_size": 17920,
        "num_attention_heads": _heads_of(96),
        "num_prelude_layers": 2,
        "num_core_layers": 4,
        "num_coda_layers": 2,
        "num_loops": 32,
        "max_position_embeddings": 4096,
        "attention_bias": "qk",
    },
    "rdm": {
        **_HUGINN_BLOCK,
        "hidden_size": 1024,
        "intermediate_size": 3520,
        "num_attention_heads": _heads_of(64),
        "num_prelude_layers": 1,
        "num_core_layers": 1,
        "num_coda_layers": 1,
        "num_loops": 16,
        "max_position_embeddings": 2048,
    },
    "parcae": {
        "vocab_size": 32768,
        "hidden_size": 768,
        "intermediate_size": lambda f: 4 * f["hidden_size"],
        "num_attention_heads": _heads_of(128),
        "num_prelude_layers": 2,
        "num_core_layers": 2,
        "num_coda_layers": 2,
        "num_loops": 8,
        "max_position_embeddings": 2048,
        "state_init": "normal",
        "prelude_norm": True,
        "injection": "diagonal",
        "coda_input": "linear",
        "qk_norm": "free",
        "hidden_act": "relu2",
        "mlp_gated": False,
        "mlp_activation_scale": 0.5,
        "value_embeddings": True,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "init_scheme": "scaled_zero",
    },
    "ouro": _OURO,
    # residual scaling: Llama blocks, d 768, the whole stack looped
    "residual_scaling": {
        "vocab_size": 128256,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": _heads_of(64),
        "num_core_layers": 12,
        "residual_scaling": "factored",
        "residual_reference_layers": 12,
        "tie_word_embeddings": True,
    },
    # the readout paper: table 2, then appendix G
    "readout_terminal_rmsnorm": _READOUT,
    "readout_terminal_raw": {**_READOUT, "readout_norm": "none"},
    "readout_per_loop_rmsnorm": {**_READOUT, "loop_loss": "per_loop"},
    "readout_per_loop_raw": {**_READOUT, "loop_loss": "per_loop", "readout_norm": "none"},
    "readout_per_loop_final_only": {**_READOUT, "loop_loss": "per_loop", "readout_norm": "final_only"},
    "readout_terminal_penalty": {**_READOUT, "norm_penalty": 0.01},
    "readout_per_loop_penalty": {**_READOUT, "loop_loss": "per_loop", "norm_penalty": 0.01},
    "readout_exit_weighted": {**_READOUT, "loop_loss": "exit_weighted", "exit_gate": "raw"},
    "readout_damping": {**_READOUT, "loop_damping": True},
    "readout_inter_loop_norm": {**_READOUT, "inter_loop_norm": "own"},
    # appendix B: Ouro's shape, and its loss as its released code computes it; with and without the last readout's norm
    "readout_1b4": {**_OURO, "loop_loss": "exit_weighted_logits"},
    "readout_1b4_raw": {**_OURO, "loop_loss": "exit_weighted_logits", "readout_norm": "final_raw"},
}


def preset_fields(name: str, overrides: dict) -> dict:
    """Return the fields of preset `name` with `overrides`; functions of fields are evaluated in the order written."""
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; choose one of {', '.join(sorted(PRESETS))}")
    fields = {**deepcopy(PRESETS[name]), **with_rope_kept(overrides, PRESETS[name])}
    pending = {key: value for key, value in fields.items() if callable(value)}
    values = {key: value for key, value in fields.items() if not callable(value)}
    if not all(isinstance(values.get(name, 0), int) for name in ("num_core_layers", "hidden_size")):
        return values  # of a wrong type, which the config refuses by the name of its field
    for key, value in pending.items():
        values[key] = value(values)
    return values
