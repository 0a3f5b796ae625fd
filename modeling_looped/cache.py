"""The key/value cache of a looped model, and the view of it that a pass uses.

Any transformers cache serves a looped model, with a slot per (loop, core layer), see `LoopedConfig.core_slot`. Some
cases need more than that. `CacheView` serves rows of a batch that run to different depths, passes that are shallower
than the cache, and slots that loops share. The buffers of `LoopedCache`, which `row_view.py` reads and writes, serve
rows at different positions and loops.

A token that stops at loop k leaves its keys and values of loop k in every deeper slot, so that all slots have the same
length and later tokens that run deeper read the last keys and values of that token.
"""

import copy
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from .int8_cache import SIZE_BYTES, from_int8, to_int8
from .tensors import at_least_fp32, members_by_number, on_device


ONE_SLOT = ("last", "first", "average")  # policies of sharing: of which loop past tokens keep keys and values


def loops_with_slots(sharing: str) -> int | None:
    """Return how many loops have separate slots under a sharing policy; None if all do."""
    if sharing == "none":
        return None
    if sharing in ONE_SLOT:
        return 1
    kind, _, count = str(sharing).partition("-")
    if kind == "cyclic" and count.isdigit() and int(count) >= 1:
        return int(count)
    raise ValueError(
        f"cache_sharing={sharing!r} is not known: choose 'none', 'last', 'first', 'average' or 'cyclic-S' with "
        "S >= 1, e.g. 'cyclic-4'"
    )


def sharing_of(cache) -> str:
    return getattr(cache, "sharing", "none")


def index_of_loop(loop: Any, num_stored: int) -> Any:
    """Return the index at which a layer with `num_stored` loops stores this loop, a number or a tensor. Prelude and
    coda store one, for all loops; with S shared slots, loop t has slot t mod S; else each loop has its own."""
    return loop % num_stored


class PreallocatedLayer(DynamicLayer):
    """A dynamic layer that writes new tokens in place, since concatenation copies the whole past for every token.

    So tensors taken from it before a crop change when new tokens are written: clone tensors that must not change."""

    room = 64  # tokens
    keys: torch.Tensor  # set once the layer is initialized, as the values are
    values: torch.Tensor
    buffers: tuple[torch.Tensor, ...] = ()  # keys and values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if torch.is_grad_enabled() or torch.compiler.is_compiling():  # autograd may need the tensors unchanged
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self.has_room(end):
            states, held = (key_states, value_states), (self.keys, self.values)
            self.buffers = tuple(new.new_empty(*new.shape[:-2], end + self.room, new.shape[-1]) for new in states)
            for buffer, old in zip(self.buffers, held) if start else ():
                buffer[..., :start, :] = old
        keys, values = self.buffers
        keys.narrow(-2, start, end - start).copy_(key_states)
        values.narrow(-2, start, end - start).copy_(value_states)
        self.keys, self.values = keys.narrow(-2, 0, end), values.narrow(-2, 0, end)
        return self.keys, self.values

    def has_room(self, length: int) -> bool:
        """Whether the buffers have room for `length` tokens and still back the layer's tensors, which other code may
        have replaced."""
        if not self.buffers or self.keys.numel() == 0:
            return False
        keys, values = self.buffers
        if keys.is_inference() and not torch.is_inference_mode_enabled():  # may not be written to
            return False
        pairs = (keys, self.keys), (values, self.values)
        is_held = all(a.data_ptr() == b.data_ptr() and a.stride() == b.stride() for a, b in pairs)
        return is_held and keys.shape[-2] >= length and keys.shape[:-2] == self.keys.shape[:-2]

    def __copy__(self):
        """Drop the buffers of both layers, so that neither writes where the other reads."""
        self.buffers = ()
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def move(self, keys: torch.Tensor, values: torch.Tensor, length: int):
        """Move into buffers of the cache, whose first `length` tokens are this layer's; new tokens go there too."""
        self.buffers = (keys, values)
        self.keys, self.values = keys[..., :length, :], values[..., :length, :]

    def reset(self):
        super().reset()
        self.buffers = ()


class LoopedCache(DynamicCache):
    """The cache that `generate` makes: dynamic, written in place, with slots that loops can share.

    sharing: "none"; "last" (past positions are seen as their last loop left them), "first" or "average" (as their
    first loop did, or the mean over their loops); "cyclic-S" (loop t uses slot t mod S). Tokens of the same pass
    always see each other at the current loop. So with sharing, which takes 1/N or S/N of the memory, the result
    depends on how the sequence was cut into passes: sharing is an approximation.

    If rows decode at different positions and loops, keys and values are in one buffer per unique layer, in the order
    of slots: [rows, loops, heads, 2, capacity, head_dim]; the 2 are key and value. The layers of this cache are views
    of the buffers (except sliding layers, which hold only their window). Entries beyond a row's position do not
    matter: no query sees them, and they are overwritten when the row gets there. So nothing has to be undone after an
    exit check that does not exit, or after a rejected draft.
    """

    layers: list[DynamicLayer]

    def __init__(self, config, sharing: str = "none", num_loops: int | None = None):
        self.model_config, self.sharing = config, sharing
        self.is_int8 = False  # whether the buffers, and during decoding the layers, hold int8
        loops = config.num_loops if num_loops is None else num_loops
        shared = loops_with_slots(sharing)
        if shared is not None and config.shares_keys:
            raise ValueError(
                f"cache_sharing={sharing!r} is for models whose loops all compute keys and values; this one shares "
                f"them already, by key_value_interval={config.key_value_interval} and "
                f"num_key_value_loops={config.num_key_value_loops}: leave out cache_sharing"
            )
        config = copy.deepcopy(config)
        config.num_loops = loops if shared is None else min(loops, shared)
        super().__init__(config=config)
        self.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
        self.buffers: list[torch.Tensor] = []
        self.max_length = 0  # of the generation that fills the buffers
        self.bytes_of_token = 0  # bytes in the buffers for one token of every row
        self.is_on_cpu = False  # whether all buffers are; a model's layers may lie on several devices
        kinds = config.types_of_slots(1)  # those of deeper loops are the same
        self.windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        # by (heads, head_dim): room for what one row sees, converted to floats, [1, heads, 2, capacity, head_dim]
        self.one_row: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def num_stored_loops(self) -> int:
        return self.model_config.split_slot(len(self.layers) - 1)[1] + 1

    @property
    def capacity(self) -> int:
        """The number of tokens for which the buffers have room."""
        return self.buffers[0].shape[-2]

    def begin_empty(self, num_rows: int, like: torch.Tensor):
        """Initialize the layers as a pass over no tokens would, in the dtype and on the device of `like`."""
        config = self.model_config
        for slot, layer in enumerate(self.layers):
            section = "core" if slot >= config.core_slot(0) else "prelude"
            heads = config.block_sizes(section).num_key_value_heads
            states = like.new_empty(num_rows, heads, 0, config.head_dim)
            layer.lazy_initialization(states, states)
            layer.keys = layer.values = states

    def fill_buffers(self, cache: Cache, max_length: int, least: int):
        """Copy the tokens of a cache (this one, or another) into buffers, layer by layer to save memory.

        A static layer holds more than the tokens so far, a sliding one only its window. max_length: of the generation.
        least: the buffers get room for at least this many tokens.
        """
        self.max_length, length, self.buffers = max_length, int(cache.get_seq_length()), []
        for first_slot in range(self.model_config.core_slot(1)):
            loops = self.num_stored_loops if first_slot >= self.model_config.core_slot(0) else 1
            slots = [cache.layers[self.model_config.slot_at(first_slot, loop)] for loop in range(loops)]
            rows, heads, _, head_dim = slots[0].keys.shape
            self.dtype, width = slots[0].keys.dtype, head_dim + SIZE_BYTES * self.is_int8
            shape = (rows, loops, heads, 2, self.with_room(max(length, least)), width)
            buffer = slots[0].keys.new_zeros(shape, dtype=torch.int8 if self.is_int8 else None)
            for slot, of_loop in zip(slots, buffer.unbind(1)):
                for tensor, room in zip((slot.keys, slot.values), of_loop.unbind(2)):
                    tensor = tensor[..., :length, :]
                    room[..., length - tensor.shape[-2] : length, :] = self.as_stored(tensor)
            self.buffers.append(buffer)
            self.point_slots_at_buffer(first_slot, length)
        self.bytes_of_token = sum(buffer[..., :1, :].nbytes for buffer in self.buffers)
        self.is_on_cpu = all(buffer.device.type == "cpu" for buffer in self.buffers)

    def as_stored(self, states: torch.Tensor) -> torch.Tensor:
        return to_int8(states) if self.is_int8 else states

    def as_read(self, stored: torch.Tensor) -> torch.Tensor:
        return from_int8(stored, self.dtype) if self.is_int8 else stored

    def reserve(self, length: int):
        """Make room for `length` tokens in every row; buffers grow by half, so that copying stays rare."""
        if length <= self.capacity:
            return
        room = self.with_room(length)
        # the first buffer last: its size counts as the capacity of all, and one of the others may not fit into memory
        for first_slot, before in reversed(list(enumerate(self.buffers))):
            if before.shape[-2] < room:
                self.buffers[first_slot] = torch.nn.functional.pad(before, (0, 0, 0, room - before.shape[-2]))
                self.point_slots_at_buffer(first_slot, self.layers[first_slot].get_seq_length())

    def with_room(self, length: int) -> int:
        return max(length, min(length + max(length // 2, 64), self.max_length))

    def point_slots_at_buffer(self, first_slot: int, length: int):
        """Make the slots of a unique layer views of the first `length` tokens of its buffer."""
        for loop, buffer in enumerate(self.buffers[first_slot].unbind(1)):
            slot = self.layers[self.model_config.slot_at(first_slot, loop)]
            if type(slot) is PreallocatedLayer and slot.is_initialized:
                keys, values = buffer.unbind(2)
                slot.move(keys, values, length)

    def store_back(self, cache: Cache, length: int):
        """Make `cache` (this one, or another) hold the tokens of all rows up to `length`, and drop the buffers."""
        start = int(cache.get_seq_length())
        for slot, held in enumerate(cache.layers):
            first_slot, loop = self.model_config.split_slot(slot)
            buffer = self.buffers[first_slot]
            # only with new tokens: a static layer with a full window fails at an update without any
            if start < length and (cache is not self or type(held) is not PreallocatedLayer):
                # slots of loops deeper than this run get the tokens of its last loop
                tokens = buffer[:, min(loop, buffer.shape[1] - 1), :, :, start:length]
                keys, values = self.as_read(tokens).unbind(2)
                cache.update(keys, values, slot)
        for first_slot in range(len(self.buffers)):
            self.point_slots_at_buffer(first_slot, length)
        self.leave_buffers()

    def leave_buffers(self):
        """Drop the buffers. Layers that are views of them keep their memory, but int8 returns to the model's dtype."""
        for held in self.layers:
            if type(held) is PreallocatedLayer and held.is_initialized and held.keys.dtype == torch.int8:
                held.keys, held.values, held.buffers = self.as_read(held.keys), self.as_read(held.values), ()
        self.buffers, self.one_row = [], {}

    def leave_in_deeper_loops(self, rows: list[int], loops: list[int], places: list[int]):
        """Copy each token's last keys and values to the slots of deeper loops, which it did not run. One entry of
        rows, loops and places per token; loops: how many it ran."""
        core = self.buffers[self.model_config.core_slot(0) :]
        for ran, members in members_by_number(list(map(self.model_config.num_stored_loops, loops))):
            if ran >= self.num_stored_loops:
                continue
            if len(members) == 1:
                (i,) = members
                for buffer in core:
                    token = buffer[rows[i], :, :, :, places[i]]  # [loops, heads, 2, head_dim]
                    token[ran:] = token[ran - 1]
                continue
            of_tokens = [[numbers[i] for i in members] for numbers in (rows, places)]
            its_rows, its_places = on_device(of_tokens, core[0].device).unbind()
            for buffer in core:  # may lie on another device
                its_rows, its_places = its_rows.to(buffer.device), its_places.to(buffer.device)
                buffer[its_rows, ran:, :, :, its_places] = buffer[its_rows, ran - 1, :, :, its_places].unsqueeze(1)


class CacheView:
    """The cache as the blocks of one pass see it; `update` has the same arguments as that of the cache."""

    def __init__(self, cache: Cache, config, plan, stored_loops: int, may_exit: bool):
        self.cache, self.config, self.plan = cache, config, plan
        self.shared = loops_with_slots(sharing_of(cache))
        self.stored_loops = stored_loops  # loops whose slots hold the past, which this pass must fill too
        # keys and values of this pass, of all rows. latest: by a core layer's first slot, as each row's last loop left
        # them; written: by slot, as the last writer left them, for prelude and coda and for slots that loops share
        self.latest, self.written = {}, {}
        self.kept = {}  # by a core layer's first slot: what stays of this pass, if not what its last loop left
        self.loops_run = 0
        self.frozen: torch.Tensor | None = None  # [batch, length]: tokens that have exited
        self.recording: list[Any] = []  # sliding layers that record their past for this pass only
        if self.shared is not None or may_exit:  # sliding layers must be able to drop the tokens of an earlier loop
            self.recording = [layer for layer in cache.layers if not getattr(layer, "record_past", True)]
            cache.activate_past_recording()

    def slot(self, first_slot: int, loop: int) -> int:
        return self.config.slot_at(first_slot, loop if self.shared is None else index_of_loop(loop, self.shared))

    def update(self, keys: torch.Tensor, values: torch.Tensor, slot: int, *args, **kwargs):
        rows = keys.shape[0]
        first_slot, loop = self.config.split_slot(slot)
        slot = self.slot(first_slot, loop)
        self.loops_run = max(self.loops_run, loop + 1)
        fresh, is_core = (keys, values), first_slot >= self.config.core_slot(0)
        if is_core:
            fresh = self.latest[first_slot] = self.of_all_tokens((keys, values), self.latest.get(first_slot))
            self.keep(first_slot, loop, keys, values)
        if slot in self.written:  # remove what an earlier loop of this pass wrote, or the coda at an exit check
            fresh = self.of_all_tokens((keys, values), self.written[slot]) if is_core else (keys, values)
            layer: Any = self.cache.layers[slot]
            layer.crop(-keys.shape[-2])
        if self.shared is not None or not is_core:
            self.written[slot] = fresh
        keys, values = self.write(slot, *fresh, *args, **kwargs)
        if self.plan.is_mixed:
            keys, values = self.plan.sort(keys)[:rows], self.plan.sort(values)[:rows]
        return keys, values

    def keep(self, first_slot: int, loop: int, keys: torch.Tensor, values: torch.Tensor):
        """Note what "first" and "average" leave of this loop. The mean is that of the loops which a token ran."""
        sharing, before = sharing_of(self.cache), self.kept.get(first_slot)
        if sharing == "average":
            new = at_least_fp32(keys), at_least_fp32(values)
            if before is not None:
                of_rows = (old[: len(part)] for part, old in zip(new, before))
                new = tuple(old + (part - old) / (loop + 1) for part, old in zip(new, of_rows))
            self.kept[first_slot] = self.of_all_tokens(new, before)
        elif sharing == "first" and before is None:
            self.kept[first_slot] = (keys, values)

    def of_all_tokens(self, new: tuple[torch.Tensor, ...], before: tuple[torch.Tensor, ...] | None):
        """Return keys and values of this loop; tokens that exited and rows that finished keep those from before."""
        if before is None:
            return new
        if self.frozen is not None:
            frozen = self.frozen[:, None, :, None]
            new = tuple(torch.where(frozen, old, part) for part, old in zip(new, before))
        if len(new[0]) == len(before[0]):
            return new
        return tuple(torch.cat([part, whole[len(part) :]]) for part, whole in zip(new, before))

    def write(self, slot: int, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        return self.cache.update(self.plan.unsort(keys), self.plan.unsort(values), slot, *args, **kwargs)

    def finish(self):
        """Write the last loop's keys and values to the deeper slots that hold the past, and what else is to stay."""
        stored = self.stored_loops if self.shared is None else min(self.stored_loops, self.shared)
        for loop in range(self.loops_run, stored):
            for first_slot, states in self.latest.items():
                self.write(self.slot(first_slot, loop), *states)
        for first_slot, states in self.kept.items():
            self.cache.layers[first_slot].crop(-states[0].shape[-2])
            self.write(first_slot, *(part.to(self.latest[first_slot][0].dtype) for part in states))
        for layer in self.recording:
            if layer.is_initialized:
                layer.crop(0)  # back to the window
            layer.record_past = False


def is_written(cache: Cache, slot: int) -> bool:
    layer = cache.layers[slot] if slot < len(cache.layers) else None
    return isinstance(layer, CacheLayerMixin) and layer.is_initialized


def view_for_pass(cache, config, plan, may_exit: bool):
    """Return the cache itself if that suffices, else a `CacheView`. Refuse to run a sequence deeper than its past."""
    if cache is None or not isinstance(cache, Cache):
        return cache
    shared = loops_with_slots(sharing_of(cache))
    depth = config.num_stored_loops(plan.max_depth)
    needed = depth if shared is None else min(depth, shared)
    stored = 0
    while is_written(cache, config.core_slot(stored)):
        stored += 1

    if stored < needed:
        if stored > 0 and int(cache.get_seq_length(config.core_slot(0))) > 0:
            held = max(loops for loops in range(1, plan.max_depth) if config.num_stored_loops(loops) <= stored)
            raise ValueError(
                f"num_loops={plan.max_depth} is deeper than the {held} loops that the cache holds of this sequence, "
                "and the past has no keys and values for the deeper loops. Run the sequence at one depth or "
                "shallower, or start it again with an empty cache."
            )
        if cache.layer_class_to_replicate is None:  # a new sequence; its layers were made for the configured depth
            fit_layers(cache, config.core_slot(needed), config.num_core_layers)
    if plan.is_mixed or shared is not None or stored > depth or may_exit:
        return CacheView(cache, config, plan, max(stored, depth) if may_exit else stored, may_exit)
    return cache


def fit_layers(cache: Cache, count: int, per_loop: int):
    """Add layers for deeper loops; drop those of loops that do not run, as unfilled sliding ones cannot be cropped."""
    del cache.layers[count:]
    while len(cache.layers) < count:
        cache.layers.append(copy.deepcopy(cache.layers[-per_loop]))
