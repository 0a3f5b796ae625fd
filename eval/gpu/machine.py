"""The machine: installed packages, and the rates of matrix products and memory, the ceilings for other results."""

import importlib.metadata
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from looped_eval.benchmark.bandwidth import bytes_per_second
from looped_recipes.common.hardware import device_rate, measured_rate
from looped_recipes.common.provenance import hardware

from .pieces import Measurement, Setting


NEEDED = {
    "transformers": "everything",
    "accelerate": "training",
    "datasets": "training and its tests",
    "pytest": "tests",
    "hypothesis": "tests",
    "lm_eval": "nothing of this check",
    "flash_attn": "the test of flash attention",
    "cut_cross_entropy": "an option of training",
    "liger_kernel": "two options of training",
    "torchao": "float8",
}


def measurements(setting: Setting) -> Iterator[Measurement]:
    yield Measurement("packages", packages)
    yield Measurement("rates", lambda: rates(setting))


def packages() -> dict:
    """Return the versions of installed packages, and for missing ones what needs them."""
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
    return {
        "peak_flops": device_rate(torch.device(setting.device), dtype),
        "measured_flops": measured_rate(setting.device, dtype, 8192 if on_gpu else 256, repeats=10),
        "memory_bytes_per_second": bytes_per_second(setting.device),
        "cache_bytes": torch.cuda.get_device_properties(0).L2_cache_size if on_gpu else 0,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if on_gpu else 0,
    }
