"""Evaluation mode for a while."""

from contextlib import contextmanager

import torch


@contextmanager
def evaluating(model: torch.nn.Module):
    """Set eval mode, and restore the mode of every module afterwards, because measures are called during training."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield model
    finally:
        for module, mode in modes:
            module.training = mode
