"""Greedy decoding at batch 1 against both bandwidth limits (see eval/benchmark/bandwidth.py)."""

from collections.abc import Iterator

from looped_eval.benchmark.bandwidth import against_limits
from looped_eval.benchmark.models import build, looped_config, tokens

from .against_llama import shaped
from .pieces import Measurement, Setting


# C, N, width: a core that fits into a cache of 50 MB, and one that does not
SHAPES = {"1x16_width_1024": (1, 16, 1024), "12x4_width_2048": (12, 4, 2048)}


def measurements(setting: Setting) -> Iterator[Measurement]:
    for way, ending in (("as_it_is", ""), ("static_cache", "_static_cache")):  # the second compiles for minutes
        for name, shape in SHAPES.items():
            yield Measurement(name + ending, lambda shape=shape, way=way: decoding(*shape, way, setting))


def decoding(layers: int, num_loops: int, width: int, way: str, setting: Setting) -> dict:
    args = shaped(setting, layers, num_loops, width, dtype=setting.dtype)
    prompt, new_tokens = (8, 8) if setting.tiny else (64, 160)
    model = build(args, looped_config(args)).eval()
    return against_limits(model, tokens(args, batch=1, length=prompt), new_tokens, [way])
