"""One graph of a block for all loops, where a decoding step with a static cache is compiled.

The step is one graph. In it a block is a region, which is compiled where it is met first, and called in every later
loop. Two calls are the same region if they differ in tensors alone, so it takes those of its slot, not the cache.

A region writes to its slot, which torch's compiler does not tell others of. So nothing else of the graph may read a
slot: positions and masks are given, as by `generate`. What hooks record inside does not get out either. And a slot
must be marked as one that stays where it is, since CUDA graphs read copies of all others.
"""

from inspect import signature
from typing import Any

import torch

from .borrowed import class_or_missing, look_up


StaticCache, StaticLayer = (
    class_or_missing("transformers.cache_utils", name) for name in ("StaticCache", "StaticLayer")
)
nested_compile_region = look_up("torch.compiler", "nested_compile_region", lambda: lambda function: function)
# how many differing calls one region may serve. Older torch lacks this argument and its regions differ, so none are
# made
LIMIT: Any = {"max_reuse_entries": 2**20} if "max_reuse_entries" in signature(nested_compile_region).parameters else {}

DEVICES = {"cpu", "cuda"}

STAYS = "_dynamo_static_input_type"  # of tensors that `torch._dynamo.mark_static_address` has marked


class StaticSlot(StaticLayer):
    """A static layer made of its tensors, in place of the cache that it is a slot of."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor):
        self.keys, self.values, self.cumulative_length = keys, values, length
        self.device, self.is_initialized = keys.device, True


@nested_compile_region(**LIMIT)
def run_as_region(block, slot: tuple, args: tuple, kwargs: dict):
    """A block's new stream; the tensors of the slot are changed in place. No tensor may be given twice."""
    output = block(*args, cache=StaticSlot(*slot), **kwargs)
    return output[0] if kwargs["keeps_keys"] else output


def can_have_regions(cache, attention_mask, position_ids) -> bool:
    if not LIMIT or not torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.is_grad_enabled():
        return False
    has_masks = isinstance(attention_mask, dict) or (torch.is_tensor(attention_mask) and attention_mask.ndim == 4)
    return has_masks and position_ids is not None and type(cache) is StaticCache and not cache.offloading


def slot_of_region(cache, slot: int) -> tuple | None:
    """Keys, values and length of a slot, where the block that fills it can be a region."""
    layer = cache.layers[slot]
    if type(layer) is not StaticLayer or layer.keys is None or not hasattr(layer.keys, STAYS):
        return None
    return (layer.keys, layer.values, layer.cumulative_length) if layer.keys.device.type in DEVICES else None
