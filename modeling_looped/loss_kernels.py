"""Kernels of others for the cross-entropy of many tokens, which never write their logits to memory.

A model takes one with `model.loss_kernel = LOSS_KERNELS[name]`: a function of hidden states [tokens, hidden], the
head's weight, labels [tokens] and the softcap of the logits, to losses [tokens]. Without one, losses.py takes a chunk
of tokens after the other.
"""

import torch


def cut_cross_entropy(hidden, weight, labels, softcap: float | None):
    """With exact gradients: by default it leaves out those that bf16 would lose."""
    from cut_cross_entropy import linear_cross_entropy  # pyrefly: ignore[missing-import]

    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (hidden, weight))
    return linear_cross_entropy(hidden, weight, labels, softcap=softcap, reduction="none", filter_eps=None)


LOSS_KERNELS = {"cut_cross_entropy": cut_cross_entropy}
