"""Keys and values of rows that stand at different tokens and loops.

One buffer per unique layer, [rows, loops, heads, 2, length, head_dim], written in place; the 2 are key and value. A
pass over some rows at their own loops and positions goes through a `Cursor`, which the blocks take for a cache. What
lies beyond a row's position is of no consequence: no query sees it, and it is overwritten when the row gets there. So
a check that does not exit, or a draft that is rejected, needs no undoing.

The prompt comes from an ordinary cache, whose layers look into the same buffers where they can: nothing is held twice.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from .cache import RoomyLayer, shared_slots
from .cpu import is_slow_single_query
from .slots import core_slot, slot_at, split_slot, structural_layer_types


class RowCache:
    def __init__(
        self, config, num_loops: int, rows: int, valid: torch.Tensor | None, max_length: int, sharing: str = "none"
    ):
        """valid: [rows, prompt length], False at padding; None without padding. max_length: of a generation."""
        self.config, self.num_loops, self.num_rows, self.max_length = config, num_loops, rows, max_length
        shared = shared_slots(sharing)
        self.loops_stored = num_loops if shared is None else min(num_loops, shared)
        self.valid = valid
        self.first_tokens = first_tokens(valid, rows)
        prelude, core, coda = structural_layer_types(config)
        kinds = prelude + coda + core  # in the order of slots
        self.windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        self.capacity, self.layers, self.ordinary = 0, {}, None
        self.buffers: list[torch.Tensor | None] = [None] * core_slot(config, 1, 0)
        self.of_heads = None
        self.of_one_row = None  # room for what one row sees, [1, heads, 2, length, head_dim] in fp32

    @property
    def device(self) -> torch.device:
        return self.buffers[0].device

    def layer_of(self, slot: int) -> int:
        """A layer is named by its slot in the first loop. Asked for at every layer of every tick, so remembered."""
        if slot not in self.layers:
            self.layers[slot], _ = split_slot(self.config, slot)
        return self.layers[slot]

    def await_prompt(self, cache, length: int, dtype: torch.dtype, device: torch.device):
        """Before the pass over a prompt: an empty cache is to write it where it will be read.

        Should keys turn out to be of another kind than expected, no harm is done.
        """
        shape = (self.num_rows, self.config.num_key_value_heads, 0, self.config.head_dim)
        self.make_room(length, self.with_room(length), like=torch.empty(shape, dtype=dtype, device=device))
        self.ordinary = cache
        for layer in range(len(self.buffers)):
            self.share(layer, 0)

    def load(self, cache):
        """Take over what an ordinary cache holds of the prompt, where it is not here already.

        A static layer holds more than the tokens so far, a sliding one less, its window.
        """
        length, like = int(cache.get_seq_length()), cache.layers[0].keys
        if not self.has_room(length, like):
            self.buffers = [None] * len(self.buffers)
            self.make_room(length, self.with_room(length), like)
        self.ordinary = cache
        for layer, buffer in enumerate(self.buffers):
            for loop in range(buffer.shape[1]):
                held = cache.layers[slot_at(self.config, layer, loop)]
                for tensor, room in zip((held.keys, held.values), buffer[:, loop].unbind(2)):
                    if tensor.data_ptr() == room.data_ptr():
                        continue
                    tensor = tensor[..., :length, :]
                    start = length - tensor.shape[-2]
                    room[..., :start, :] = 0
                    room[..., start:length, :] = tensor
            self.share(layer, length)

    def has_room(self, length: int, like: torch.Tensor) -> bool:
        buffer = self.buffers[0]
        if buffer is None or length > self.capacity or (buffer.dtype, buffer.device) != (like.dtype, like.device):
            return False
        return buffer.shape[2] == like.shape[1] and buffer.shape[-1] == like.shape[-1]

    def share(self, layer: int, length: int):
        """The ordinary cache sees its first tokens here."""
        buffer = self.buffers[layer]
        for loop in range(buffer.shape[1]):
            held = self.ordinary.layers[slot_at(self.config, layer, loop)]
            if type(held) is RoomyLayer:
                held.move(*buffer[:, loop].unbind(2), length)

    def make_room(self, length: int, capacity: int, like: torch.Tensor):
        """Buffers of this capacity; they keep what was there, and what is behind `length` is zero."""
        heads, head_dim = like.shape[1], like.shape[-1]
        for layer, before in enumerate(self.buffers):
            loops = self.loops_stored if layer >= core_slot(self.config, 0, 0) else 1
            new = like.new_empty(self.num_rows, loops, heads, 2, capacity, head_dim)
            if before is not None:
                new[..., :length, :] = before[..., :length, :]
            new[..., length:, :] = 0
            self.buffers[layer] = new  # one by one, so that memory holds no more than one layer twice
            if before is not None:
                self.share(layer, int(self.ordinary.get_seq_length()))
        self.capacity = capacity
        self.of_heads = torch.arange(heads * 2, device=like.device) * capacity  # where they begin in one row and loop
        if like.dtype == torch.bfloat16:
            self.of_one_row = like.new_empty(1, heads, 2, capacity, head_dim, dtype=torch.float32)
        if self.valid is not None:
            self.valid = torch.nn.functional.pad(self.valid, (0, capacity - self.valid.shape[1]), value=True)

    def reserve(self, length: int):
        """Room for `length` tokens in every row; grows by half, so that copying stays rare."""
        if length > self.capacity:
            self.make_room(self.capacity, self.with_room(length), like=self.buffers[0][:, 0, :, 0])

    def with_room(self, length: int) -> int:
        return max(length, min(length + max(length // 2, 64), self.max_length))

    def store_back(self, length: int):
        """The ordinary cache holds the tokens up to `length` of all rows."""
        cache, start = self.ordinary, int(self.ordinary.get_seq_length())
        for slot, held in enumerate(cache.layers):
            layer, loop = split_slot(self.config, slot)
            buffer = self.buffers[layer]  # of a cache that is deeper than this run, the deeper slots too
            if type(held) is not RoomyLayer or loop >= buffer.shape[1]:
                cache.update(*buffer[:, min(loop, buffer.shape[1] - 1), :, :, start:length].unbind(2), slot)
        for layer in range(len(self.buffers)):
            self.share(layer, length)

    def leave_in_deeper_loops(self, rows: list[int], loops: list[int], positions: list[int]):
        """A token that exits after so many loops leaves its last keys and values in slots that no loop of it used."""
        core = self.buffers[core_slot(self.config, 0, 0) :]
        for row, ran, position in zip(rows, loops, positions):
            for buffer in core if ran < self.loops_stored else ():
                token = buffer[row, :, :, :, position]  # [loops, heads, 2, head_dim]
                token[ran:] = token[ran - 1]


def first_tokens(valid: torch.Tensor | None, rows: int) -> list[int] | None:
    """Where each row begins after left padding; None if there are holes further on."""
    if valid is None:
        return [0] * rows
    starts = (~valid).sum(-1)
    is_left = torch.arange(valid.shape[1], device=valid.device) >= starts[:, None]
    return starts.tolist() if torch.equal(is_left, valid) else None


class Cursor:
    """A pass over `rows`, each at its own loop and position; `update` is that of a cache.

    loops: one number per row, counted from 0. positions: of the first token of the pass, `length` tokens each.
    """

    def __init__(self, cache: RowCache, rows: list[int], loops: list[int], positions: list[int], length: int = 1):
        self.cache, self.length = cache, length
        self.end = max(positions) + length
        cache.reserve(self.end)
        self.rows, self.loops, self.positions = rows, loops, positions
        together = len(rows) == cache.num_rows and len(set(loops)) == len(set(positions)) == 1
        self.position = positions[0] if together else None  # of all rows at once: slices, nothing is copied
        on_cpu = cache.device.type == "cpu"
        self.by_row = on_cpu and not together and length == 1 and cache.first_tokens is not None
        self.vectors, self.spans, self.rooms = {}, {}, {}

    def update(self, keys: torch.Tensor, values: torch.Tensor, slot: int, *args, **kwargs):
        """What the tokens see: [rows, heads, tokens so far, head_dim] each; or if `by_row`, what `attend` wants."""
        layer = self.cache.layer_of(slot)
        buffer = self.cache.buffers[layer]
        new = torch.stack([keys, values], dim=2)
        if self.position is not None:
            of_loop = buffer[:, self.loops[0] % buffer.shape[1]]
            of_loop[..., self.position : self.end, :] = new
            return of_loop[..., : self.end, :].unbind(2)
        buffer.flatten(0, -2).index_copy_(0, self.vectors_of(buffer), new.flatten(0, -2))
        if self.by_row:
            return [buffer.as_strided(*seen) for seen in self.seen(buffer, self.cache.windows[layer])], None
        seen = buffer.new_empty(len(self.rows), *buffer.shape[2:4], self.end, buffer.shape[-1])
        of_loops = (buffer[row, loop % buffer.shape[1]] for row, loop in zip(self.rows, self.loops))
        torch._foreach_copy_(list(seen), [of_loop[:, :, : self.end] for of_loop in of_loops])
        return seen.unbind(2)

    def vectors_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Where the new tokens lie among all vectors of a buffer, [rows * heads * 2 * length]."""
        loops_stored = buffer.shape[1]
        if loops_stored not in self.vectors:
            firsts = [offset // buffer.shape[-1] for offset in self.offsets(buffer, self.positions)]
            vectors = torch.tensor(firsts, device=buffer.device)[:, None] + self.cache.of_heads
            if self.length > 1:
                vectors = vectors[:, :, None] + torch.arange(self.length, device=buffer.device)
            self.vectors[loops_stored] = vectors.flatten()
        return self.vectors[loops_stored]

    def seen(self, buffer: torch.Tensor, window: int | None) -> list[tuple]:
        """What each row's token sees, [1, heads, 2, tokens, head_dim]: shapes, strides and offsets in a buffer."""
        kind = buffer.shape[1], window
        if kind not in self.spans:  # the same in all layers of a kind
            heads, head_dim = buffer.shape[2], buffer.shape[-1]
            of_row, _, *strides = buffer.stride()
            starts = self.starts(window)
            self.spans[kind] = [
                ((1, heads, 2, place + 1 - start, head_dim), (of_row, *strides), offset)
                for start, place, offset in zip(starts, self.positions, self.offsets(buffer, starts))
            ]
        return self.spans[kind]

    def offsets(self, buffer: torch.Tensor, places: list[int]) -> list[int]:
        """Where each row's token at its place begins in the memory of a buffer."""
        of_row, of_loop, _, _, of_place, _ = buffer.stride()
        return [
            row * of_row + loop % buffer.shape[1] * of_loop + place * of_place
            for row, loop, place in zip(self.rows, self.loops, places)
        ]

    def starts(self, window: int | None) -> list[int]:
        """Where what each row's token sees begins: after the padding, and inside the window."""
        starts = [self.cache.first_tokens[row] for row in self.rows]
        if window is None:
            return starts
        return [max(start, place + 1 - window) for start, place in zip(starts, self.positions)]

    def attend(self, queries: torch.Tensor, views: list[torch.Tensor], scaling: float) -> torch.Tensor:
        """Attention of one query per row, [rows, heads, 1, head_dim], to views of different lengths: no batch is made.

        In bfloat16 a row is copied to fp32 first, all rows into the same memory, which stays in the processor's cache.
        """
        exact = is_slow_single_query(queries)
        grouped = queries.shape[1] != views[0].shape[1]
        outputs = []
        for query, view in zip((queries.float() if exact else queries).unsqueeze(1).unbind(), views):
            keys, values = self.in_fp32(view) if exact else view.unbind(2)
            outputs.append(scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=grouped))
        return torch.cat(outputs).to(queries.dtype)

    def in_fp32(self, view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one row, until the next one's take their place."""
        length = view.shape[3]
        if length not in self.rooms:  # the same in all layers
            room = self.cache.of_one_row[..., :length, :]
            self.rooms[length] = room, *room.unbind(2)
        room, keys, values = self.rooms[length]
        room.copy_(view)
        return keys, values

    def masks(self, as_bias: torch.dtype | None = None) -> dict[str, torch.Tensor | None]:
        """What each token may see, [rows, 1, length, tokens so far], per kind of attention.

        as_bias: for eager attention, which adds its mask to the scores.
        """
        if self.by_row:
            return dict.fromkeys(("full_attention", "sliding_attention"))
        masks = {"full_attention": self._mask(None)}
        if self.cache.config.window_pattern is not None:
            masks["sliding_attention"] = self._mask(self.cache.config.sliding_window)
        if as_bias is not None:
            closed = torch.finfo(as_bias).min
            for kind, mask in masks.items():
                if mask is not None:
                    masks[kind] = torch.zeros_like(mask, dtype=as_bias).masked_fill_(~mask, closed)
        return masks

    def _mask(self, window: int | None) -> torch.Tensor | None:
        valid = self.cache.valid
        sees_all = self.position is not None and self.length == 1 and (window is None or self.end <= window)
        if sees_all and valid is None:
            return None
        rows, positions = torch.tensor([self.rows, self.positions], device=self.cache.device).unbind(0)
        places = (positions[:, None] + torch.arange(self.length, device=rows.device))[:, :, None]  # [rows, length, 1]
        seen = torch.arange(self.end, device=rows.device)
        mask = seen <= places
        if window is not None:
            mask &= seen > places - window
        if valid is not None:
            mask &= valid[rows, None, : self.end]
        return mask[:, None]
