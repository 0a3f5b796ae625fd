"""Which activations are kept for the backward pass, and which are computed again.

True        the input of every block is kept
loops       the state of every loop is kept: the least memory where a core has several layers
selective   outputs of matrix products and of attention are kept: norms, activations and rotations are computed again
offload     as true, in the memory of the host
"""

from functools import partial

import torch
import transformers
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from looped_recipes.settings.recipe import RecipeError
from modeling_looped import LoopedForCausalLM


KEPT = ("mm", "addmm", "bmm", "linear")  # and whatever has attention in its name


def keep_fewer_activations(model: LoopedForCausalLM, how: bool | str):
    if how == "loops":
        if model.config.shares_keys:
            raise RecipeError(
                "training.gradient_checkpointing='loops' computes a loop again by itself, but here loops read keys of "
                f"others (model.key_value_interval={model.config.key_value_interval}, model.num_key_value_loops="
                f"{model.config.num_key_value_loops}): set it to true"
            )
        model.model.checkpoints_loops = True
        return
    options = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
    # its name from transformers 5.23 on, and before
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    try:
        enable(options, **({"offload": True} if how == "offload" else {}))
    except TypeError as error:
        here = transformers.__version__
        raise RecipeError(
            f"training.gradient_checkpointing={how!r} needs transformers 5.23 or newer, here is {here}"
        ) from error


def keep_products(context, operation, *args, **kwargs) -> CheckpointPolicy:
    name = operation.overloadpacket.__name__ if isinstance(operation, torch._ops.OpOverload) else str(operation)
    is_kept = name in KEPT or "attention" in name
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
