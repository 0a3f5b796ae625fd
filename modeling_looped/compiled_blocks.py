"""One graph of a block for all loops, where a decoding pass with a static cache is compiled.

The pass is one graph. In it each block is a region, which is compiled at its first call and called again in every
later loop. Two calls share a region if they differ in tensors only, so a region takes a slot's tensors, not the cache.

A region writes to its slot, and torch's compiler does not inform the rest of the graph of it. So nothing else in the
graph may read a slot: positions and masks must be passed in, as `generate` does. A slot's tensors must be marked as
having a fixed address, because CUDA graphs read copies of all other tensors.

Python runs once for all calls of a region. So hooks inside would miss their other calls, and nothing that they record
would get out: a model that has some goes without regions, as where transformers records outputs of blocks.
"""

from inspect import signature
from typing import Any

import torch

from .compatibility import class_or_missing, look_up


StaticCache, StaticLayer = (
    class_or_missing("transformers.cache_utils", name) for name in ("StaticCache", "StaticLayer")
)
nested_compile_region = look_up("torch.compiler", "nested_compile_region", lambda: lambda function: function)
# limit on the number of differing calls that share a region. Older torch lacks this argument and would not share a
# region between such calls, so none are made
LIMIT: Any = {"max_reuse_entries": 2**20} if "max_reuse_entries" in signature(nested_compile_region).parameters else {}

REGION_DEVICES = {"cpu", "cuda"}

STAYS = "_dynamo_static_input_type"  # attribute of tensors marked by `torch._dynamo.mark_static_address`


class StaticSlot(StaticLayer):
    """A static layer made of the tensors of one slot; a block gets it in place of the whole cache."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor):
        self.keys, self.values, self.cumulative_length = keys, values, length
        self.device, self.is_initialized = keys.device, True


@nested_compile_region(**LIMIT)
def run_as_region(block, slot: tuple, args: tuple, kwargs: dict):
    """Run a block and return its new stream; the slot's tensors change in place. No tensor may be passed twice."""
    output = block(*args, cache=StaticSlot(*slot), **kwargs)
    return output[0] if kwargs["keeps_keys"] else output


def can_have_regions(cache, attention_mask, position_ids) -> bool:
    if not LIMIT or not torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.is_grad_enabled():
        return False
    has_masks = isinstance(attention_mask, dict) or (torch.is_tensor(attention_mask) and attention_mask.ndim == 4)
    return has_masks and position_ids is not None and type(cache) is StaticCache and not cache.offloading


def slot_of_region(cache, slot: int) -> tuple | None:
    """Return keys, values and length of a slot, or None where the block that fills it cannot be a region."""
    layer = cache.layers[slot]
    if type(layer) is not StaticLayer or layer.keys is None or not hasattr(layer.keys, STAYS):
        return None
    return (layer.keys, layer.values, layer.cumulative_length) if layer.keys.device.type in REGION_DEVICES else None
