"""Key/value caches under a loop.

Any transformers cache serves a looped model: a slot per (loop, core layer), see slots.py. Three things need more than
that, and `CacheView` gives them: rows of a batch that run to different depths, passes that are shallower than what the
cache already holds, and caches that share slots between loops (`LoopedCache`).

A token that stops at loop k leaves its keys and values of loop k in every deeper slot, so that all slots have the same
length and later tokens that run deeper read what that token last knew.
"""

import copy

import torch
from transformers.cache_utils import Cache, DynamicCache

from .slots import core_slot, num_slots


def shared_slots(sharing: str) -> int | None:
    """How many loops have slots of their own under a sharing policy; None if all do."""
    if sharing == "none":
        return None
    if sharing == "last":
        return 1
    kind, _, count = sharing.partition("-")
    if kind == "cyclic" and count.isdigit() and int(count) >= 1:
        return int(count)
    raise ValueError(
        f"cache_sharing={sharing!r} is not known: choose 'none', 'last' or 'cyclic-S' with S >= 1, e.g. 'cyclic-4'"
    )


class LoopedCache(DynamicCache):
    """A dynamic cache whose loops share slots: 1/N of the memory for past positions.

    sharing: "none"; "last" (past positions are seen as their last loop left them); "cyclic-S" (loop t uses slot
    t mod S).
    Tokens of the same pass always see each other at their own loop. So with sharing, what a token sees depends on how
    the sequence was cut into passes: that is the approximation.
    """

    def __init__(self, config, sharing: str = "none", num_loops: int | None = None):
        self.sharing = sharing
        loops = config.num_loops if num_loops is None else num_loops
        shared = shared_slots(sharing)
        config = copy.deepcopy(config)
        config.num_loops = loops if shared is None else min(loops, shared)
        super().__init__(config=config)
        if shared is not None:
            self.activate_past_recording()  # sliding windows must be able to give back the tokens of an earlier loop


class CacheView:
    """What the blocks see of a cache during one pass; `update` is that of the cache."""

    def __init__(self, cache: Cache, config, plan, stored_loops: int):
        self.cache, self.config, self.plan = cache, config, plan
        self.shared = shared_slots(getattr(cache, "sharing", "none"))
        self.stored_loops = stored_loops  # loops whose slots hold the past, which this pass must fill too
        self.latest = {}  # per layer: keys and values of this pass, of all rows, as each row's last loop left them

    def layer_and_loop(self, slot: int) -> tuple[int, int]:
        first = core_slot(self.config, 0, 0)
        if slot < first:
            return slot, 0
        loop, layer = divmod(slot - first, self.config.num_core_layers)
        return first + layer, loop

    def update(self, keys: torch.Tensor, values: torch.Tensor, slot: int, *args, **kwargs):
        rows = keys.shape[0]
        layer, loop = self.layer_and_loop(slot)
        if rows < len(self.plan.depths):  # the other rows have finished: they keep what their last loop left
            kept_keys, kept_values = self.latest[layer]
            keys, values = torch.cat([keys, kept_keys[rows:]]), torch.cat([values, kept_values[rows:]])
        self.latest[layer] = keys, values
        keys, values = self.write(layer, loop, keys, values, *args, **kwargs)
        if self.plan.is_mixed:
            keys, values = self.plan.sort(keys)[:rows], self.plan.sort(values)[:rows]
        return keys, values

    def write(self, layer: int, loop: int, keys, values, *args, **kwargs):
        slot = layer
        if layer >= core_slot(self.config, 0, 0):
            slot += (loop if self.shared is None else loop % self.shared) * self.config.num_core_layers
            if self.shared is not None and loop >= self.shared:  # take back what an earlier loop of this pass wrote
                self.cache.layers[slot].crop(-keys.shape[-2])
        return self.cache.update(self.plan.unsort(keys), self.plan.unsort(values), slot, *args, **kwargs)

    def finish(self):
        """Leave the last loop's keys and values in the deeper slots that hold the past."""
        for loop in range(self.plan.max_depth, self.stored_loops):
            for layer in range(self.config.num_core_layers):
                layer = core_slot(self.config, 0, layer)
                self.write(layer, loop, *self.latest[layer])
        if self.shared is not None:
            for layer in self.cache.layers:
                if layer.is_sliding and layer.is_initialized:
                    layer.crop(0)  # back to the window


def is_written(cache: Cache, slot: int) -> bool:
    return slot < len(cache.layers) and cache.layers[slot].is_initialized


def view_for_pass(cache, config, plan):
    """The cache itself where it serves as it is, else a `CacheView`. Refuses to deepen a sequence that is under "
    "way."""
    if cache is None or not isinstance(cache, Cache):
        return cache
    shared = shared_slots(getattr(cache, "sharing", "none"))
    needed = plan.max_depth if shared is None else min(plan.max_depth, shared)
    first = core_slot(config, 0, 0)

    if not is_written(cache, first):  # a new sequence
        stored = 0
        if cache.layer_class_to_replicate is None:  # layers were made for the configured depth: add for this one
            for slot in range(len(cache.layers), num_slots(config, needed)):
                cache.layers.append(copy.deepcopy(cache.layers[slot - config.num_core_layers]))
    else:
        stored = needed
        if not is_written(cache, core_slot(config, needed - 1, 0)):
            stored = next(loop for loop in range(needed) if not is_written(cache, core_slot(config, loop, 0)))
            if int(cache.get_seq_length(first)) > 0:
                raise ValueError(
                    f"num_loops={plan.max_depth} is deeper than the {stored} loops that the cache holds of this "
                    "sequence, "
                    "and the past has no keys and values for the deeper loops. Run the sequence at one depth or "
                    "shallower, or start it again with an empty cache."
                )
        while is_written(cache, core_slot(config, stored, 0)):
            stored += 1

    if plan.is_mixed or shared is not None or stored > plan.max_depth:
        return CacheView(cache, config, plan, stored)
    return cache
