"""Keys and values of rows that stand at different tokens and loops.

One buffer per unique layer, [rows, loops, heads, length, head_dim], written in place. A pass over some rows at their
own loops and positions goes through a `Cursor`, which the blocks take for a cache. What lies beyond a row's position
is of no consequence: no query sees it, and it is overwritten when the row gets there. So a check that does not exit,
or a draft that is rejected, needs no undoing.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from .cache import shared_slots
from .cpu import is_slow_alone
from .slots import core_slot, slot_at, split_slot, structural_layer_types


def with_room(length: int) -> int:
    return length + max(length // 2, 64)


class RowCache:
    def __init__(self, config, num_loops: int, rows: int, valid: torch.Tensor | None, sharing: str = "none"):
        """valid: [rows, prompt length], False at padding; None without padding."""
        self.config, self.num_loops, self.num_rows = config, num_loops, rows
        shared = shared_slots(sharing)
        self.loops_stored = num_loops if shared is None else min(num_loops, shared)
        self.valid = valid
        self.first_tokens = first_tokens(valid, rows)
        prelude, core, coda = structural_layer_types(config)
        kinds = prelude + coda + core  # in the order of slots
        self.windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        self.capacity, self.layers = 0, {}
        self.buffers: dict[int, list[torch.Tensor]] = {}  # by layer, see `layer_of`

    def layer_of(self, slot: int) -> int:
        """A layer is named by its slot in the first loop. Asked for at every layer of every tick, so remembered."""
        if slot not in self.layers:
            self.layers[slot], _ = split_slot(self.config, slot)
        return self.layers[slot]

    def load(self, cache):
        """Take over what an ordinary cache holds of the prompt."""
        length, first_core = int(cache.get_seq_length()), core_slot(self.config, 0, 0)
        self.capacity = with_room(length)
        for layer in range(core_slot(self.config, 1, 0)):
            loops = self.loops_stored if layer >= first_core else 1
            slots = [cache.layers[slot_at(self.config, layer, loop)] for loop in range(loops)]
            self.buffers[layer] = [
                self.copied([slot.keys for slot in slots], length),
                self.copied([slot.values for slot in slots], length),
            ]
        self.extend_valid()

    def copied(self, of_loops: list[torch.Tensor], length: int) -> torch.Tensor:
        """[rows, loops, heads, capacity, head_dim] of one tensor per loop.

        A static layer holds more than the tokens so far, a sliding one less, its window.
        """
        rows, heads, _, head_dim = of_loops[0].shape
        buffer = of_loops[0].new_zeros(rows, len(of_loops), heads, self.capacity, head_dim)
        for loop, held in enumerate(of_loops):
            held = held[..., :length, :]
            buffer[:, loop, :, length - held.shape[-2] : length] = held
        return buffer

    def reserve(self, length: int):
        """Room for `length` tokens in every row; grows by half, so that copying stays rare."""
        if length <= self.capacity:
            return
        before, self.capacity = self.capacity, with_room(length)
        for pair in self.buffers.values():
            for i, tensor in enumerate(pair):
                pair[i] = tensor.new_zeros(*tensor.shape[:3], self.capacity, tensor.shape[-1])
                pair[i][..., :before, :] = tensor
        self.extend_valid()

    def extend_valid(self):
        if self.valid is not None:
            self.valid = torch.nn.functional.pad(self.valid, (0, self.capacity - self.valid.shape[1]), value=True)

    def store_back(self, cache, start: int, end: int):
        """Append the tokens start..end of all rows to an ordinary cache."""
        for slot in range(len(cache.layers)):
            layer, loop = split_slot(self.config, slot)
            keys, values = (  # of a cache that is deeper than this run, the deeper slots too
                tensor[:, min(loop, tensor.shape[1] - 1), :, start:end] for tensor in self.buffers[layer]
            )
            cache.update(keys, values, slot)

    def leave_in_deeper_loops(self, rows: list[int], loops: list[int], positions: list[int]):
        """A token that exits after so many loops leaves its last keys and values in slots that no loop of it used."""
        first_core = core_slot(self.config, 0, 0)
        for row, ran, position in zip(rows, loops, positions):
            if ran >= self.loops_stored:
                continue
            for layer in range(first_core, first_core + self.config.num_core_layers):
                for tensor in self.buffers[layer]:
                    token = tensor[row, :, :, position]  # [loops, heads, head_dim]
                    token[ran:] = token[ran - 1]


def first_tokens(valid: torch.Tensor | None, rows: int) -> list[int] | None:
    """Where each row begins after left padding; None if there are holes further on."""
    if valid is None:
        return [0] * rows
    starts = (~valid).sum(-1)
    is_left = torch.arange(valid.shape[1], device=valid.device) >= starts[:, None]
    return starts.tolist() if torch.equal(is_left, valid) else None


def attend_by_row(queries, keys: list[torch.Tensor], values: list[torch.Tensor], scaling: float) -> torch.Tensor:
    """Attention of one query per row, [rows, heads, 1, head_dim], to views of different lengths: no batch is made."""
    exact = is_slow_alone(queries)  # then in fp32: what one row sees stays in the processor's cache
    outputs = [
        scaled_dot_product_attention(
            query,
            key.float() if exact else key,
            value.float() if exact else value,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for query, key, value in zip((queries.float() if exact else queries).unsqueeze(1).unbind(), keys, values)
    ]
    return torch.cat(outputs).to(queries.dtype)


class Cursor:
    """A pass over `rows` (None: all), each at its own loop and position; `update` is that of a cache.

    loops: one number per row, counted from 0. positions: of the first token of the pass, `length` tokens each.
    """

    def __init__(
        self, cache: RowCache, rows: list[int] | None, loops: list[int], positions: list[int], length: int = 1
    ):
        self.cache, self.length = cache, length
        self.end = max(positions) + length
        cache.reserve(self.end)
        self.loop = loops[0] if len(set(loops)) == 1 else None
        together = rows is None and self.loop is not None and len(set(positions)) == 1
        self.position = positions[0] if together else None  # of all rows at once: slices, no indices
        self.row_numbers = list(range(cache.num_rows)) if rows is None else rows
        self.loops, self.positions = loops, positions
        self.by_row = self.position is None and length == 1 and cache.first_tokens is not None
        self.index, self.places = None, {}

    def indices(self, device):
        """Rows, loops and first positions as indices into a buffer, [rows] each."""
        if self.index is None:
            self.index = torch.tensor([self.row_numbers, self.loops, self.positions], device=device).unbind(0)
        return self.index

    def update(self, keys: torch.Tensor, values: torch.Tensor, slot: int, *args, **kwargs):
        """What the tokens see: [rows, heads, tokens so far, head_dim], or a list with the view of each row."""
        layer = self.cache.layer_of(slot)
        window = self.cache.windows[layer]
        return tuple(
            self._update(buffer, new, window) for buffer, new in zip(self.cache.buffers[layer], (keys, values))
        )

    def _update(self, buffer: torch.Tensor, new: torch.Tensor, window: int | None):
        if self.position is not None:
            of_loop = buffer[:, self.loop % buffer.shape[1]]
            of_loop[:, :, self.position : self.end] = new
            return of_loop[:, :, : self.end]
        buffer.flatten(0, 3).index_copy_(0, self.vectors(buffer), new.reshape(-1, new.shape[-1]))
        if self.by_row:
            return self.views(buffer, window)
        rows, loops, _ = self.indices(buffer.device)
        return buffer[:, :, :, : self.end][rows, loops % buffer.shape[1]]

    def vectors(self, buffer: torch.Tensor) -> torch.Tensor:
        """Where the new tokens lie among all vectors of a buffer, [rows * heads * length]."""
        _, loops_stored, heads, capacity, _ = buffer.shape
        if loops_stored not in self.places:
            rows, loops, positions = self.indices(buffer.device)
            first_heads = (rows * loops_stored + loops % loops_stored) * heads
            of_heads = (first_heads[:, None] + torch.arange(heads, device=buffer.device)) * capacity
            tokens = positions[:, None] + torch.arange(self.length, device=buffer.device)
            self.places[loops_stored] = (of_heads[:, :, None] + tokens[:, None]).flatten()
        return self.places[loops_stored]

    def views(self, buffer: torch.Tensor, window: int | None) -> list[torch.Tensor]:
        """What each row's token sees, [1, heads, tokens, head_dim]."""
        _, loops_stored, heads, _, head_dim = buffer.shape
        strides = of_row, of_loop, _, of_place, _ = buffer.stride()
        return [
            buffer.as_strided(
                (1, heads, place + 1 - start, head_dim),
                (of_row, *strides[2:]),
                buffer.storage_offset() + row * of_row + loop % loops_stored * of_loop + start * of_place,
            )
            for row, loop, start, place in zip(self.row_numbers, self.loops, self.starts(window), self.positions)
        ]

    def starts(self, window: int | None) -> list[int]:
        """Where what each row's token sees begins: after the padding, and inside the window."""
        starts = self.cache.first_tokens
        if window is None:
            return [starts[row] for row in self.row_numbers]
        return [max(starts[row], place + 1 - window) for row, place in zip(self.row_numbers, self.positions)]

    def masks(self, device, as_bias: torch.dtype | None = None) -> dict[str, torch.Tensor | None]:
        """What each token may see, [rows, 1, length, tokens so far], per kind of attention.

        as_bias: for eager attention, which adds its mask to the scores.
        """
        if self.by_row:
            return dict.fromkeys(("full_attention", "sliding_attention"))
        masks = {"full_attention": self._mask(device, None)}
        if self.cache.config.window_pattern is not None:
            masks["sliding_attention"] = self._mask(device, self.cache.config.sliding_window)
        if as_bias is not None:
            closed = torch.finfo(as_bias).min
            for kind, mask in masks.items():
                if mask is not None:
                    masks[kind] = torch.zeros_like(mask, dtype=as_bias).masked_fill_(~mask, closed)
        return masks

    def _mask(self, device, window: int | None) -> torch.Tensor | None:
        valid = self.cache.valid
        sees_all = self.position is not None and self.length == 1 and (window is None or self.end <= window)
        if sees_all and valid is None:
            return None
        rows, _, positions = self.indices(device)
        places = (positions[:, None] + torch.arange(self.length, device=device))[:, :, None]  # [rows, length, 1]
        seen = torch.arange(self.end, device=device)
        mask = seen <= places
        if window is not None:
            mask &= seen > places - window
        if valid is not None:
            mask &= valid[rows, None, : self.end]
        return mask[:, None]
