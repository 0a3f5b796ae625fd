"""Matrix products of the blocks in float8, by torchao, for layers so large that converting their inputs costs little.

Weights, gradients and checkpoints keep their formats; the head and the injection are not converted.
"""

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from looped_recipes.settings.recipe import RecipeError
from modeling_looped.layers import with_role


MULTIPLE = 16  # layer sizes must be multiples of it for float8 products on a GPU
OLDEST = {"tensorwise": (8, 9), "rowwise": (9, 0)}  # least compute capability


def take_float8(blocks: list[nn.Module], kind: str, precision: str):
    """Convert the blocks for training on this GPU. precision: accelerate's mixed_precision."""
    asked = f"training.float8={kind!r}"
    if find_spec("torchao") is None:
        raise RecipeError(f"{asked} needs torchao: install it (pip install torchao), or leave it out")
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST[kind]:
        raise RecipeError(
            f"{asked} needs a GPU of compute capability {OLDEST[kind]} or newer, and this one has {capability}: leave "
            "it out"
        )
    if precision != "bf16":
        raise RecipeError(
            f"{asked} needs accelerate's mixed_precision bf16, not {precision!r}: set it, or leave it out"
        )
    convert(blocks, kind)


def convert(blocks: list[nn.Module], kind: str, emulate: bool = False):
    """Replace large linear layers by float8 layers. emulate: compute in higher precision, which any device can do."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for block in blocks:
        before = {name: layer for name, layer in block.named_modules() if is_large(layer)}
        for name, layer in before.items():
            refuse_size(name, layer)
        config = replace(Float8LinearConfig.from_recipe_name(kind), emulate=emulate)
        convert_to_float8_training(block, module_filter_fn=lambda layer, _: is_large(layer), config=config)
        for name, layer in before.items():
            if hasattr(layer, "init_role"):  # which nn.Linear in a block of the user's own lacks
                with_role(block.get_submodule(name), layer.init_role, layer.init_width)


def is_large(layer: nn.Module) -> bool:
    """Return whether a layer is a large linear layer. Value gates are too small: they have one output per head."""
    return isinstance(layer, nn.Linear) and getattr(layer, "init_role", None) != "value_gate"


def refuse_size(name: str, layer: nn.Linear):
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        raise RecipeError(
            f"training.float8 needs sizes that are multiples of {MULTIPLE}, but {name} has {layer.in_features} inputs "
            f"and {layer.out_features} outputs: change the sizes of the model, or leave it out"
        )
