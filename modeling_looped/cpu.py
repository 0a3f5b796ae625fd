"""Decoding on a CPU: products of few rows and attention of single queries, faster than torch computes them.

A reader can skip this file: up to rounding, `project(layer, x)` is `layer(x)` and `attend_single_query` is attention.
`fast_paths` switches all of this on or off. A method is used where `looped benchmark products` shows a gain. Time over
that of torch, with 1 to 8 rows, on AMD (Zen 4 and 5) and Intel (AVX512):

- bfloat16 weights in oneDNN's order, since torch reorders them at every product: AMD .46 to .72, Intel .63 to .94
- fp32 weights in that order: AMD .47 to .86 with one row on two threads (on one thread .6 to 1.1 where rows are short,
  1.0 to 1.4 where they are long, so it is off there), .12 to .7 with more; off on Intel, where one row takes 1.4 to 2
  times as long (Emerald Rapids)
- attention of single queries in bfloat16: AMD .10 to .63 with one row, Intel without AMX a third; off with AMX, where
  it takes twice as long (Emerald Rapids)
"""

import math
import platform
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import logging

from .overrides import has_global_hooks, has_hooks
from .switches import is_switched_on
from .tensors import may_be_transformed


logger = logging.get_logger(__name__)

FAST_PATHS = "LOOPED_CPU_FAST_PATHS"  # environment variable
FEW_ROWS = 8
MIN_ORDERED_SIZE = 2**16  # elements of bfloat16 weights: below, reordering gains nothing
MIN_ORDERED_FP32_SIZE = 2**17
LONG_ROW = 1024  # in fp32 torch multiplies a single row of so many numbers as fast as one thread reads the weights
READS_BEFORE_ORDERING = 16  # after so many products, or twice as many for large weights, reordering has paid
CONTAINER = Path("/sys/fs/cgroup")


_is_on = is_switched_on(FAST_PATHS, "faster ways on CPUs")


def fast_paths_are_on() -> bool:
    return _is_on


@contextmanager
def fast_paths(enabled: bool):
    """Switch the faster methods of this file on or off inside the context, in all threads."""
    global _is_on
    before, _is_on = _is_on, enabled
    try:
        yield
    finally:
        _is_on = before


def onednn_operator(name: str):
    """Return an operator of torch.ops.mkldnn; torch does not promise to keep it."""
    try:
        return getattr(torch.ops.mkldnn, name)
    except AttributeError as error:
        raise NotImplementedError(f"torch {torch.__version__} has no operator mkldnn.{name}") from error


# the layers whose products this generation may compute in its own way; None outside of generations
_products: ContextVar[dict[nn.Module, "RepeatedProduct"] | None] = ContextVar("products", default=None)


@contextmanager
def repeated_products(model: nn.Module):
    """Enable faster products during `generate`, which reads the same weights again and again; rounding may differ.

    Plain layers are determined before anything runs: weights that FSDP or offloading provides only while a layer runs
    are not plain.
    """
    outer = _products.get()
    # a nested call, such as that of an assistant model, adds to the same products
    products: dict[nn.Module, RepeatedProduct] = {} if outer is None else outer
    if fast_paths_are_on():
        layers = [layer for layer in model.modules() if layer not in products and is_plain_linear(layer)]
        new = [RepeatedProduct(layer) for layer in layers if can_be_ordered(layer.weight)]
        if new and fits_twice([product.weight for product in new]):
            products.update((product.layer, product) for product in new)
    token = _products.set(products)
    try:
        yield
    finally:
        _products.reset(token)


@contextmanager
def multiplying_as_in(context: Context):
    """Let generations inside share the products of `context`, and the copies of weights that these keep."""
    token = _products.set(context.get(_products))
    try:
        yield
    finally:
        _products.reset(token)


def fits_twice(weights: list[torch.Tensor]) -> bool:
    """Return whether half of the memory that is left holds a copy of the weights, and log what is done."""
    size = sum(weight.nbytes for weight in weights)
    if size > memory_left() / 2:
        logger.info(f"Decoding goes without a faster order of the weights: {size} bytes more might not fit.")
        return False
    logger.info(
        "Decoding keeps weights a second time, in the order that oneDNN reads: up to "
        f"{size} bytes more, until generate returns. {FAST_PATHS}=0 goes without."
    )
    return True


def memory_left() -> float:
    """Return the bytes that Linux says are left, in a container no more than that may still take; elsewhere infinity.

    Files that are read into memory count as left, since they give way."""
    bounds = [math.inf]
    with suppress(OSError, KeyError, ValueError):
        bounds.append(1024 * numbers_of("/proc/meminfo")["MemAvailable:"])
    with suppress(OSError, KeyError, ValueError):  # "max" where there is no limit
        limit, used = (int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        of_container = numbers_of(CONTAINER / "memory.stat")
        bounds.append(limit - used + of_container["active_file"] + of_container["inactive_file"])
    return min(bounds)


def numbers_of(path: str | Path) -> dict[str, int]:
    """Return the numbers of a file that has a name and a number in each line."""
    rows = (line.split() for line in Path(path).read_text().splitlines())
    return {name: int(number) for name, number, *_ in rows}


def project(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return `layer(x)`; in a generation a faster method computes it if it is just x W^T + b."""
    if torch.compiler.is_compiling():
        return layer(x)
    products = _products.get()
    product = products.get(layer) if products and _is_on else None
    if product is None or not product.still_applies(x):
        return layer(x)
    y = product(x)
    return layer(x) if y is None else y


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether calling the layer is x W^T + b, and nothing watches or changes the call.

    Adapted, quantised and parametrized layers are of other types; offloaded ones have another forward.
    """
    if type(layer) is not nn.Linear or "forward" in layer.__dict__ or layer._compiled_call_impl is not None:
        return False
    return not has_hooks(layer) and not has_global_hooks()


@cache
def processor() -> Mapping[str, Any]:
    """Return what torch reports of the processor, or nothing where it does not."""
    try:
        return torch.cpu.get_capabilities()
    except AttributeError:
        return {}


def maker() -> str:
    """Return the maker of the processor: AMD, Intel, or '' for another."""
    name = processor().get("cpu_name", "")
    return next((maker for maker in ("AMD", "Intel") if maker in name), "")


def has_amx() -> bool:
    """Return whether the processor multiplies whole tiles of bfloat16."""
    return bool(processor().get("amx_bf16"))


def can_be_ordered(weight: torch.Tensor) -> bool:
    """Return whether oneDNN on this machine has its own order for such weights, and products gain by it."""
    if type(weight) is not nn.Parameter or weight.device.type != "cpu":  # sharded, or elsewhere
        return False
    is_fp32 = weight.dtype == torch.float32
    if weight.dtype != torch.bfloat16 and not is_fp32:
        return False
    if weight.numel() < (MIN_ORDERED_FP32_SIZE if is_fp32 else MIN_ORDERED_SIZE):
        return False
    mkldnn = torch.backends.mkldnn
    if platform.machine() not in ("x86_64", "AMD64") or not (mkldnn.is_available() and mkldnn.enabled):
        return False
    if is_fp32:
        return maker() == "AMD"
    try:
        return onednn_operator("_is_mkldnn_bf16_supported")()
    except NotImplementedError:
        return False


class RepeatedProduct:
    """x W^T + b of one plain layer in one generation.

    Weights are reordered only after READS_BEFORE_ORDERING products. The reordered copy is kept until the generation
    ends, so that these weights take their memory twice.
    """

    def __init__(self, layer: nn.Linear):
        self.layer, self.weight, self.dtype = layer, layer.weight, layer.weight.dtype
        self.can_be_ordered = True
        self.reads = 0
        self.ordered: torch.Tensor | None = None
        self.ordered_from: tuple | None = None  # `content_of` the weights at that time

    def still_applies(self, x: torch.Tensor) -> bool:
        """Return whether calling the layer is still this product and nothing else."""
        is_same = type(x) is torch.Tensor and self.layer._parameters.get("weight") is self.weight
        return (
            is_same
            and x.dtype == self.weight.dtype == self.dtype
            and not torch.is_autocast_enabled("cpu")  # which may multiply in another dtype
            and is_plain_linear(self.layer)
            and not may_be_transformed()
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the product, or None while a copy is not yet worth its cost, and where torch has no such operator."""
        if not self.can_be_ordered or torch.is_grad_enabled() or is_quick_by_torch(x):
            return None
        try:
            if self.ordered is not None and self.ordered_from != content_of(self.weight):
                self.reads, self.ordered = 0, None  # trained, or loaded anew, between two generations
            if self.ordered is None:
                if self.reads < READS_BEFORE_ORDERING:
                    self.reads += 1
                    return None
                self.ordered, self.ordered_from = order(self.weight), content_of(self.weight)
            return multiply_with_ordered(self.ordered, self.layer.bias, x)
        except NotImplementedError:
            self.can_be_ordered, self.ordered = False, None
            return None


def is_quick_by_torch(x: torch.Tensor) -> bool:
    """Return whether x is a single long row in fp32 and there is one thread; torch uses no more for its product."""
    return x.dtype == torch.float32 and x.numel() == x.shape[-1] >= LONG_ROW and torch.get_num_threads() == 1


def content_of(weight: torch.Tensor) -> tuple:
    """Return a tuple that changes when the weights are written to; weights of inference mode have no version."""
    return weight.data_ptr(), None if weight.is_inference() else weight._version


def order(weight: torch.Tensor) -> torch.Tensor:
    """Return the same weights in the order in which oneDNN reads them for few rows."""
    return onednn_operator("_reorder_linear_weight")(weight.detach(), FEW_ROWS)


def multiply_with_ordered(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return onednn_operator("_linear_pointwise")(x, weight, bias, "none", [], "")


def is_slow_single_query(queries: torch.Tensor) -> bool:
    """Return whether these are single queries for which the kernel takes three times as long as for two queries."""
    if queries.shape[2] != 1 or queries.dtype != torch.bfloat16 or torch.compiler.is_compiling():
        return False
    return queries.device.type == "cpu" and fast_paths_are_on() and not has_amx()


def attend_single_query(queries, keys, values, mask, scaling: float) -> torch.Tensor:
    """Attend with queries [rows, heads, 1, head_dim]: each one doubled, or those that share a key head in one call."""
    groups = queries.shape[1] // keys.shape[1]
    if groups == 1:
        asked = torch.cat((queries, queries), dim=2)  # a view made by expand takes half as long again
        return F.scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=scaling)[:, :, :1]
    asked = queries.reshape(len(queries), -1, groups, queries.shape[-1])
    if mask is not None and mask.shape[1] > 1:  # one mask per head
        mask = mask.reshape(len(mask), -1, groups, mask.shape[-1])
    return F.scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=scaling).reshape(queries.shape)
