"""Known or measured floating-point operations per second of a device, the reference for utilisation."""

import re
import time

import torch


PEAK_FLOPS = {  # for 16-bit types, by words in a GPU's name
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "4090": 165e12,
    "V100": 125e12,
}


def makers_rate(device: torch.device) -> float | None:
    """Return the maker's bf16 figure of a known GPU. A measured rate is none that a run can be compared with: on a
    processor that others use, the run is often faster than the few products of the measurement."""
    return known_rate(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def device_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of one device: the maker's figure for known GPUs, else measured."""
    return makers_rate(device) or measured_rate(device, dtype, 1024 if device.type == "cpu" else 8192)


def known_rate(name: str) -> float | None:
    words = set(re.findall(r"\w+", name))
    return next((rate for key, rate in PEAK_FLOPS.items() if words.issuperset(key.split())), None)


def measured_rate(device, dtype: torch.dtype, size: int = 1024, repeats: int = 4) -> float:
    """Measure the floating-point operations per second of a matrix product, as the best of `repeats`."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
