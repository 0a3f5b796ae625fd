"""What is there: packages, and how fast products and memory are, the ceilings that others are compared with."""

import importlib.metadata
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from looped_eval.common.timing import now
from looped_recipes.common.hardware import device_rate, measured_rate
from looped_recipes.common.provenance import hardware

from .pieces import Measurement, Setting


NEEDED = {
    "transformers": "everything",
    "accelerate": "training",
    "datasets": "training",
    "pytest": "tests",
    "hypothesis": "tests",
    "lm_eval": "nothing of this check",
    "flash_attn": "the test of flash attention",
}


def measurements(setting: Setting) -> Iterator[Measurement]:
    yield Measurement("packages", packages)
    yield Measurement("rates", lambda: rates(setting))


def packages() -> dict:
    """Versions of what is there; of what is missing, what needs it."""
    versions = {"torch": torch.__version__}
    for name in NEEDED:
        if find_spec(name) is not None:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "of no version"
    missing = {name: f"is missing: {use} needs it" for name, use in NEEDED.items() if name not in versions}
    return {"hardware": hardware(), "versions": versions, "missing": missing}


def rates(setting: Setting) -> dict:
    dtype = getattr(torch, setting.dtype)
    on_gpu = setting.device == "cuda"
    properties = torch.cuda.get_device_properties(0) if on_gpu else None
    return {
        "peak_flops": device_rate(torch.device(setting.device), dtype),
        "measured_flops": measured_rate(setting.device, dtype, 8192 if on_gpu else 256, repeats=10),
        "memory_bytes_per_second": bytes_per_second(setting.device, 2**32 if on_gpu else 2**24),
        "cache_bytes_per_second": bytes_per_second(setting.device, 2**24 if on_gpu else 2**18),
        "cache_bytes": properties.L2_cache_size if properties else 2**20,
        "memory_bytes": properties.total_memory if properties else 0,
    }


def bytes_per_second(device: str, size: int, repeats: int = 20) -> float:
    """Of copies of `size` bytes, read and written. What fits into the cache, twice, is copied in it."""
    source = torch.randint(0, 127, (size,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    inner, best = max(1, 2**30 // size if device == "cuda" else 1), float("inf")
    target.copy_(source)
    for _ in range(repeats):
        start = now()
        for _ in range(inner):
            target.copy_(source)
        best = min(best, (now() - start) / inner)
    return 2 * size / best
