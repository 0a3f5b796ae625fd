"""Greedy decoding at batch 1, over the time in which its bytes can be read.

memory_limit: every loop reads the core's weights from memory. cache_limit: the first loop does, the others find them
in the cache of the chip; given where they fit there. Keys and values of the tokens before are counted in both.
"""

from collections.abc import Iterator

import torch

from looped_eval.benchmark.models import build, looped_config
from looped_eval.common.timing import least_seconds
from looped_recipes.common.flops import sizes

from .against_llama import shaped
from .ledger import Ledger
from .machine import rates
from .pieces import Measurement, Setting


# C, N, width: the core in memory alone, and one that fits into a cache of 50 MB
SHAPES = {"24x4_width_2048": (24, 4, 2048), "1x16_width_1024": (1, 16, 1024)}
WAYS = {"as_it_is": {}, "static_cache_compiled": {"cache_implementation": "static"}}


def measurements(setting: Setting) -> Iterator[Measurement]:
    for name, shape in SHAPES.items():
        yield Measurement(name, lambda shape=shape: decoding(*shape, setting))


def decoding(layers: int, num_loops: int, width: int, setting: Setting) -> dict:
    args = shaped(setting, layers, num_loops, width, dtype=setting.dtype)
    model = build(args, looped_config(args)).eval()
    prompt, few, many = (8, 2, 6) if setting.tiny else (64, 16, 144)
    ids = torch.randint(3, args.vocab, (1, prompt), device=setting.device)
    known = Ledger(setting.out).results("machine").get("rates") or rates(setting)
    memory, cache = limits(model, prompt + many // 2, known)
    result = {"memory_limit_tokens_per_second": 1 / memory, "cache_limit_tokens_per_second": cache and 1 / cache}
    for name, way in WAYS.items():
        calls = {number: lambda number=number, way=way: generate(model, ids, number, way) for number in (few, many)}
        seconds, _ = least_seconds(calls, 2 if setting.tiny else 4)
        per_token = max((seconds[many] - seconds[few]) / (many - few), 1e-9)
        result[f"{name}_tokens_per_second"] = 1 / per_token
        result[f"{name}_over_memory_limit"] = memory / per_token
        result[f"{name}_over_cache_limit"] = cache and cache / per_token
    best = max(WAYS, key=lambda name: result[f"{name}_tokens_per_second"])
    return {**result, "best": best, "best_over_memory_limit": result[f"{best}_over_memory_limit"]}


def generate(model, ids: torch.Tensor, number: int, way: dict):
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, max_new_tokens=number, min_new_tokens=number, **settings, **way)


def limits(model, length: int, known: dict) -> tuple[float, float | None]:
    """Least seconds of a token, read from memory; and with the core in the cache, if it fits there."""
    config, n, width = model.config, sizes(model.config), model.lm_head.weight.element_size()
    once, core = (n.outer + n.coda + n.head) * width, n.core * width
    heads = config.num_key_value_heads * config.head_dim
    keys_and_values = 2 * config.num_hidden_layers * heads * width * length
    memory = known["memory_bytes_per_second"]
    first = (once + core + keys_and_values) / memory
    others = (config.num_loops - 1) * core
    fits = core <= known["cache_bytes"]
    return first + others / memory, first + others / known["cache_bytes_per_second"] if fits else None
