"""External kernels that a recipe names: use them, or refuse the recipe if they are missing.

Liger has one kernel each for RMSNorms and for the gated activation of an MLP (SwiGLU), which replaces several kernels
of torch. Compiling fuses the same operations; this is for blocks that are not compiled. Liger's rotary positions are
not used: its kernel rotates queries and keys in one call and in place, but looped layers rotate each where it is made,
since loops may share keys or take them from another state.
"""

from importlib.util import find_spec

import torch
from torch import nn
from transformers.activations import ACT2FN

from looped_recipes.settings.recipe import RecipeError, TrainingConfig
from modeling_looped import LoopedForCausalLM
from modeling_looped.layers import LoopedMLP
from modeling_looped.norms import LoopedNorm

from .loss_kernels import LOSS_KERNELS


def check_device(training: TrainingConfig, device: str):
    """Refuse kernels that need a GPU, or a package that is not installed."""
    on_gpus = {
        "compile": training.compile == "cuda_graphs",
        "attention": training.attention is not None,
        "cross_entropy": training.cross_entropy is not None,
        "kernels": training.kernels is not None,
        "float8": training.float8 is not None,
        "gradient_checkpointing": training.gradient_checkpointing == "offload",
    }
    for name, is_named in on_gpus.items():
        if is_named and device != "cuda":
            raise RecipeError(
                f"training.{name}={getattr(training, name)!r} needs a GPU, but this run is on {device!r}: leave it out"
            )
    for name in ("cross_entropy", "kernels"):
        package = getattr(training, name)
        if package is not None and find_spec(package) is None:
            raise RecipeError(
                f"training.{name}={package!r} is not installed: install it (pip install {package.replace('_', '-')}), "
                "or leave it out"
            )


def take_kernels(model: LoopedForCausalLM, training: TrainingConfig):
    """Use the kernels that the recipe names; `check_device` has checked that they are available."""
    if training.attention is not None:
        try:
            model.set_attn_implementation(training.attention)
        except (ImportError, ValueError) as error:
            raise RecipeError(f"training.attention={training.attention!r}: {' '.join(str(error).split())}") from error
    if training.cross_entropy is not None:
        model.loss_kernel = LOSS_KERNELS[training.cross_entropy]
    if training.kernels is not None:
        take_liger(model)


def take_liger(model: nn.Module):
    norms = [module for module in model.modules() if type(module) is LoopedNorm and has_plain_weight(module)]
    gated = [module for module in model.modules() if isinstance(module, LoopedMLP) and is_swiglu(module)]
    if not norms and not gated:
        raise RecipeError(
            "training.kernels='liger_kernel' would have no effect: the model has neither an RMSNorm with one weight "
            "for all loops, nor a gated MLP with hidden_act='silu'; leave it out"
        )
    for norm in norms:
        norm.kernel = rms_norm
    for mlp in gated:
        mlp.gated_activation = swiglu


def has_plain_weight(norm: LoopedNorm) -> bool:
    return norm.is_plain and norm.weight is not None and not norm.is_by_loop


def is_swiglu(mlp: LoopedMLP) -> bool:
    return mlp.gate_proj is not None and isinstance(mlp.activation, type(ACT2FN["silu"]))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    # in place, it would overwrite the gradient of the output, which residual connections still need
    return liger_rms_norm(x, weight, eps, casting_mode="gemma", in_place=False)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    return liger_swiglu(gate, up)
