"""Python's numbers as tensors on a device."""

import torch


def numbers_on(device, numbers, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A GPU is not waited for: a copy from memory that is not pinned would let it finish first."""
    if torch.compiler.is_compiling() or torch.device(device).type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
