"""Helpers for tensors that many files use: precision, device, rows."""

import torch


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return float32, or the tensor's dtype if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(wide_dtype(tensor))


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float64, or to float32 on Apple's GPUs, which have no float64."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def on_device(values, device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy numbers from the host to a device. The memory is pinned, as other copies make the host wait for a GPU."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda" or torch.compiler.is_compiling():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def first_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first rows; for all rows the tensor itself, since the backward pass would copy a slice. shape[0]
    stays a symbol in exported programs, where len would give a constant."""
    return tensor if count == tensor.shape[0] else tensor[:count]


def rows_of(rows: list[int], tensor: torch.Tensor) -> torch.Tensor:
    """Select rows, in ascending order; the tensor itself if they are all of its rows."""
    return tensor if len(rows) == len(tensor) else tensor[on_device(rows, tensor.device)]


def members_by_number(numbers: list[int]):
    """Group equal numbers: return each number with the indices at which it occurs."""
    groups: dict[int, list[int]] = {}
    for i, number in enumerate(numbers):
        groups.setdefault(number, []).append(i)
    return groups.items()


def may_be_transformed() -> bool:
    """Whether torch.func may be transforming the running code; True if torch cannot tell."""
    try:
        return torch._C._are_functorch_transforms_active()
    except AttributeError:
        return True
