"""Choice of the activations kept for the backward pass; all others are computed again.

True        the input of every block is kept
loops       the state of every loop is kept: the least memory if the core has several layers
selective   outputs of matrix products and of attention are kept: norms, activations and rotations are computed again
offload     the same tensors as with True, moved to the memory of the host
"""

from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from looped_recipes.settings.run_checks import check_recomputed
from modeling_looped import LoopedForCausalLM


KEPT = ("mm", "addmm", "bmm", "linear")  # operations with "attention" in their name are kept too


def keep_fewer_activations(model: LoopedForCausalLM, how: bool | str):
    check_recomputed(how, model.config)
    if how == "loops":
        model.model.checkpoints_loops = True
        return
    options = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
    # the first name exists from transformers 5.23 on, the second until transformers 6
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options, offload=how == "offload")


def keep_products(context, operation, *args, **kwargs) -> CheckpointPolicy:
    name = operation.overloadpacket.__name__ if isinstance(operation, torch._ops.OpOverload) else str(operation)
    is_kept = name in KEPT or "attention" in name
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
