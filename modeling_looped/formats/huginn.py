"""Models of type `huginn_raven`: Huginn itself, and Llama, TinyLlama and OLMo models that were made to loop.

They share names and sizes; the tensors of a layer show which kind it is. In Huginn a layer has four norms, rotary
positions rotate pairs of neighbours, and the coda reads a normed state. In retrofitted models a layer has two norms,
rotary positions rotate halves as in the models they come from, and the coda reads the state unchanged.
"""

from math import isclose, sqrt
from typing import Any

import torch

from ..initialization import small_std
from .changes import FusedBiases, FusedGate, FusedHeads
from .layout import Fields, Layout, LoopedConfigError, Rule, rope_words, rules, token_ids


SECTIONS = {"prelude": "prelude", "core_block": "core", "coda": "coda"}
LOOP = {"injection": "concat", "init_scheme": "takase"}
NAMES_OF_PARTS = {  # the values of the only implementation
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "state_init": "like-init",
    "injection_type": "linear",
    "bias": False,
    "test_time_noise": 0,
}
UNREAD_KEYS = """
    init_strategy init_orthogonal sampling_scheme mean_backprop_depth activation_checkpoint_impl padding_multiple
    effective_expected_depth test_time_noise_type name hf_config n_layers num_hidden_layers init_values
    max_position_embeddings
""".split()
VOCABULARY, BEGIN, END_OF_TEXT, END_OF_TURN, PAD = 65536, 65504, 65505, 65508, 65509


def trunk_rules() -> list[Rule]:
    table = {
        "transformer.wte": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "transformer.adapter": "model.injection.proj",
        "lm_head": "lm_head",
    }
    return rules(table)


def layer_rules(norms: dict[str, str], pairs: bool) -> list[Rule]:
    made = []
    for stored, ours in SECTIONS.items():
        theirs, own = f"transformer.{stored}.{{i}}", f"model.{ours}.{{i}}"
        plain = {**norms, "attn.proj": "self_attn.o_proj", "mlp.proj": "mlp.down_proj"}
        made += rules({f"{theirs}.{name}": f"{own}.{meaning}" for name, meaning in plain.items()})
        heads = tuple(f"{own}.self_attn.{part}_proj.weight" for part in "qkv")
        made.append(Rule(f"{theirs}.attn.Wqkv.weight", heads, FusedHeads(pairs)))
        if pairs:
            biases = tuple(f"{own}.self_attn.{part}_proj.bias" for part in "qk")
            made.append(Rule(f"{theirs}.attn.qk_bias", biases, FusedBiases()))
        gated = tuple(f"{own}.mlp.{part}_proj.weight" for part in ("gate", "up"))
        made.append(Rule(f"{theirs}.mlp.fc.weight", gated, FusedGate()))
    return made


def rotary_factors(config, theta: float, length: int) -> torch.Tensor:
    """Return cos and sin of every position, [1, length, 1, head_dim / 2, 2]: a table that these layouts store."""
    frequencies = 1.0 / (theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim))
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)[None, :, None]
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


class Raven(Layout):
    """Base of the layouts of type `huginn_raven`."""

    architecture, model_type = "RavenForCausalLM", "huginn_raven"
    ignored = (r"^freqs_cis$",)
    keeps_tied_head = True

    def read_sizes(self, fields: Fields) -> dict[str, Any]:
        width, heads = fields.take("n_embd", "hidden_size"), fields.take("n_heads", "num_attention_heads")
        vocab_size = fields.take("padded_vocab_size", default=None) or fields.take("vocab_size")
        fields.drop("vocab_size")
        for name, value in NAMES_OF_PARTS.items():
            fields.expect(name, value)
        sizes: dict[str, Any] = {
            "vocab_size": vocab_size,
            "hidden_size": width,
            "intermediate_size": fields.take("intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": fields.take("num_key_value_heads", default=heads),
            "num_prelude_layers": fields.take("n_layers_in_prelude"),
            "num_core_layers": fields.take("n_layers_in_recurrent_block"),
            "num_coda_layers": fields.take("n_layers_in_coda"),
            "num_loops": fields.take("mean_recurrence"),
            "max_position_embeddings": fields.take("block_size"),
            "rms_norm_eps": fields.take("norm_eps", default=1e-6),
            # in retrofitted models the field of transformers keeps its default; their code reads this one
            "tie_word_embeddings": fields.take("tie_embeddings", default=fields.left.get("tie_word_embeddings", True)),
            "use_cache": fields.take("use_cache", default=True),
        }
        fields.drop("tie_word_embeddings")
        values = fields.stored.get("init_values") or {}
        sizes["embedding_scale"] = self.embedding_scale(values, width)
        usual = small_std(width) * sizes["embedding_scale"]
        std = values["std"] * sizes["embedding_scale"] if "std" in values else usual
        sizes["state_init"] = self.read_first_state(fields.take("initial_state_mode", default="random"))
        if sizes["state_init"] == "normal" and not isclose(std, usual):
            sizes["state_init_std"] = std
        return {**LOOP, **sizes}

    def embedding_scale(self, values: dict, width: int) -> float:
        """Return the factor of embeddings. values: init_values of the config."""
        return sqrt(width)

    def read_first_state(self, mode: str) -> str:
        known = {"random": "normal", "embed-init": "embedding"}
        if mode not in known:
            raise LoopedConfigError(
                f"config.json of {self.title} has initial_state_mode={mode!r}, but only {', '.join(known)} can be "
                "run: there is no adapter that is left out of the first loop"
            )
        return known[mode]

    def write_sizes(self, config) -> dict[str, Any]:
        width, embed_scale = config.hidden_size, config.embedding_scale
        depth = config.core_slot(config.num_loops)
        std = small_std(width) if config.state_init_std is None else config.state_init_std / embed_scale
        return {
            "model_type": self.model_type,
            **NAMES_OF_PARTS,
            "n_embd": width,
            "n_heads": config.num_attention_heads,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size,
            "n_layers": config.num_layers,
            "n_layers_in_prelude": config.num_prelude_layers,
            "n_layers_in_recurrent_block": config.num_core_layers,
            "n_layers_in_coda": config.num_coda_layers,
            "mean_recurrence": config.num_loops,
            "mean_backprop_depth": min(8, config.num_loops),
            "sampling_scheme": "poisson-lognormal-filling",
            "block_size": config.max_position_embeddings,
            "max_position_embeddings": config.max_position_embeddings,
            "vocab_size": config.vocab_size,
            "padded_vocab_size": config.vocab_size,
            "norm_eps": config.rms_norm_eps,
            "tie_embeddings": config.tie_word_embeddings,
            "tie_word_embeddings": config.tie_word_embeddings,
            "initial_state_mode": "random" if config.state_init == "normal" else "embed-init",
            "qk_bias": config.attention_bias == "qk",
            "init_strategy": "takase",
            "effective_expected_depth": depth,
            "init_values": {
                "std": std,
                "out_proj": small_std(width) / sqrt(2 * depth),
                "embedding": small_std(width),
                "embed_scale": embed_scale,
            },
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "use_cache": config.use_cache,
        }


class Huginn(Raven):
    name, title = "huginn", "Huginn"

    def recognises(self, config, stored_names):
        return super().recognises(config, stored_names) and any(".norm_3." in name for name in stored_names)

    def make_rules(self):
        norms = {
            "norm_1": "input_layernorm",
            "norm_2": "attention_output_norm",
            "norm_3": "post_attention_layernorm",
            "norm_4": "mlp_output_norm",
        }
        return [*trunk_rules(), *layer_rules(norms, pairs=True)]

    def read_config(self, config):
        fields = Fields(self, config)
        looped: dict[str, Any] = {**self.read_sizes(fields), "block_norm": "residual_sandwich", "coda_input": "norm"}
        looped["attention_bias"] = "qk" if fields.take("qk_bias", default=True) else "none"
        looped["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.take("rope_base", default=50000.0)}
        fields.expect("head_dim", looped["hidden_size"] // looped["num_attention_heads"])
        fields.drop(*UNREAD_KEYS)
        has_own = looped["vocab_size"] == VOCABULARY
        ids = token_ids(fields, looped["vocab_size"], *((BEGIN, END_OF_TEXT, PAD) if has_own else ()))
        return {**looped, **ids, **fields.shared()}

    def write_config(self, config):
        words = self.write_sizes(config)
        parameters = config.rope_parameters or {}
        return {**words, "rope_base": parameters.get("rope_theta", 10000.0)}

    def further_tensors(self, config, tensors):
        theta, length = config.rope_parameters["rope_theta"], config.max_position_embeddings
        return {"freqs_cis": rotary_factors(config, theta, length)}

    def adjust_generation(self, generation, config, stored):
        if config.vocab_size == VOCABULARY and generation.eos_token_id in (None, END_OF_TEXT, [END_OF_TEXT]):
            generation.eos_token_id = [END_OF_TEXT, END_OF_TURN]


class Retrofitted(Raven):
    name, title = "retrofitted", "a retrofitted Llama (huginn_raven with two norms)"
    norms_queries = False
    block = {"block_norm": "pre"}
    parts = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}

    def recognises(self, config, stored_names):
        is_raven = super().recognises(config, stored_names)
        has_query_norms = any(".q_norm." in name for name in stored_names)
        is_huginn = any(".norm_3." in name for name in stored_names)
        return is_raven and not is_huginn and has_query_norms == self.norms_queries

    def make_rules(self):
        return [*trunk_rules(), *layer_rules(self.parts, pairs=False)]

    def embedding_scale(self, values, width):
        return values.get("embed_scale", sqrt(width))

    def read_config(self, config):
        fields = Fields(self, config)
        looped: dict[str, Any] = {**self.read_sizes(fields), **self.block}
        fields.expect("qk_bias", False)
        theta = fields.take("rope_theta", default=None) or fields.take("rope_base", default=50000.0)
        fields.drop("rope_base")
        looped["rope_parameters"] = fields.rope(theta)
        fields.expect("head_dim", looped["hidden_size"] // looped["num_attention_heads"])
        longest = fields.take("max_position_embeddings", default=None)  # of the original model
        looped["max_position_embeddings"] = longest or looped["max_position_embeddings"]
        fields.drop(*UNREAD_KEYS)
        ids = token_ids(fields, looped["vocab_size"])
        of_huginn = (BEGIN, END_OF_TEXT, PAD)  # copied from Huginn's config; they belong to another tokenizer
        ids = {name: None if value in of_huginn else value for name, value in ids.items()}
        return {**looped, **ids, **fields.shared()}

    def write_config(self, config):
        words = rope_words(config)
        return {**self.write_sizes(config), "rope_base": words["rope_theta"], **words}


class RetrofittedOlmo(Retrofitted):
    """With norms after the branches, and norms of queries and of keys that span all heads."""

    name, title = "retrofitted-olmo", "a retrofitted OLMo (huginn_raven with norms of queries and keys)"
    norms_queries = True
    block = {"block_norm": "post", "qk_norm": "all_heads"}
    parts = {
        "norm_1": "attention_output_norm",
        "norm_2": "mlp_output_norm",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
    }


HUGINN, RETROFITTED, RETROFITTED_OLMO = Huginn(), Retrofitted(), RetrofittedOlmo()
