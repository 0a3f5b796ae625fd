"""Key/value caches under a loop.

Any transformers cache serves a looped model: a slot per (loop, core layer), see slots.py. Three things need more than
that, and `CacheView` gives them: rows of a batch that run to different depths, passes that are shallower than what the
cache already holds, and caches that share slots between loops (`LoopedCache`).

A token that stops at loop k leaves its keys and values of loop k in every deeper slot, so that all slots have the same
length and later tokens that run deeper read what that token last knew.
"""

import copy

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .slots import core_slot, num_slots, slot_at, split_slot


def shared_slots(sharing: str) -> int | None:
    """How many loops have slots of their own under a sharing policy; None if all do."""
    if sharing == "none":
        return None
    if sharing == "last":
        return 1
    kind, _, count = str(sharing).partition("-")
    if kind == "cyclic" and count.isdigit() and int(count) >= 1:
        return int(count)
    raise ValueError(
        f"cache_sharing={sharing!r} is not known: choose 'none', 'last' or 'cyclic-S' with S >= 1, e.g. 'cyclic-4'"
    )


class RoomyLayer(DynamicLayer):
    """A dynamic layer that writes new tokens in place; one that concatenates copies all the past for each of them."""

    room = 64  # tokens
    buffers = (None, None)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if key_states.requires_grad or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self.has_room(end, key_states):
            self.buffers = tuple(
                new.new_empty(*new.shape[:-2], end + self.room, new.shape[-1]) for new in (key_states, value_states)
            )
            if start:
                self.buffers[0][..., :start, :], self.buffers[1][..., :start, :] = self.keys, self.values
        keys, values = self.buffers
        keys.narrow(-2, start, end - start).copy_(key_states)
        values.narrow(-2, start, end - start).copy_(value_states)
        self.keys, self.values = keys.narrow(-2, 0, end), values.narrow(-2, 0, end)
        return self.keys, self.values

    def has_room(self, length: int, like: torch.Tensor) -> bool:
        """Also that the buffers hold what the layer holds: others may have put tensors of their own."""
        keys, values = self.buffers
        is_empty = self.keys.numel() == 0
        held = like if is_empty else self.keys
        if keys is None or keys.shape[-2] < length or keys.shape[:-2] != held.shape[:-2]:
            return False
        if is_empty:
            return (keys.dtype, keys.device) == (like.dtype, like.device)
        return keys.data_ptr() == self.keys.data_ptr() and values.data_ptr() == self.values.data_ptr()

    def move(self, keys: torch.Tensor, values: torch.Tensor, length: int):
        """To buffers of somebody else, of which it holds the first tokens; it goes on writing there."""
        self.buffers = (keys, values)
        if length:
            self.keys, self.values = keys[..., :length, :], values[..., :length, :]

    def reset(self):
        super().reset()
        self.buffers = (None, None)


class LoopedCache(DynamicCache):
    """The cache that `generate` makes: dynamic, written in place, and its loops can share slots.

    sharing: "none"; "last" (past positions are seen as their last loop left them); "cyclic-S" (loop t uses slot t mod
    S). Tokens of the same pass always see each other at their own loop. So with sharing, which takes 1/N or S/N of the
    memory, what a token sees depends on how the sequence was cut into passes: that is the approximation.
    """

    def __init__(self, config, sharing: str = "none", num_loops: int | None = None):
        self.sharing = sharing
        loops = config.num_loops if num_loops is None else num_loops
        shared = shared_slots(sharing)
        config = copy.deepcopy(config)
        config.num_loops = loops if shared is None else min(loops, shared)
        super().__init__(config=config)
        self.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]


class CacheView:
    """What the blocks see of a cache during one pass; `update` is that of the cache."""

    def __init__(self, cache: Cache, config, plan, stored_loops: int):
        self.cache, self.config, self.plan = cache, config, plan
        self.shared = shared_slots(getattr(cache, "sharing", "none"))
        self.stored_loops = stored_loops  # loops whose slots hold the past, which this pass must fill too
        # keys and values of this pass, of all rows: per layer as each row's last loop left them; and where loops share
        # slots, per slot as the last loop that uses it left them
        self.latest, self.written = {}, {}  # a layer is named by its slot in the first loop
        self.loops_run = 0
        self.frozen = None  # [batch, length]: tokens that have exited
        if self.shared is not None:
            cache.activate_past_recording()  # sliding windows must be able to give back the tokens of an earlier loop

    def slot(self, layer: int, loop: int) -> int:
        return slot_at(self.config, layer, loop if self.shared is None else loop % self.shared)

    def update(self, keys: torch.Tensor, values: torch.Tensor, slot: int, *args, **kwargs):
        rows = keys.shape[0]
        layer, loop = split_slot(self.config, slot)
        slot = self.slot(layer, loop)
        self.loops_run = max(self.loops_run, loop + 1)
        fresh = self.latest[layer] = self.of_all_tokens((keys, values), self.latest.get(layer))
        if self.shared is not None:
            if slot in self.written:  # take back what an earlier loop of this pass wrote
                fresh = self.of_all_tokens((keys, values), self.written[slot])
                self.cache.layers[slot].crop(-keys.shape[-2])
            self.written[slot] = fresh
        keys, values = self.write(slot, *fresh, *args, **kwargs)
        if self.plan.is_mixed:
            keys, values = self.plan.sort(keys)[:rows], self.plan.sort(values)[:rows]
        return keys, values

    def of_all_tokens(self, new: tuple[torch.Tensor, ...], before: tuple[torch.Tensor, ...] | None):
        """Keys and values of this loop; of rows and tokens that have stopped, those from before."""
        if before is not None and self.frozen is not None:
            new = with_frozen_tokens(new, before, self.frozen)
        return with_finished_rows(new, before)

    def write(self, slot: int, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        return self.cache.update(self.plan.unsort(keys), self.plan.unsort(values), slot, *args, **kwargs)

    def finish(self):
        """Leave the last loop's keys and values in the deeper slots that hold the past."""
        stored = self.stored_loops if self.shared is None else min(self.stored_loops, self.shared)
        for loop in range(self.loops_run, stored):
            for layer in range(self.config.num_core_layers):
                layer = core_slot(self.config, 0, layer)
                self.write(self.slot(layer, loop), *self.latest[layer])
        if self.shared is not None:
            for layer in self.cache.layers:
                if layer.is_sliding and layer.is_initialized:
                    layer.crop(0)  # back to the window
                    layer.record_past = False


def with_finished_rows(new: tuple[torch.Tensor, ...], all_rows: tuple[torch.Tensor, ...] | None):
    """Keys and values of the rows that ran, followed by those of the rows that have finished."""
    if all_rows is None or len(new[0]) == len(all_rows[0]):
        return new
    return tuple(torch.cat([part, whole[len(part) :]]) for part, whole in zip(new, all_rows))


def with_frozen_tokens(new: tuple[torch.Tensor, ...], before: tuple[torch.Tensor, ...], frozen: torch.Tensor):
    """Keys and values of this loop, but those of the loop before where a token has exited."""
    frozen = frozen[:, None, :, None]
    return tuple(torch.where(frozen, old, part) for part, old in zip(new, before))


def is_written(cache: Cache, slot: int) -> bool:
    return slot < len(cache.layers) and cache.layers[slot].is_initialized


def view_for_pass(cache, config, plan, may_exit: bool = False):
    """The cache itself where it serves as it is, else a `CacheView`. Refuses to deepen a sequence under way."""
    if cache is None or not isinstance(cache, Cache):
        return cache
    shared = shared_slots(getattr(cache, "sharing", "none"))
    needed = plan.max_depth if shared is None else min(plan.max_depth, shared)
    first_slot, per_loop, stored = core_slot(config, 0, 0), config.num_core_layers, 0
    while is_written(cache, first_slot + stored * per_loop):
        stored += 1

    if stored < needed:
        if stored > 0 and int(cache.get_seq_length(first_slot)) > 0:
            raise ValueError(
                f"num_loops={plan.max_depth} is deeper than the {stored} loops that the cache holds of this sequence, "
                "and the past has no keys and values for the deeper loops. Run the sequence at one depth or "
                "shallower, or start it again with an empty cache."
            )
        if cache.layer_class_to_replicate is None:  # a new sequence in layers that were made for the configured depth
            fit_layers(cache, num_slots(config, needed), per_loop)
    if plan.is_mixed or shared is not None or stored > plan.max_depth or may_exit:
        return CacheView(cache, config, plan, max(stored, plan.max_depth) if may_exit else stored)
    return cache


def fit_layers(cache: Cache, count: int, per_loop: int):
    """Add layers for deeper loops and drop those of loops that do not run: unfilled sliding ones cannot be cropped."""
    del cache.layers[count:]
    while len(cache.layers) < count:
        cache.layers.append(copy.deepcopy(cache.layers[-per_loop]))
