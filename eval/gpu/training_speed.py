"""Utilisation of training steps: tokens per second times the operations of a token, over the peak of the device.

Operations are those of the model (Parcae, appendix D) without recomputation; causal attention counts half of its
square. bf16 products under autocast, fp32 weights, compiled blocks and losses, fused AdamW, random tokens.
"""

from collections.abc import Iterator
from functools import partial

import torch

from looped_eval.benchmark.models import training_step
from looped_eval.common.timing import now
from looped_recipes.common.activation_memory import bytes_under_bf16, kept_of_token
from looped_recipes.common.flops import sizes, training_flops_per_token
from looped_recipes.common.hardware import device_rate
from looped_recipes.common.provenance import ROOT
from looped_recipes.engine.compiling import compile_parts
from looped_recipes.settings.recipe import load_recipe
from modeling_looped import LoopedForCausalLM

from .pieces import Measurement, Setting


RECIPES = {
    "370m": "parcae/medium.yaml",
    "770m": "parcae/large.yaml",
    "1.3b": "parcae/xlarge.yaml",
    "1.4b_ouro": "ouro/stage_1b.yaml",
}
TINY = ["hidden_size=64", "intermediate_size=96", "num_attention_heads=2", "vocab_size=256", "num_core_layers=1"]
TINY_OUTER = ["num_prelude_layers=1", "num_coda_layers=1"]
LENGTH, MICRO_BATCHES = 2048, (16, 8, 4, 2, 1)  # the largest micro-batch that fits is used
WARM_UP, STEPS = 4, 10


def measurements(setting: Setting) -> Iterator[Measurement]:
    for name, path in RECIPES.items():
        yield Measurement(name, lambda path=path: utilisation(path, setting))


def utilisation(path: str, setting: Setting) -> dict:
    tiny = [f"model.{field}" for field in [*TINY, *(TINY_OUTER if "parcae" in path else [])]] if setting.tiny else []
    recipe = load_recipe(ROOT / "recipes" / path, tiny)
    config = recipe.model_config()
    depth, window = round(recipe.mean_depth(config)), recipe.backprop_loops(config)
    length = 32 if setting.tiny else min(LENGTH, config.max_position_embeddings)
    with torch.device(setting.device):
        model = LoopedForCausalLM(config)
    model = model.to(setting.device).train()
    if not setting.tiny:  # on a CPU, compiling takes a minute
        compile_parts(model)
    how = {"num_loops": depth, "backprop_loops": window, "output_logits": False}
    step_of = partial(training_step, model, bf16=setting.device == "cuda", **how)
    of_row = kept_of_token(config, window or depth, 1, False, bytes_under_bf16) * length
    rows, seconds = largest_that_fits(step_of, config.vocab_size, length, 18 * sizes(config).total, of_row, setting)
    speed = rows * length / seconds
    peak = device_rate(torch.device(setting.device), getattr(torch, setting.dtype))
    return {
        "parameters": sizes(config).total,
        "loops": depth,
        "loops_with_gradients": window or depth,
        "micro_batch": rows,
        "length": length,
        "seconds_per_step": seconds,
        "tokens_per_second": speed,
        "mfu": speed * training_flops_per_token(config, length / 2, depth, window) / peak,
        "mfu_with_attention_of_the_whole_square": speed
        * training_flops_per_token(config, length, depth, window)
        / peak,
        "peak_memory": torch.cuda.max_memory_allocated() if setting.device == "cuda" else None,
    }


def largest_that_fits(
    step_of, vocab_size: int, length: int, weights: int, of_row: int, setting: Setting
) -> tuple[int, float]:
    """Return (rows, seconds of a step) of the largest micro-batch that fits.

    weights, of_row: estimated bytes of the weights and of the activations of a row.
    """
    room = (torch.cuda.get_device_properties(0).total_memory if setting.device == "cuda" else 0) - weights
    for rows in [rows for rows in MICRO_BATCHES if rows * of_row < room] or [1]:
        ids = torch.randint(3, vocab_size, (rows, length), device=setting.device)
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # drops the peak of sizes that did not fit
        try:
            step = step_of(ids)
            for _ in range(1 if setting.tiny else WARM_UP):
                step()
            start = now()
            for _ in range(STEPS):
                step()
            return rows, (now() - start) / STEPS
        except torch.OutOfMemoryError:
            torch._dynamo.reset()  # otherwise the next size would compile with dynamic shapes
        torch.cuda.empty_cache()
    raise MemoryError(f"not even one row of {length} tokens fits")
