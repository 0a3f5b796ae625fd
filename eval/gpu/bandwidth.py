"""Greedy decoding at batch 1, over the time in which its bytes can be read.

memory_limit: every loop reads the core's weights from memory. cache_limit: the first loop does, the others find them
in the cache of the chip; given where they fit there. Keys and values of the tokens before are counted in both.
"""

import statistics
from collections.abc import Iterator

import torch
from transformers import StoppingCriteria

from looped_eval.benchmark.models import build, looped_config
from looped_eval.common.timing import now
from looped_recipes.common.flops import sizes

from .against_llama import shaped
from .ledger import Ledger
from .machine import rates
from .pieces import Measurement, Setting


# C, N, width: the core in memory alone, and one that fits into a cache of 50 MB
SHAPES = {"12x4_width_2048": (12, 4, 2048), "1x16_width_1024": (1, 16, 1024)}
WAYS = {"as_it_is": {}, "static_cache_compiled": {"cache_implementation": "static"}}


def measurements(setting: Setting) -> Iterator[Measurement]:
    for name, shape in SHAPES.items():
        yield Measurement(name, lambda shape=shape: decoding(*shape, setting))


def decoding(layers: int, num_loops: int, width: int, setting: Setting) -> dict:
    args = shaped(setting, layers, num_loops, width, dtype=setting.dtype)
    model = build(args, looped_config(args)).eval()
    prompt, new_tokens = (8, 8) if setting.tiny else (64, 160)
    ids = torch.randint(3, args.vocab, (1, prompt), device=setting.device)
    known = Ledger(setting.out).results("machine").get("rates") or rates(setting)
    memory, cache = limits(model, prompt + new_tokens // 2, known)
    result = {"memory_limit_tokens_per_second": 1 / memory, "cache_limit_tokens_per_second": cache and 1 / cache}
    for name, way in WAYS.items():
        generate(model, ids, new_tokens, way)  # compiles
        per_token = statistics.median(generate(model, ids, new_tokens, way))
        result[f"{name}_tokens_per_second"] = 1 / per_token
        result[f"{name}_over_memory_limit"] = memory / per_token
        result[f"{name}_over_cache_limit"] = cache and cache / per_token
    best = max(WAYS, key=lambda name: result[f"{name}_tokens_per_second"])
    return {**result, "best": best, "best_over_memory_limit": result[f"{best}_over_memory_limit"]}


class Clock(StoppingCriteria):
    """Stops nothing, and notes when each token is there."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(now())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(model, ids: torch.Tensor, number: int, way: dict) -> list[float]:
    """Seconds of each token but the first, which is the prompt's."""
    clock = Clock()
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    model.generate(ids, max_new_tokens=number, stopping_criteria=[clock], **settings, **way)
    return [after - before for before, after in zip(clock.times, clock.times[1:])]


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
