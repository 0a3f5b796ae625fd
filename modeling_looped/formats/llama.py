"""Llama's layers and names: the base of Ouro and Nanbeige, and a layout to write models without loops in.

Llama itself is not read here: a dense model becomes a looped one by `from_dense`.
"""

from typing import Any

from ..configuration_looped import LoopedConfig, LoopedConfigError
from .layout import OF_TRAINING, Fields, Layout, Rule, rope_words, rules, token_ids


LEAVES = """
    self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj
    input_layernorm post_attention_layernorm
""".split()


def llama_rules(**renamed: str) -> list[Rule]:
    """Return the rules of Llama's names. renamed: from a stored part of a layer to its name here."""
    leaves = {**{leaf: leaf for leaf in LEAVES}, **renamed}
    table = {f"model.layers.{{i}}.{stored}": f"model.core.{{i}}.{ours}" for stored, ours in leaves.items()}
    same = ("model.embed_tokens", "model.norm", "lm_head")
    return rules({**table, **{name: name for name in same}})


def llama_sizes(fields: Fields) -> dict[str, Any]:
    """Take the fields that all configs of this kind have under the same names."""
    hidden_size, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    sizes: dict[str, Any] = {
        "vocab_size": fields.take("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.take("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.take("num_key_value_heads", default=heads),
        "head_dim": fields.take("head_dim", "kv_channels", default=None),
        "num_core_layers": fields.take("num_hidden_layers"),
        "max_position_embeddings": fields.take("max_position_embeddings"),
        "hidden_act": fields.take("hidden_act", default="silu"),
        "rms_norm_eps": fields.take("rms_norm_eps", default=1e-6),
        "initializer_range": fields.take("initializer_range", default=0.02),
        "attention_dropout": fields.take("attention_dropout", default=0.0),
        "tie_word_embeddings": fields.take("tie_word_embeddings", default=False),
        "use_cache": fields.take("use_cache", default=True),
        "rope_parameters": fields.rope(fields.take("rope_theta", default=10000.0)),
    }
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    fields.expect("pretraining_tp", 1)
    return sizes


def llama_words(config: LoopedConfig) -> dict[str, Any]:
    """The inverse of `llama_sizes`."""
    names = """
        vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim
        max_position_embeddings hidden_act rms_norm_eps initializer_range attention_dropout tie_word_embeddings
        use_cache bos_token_id eos_token_id pad_token_id
    """.split()
    words = {name: getattr(config, name) for name in names}
    return {**words, "num_hidden_layers": config.num_core_layers, **rope_words(config)}


class Llama(Layout):
    name, title, architecture, model_type = "llama", "Llama", "LlamaForCausalLM", "llama"
    reads = False

    def make_rules(self):
        return llama_rules()

    def read_config(self, config):
        fields = Fields(self, config)
        looped: dict[str, Any] = {**llama_sizes(fields), "num_loops": 1}
        return {**looped, **token_ids(fields, looped["vocab_size"]), **fields.shared()}

    def write_config(self, config):
        return {
            "model_type": "llama",
            **llama_words(config),
            "attention_bias": False,
            "mlp_bias": False,
        }


def as_one_stack(config: LoopedConfig, unroll: bool) -> LoopedConfig:
    """Return the config of the same model without loops: prelude, the core once for each loop, coda."""
    if config.num_loops > 1 and not unroll:
        raise LoopedConfigError(
            f"the model loops {config.num_loops} times, and llama has no loops: --unroll writes the "
            f"{config.num_core_layers} layers of the loop {config.num_loops} times over, or --num-loops 1 makes it "
            "a model of one loop"
        )
    own = LoopedConfig.__annotations__.keys() - OF_TRAINING
    values: dict[str, Any] = {name: getattr(config, name) for name in own}
    if config.num_loops == 1 and config.inter_loop_norm != "none":
        values["inter_loop_norm"] = "none"  # with one loop there is no place for it
    if config.residual_factor(config.trained_depth) == config.residual_factor(1) == 1:
        values |= {"residual_scaling": "none", "residual_scale": 1.0, "residual_reference_layers": 1}
        values["residual_depth"] = "trained"
    sections = {"num_prelude_layers": 0, "num_core_layers": config.num_hidden_layers, "num_coda_layers": 0}
    whole: dict[str, Any] = {**values, **sections, "num_loops": 1, "dtype": config.dtype}
    return LoopedConfig(**whole)


def unrolled_tensors(config: LoopedConfig, tensors: dict) -> dict[str, Any]:
    """Return the tensors under the names of one stack, see `as_one_stack`."""
    first, last = config.num_prelude_layers, config.num_prelude_layers + config.num_core_layers * config.num_loops
    starts = {
        "prelude": [0],
        "core": [first + loop * config.num_core_layers for loop in range(config.num_loops)],
        "coda": [last],
    }
    stack = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "model" and parts[1] in starts:
            for start in starts[parts[1]]:
                stack[".".join(["model", "core", str(start + int(parts[2])), *parts[3:]])] = tensor
        else:
            stack[name] = tensor
    return stack


LLAMA = Llama()
