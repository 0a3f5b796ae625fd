"""A training step of C layers and N loops against transformers' Llama of C * N layers, both compiled, in turns."""

from argparse import Namespace
from collections.abc import Iterator

import torch

from looped_eval.benchmark.models import build, looped_config, tokens, training_step, unrolled_llama
from looped_eval.common.timing import in_turns
from looped_recipes.engine.compiling import compile_blocks, compile_parts

from .pieces import Measurement, Setting


# C, N, width: layers of a usual width, and narrow ones, where kernel launches weigh more
SHAPES = {"6x4_width_1536": (6, 4, 1536), "12x4_width_768": (12, 4, 768), "2x12_width_2048": (2, 12, 2048)}


def measurements(setting: Setting) -> Iterator[Measurement]:
    for name, shape in SHAPES.items():
        yield Measurement(name, lambda shape=shape: speedup(*shape, setting))


def shaped(setting: Setting, layers: int, num_loops: int, width: int, **more) -> Namespace:
    if setting.tiny:
        layers, width, more = 1, 64, {"batch_size": 1, "length": 32, "vocab": 256, **more}
    fields = {"vocab": 32768, "batch_size": 8, "length": 1024, "dtype": "float32", "device": setting.device, **more}
    return Namespace(layers=layers, num_loops=num_loops, width=width, ff=width * 8 // 3 // 64 * 64, **fields)


def speedup(layers: int, num_loops: int, width: int, setting: Setting) -> dict:
    args = shaped(setting, layers, num_loops, width)
    looped, llama = build(args, looped_config(args)).train(), unrolled_llama(args).train()
    if not setting.tiny:
        compile_parts(looped)
        compile_blocks(llama.model.layers)
        llama.loss_function = torch.compile(llama.loss_function)
    batch, bf16 = tokens(args), setting.device == "cuda"
    ours, theirs = training_step(looped, batch, bf16, output_logits=False), training_step(llama, batch, bf16)
    seconds, llama_seconds = in_turns(ours, theirs, 2 if setting.tiny else 10)
    return {"seconds": seconds, "llama_seconds": llama_seconds, "speedup_over_llama": llama_seconds / seconds}
