"""Kernels of other libraries for the cross-entropy of many tokens, which hold only part of the logits at a time.

A model takes one with `model.loss_kernel = LOSS_KERNELS[name]`: a function of hidden states [tokens, hidden], the
head's weight, labels [tokens] and the softcap of the logits, to losses [tokens]. Without a kernel, the model computes
one chunk of tokens after the other. Each of these kernels reads the number of labels, for which the host waits for a
GPU.
"""

import torch


def cut_cross_entropy(hidden, weight, labels, softcap: float | None):
    """Cut cross-entropy with exact gradients: by default the library leaves out those that bf16 would lose."""
    from cut_cross_entropy import linear_cross_entropy

    hidden, weight = as_multiplied(hidden, weight)
    return linear_cross_entropy(hidden, weight, labels, softcap=softcap, reduction="none", filter_eps=None)


def liger_kernel(hidden, weight, labels, softcap: float | None):
    """Liger's kernel, with the head's gradient summed in fp32. Logits are computed once more for the gradients."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    hidden, weight = as_multiplied(hidden, weight)
    return liger_fused_linear_cross_entropy(
        hidden, weight, labels, reduction="none", softcap=softcap, accum_dtype=torch.float32
    )


def as_multiplied(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Convert tensors to the dtype in which autocast multiplies, if autocast is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


LOSS_KERNELS = {"cut_cross_entropy": cut_cross_entropy, "liger_kernel": liger_kernel}
