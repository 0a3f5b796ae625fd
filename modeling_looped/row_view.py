"""View of a cache for the blocks, during a pass over rows that are at different tokens and loops.

`row_attention` writes keys and values and attends. Rows at one place read slices of the cache, and on a CPU each row
reads its own where possible; else what the tokens see is copied into one batch. Rows of several caches: `JointView`.
"""

import threading
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from .cache import LoopedCache, index_of_loop
from .cpu import attend_single_query, is_slow_single_query
from .int8_cache import attend_to_int8, sizes_of, steps_of
from .tensors import on_device, wide_dtype


def attend_to_all(
    queries, keys, values, mask: torch.Tensor | None, scaling: float, softcap: float | None = None
) -> torch.Tensor:
    """Compute attention of single queries, [rows, heads, 1, head_dim]; all heads have the same mask."""
    if is_slow_single_query(queries) and softcap is None:
        return attend_single_query(queries, keys, values, mask, scaling)
    groups = queries.shape[1] // keys.shape[1]  # what follows is what plain decoding computes, bit for bit
    if softcap is not None:
        keys, values = (states.repeat_interleave(groups, dim=1) for states in (keys, values))
        scores = torch.tanh(queries @ keys.mT * scaling / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1, dtype=wide_dtype(scores)).to(values.dtype) @ values
    if mask is None:
        return scaled_dot_product_attention(queries, keys, values, scale=scaling, enable_gqa=groups > 1)
    # query heads that share keys and values become several queries of one head: few kernels take groups and a mask
    packed = queries.unflatten(1, (keys.shape[1], groups)).squeeze(3)
    return scaled_dot_product_attention(packed, keys, values, mask, scale=scaling).reshape(queries.shape)


_cudnn_lock, _cudnn_users, _cudnn_before = threading.Lock(), 0, True


@contextmanager
def kernels_of_single_queries(device: torch.device):
    """Turn off cuDNN's attention during decoding: its plan for every number of keys takes longer than a pass."""
    global _cudnn_users, _cudnn_before
    if device.type != "cuda":
        yield
        return
    with _cudnn_lock:
        if _cudnn_users == 0:
            _cudnn_before = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        _cudnn_users += 1
    try:
        yield
    finally:
        with _cudnn_lock:
            _cudnn_users -= 1
            if _cudnn_users == 0:
                torch.backends.cuda.enable_cudnn_sdp(_cudnn_before)


class Padding:
    """Places of the prompts that hold no token. mask: [rows, prompt length], False there; None without padding."""

    def __init__(self, mask: torch.Tensor | None, num_rows: int):
        self.mask, self.has_holes = mask, False  # holes: padding after a row has begun
        self.starts = [0] * num_rows  # where each row begins
        if mask is not None:
            starts = (~mask).sum(-1)
            is_left = torch.arange(mask.shape[1], device=mask.device) >= starts[:, None]
            self.starts, self.has_holes = starts.tolist(), not torch.equal(is_left, mask)

    @property
    def has_empty_rows(self) -> bool:
        return self.mask is not None and max(self.starts) == self.mask.shape[1]

    def goes_with(self, positions: torch.Tensor | None) -> bool:
        """Return whether positions of the prompts, [rows or 1, length], count the tokens of every row one by one."""
        if positions is None:
            return self.mask is None or not any(self.starts)
        shifts = positions - torch.arange(positions.shape[1], device=positions.device)
        is_counted = shifts == shifts[:, -1:]
        return bool((is_counted if self.mask is None else is_counted | ~self.mask).all())

    def has_token(self, rows: torch.Tensor, length: int) -> torch.Tensor | None:
        """Return where these rows hold tokens, [rows, 1, length]; None without padding."""
        if self.mask is None:
            return None
        mask = self.mask.to(rows.device)
        return pad(mask, (0, length - mask.shape[1]), value=True)[rows, None]


class Span(NamedTuple):
    """Consecutive tokens of one row and loop, and where a buffer holds what they see."""

    count: int
    seen: tuple  # what the last of them sees, [1, heads, 2, tokens, head_dim]: shape, strides and offset
    mask: torch.Tensor | None  # which part of `seen` each of several tokens sees; None: all up to itself


def causal_mask(before: int, count: int, window: int | None) -> torch.Tensor | None:
    """Return which of the tokens before and of `count` new ones each new token sees, [count, before + count]. None if
    there are none before and each sees all up to itself."""
    if before == 0 and (window is None or count <= window):
        return None
    places, seen = torch.arange(before, before + count)[:, None], torch.arange(before + count)
    mask = seen <= places
    return mask if window is None else mask & (seen > places - window)


def visible(rows, places, length: int, window: int | None, padding: Padding) -> torch.Tensor:
    """Return which of the first `length` places tokens of these rows see from their places, [tokens, 1, 1, length]."""
    places, seen = places[:, None, None], torch.arange(length, device=places.device)
    mask = seen <= places
    if window is not None:
        mask &= seen > places - window
    if (has_token := padding.has_token(rows, length)) is not None:
        mask &= has_token
    return mask[:, None]


class RowView:
    """View of one cache in a pass over tokens of its rows, each token at its own loop and place.

    rows, loops, places: one entry for each token; a row with several tokens occurs several times. Loops are counted
    from 0.
    """

    def __init__(self, cache: LoopedCache, padding: Padding, rows: list, loops: list, places: list):
        self.cache, self.padding, self.end = cache, padding, max(places) + 1
        cache.reserve(self.end)
        self.rows, self.places = rows, places
        together = rows == list(range(len(cache.buffers[0]))) and len(set(loops)) == len(set(places)) == 1
        self.place = places[0] if together else None  # if all rows share one: slices, nothing is copied
        self.softcap = cache.model_config.attention_softcap
        # row by row: what a row sees must lie in one piece, and the kernel has no softcap
        self.can_go_by_row = cache.is_on_cpu and not padding.has_holes and self.softcap is None
        self.masks_by_window = {}
        self.go_to(loops)

    def go_to(self, loops: list[int]):
        config = self.cache.model_config
        self.loops = list(map(config.stored_loop, loops))
        # tokens at loops that make keys and values; those computed for other tokens are not used
        self.writing = [i for i, loop in enumerate(loops) if config.makes_keys(loop)]
        self.written_at, self.spans_by_kind = {}, {}

    def row_attention(self, queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
        """Write keys and values, and attend; [tokens, heads, 1, head_dim] each. slot: of the layer in the first loop.
        keys and values are None where no token's loop makes any."""
        if self.place is not None or not self.can_go_by_row:
            return self.attend_to_seen(queries, keys, values, slot, scaling)
        return self.attend_row_by_row(queries, keys, values, slot, scaling)

    def seen(self, keys: torch.Tensor | None, values: torch.Tensor | None, slot: int) -> torch.Tensor:
        """Write keys and values, and return what tokens see as stored, [tokens, heads, 2, tokens so far, width]."""
        buffer = self.cache.buffers[slot]
        if self.place is not None:
            of_loop = buffer[:, index_of_loop(self.loops[0], buffer.shape[1])]
            if keys is not None and values is not None and self.writing:
                of_loop[..., self.place : self.end, :] = self.cache.as_stored(torch.stack([keys, values], dim=2))
            return of_loop[..., : self.end, :]
        self.write(buffer, keys, values)
        of_loops = (buffer[row, index_of_loop(loop, buffer.shape[1])] for row, loop in zip(self.rows, self.loops))
        return torch.stack([of_loop[:, :, : self.end] for of_loop in of_loops])

    def attend_to_seen(self, queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
        """Attend at any loops and places, if need be to copies of what the tokens see."""
        seen, window = self.seen(keys, values, slot), self.cache.windows[slot]
        if window not in self.masks_by_window:
            self.masks_by_window[window] = self.mask(window)
        if (mask := self.masks_by_window[window]) is not None:
            mask = mask.to(seen.device)
        if self.cache.is_int8 and self.can_go_by_row:  # neither a softcap nor holes
            return attend_to_int8(queries, steps_of(seen).to(wide_dtype(queries)), sizes_of(seen), mask, scaling)
        keys, values = self.cache.as_read(seen).unbind(2)
        return attend_to_all(queries.to(keys.dtype), keys, values, mask, scaling, self.softcap)

    def attend_row_by_row(self, queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
        """Attend row by row, each to what it sees, of any length.

        For a single query in bfloat16, or on 8-bit keys and values, a row is first copied to floats. All rows use the
        same memory, which therefore stays in the processor's cache.
        """
        buffer, spans, outputs = self.cache.buffers[slot], self.spans(slot), []
        self.write(buffer, keys, values)
        exact, grouped = is_slow_single_query(queries), queries.shape[1] != buffer.shape[2]
        in_floats = queries.to(wide_dtype(queries)) if exact else queries
        counts = [span.count for span in spans]
        for span, its_queries, its_floats in zip(spans, queries.split(counts), in_floats.split(counts)):
            held = buffer.as_strided(*span.seen)
            if span.count > 1:
                outputs.append(attend_to_span(its_queries, held, span.mask, scaling, grouped))
            elif self.cache.is_int8:
                steps = self.in_floats(steps_of(held), wide_dtype(queries))
                outputs.append(attend_to_int8(its_floats, steps, sizes_of(held), None, scaling))
            else:
                keys, values = (self.in_floats(held, its_floats.dtype) if exact else held).unbind(2)
                output = scaled_dot_product_attention(its_floats, keys, values, scale=scaling, enable_gqa=grouped)
                outputs.append(output)
        return torch.cat(outputs).to(queries.dtype)

    def in_floats(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return keys and values of one row as floats, in memory that the next row overwrites."""
        length, kind = view.shape[3], (view.shape[1], view.shape[-1])
        room = self.cache.one_row.get(kind)
        if room is None or room.shape[3] < length or room.dtype != dtype:
            shape = (*view.shape[:3], self.cache.capacity, view.shape[-1])
            room = self.cache.one_row[kind] = view.new_empty(shape, dtype=dtype)
        return room[..., :length, :].copy_(view)

    def write(self, buffer: torch.Tensor, keys: torch.Tensor | None, values: torch.Tensor | None):
        """Write new tokens to their places in a buffer, where their loop makes keys and values."""
        if keys is None or values is None or not self.writing:
            return
        loops_stored = buffer.shape[1]
        kind = loops_stored, buffer.device
        if kind not in self.written_at:  # the same in all layers of a section
            cells = [(self.rows[i], index_of_loop(self.loops[i], loops_stored), self.places[i]) for i in self.writing]
            self.written_at[kind] = on_device(cells, buffer.device).unbind(1)
        rows, loops, places = self.written_at[kind]
        buffer[rows, loops, :, :, places] = self.stored(keys, values)

    def stored(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return, as stored in buffers, keys and values of the tokens that make any, [tokens, heads, 2, head_dim]."""
        states = self.cache.as_stored(torch.cat([keys, values], dim=2))
        return states if len(states) == len(self.writing) else states[self.writing]

    def spans(self, slot: int) -> list[Span]:
        buffer, window = self.cache.buffers[slot], self.cache.windows[slot]
        kind = *buffer.shape, window
        if kind not in self.spans_by_kind:  # the same in all layers of a kind
            heads, head_dim = buffer.shape[2], buffer.shape[-1]
            of_row, of_loop, of_head, of_part, of_token, _ = buffer.stride()
            spans = self.spans_by_kind[kind] = []
            for i, count in self.runs():
                row, loop, place = self.rows[i], self.loops[i], self.places[i]
                start = self.padding.starts[row]
                if window is not None:
                    start = max(start, place + 1 - window)
                first = row * of_row + index_of_loop(loop, buffer.shape[1]) * of_loop + start * of_token
                shape = 1, heads, 2, place + count - start, head_dim
                mask = None if count == 1 else causal_mask(place - start, count, window)
                spans.append(Span(count, (shape, (of_row, of_head, of_part, of_token, 1), first), mask))
        return self.spans_by_kind[kind]

    def runs(self) -> list[tuple[int, int]]:
        """Return runs of consecutive tokens in one row and loop, which can attend together: first index and count."""
        runs: list[tuple[int, int]] = []
        before, writing = None, set(self.writing)
        for i, (row, loop, place) in enumerate(zip(self.rows, self.loops, self.places)):
            # where loops read the keys of an earlier loop, some tokens at one stored loop may write and others not
            kind = row, loop, i in writing
            if before == (*kind, place - 1) and not self.cache.is_int8:  # int8 attends one token at a time
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((i, 1))
            before = *kind, place
        return runs

    def mask(self, window: int | None) -> torch.Tensor | None:
        sees_all = self.place is not None and (window is None or self.end <= window)
        if sees_all and self.padding.mask is None:
            return None
        device = self.cache.buffers[0].device
        rows, places = on_device([self.rows, self.places], device).unbind(0)
        return visible(rows, places, self.end, window, self.padding)


def attend_to_span(queries, held, mask: torch.Tensor | None, scaling: float, grouped: bool) -> torch.Tensor:
    """Compute attention of several tokens, [tokens, heads, 1, head_dim]. held: what the last of them sees."""
    keys, values = held.unbind(2)
    output = scaled_dot_product_attention(
        queries.transpose(0, 2), keys, values, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(0, 2)


class JointView:
    """View of several caches in a pass over tokens of their rows. views: one for each cache."""

    def __init__(self, views: list[RowView]):
        self.views, self.sizes = views, [len(view.rows) for view in views]

    def row_attention(self, queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
        none = [None] * len(self.views)
        parts = (none if states is None else states.split(self.sizes) for states in (queries, keys, values))
        return torch.cat([view.row_attention(*its, slot, scaling) for view, *its in zip(self.views, *parts)])
