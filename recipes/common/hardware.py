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


def reference_rate(accelerator) -> float:
    """Return the rate of this process's device in the precision of its launch."""
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return device_rate(accelerator.device, halves.get(accelerator.mixed_precision, torch.float32))


def device_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of one device: the maker's bf16 figure for known GPUs, else measured."""
    if device.type == "cpu":
        return measured_rate(device, dtype)
    known = known_rate(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known or measured_rate(device, dtype, 8192)


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
