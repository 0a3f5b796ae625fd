"""Checks where serving engines build a model: refuse the settings that they would leave out silently."""

from transformers.generation import GenerationConfig

from .checks import check_softcap
from .compatibility import look_up
from .depth_options import DEPTH_FIELDS, listed


def check_for_engine(config):
    """Refuse settings that an engine which builds this model would not follow, or at which it would fail later."""
    engine = config._attn_implementation
    if engine == "vllm" and (current := look_up("vllm.config", "get_current_vllm_config")):
        parallel, served = current().parallel_config, current().model_config
        check_parallelism(config, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        if served.generation_config != "vllm":  # "vllm" means that the saved file is not used
            check_saved_depth(config, served.try_get_generation_config(), "--hf-overrides")
    elif engine == "sglang":  # SGLang itself refuses pipeline stages
        check_softcap(config.attention_softcap, engine)
        if config.has_windows:
            raise ValueError(
                f"sliding_window={config.sliding_window}: SGLang's backend for transformers' models lets a token see "
                "one token more than that: use vLLM or `looped serve`"
            )
        parallel = look_up("sglang.srt.runtime_context", "get_parallel")
        check_parallelism(config, parallel().tp_size if parallel else 1)
        check_saved_depth(config, saved_generation_config(config), "--json-model-override-args")


def saved_generation_config(config) -> dict:
    try:
        return GenerationConfig.from_pretrained(config.name_or_path).to_dict()
    except OSError:  # none was saved
        return {}


def check_parallelism(config, ranks: int, stages: int = 1):
    if stages > 1:
        raise ValueError(
            f"pipeline_parallel_size={stages}: every loop runs through all core layers, so a looped model has no "
            "stages that tokens pass once: use tensor_parallel_size"
        )
    if config.core_num_attention_heads not in (None, config.num_attention_heads):
        raise ValueError(
            f"engines have one number of heads for all layers, but core_num_attention_heads="
            f"{config.core_num_attention_heads} and num_attention_heads={config.num_attention_heads}: use generate"
        )
    whole = {"qk_norm": config.qk_norm == "all_heads", "loop_lora_rank": config.loop_lora_rank is not None}
    for name, stands in whole.items():
        if ranks > 1 and stands:
            raise ValueError(
                f"tensor_parallel_size={ranks}: {name}={getattr(config, name)!r} needs all heads of a layer on one "
                "rank: leave it at 1"
            )
    if config.num_key_value_heads % ranks != 0:
        raise ValueError(
            f"tensor_parallel_size={ranks} does not divide num_key_value_heads={config.num_key_value_heads}"
        )


def check_saved_depth(config, saved: dict, override: str):
    """Refuse other saved depths: engines run tokens to the config's depth. override: their flag that changes it."""
    if getattr(config, "_num_loops_asked_for", False):
        return
    plain = {**DEPTH_FIELDS, "num_loops": config.num_loops}
    if fields := {name: saved[name] for name, value in plain.items() if saved.get(name) not in (None, value)}:
        raise ValueError(
            f"generation_config.json says {listed(fields)}, but this engine runs all tokens at one depth, without "
            f"exits or drafts. To serve num_loops={config.num_loops}, or another depth, pass "
            f"{override} '{{\"num_loops\": {config.num_loops}}}'; to serve what was saved, use `looped serve`"
        )
