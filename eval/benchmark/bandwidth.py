"""Greedy decoding of one row over the time in which its bytes can be read, by `looped benchmark bandwidth`.

memory_limit: every loop reads the weights of the core from memory. cache_limit: the first loop does, the others read
them as fast as so many bytes can be read again and again: from the cache of the chip, where they fit there. Keys and
values of the tokens before are counted in both. Both rates are measured in the same run.
"""

from typing import NamedTuple

import torch
from transformers import StoppingCriteria

from looped_eval.common.timing import now
from looped_recipes.common.flops import cache_numbers_per_token, sizes

from .models import build, greedy, looped_config, tokens


# on a GPU the first way records a token as a CUDA graph, and the second compiles it
WAYS = {"as_it_is": {}, "static_cache": {"cache_implementation": "static"}}
BEYOND_CACHES = {"cuda": 2**32, "cpu": 2**28}  # bytes that no cache holds
MOVED_AT_ONCE = {"cuda": 2**32, "cpu": 2**26}  # bytes between two readings of the clock


def bandwidth(args) -> dict:
    model = build(args, looped_config(args)).eval()
    return against_limits(model, tokens(args, batch=1, length=args.prompt), args.new_tokens)


def against_limits(model, ids: torch.Tensor, new_tokens: int, ways=tuple(WAYS)) -> dict:
    """Compare decoding with both limits. ids: [1, length]; ways: names of WAYS."""
    limits = limits_of(model, ids.shape[1] + new_tokens // 2)
    result = {**limits._asdict(), "memory_limit_tokens_per_second": 1 / limits.memory_seconds}
    result["cache_limit_tokens_per_second"] = 1 / limits.cache_seconds
    for name, way in ((name, WAYS[name]) for name in ways):
        seconds_of_tokens(model, ids, new_tokens, way)  # records or compiles the token
        per_token = min(seconds_of_tokens(model, ids, new_tokens, way))
        result[f"{name}_tokens_per_second"] = 1 / per_token
        result[f"{name}_over_memory_limit"] = limits.memory_seconds / per_token
        result[f"{name}_over_cache_limit"] = limits.cache_seconds / per_token
    best = max(ways, key=lambda name: result[f"{name}_tokens_per_second"])
    of_best = {f"best_over_{limit}_limit": result[f"{best}_over_{limit}_limit"] for limit in ("memory", "cache")}
    return {**result, "best": best, **of_best}


class Limits(NamedTuple):
    core_bytes: int
    memory_bytes_per_second: float
    core_bytes_per_second: float  # when as many bytes as the core has are read repeatedly
    memory_seconds: float  # per token, by memory_limit
    cache_seconds: float  # per token, by cache_limit


def limits_of(model, length: int) -> Limits:
    """Return the limits for a token after `length` other tokens."""
    config, n, width = model.config, sizes(model.config), model.lm_head.weight.element_size()
    core, once = n.core * width, (n.outer + n.coda + n.head + cache_numbers_per_token(config) * length) * width
    others = (config.num_loops - 1) * core
    memory = bytes_per_second(model.device.type)
    cached = max(memory, bytes_per_second(model.device.type, core))
    first = (once + core) / memory
    return Limits(core, memory, cached, first + others / memory, first + others / cached)


def bytes_per_second(device: str, size: int | None = None, repeats: int = 5) -> float:
    """Measure the rate of reading `size` bytes, by default more than any cache holds: by summing them or by copying
    half of them onto the other half, whichever is faster."""
    size = BEYOND_CACHES[device] if size is None else size
    buffer = torch.ones(size // 4, device=device)
    half, inner, best = buffer.numel() // 2, max(1, MOVED_AT_ONCE[device] // size), float("inf")
    for read in (buffer.sum, lambda: buffer[:half].copy_(buffer[-half:])):
        read()
        for _ in range(repeats):
            start = now()
            for _ in range(inner):
                read()
            best = min(best, (now() - start) / inner)
    return size / best


class Clock(StoppingCriteria):
    """Records the time of each token, and never stops generation."""

    reads_rows_apart = True  # it does not look at rows at all

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(now())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def seconds_of_tokens(model, ids: torch.Tensor, number: int, way: dict) -> list[float]:
    """Return the seconds of each token but the first, which comes from the pass of the prompt."""
    clock = Clock()
    model.generate(ids, max_new_tokens=number, stopping_criteria=[clock], **greedy(ids), **way)
    return [after - before for before, after in zip(clock.times, clock.times[1:])]
