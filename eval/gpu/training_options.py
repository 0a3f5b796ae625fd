"""Gain and cost of training options: seconds and peak memory of a step, over those of a step without options.

Options that are not installed or not for this device give the reason instead. Attention kernels are timed on rows of
several documents.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace

import torch

from looped_eval.benchmark.models import build, looped_config, tokens, training_step
from looped_eval.common.timing import now
from looped_recipes.engine.compiling import begin_step, take_options
from looped_recipes.engine.kernels import check_device
from looped_recipes.settings.recipe import RecipeError, TrainingConfig

from .against_llama import shaped
from .pieces import Measurement, Setting


SHAPE = {"layers": 6, "num_loops": 4, "width": 1536}
OPTIONS = {
    "compile": {"compile": True},
    "cuda_graphs": {"compile": "cuda_graphs"},
    "cut_cross_entropy": {"cross_entropy": "cut_cross_entropy"},
    "liger_cross_entropy": {"cross_entropy": "liger_kernel"},
    "liger_kernels": {"kernels": "liger_kernel"},
    "flex_attention": {"attention": "flex_attention", "compile": True},
    "flash_attention_2": {"attention": "flash_attention_2", "compile": True},
    "float8": {"float8": "tensorwise", "compile": True},
    "float8_rowwise": {"float8": "rowwise", "compile": True},
    "checkpoint_blocks": {"gradient_checkpointing": True},
    "checkpoint_loops": {"gradient_checkpointing": "loops"},
    "checkpoint_selective": {"gradient_checkpointing": "selective"},
    "checkpoint_offload": {"gradient_checkpointing": "offload"},
}
DOCUMENT = 200  # tokens of each document in packed rows
WARM_UP, STEPS = 4, 8


def measurements(setting: Setting) -> Iterator[Measurement]:
    for name, options in OPTIONS.items():
        yield Measurement(name, lambda options=options: against_none(options, setting))


def against_none(options: dict, setting: Setting) -> dict:
    is_packed = "attention" in options
    beside = {"compile": True} if options.keys() & {"attention", "float8"} else {}  # both steps compile
    try:
        seconds, memory = step_with(options, is_packed, setting)
    except RecipeError as error:
        return {"said": [str(error)]}
    before, memory_before = step_with(beside, is_packed, setting)
    return {
        "seconds": seconds,
        "seconds_without": before,
        "speedup": before / seconds,
        "memory": memory,
        "memory_over_that_without": memory / memory_before if memory and memory_before else None,
    }


def step_with(options: dict, is_packed: bool, setting: Setting) -> tuple[float, int | None]:
    """Return the seconds and the peak memory of a step."""
    torch._dynamo.reset()
    gc.collect()  # frees the previous model
    args = shaped(setting, **SHAPE)
    model = build(args, looped_config(args, loop_loss="per_loop")).train()
    training, batch = TrainingConfig(**options), tokens(args)
    check_device(training, setting.device)
    take_options(model, replace(training, compile=False) if setting.tiny else training, "bf16")
    uses_graphs = training.compile == "cuda_graphs"
    how = {"output_logits": False}
    if is_packed:
        how["position_ids"] = (torch.arange(batch.shape[1], device=batch.device) % DOCUMENT).expand(batch.shape)
    step = training_step(model, batch, setting.device == "cuda", **how)
    for _ in range(1 if setting.tiny else WARM_UP):
        begin_step(uses_graphs)
        step()
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = now()
    for _ in range(1 if setting.tiny else STEPS):
        begin_step(uses_graphs)
        step()
    seconds = (now() - start) / (1 if setting.tiny else STEPS)
    return seconds, torch.cuda.max_memory_allocated() if setting.device == "cuda" else None
