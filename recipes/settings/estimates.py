"""Estimates of the time and the memory of a run, by formulas."""

from collections.abc import Callable

import torch

from looped_recipes.common.activation_memory import kept_of_token, numbers_in_fp32
from looped_recipes.common.flops import sizes
from looped_recipes.common.hardware import PEAK_FLOPS, device_rate
from looped_recipes.common.words import counted, in_bytes
from modeling_looped import LoopedConfig

from .operations import drawn_depth
from .recipe import Recipe


UTILISATION = 0.4  # assumed: the share of a processor's operations per second that training reaches
FLOAT = 4  # bytes: weights, gradients and moments are fp32; activations too, or half this size under bf16
GPU = "H100"


def estimates(recipe: Recipe, training_flops: float | None) -> dict[str, str]:
    """Return the time and memory that `recipes.plan` prints besides its counts."""
    found = {}
    if training_flops is not None:
        rate, name = own_rate()
        found["time here"] = f"{duration(training_flops / rate / UTILISATION)}, at {UTILISATION:.0%} of {name}"
        of_gpu = duration(training_flops / PEAK_FLOPS[GPU] / UTILISATION)
        found[f"time on one {GPU}"] = f"{of_gpu}, at {UTILISATION:.0%} of {PEAK_FLOPS[GPU] / 1e12:,.0f} TFLOP/s"
    parts = memory(recipe, recipe.model_config())
    said = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items())
    found["memory, in fp32"] = f"{in_bytes(sum(parts.values()))}: {said}"
    return found


def own_rate() -> tuple[float, str]:
    if torch.cuda.is_available():
        rate = device_rate(torch.device("cuda"), torch.bfloat16)
        return rate, f"the {rate / 1e12:,.0f} TFLOP/s of {torch.cuda.get_device_name()}"
    rate = device_rate(torch.device("cpu"), torch.float32)
    return rate, f"the {rate / 1e9:,.0f} GFLOP/s that {counted(torch.get_num_threads(), 'thread')} measured just now"


def memory(recipe: Recipe, config: LoopedConfig) -> dict[str, float]:
    """Return the bytes of each kind of memory, for one process that shards nothing."""
    n, only_gate = sizes(config), recipe.training.freeze_all_but_gate
    trained = 0 if only_gate else n.total  # the size of a gate is negligible
    of_blocks = n.total - n.embedding - n.value_tables - (0 if config.tie_word_embeddings else n.head)
    one_moment = of_blocks if trained and recipe.optimizer.name in ("muon", "normuon") else 0  # AdamW keeps two
    rows = min(recipe.training.micro_batch_size, recipe.training.rows_per_step)
    activations = rows * recipe.data.sequence_length * (config.vocab_size + kept_by_layers(recipe, config))
    return {
        "weights": FLOAT * n.total,
        "gradients": FLOAT * trained,
        "optimizer": FLOAT * (2 * trained - one_moment),
        f"activations of {rows} rows": FLOAT * activations,
    }


def kept_by_layers(recipe: Recipe, config: LoopedConfig, of_layer: Callable = numbers_in_fp32) -> float:
    """Return the size of what the backward pass needs of a token, without logits: the activations of every layer that
    is applied with gradients, or, if only the gate is trained, the states that it reads. of_layer: the size of one
    layer, in numbers or in bytes."""
    mean, window = recipe.mean_depth(config), recipe.backprop_loops(config)
    depth = drawn_depth(recipe, mean, window)
    if recipe.training.freeze_all_but_gate or config.loop_loss == "gate":
        return depth * of_layer(config, "core").input
    loops = depth if window is None else min(window, depth)
    readouts = 1 if config.loop_loss == "terminal" else loops
    return kept_of_token(config, loops, readouts, recipe.training.gradient_checkpointing, of_layer)


def duration(seconds: float) -> str:
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
