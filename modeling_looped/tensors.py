"""What many files do with tensors: their precision, their device, their rows."""

import torch


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """float32, or its own where that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(wide_dtype(tensor))


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """float64, or float32 on Apple's GPUs, which have no float64."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def on_device(values, device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers of the host on a device. The host waits for a GPU where memory that is not pinned is copied."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda" or torch.compiler.is_compiling():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def first_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """A slice of all rows would be copied in the backward pass. In exported programs their number stays a symbol,
    which len would make a constant."""
    return tensor if count == tensor.shape[0] else tensor[:count]


def rows_of(rows: list[int], tensor: torch.Tensor) -> torch.Tensor:
    """These, in ascending order, of all rows of a tensor."""
    return tensor if len(rows) == len(tensor) else tensor[on_device(rows, tensor.device)]


def members_by_number(numbers: list[int]):
    """Of each number, where it stands."""
    groups: dict[int, list[int]] = {}
    for i, number in enumerate(numbers):
        groups.setdefault(number, []).append(i)
    return groups.items()


def may_be_transformed() -> bool:
    """Whether torch.func transforms what runs now; where torch does not say, it may."""
    try:
        return torch._C._are_functorch_transforms_active()
    except AttributeError:
        return True
