"""Activation memory per token for the backward pass, by formulas in the width d and the inner width f of a block.

The factors were measured on real passes. In fp32, autograd keeps ten vectors of width d: inputs and outputs of norms,
queries and keys before and after their rotation, values, and the output of attention; four more if branches have norms
on their outputs. It keeps four vectors of width f, or two without a gate. Under bf16 autocast it keeps 32 d + 8 f
bytes. With `training.gradient_checkpointing` less is kept, and the rest is computed again.
"""

from collections.abc import Callable
from typing import NamedTuple


class Kept(NamedTuple):
    """Activations of one token that one application of a layer may keep, in numbers or in bytes."""

    everything: float
    products: float  # outputs of matrix products and of attention
    input: float


def numbers_in_fp32(config, section: str) -> Kept:
    sizes = config.block_sizes(section)
    d, f = sizes.hidden_size, sizes.intermediate_size
    of_norms = 4 * ("sandwich" in config.block_norm)
    everything = (10 + of_norms) * d + (4 if config.mlp_gated else 2) * f
    return Kept(everything, products=6 * d + (2 if config.mlp_gated else 1) * f, input=d)


def bytes_under_bf16(config, section: str) -> Kept:
    """Return the bytes under bf16 autocast, where the residual stream stays in fp32."""
    sizes = config.block_sizes(section)
    d, f = sizes.hidden_size, sizes.intermediate_size
    return Kept(32 * d + 8 * f, products=12 * d + (4 if config.mlp_gated else 2) * f, input=4 * d)


def kept_of_token(
    config, loops: float, readouts: float, checkpointing: bool | str, of_layer: Callable = numbers_in_fp32
) -> float:
    """Return the activations per token that all layers keep, plus the largest part that is recomputed at a time.

    loops, readouts: how often the core and the coda are applied with gradients. checkpointing: the value of
    `training.gradient_checkpointing`.
    """
    total, recomputed = 0.0, 0.0
    for section, times in (("prelude", 1), ("core", loops), ("coda", readouts)):
        layers, layer = getattr(config, f"num_{section}_layers"), of_layer(config, section)
        is_one_unit = checkpointing == "loops" and section == "core"  # a loop is recomputed as a whole
        total += times * (layer.input if is_one_unit else layers * kept_of_layer(layer, checkpointing))
        if layers and checkpointing:
            recomputed = max(recomputed, layer.everything * (layers if is_one_unit else 1))
    return total + recomputed


def kept_of_layer(layer: Kept, checkpointing: bool | str) -> float:
    if checkpointing == "selective":
        return layer.products + layer.input
    if checkpointing == "offload":
        return 0
    return layer.input if checkpointing is True else layer.everything  # "loops" affects only the core
