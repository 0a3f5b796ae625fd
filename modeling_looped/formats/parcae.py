"""Parcae (SandyResearch/parcae-*): a stable linear recurrence between the loops, and value embeddings.

Its folder has a pickled state and a config.json without a model_type; `_class_name` identifies it.
"""

from math import sqrt
from typing import Any

from .changes import FusedBiases, FusedGate, Halves
from .huginn import SECTIONS, rotary_factors
from .layout import Fields, Layout, LoopedConfigError, Rule, rules, token_ids


INJECTIONS = {"diagonal": "diagonal", "linear": "concat", "add": "add"}
STATES = {"like-init": "normal", "zero": "zeros"}
# init_strategy determines the scale of embeddings; none of the known strategies scales logits
EMBEDDING_SCALES = {
    "scaled-zero": lambda width: 1.0,
    "scaled": lambda width: 1.0,
    "scaled-geiping": lambda width: 1.0,
    "takase": sqrt,
}
STRATEGIES = {"scaled_zero": "scaled-zero", "takase": "takase"}
MLPS = {("BaseMLP", "ReLU2"): ("relu2", False, 0.5), ("GatedMLP", "SiLU"): ("silu", True, 1.0)}
FIXED = {
    "block_class_name": "TransformerPreNormBlock",
    "norm_class_name": "RMSNorm",
    "bias": False,
    "mup_model_scaling_factor": 1,
    "use_abacus": False,
    "debias_attention": False,
    "center_attention": False,
    "model_class_name": "Parcae",
    "architecture_class_name": "Parcae",
}
UNREAD_KEYS = """
    name hf_config padding_multiple attn_impl init_orthogonal skip_initialization activation_checkpoint_impl simple_ops
    strategy sampling_scheme lockstep_n lockstep_k curriculum_target recurrent_iteration_method head_size n_head
    n_query_groups n_layer
""".split()
VOCABULARY, BEGIN, END, PAD = 32768, 0, 1, 2  # of SandyResearch/parcae-tokenizer


class Parcae(Layout):
    name, title, is_pickled, keeps_tied_head = "parcae", "Parcae", True, True
    ignored = (r"^freqs_cis$",)
    said_elsewhere = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})  # in the tokenizer

    gated = False

    def recognises(self, config, stored_names):
        is_gated = config.get("mlp_class_name") == "GatedMLP"
        return config.get("_class_name") == "ParcaeConfig" and is_gated == self.gated

    def make_rules(self):
        table = {
            "transformer.wte": "model.embed_tokens",
            "transformer.ln_f": "model.norm",
            "transformer.ln_prelude": "model.prelude_norm",
            "transformer.C": "model.coda_proj",
            "transformer.adapter.A_log": "model.injection.log_rate",
            "transformer.adapter.dt_bias": "model.injection.dt_bias",
            "transformer.adapter.B": "model.injection.input_proj.weight",
            "transformer.adapter.adapter": "model.injection.proj",
            "value_embeds.{i}": "model.value_embeds.{i}",
            "lm_head": "lm_head",
        }
        made = rules(table)
        plain = {
            "norm_1": "input_layernorm",
            "norm_2": "post_attention_layernorm",
            "attn.c_v": "self_attn.v_proj",
            "attn.c_proj": "self_attn.o_proj",
            "attn.ve_gate": "self_attn.value_gate",
            "mlp.proj": "mlp.down_proj",
        }
        for stored, ours in SECTIONS.items():
            theirs, own = f"transformer.{stored}.{{i}}", f"model.{ours}.{{i}}"
            made += rules({f"{theirs}.{name}": f"{own}.{meaning}" for name, meaning in plain.items()})
            made += [
                Rule(f"{theirs}.attn.c_{part}.weight", (f"{own}.self_attn.{part}_proj.weight",), Halves())
                for part in "qk"
            ]
            biases = tuple(f"{own}.self_attn.{part}_proj.bias" for part in "qk")
            made.append(Rule(f"{theirs}.attn.qk_bias", biases, FusedBiases()))
            made += self.mlp_rules(theirs, own)
        return made

    def mlp_rules(self, theirs: str, own: str) -> list[Rule]:
        return rules({f"{theirs}.mlp.fc": f"{own}.mlp.up_proj"})

    def read_config(self, config):
        fields = Fields(self, config)
        width, heads = fields.take("n_embd"), fields.take("num_attention_heads")
        for name, value in FIXED.items():
            fields.expect(name, value)
        for name in ("randomize_positions_from", "clip_qkv"):
            fields.expect(name)
        fields.expect("use_fused_head", "pytorch", "cce", "hhe")  # they differ only in how a loss is computed
        looped: dict[str, Any] = {
            "vocab_size": self.read_vocabulary(fields),
            "hidden_size": width,
            "intermediate_size": fields.take("intermediate_size", default=4 * width),
            "num_attention_heads": heads,
            "num_key_value_heads": fields.take("num_key_value_heads", default=heads),
            "num_prelude_layers": fields.take("n_layers_in_prelude", default=1),
            "num_core_layers": fields.take("n_layers_in_recurrent_block", default=4),
            "num_coda_layers": fields.take("n_layers_in_coda", default=1),
            "num_loops": fields.take("mean_recurrence", default=32),
            "max_position_embeddings": fields.take("block_size", default=4096),
            "rms_norm_eps": fields.take("norm_eps", default=1e-5),
            "tie_word_embeddings": fields.take("tie_embeddings", default=False),
            "injection": self.one_of(fields, "injection_type", INJECTIONS, "diagonal"),
            "state_init": self.one_of(fields, "state_init", STATES, "like-init"),
            "prelude_norm": fields.take("prelude_norm", default=False),
            "coda_input": "linear",
            "qk_norm": "free" if fields.take("qk_norm", default=False) else "none",
            "attention_bias": "qk" if fields.take("qk_bias", default=False) else "none",
            "logit_softcap": fields.take("logit_softcap", default=None),
            "value_embeddings": True,
        }
        kind = fields.take("mlp_class_name", default="BaseMLP"), fields.take("nonlin_name", default="GELU")
        if kind not in MLPS or MLPS[kind][1] != self.gated:
            known = " or ".join(f"{mlp} with {act}" for mlp, act in MLPS)
            raise LoopedConfigError(
                f"config.json of Parcae has {kind[0]} with {kind[1]}, but only {known} is known here"
            )
        looped["hidden_act"], looped["mlp_gated"], looped["mlp_activation_scale"] = MLPS[kind]
        strategy = fields.take("init_strategy", default="scaled")
        if strategy not in EMBEDDING_SCALES:
            raise LoopedConfigError(
                f"config.json of Parcae has init_strategy={strategy!r}, which may scale embeddings and logits; known "
                f"here are {', '.join(EMBEDDING_SCALES)}"
            )
        looped["embedding_scale"] = EMBEDDING_SCALES[strategy](width)
        looped["init_scheme"] = {theirs: ours for ours, theirs in STRATEGIES.items()}.get(strategy, "normal")
        looped["rope_parameters"] = self.read_rope(fields)
        looped.update(self.read_core(fields, looped))
        self.check_value_gates(fields, looped)
        fields.drop(*UNREAD_KEYS)
        has_own = looped["vocab_size"] == VOCABULARY
        ids = token_ids(fields, looped["vocab_size"], *((BEGIN, END, PAD) if has_own else ()))
        return {**looped, **ids, **fields.shared()}

    def one_of(self, fields: Fields, name: str, known: dict[str, str], default: str) -> str:
        value = fields.take(name, default=default)
        if value not in known:
            raise LoopedConfigError(f"config.json of Parcae has {name}={value!r}; known here are {', '.join(known)}")
        return known[value]

    def read_vocabulary(self, fields: Fields) -> int:
        padded, size = fields.take("padded_vocab_size", default=None), fields.take("vocab_size", default=None)
        multiple = fields.stored.get("padding_multiple") or 512
        if padded is None and size is None:
            raise LoopedConfigError("config.json of Parcae has neither vocab_size nor padded_vocab_size")
        return padded if padded is not None else -(-size // multiple) * multiple

    def read_rope(self, fields: Fields) -> dict[str, Any]:
        rope = dict(fields.take("rope_settings", default={}))
        base = rope.pop("rope_base", 50000)
        if not rope.pop("use_rope", True) or rope.pop("rope_condense_ratio", 1) != 1 or rope:
            raise LoopedConfigError(
                f"config.json of Parcae has rope_settings={fields.stored['rope_settings']}, but only a rope_base with "
                "use_rope=True and rope_condense_ratio=1 is known here"
            )
        return {"rope_type": "default", "rope_theta": float(base)}

    def read_core(self, fields: Fields, looped: dict) -> dict[str, Any]:
        sizes = {
            "core_hidden_size": ("recurrent_embedding_dimension", "hidden_size", 1024),
            "core_intermediate_size": ("recurrent_intermediation_embedding_dimension", "intermediate_size", 3520),
            "core_num_attention_heads": ("recurrent_num_attention_heads", "num_attention_heads", None),
        }
        core = {ours: (fields.take(name, default=default), outer) for ours, (name, outer, default) in sizes.items()}
        return {ours: value for ours, (value, outer) in core.items() if value not in (None, looped[outer])}

    def check_value_gates(self, fields: Fields, looped: dict):
        """Refuse value gates and tables at different layers: the release places gates by position among the layers run
        in training, but tables by position among the unique layers."""
        prelude, core, coda = (looped[f"num_{section}_layers"] for section in ("prelude", "core", "coda"))
        gated_parity = (core * fields.take("mean_backprop_depth", default=8) - 1) % 2
        in_training = [*range(prelude + core), *(prelude + core * looped["num_loops"] + i for i in range(coda))]
        gates = [layer for layer, number in enumerate(in_training) if number % 2 == gated_parity]
        tables = list(range((prelude + core + coda - 1) % 2, prelude + core + coda, 2))
        if gates != tables:
            raise LoopedConfigError(
                f"this Parcae model has gates of values at layers {gates} and their tables at layers {tables}, as "
                f"mean_recurrence={looped['num_loops']} and mean_backprop_depth="
                f"{fields.stored.get('mean_backprop_depth', 8)} place them: only where they meet it can be run here"
            )

    def write_config(self, config):
        theta = (config.rope_parameters or {}).get("rope_theta", 10000.0)
        kinds = {value: kind for kind, value in MLPS.items()}
        kind = kinds.get((config.hidden_act, config.mlp_gated, config.mlp_activation_scale), ("BaseMLP", "ReLU2"))
        injections, states = ({ours: theirs for theirs, ours in table.items()} for table in (INJECTIONS, STATES))
        sizes, core = config.block_sizes("prelude"), config.block_sizes("core")
        return {
            "_class_name": "ParcaeConfig",
            **{name: value for name, value in FIXED.items() if name != "architecture_class_name"},
            "block_size": config.max_position_embeddings,
            "n_embd": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": sizes.num_attention_heads,
            "num_key_value_heads": sizes.num_key_value_heads,
            "vocab_size": config.vocab_size,
            "padded_vocab_size": config.vocab_size,
            "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": int(theta)},
            "norm_eps": config.rms_norm_eps,
            "mlp_class_name": kind[0],
            "nonlin_name": kind[1],
            "qk_bias": config.attention_bias == "qk",
            "qk_norm": config.qk_norm == "free",
            "logit_softcap": config.logit_softcap,
            "init_strategy": "takase" if config.embedding_scale == sqrt(config.hidden_size) else "scaled-zero",
            "init_orthogonal": config.init_scheme == "scaled_zero",
            "injection_type": injections.get(config.injection, "diagonal"),
            "n_layers_in_prelude": config.num_prelude_layers,
            "n_layers_in_recurrent_block": config.num_core_layers,
            "n_layers_in_coda": config.num_coda_layers,
            "state_init": states.get(config.state_init, "like-init"),
            "recurrent_embedding_dimension": core.hidden_size,
            "recurrent_intermediation_embedding_dimension": core.intermediate_size,
            "recurrent_num_attention_heads": core.num_attention_heads,
            "prelude_norm": config.prelude_norm,
            "tie_embeddings": config.tie_word_embeddings,
            "mean_recurrence": config.num_loops,
            "mean_backprop_depth": self.backprop_depth(config),
            "use_fused_head": "pytorch",
        }

    def backprop_depth(self, config) -> int:
        """Return a depth that places the value gates at the layers of the tables, if there is one: the layers in a
        truncated gradient must be an odd number if all layers are one, else an even number."""
        half = -(-config.num_loops // 2)
        fits = (config.num_core_layers * half - config.num_layers) % 2 == 0
        return half if fits else half + 1

    def further_tensors(self, config, tensors):
        theta, length = config.rope_parameters["rope_theta"], config.max_position_embeddings
        return {"freqs_cis": rotary_factors(config, int(theta), length)}


class GatedParcae(Parcae):
    """Parcae with the MLP of Llama, as in the models that Parcae is compared with."""

    name, title, gated = "parcae-gated", "Parcae with a gated MLP", True

    def mlp_rules(self, theirs: str, own: str) -> list[Rule]:
        gated = tuple(f"{own}.mlp.{part}_proj.weight" for part in ("gate", "up"))
        return [Rule(f"{theirs}.mlp.fc.weight", gated, FusedGate())]


PARCAE, GATED_PARCAE = Parcae(), GatedParcae()
