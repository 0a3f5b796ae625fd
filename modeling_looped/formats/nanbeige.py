"""Nanbeige 4.2 (Nanbeige/Nanbeige4.2-3B): Llama's layers, run twice, with the final norm after every loop."""

from typing import Any

from .layout import Fields, Layout, token_ids
from .llama import llama_rules, llama_sizes, llama_words


# fields of parts that no released model has, with the values that switch them off
OFF = {
    "qk_layernorm": (False,),
    "emb_neighbor_num": (),
    "insert_ngram_layer_idx": ([],),
    "ngram_insert_all_layers": (False,),
    "enable_double_loop_split": (False,),
    "loop_middle_layers": (),
    "loop_middle_repeats": (),
    "loop_share_kv": (False,),
    "enable_hyper_connection": (False,),
    "enable_mhc": (False,),
    "enable_h_res_identity": (False,),
    "enable_depth_attention": (False,),
}
# fields that only these parts read
OF_PARTS_THAT_ARE_OFF = """
    emb_split_num ngram_vocab_size_ratio ngram_mod_force_prime ngram_embedding_hidden_size ngram_fused_mode emb_tp_num
    ngram_compressed_tokenizer skip_ngram_for_input ngram_layer_downproject_size mhc_diff_for_loop
    mhc_double_stream_position_for_loop mhc_identity_nohresparam num_residual_streams mhc_sinkhorn_iterations
    mhc_init_gating_factor depth_attention_stride depth_attention_recent_window depth_attention_static_anchor_once
""".split()


class Nanbeige(Layout):
    name, title, architecture, model_type = "nanbeige", "Nanbeige", "NanbeigeForCausalLM", "nanbeige"

    def make_rules(self):
        return llama_rules()

    def read_config(self, config):
        fields = Fields(self, config)
        looped: dict[str, Any] = llama_sizes(fields)
        for name, values in OFF.items():
            fields.expect(name, *values)
        fields.drop(*OF_PARTS_THAT_ARE_OFF)
        weights = fields.take("loop_loss_weights", default=[])  # one per loop before the last, which tells the loops
        loops = fields.take("num_loops", default=1)
        looped["num_loops"] = len(weights) + 1 if weights else loops
        looped["inter_loop_norm"] = "none" if fields.take("skip_loop_final_norm", default=False) else "shared"
        return {**looped, **token_ids(fields, looped["vocab_size"]), **fields.shared()}

    def write_config(self, config):
        return {
            "model_type": "nanbeige",
            **llama_words(config),
            "attention_bias": False,
            "mlp_bias": False,
            "num_loops": config.num_loops,
            "skip_loop_final_norm": config.inter_loop_norm == "none",
        }


NANBEIGE = Nanbeige()
