"""Random valid configs over all axes of the family, small enough to run a property on dozens of them."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

from modeling_looped import LoopedConfig, LoopedForCausalLM

from .helpers import shake


RESTARTING = ("residual_all", "attention_first", "attention_all")
VOCAB_SIZE = 61
MAX_LENGTH = 64
ROPE_THETAS = {"full_attention": 1e4, "sliding_attention": 30.0}


def examples(thorough: int) -> settings:
    """So many random examples in `make test-all`, a fifth of them in `make test`."""
    return settings(max_examples=thorough if settings.get_current_profile_name() == "thorough" else thorough // 5)


@st.composite
def looped_configs(draw, **fixed) -> LoopedConfig:
    """A config with every axis drawn but the `fixed` ones. Each draw respects those before it and the fixed ones."""
    fields = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LENGTH, "initializer_range": 0.2, **fixed}

    def choose(name: str, *options):
        if name not in fields:
            fields[name] = draw(st.sampled_from(options), label=name)
        return fields[name]

    # sizes: heads that are not hidden_size / heads wide, grouped and latent keys and values
    heads = choose("num_attention_heads", 2, 4)
    choose("num_key_value_heads", *(n for n in (1, 2, 4) if heads % n == 0))
    choose("hidden_size", 16, 24) if "head_dim" not in fields else None
    choose("head_dim", None, 6)
    choose("intermediate_size", 24, 17)
    choose("kv_latent_size", None, 5)

    # depth
    choose("num_prelude_layers", 0, 1, 2)
    choose("num_core_layers", 1, 2, 3)
    choose("num_coda_layers", 0, 1, 2)
    choose("num_loops", 1, 2, 3, 4)
    choose("residual_scaling", "none", "sqrt", "linear", "factored")
    choose("residual_scale", 1.0, 0.5)
    choose("residual_reference_layers", 1, 12)
    asks_between_loops = fields.get("loop_loss", "terminal") != "terminal" or fields.get("exit_gate", "none") != "none"
    choose("residual_depth", "trained", *(() if asks_between_loops else ("run",)))

    # the loop; without an injection the state must start from the input, and where it restarts it is the input
    injection = choose("injection", "none", "add", "concat", "diagonal", *RESTARTING)
    free_start = injection in ("add", "concat", "diagonal")
    state_init = choose("state_init", "embedding", *(("zeros", "normal") if free_start else ()))
    choose("injection_norm", False, *((True,) if free_start or injection == "residual_all" else ()))
    choose("state_init_std", None, *((0.5,) if state_init == "normal" else ()))
    choose("prelude_norm", False, True)
    choose("loop_damping", False, True)
    choose("loop_change_gate", False, True)

    # what loops have of their own; sets are fewer, as many or more than loops
    choose("loop_lora_rank", None, 1, 3)
    choose("loop_norms", False, True)
    of_runs = () if asks_between_loops or fields["residual_depth"] != "run" else ("time", "modulation")
    choose("loop_embedding", "none", "learned", "sinusoidal", *of_runs)
    choose("num_loop_parameters", None, 1, 2, 4)

    # whose keys and values loops read
    choose("key_value_interval", 1, 1, 2, 3)
    choose("num_key_value_loops", None, None, 1, 2)

    # readouts and losses
    normed = ("rmsnorm", "layernorm", "final_only", "final_raw", "final_alpha", "taper")
    readout = choose("readout_norm", *normed, "none", "alpha")
    choose("num_readout_alphas", 1, 2)
    choose("readout_alpha_learned", True, False)
    choose("inter_loop_norm", "none", "own", *(("shared",) if readout in normed else ()))
    takes_norm = readout in normed and fields["num_coda_layers"] > 0
    choose("coda_input", "none", "linear", *(("norm",) if takes_norm else ()))
    if fields["residual_depth"] == "trained":
        gate = choose("exit_gate", "none", "raw", *(("normed",) if readout in normed else ()))
        of_gates = ("exit_weighted", "exit_weighted_logits", "gate")
        loss = choose("loop_loss", "terminal", "per_loop", "last_third", *(of_gates if gate != "none" else ()))
        for penalty in ("norm_penalty", "scale_anchor", "latent_loss", "latent_anchor"):
            choose(penalty, 0.0, *((0.01,) if loss != "gate" else ()))
    choose("logit_softcap", None, 15.0)
    own_width = injection in ("concat", "diagonal") and state_init != "embedding" and fields["coda_input"] == "linear"
    reads_width = fields["inter_loop_norm"] == "shared" or fields.get("exit_gate") == "normed"
    if own_width and not (reads_width or fields.get("latent_loss") or fields.get("latent_anchor")):
        choose("core_hidden_size", None, 20)
        choose("core_intermediate_size", None, 30)
        choose("core_num_attention_heads", None, heads // 2 * (heads // fields["num_key_value_heads"]))

    # blocks
    choose("block_norm", "pre", "post", "branch_sandwich", "residual_sandwich")
    choose("norm_affine", True, False)
    choose("norm_offset", 0.0, 1.0)
    choose("norm_rounding", "after_weight", "before_weight")
    num_layers = fields["num_prelude_layers"] + fields["num_core_layers"] + fields["num_coda_layers"]
    if choose("window_pattern", None, "L", "SL", "SSL", "S" * num_layers) is not None:
        choose("sliding_window", 2, 3, 5)
    choose("attention_softcap", None, None, 1.5)
    choose("attention_scale", None, 0.5)
    choose("qk_norm", "none", "learned", "all_heads", "free")
    choose("attention_bias", "none", "qk", "qkv", "qkvo")
    choose("position_embedding", "rope", "learned")
    rotary = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ROPE_THETAS.items()}
    choose("rope_parameters", None, rotary)
    choose("rope_pattern", None, "R", "NR")
    choose("rope_rounding", "tables", "rotated")
    choose("hidden_act", "silu", "relu2", "gelu")
    choose("mlp_gated", True, False)
    choose("mlp_activation_scale", 1.0, 0.5)
    choose("mlp_bias", False, True)
    choose("value_embeddings", False, True)

    # embeddings and initial weights
    choose("embedding_scale", 1.0, 4.0)
    choose("tie_word_embeddings", False, True)
    choose("init_scheme", "normal", "scaled_zero", "takase", "zero_output", "torch")
    return LoopedConfig(**fields)


def random_model(config: LoopedConfig, seed: int = 0) -> LoopedForCausalLM:
    """In float64 and eval mode, with noise on every parameter."""
    torch.manual_seed(seed)
    return shake(LoopedForCausalLM(config), seed=seed).double().eval()


def depths(config: LoopedConfig) -> st.SearchStrategy[int]:
    """Loops to run: fewer than, as many as, or more than in training."""
    return st.integers(1, config.num_loops + 2)


def cuts(length: int) -> st.SearchStrategy[list[int]]:
    """Lengths of the pieces of a sequence of `length` tokens that is cut at random."""
    between = st.sets(st.integers(1, length - 1), max_size=4) if length > 1 else st.just(set())
    return between.map(lambda at: [b - a for a, b in zip([0, *sorted(at)], [*sorted(at), length])])
