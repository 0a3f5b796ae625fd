"""Ouro (ByteDance/Ouro-*): a stack of layers with a norm on each side of every branch, one norm at the end of every
loop, and an exit gate that reads the output of that norm."""

from typing import Any

from .layout import Fields, Layout, Rule, token_ids
from .llama import llama_rules, llama_sizes, llama_words


LOOP = {
    "block_norm": "branch_sandwich",
    "inter_loop_norm": "shared",
    "exit_gate": "normed",
    "loop_loss": "exit_weighted",
}
RENAMED = {
    "input_layernorm_2": "attention_output_norm",
    "post_attention_layernorm_2": "mlp_output_norm",
}
# its tokenizer is SmolLM2's, with <|endoftext|>, and <|im_end|> at the end of a turn; the release names only the first
VOCABULARY, END_OF_TEXT, END_OF_TURN = 49152, 0, 2


class Ouro(Layout):
    name, title, architecture, model_type = "ouro", "Ouro", "OuroForCausalLM", "ouro"

    def make_rules(self):
        return [*llama_rules(**RENAMED), Rule("model.early_exit_gate", ("exit_gate",))]

    def read_config(self, config):
        fields = Fields(self, config)
        looped: dict[str, Any] = {**llama_sizes(fields), **LOOP, "num_loops": fields.take("total_ut_steps", default=4)}
        fields.expect("early_exit_step")
        fields.expect("use_sliding_window", False)
        fields.drop("early_exit_threshold", "sliding_window", "max_window_layers")  # windows are off
        types = fields.take("layer_types", default=[])
        if set(types) - {"full_attention"}:
            fields.left["layer_types"] = types
            fields.expect("layer_types", ["full_attention"] * looped["num_core_layers"])
        return {**looped, **token_ids(fields, looped["vocab_size"]), **fields.shared()}

    def write_config(self, config):
        return {
            "model_type": "ouro",
            **llama_words(config),
            "total_ut_steps": config.num_loops,
            "early_exit_threshold": 1.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": config.num_core_layers,
            "layer_types": ["full_attention"] * config.num_core_layers,
        }

    def adjust_generation(self, generation, config, stored):
        if config.vocab_size == VOCABULARY and generation.eos_token_id in (END_OF_TEXT, [END_OF_TEXT]):
            generation.eos_token_id = [END_OF_TEXT, END_OF_TURN]
        threshold = stored.get("early_exit_threshold")
        if threshold is not None and threshold < 1:
            generation.exit_criterion, generation.exit_threshold = "gate", threshold

    def write_generation(self, words, generation):
        exits = getattr(generation, "exit_criterion", None)
        if exits == "gate" and getattr(generation, "exit_threshold", None) is not None:
            words["early_exit_threshold"] = generation.exit_threshold


OURO = Ouro()
