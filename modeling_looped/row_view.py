"""View of a cache for the blocks, during a pass over rows that are at different tokens and loops.

`update` works like that of a cache: it copies what the tokens see into one batch. On a CPU `row_attention` replaces it
where possible, and reads keys and values without copies. Rows of several caches attend cache by cache: `JointView`.
"""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from .cache import LoopedCache, index_of_loop
from .cpu import attend_single_query, is_slow_single_query
from .int8_cache import attend_to_int8, sizes_of, steps_of
from .tensors import on_device, wide_dtype


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]):
    for target, source in zip(targets, sources):
        target.copy_(source)


def attend_to_all(queries, keys, values, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """Compute attention of single queries."""
    if is_slow_single_query(queries):
        return attend_single_query(queries, keys, values, mask, scaling)
    grouped = queries.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(queries, keys, values, mask, scale=scaling, enable_gqa=grouped)


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
    own: tuple  # the tokens themselves, [count, heads, 2, head_dim]: shape, strides and offset
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
        num_rows = len(cache.buffers[0])
        all_at_one_loop = rows == list(range(num_rows)) and len(set(loops)) == 1
        together = all_at_one_loop and len(set(places)) == 1
        self.place = places[0] if together else None  # if all rows share one: slices, nothing is copied
        # row by row: what a row sees must lie in one piece, and the kernel has no softcap
        has_softcap = cache.model_config.attention_softcap is not None
        self.can_go_by_row = cache.is_on_cpu and not padding.has_holes and not has_softcap
        self.goes_by_row = self.can_go_by_row and (cache.is_int8 or not together)
        self.in_step = all_at_one_loop and self.end <= 2 * min(places)
        self.go_to(loops)
        # with fewer tokens than this, one call per token is faster than reading the unused cells
        is_filled = len(set(rows)) < len(rows) and 3 * len(rows) >= 2 * num_rows * cache.num_stored_loops
        is_grid = self.in_step or (is_filled and len(set(zip(rows, self.loops))) == len(rows))
        self.in_grid = is_grid and not cache.is_int8  # int8 rows become floats one at a time
        self.masks_by_window = {}

    def go_to(self, loops: list[int]):
        config = self.cache.model_config
        self.loops = list(map(config.stored_loop, loops))
        # tokens at loops that make keys and values; those computed for other tokens are not used
        self.writing = [i for i, loop in enumerate(loops) if config.makes_keys(loop)]
        self.one_loop = self.loops[0] if self.in_step else None
        self.written_at, self.spans_by_kind = {}, {}
        # for each token its cell in the grid of rows and loops, and its place
        self.cells: tuple[torch.Tensor, ...] | None = None

    @property
    def row_attention(self) -> Callable | None:
        """The function that attention layers call instead of `update` and a kernel, or None."""
        if not self.goes_by_row:
            return None
        if self.in_grid:
            return self.attend_in_grid
        return self.attend if self.place is None else self.attend_by_itself

    def update(self, keys: torch.Tensor | None, values: torch.Tensor | None, slot: int, *args, **kwargs):
        """Write keys and values, and return those that the tokens see, [rows, heads, tokens so far, head_dim] each.
        slot: of the layer in the first loop. keys and values are None where no row's loop makes any."""
        return self.cache.as_read(self.seen(keys, values, slot)).unbind(2)

    def seen(self, keys: torch.Tensor | None, values: torch.Tensor | None, slot: int) -> torch.Tensor:
        """Do the same as `update`, but return what is seen as it is stored, [rows, heads, 2, tokens so far, width]."""
        buffer = self.cache.buffers[slot]
        if self.place is not None:
            of_loop = buffer[:, index_of_loop(self.loops[0], buffer.shape[1])]
            if keys is not None and values is not None and self.writing:
                of_loop[..., self.place : self.end, :] = self.cache.as_stored(torch.stack([keys, values], dim=2))
            return of_loop[..., : self.end, :]
        self.write(buffer, keys, values)
        seen = buffer.new_empty(len(self.rows), *buffer.shape[2:4], self.end, buffer.shape[-1])
        of_loops = (buffer[row, index_of_loop(loop, buffer.shape[1])] for row, loop in zip(self.rows, self.loops))
        copy_all = getattr(torch, "_foreach_copy_", copy_each)
        copy_all(list(seen), [of_loop[:, :, : self.end] for of_loop in of_loops])
        return seen

    def attend(self, *states_slot_and_scaling) -> torch.Tensor:
        return attend_row_by_row([self], *states_slot_and_scaling)

    def attend_in_grid(self, queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
        """Attend where all rows are at one loop, or rows have several tokens, each at its own loop: one call for all
        loops of all rows, even those without a token, so that keys and values are read without copies."""
        buffer, window = self.cache.buffers[slot], self.cache.windows[slot]
        if self.one_loop is not None:
            buffer = buffer[:, index_of_loop(self.one_loop, buffer.shape[1])].unsqueeze(1)
        num_rows, num_loops = buffer.shape[:2]
        if self.cells is None:  # the same in all layers of the core
            cells = [row * num_loops + index_of_loop(loop, num_loops) for row, loop in zip(self.rows, self.loops)]
            self.cells = torch.tensor([cells, self.places]).unbind()
        cells, places = self.cells
        if window not in self.masks_by_window:
            ends = places.new_full((num_rows * num_loops,), self.end - 1).index_copy_(0, cells, places)
            rows = torch.arange(num_rows).repeat_interleave(num_loops)
            self.masks_by_window[window] = visible(rows, ends, self.end, window, self.padding)
        buffer = buffer.flatten(0, 1)  # [cells, heads, 2, capacity, head_dim]
        if keys is not None and self.writing:
            buffer[cells[self.writing], :, :, places[self.writing]] = self.stored(keys, values)
        grid = queries.new_zeros(len(buffer), *queries.shape[1:]).index_copy_(0, cells, queries)
        keys, values = buffer[..., : self.end, :].unbind(2)
        return attend_to_all(grid, keys, values, self.masks_by_window[window], scaling).index_select(0, cells)

    def attend_by_itself(self, queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
        """Attend for rows with one token each, at any loops and places, if need be to copies of what they see."""
        seen, window = self.seen(keys, values, slot), self.cache.windows[slot]
        if window not in self.masks_by_window:
            self.masks_by_window[window] = self.mask(window)
        if (mask := self.masks_by_window[window]) is not None:
            mask = mask.to(seen.device)
        if self.cache.is_int8:
            return attend_to_int8(queries, steps_of(seen).to(wide_dtype(queries)), sizes_of(seen), mask, scaling)
        keys, values = seen.unbind(2)
        return attend_to_all(queries, keys, values, mask, scaling)

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
                first, end = row * of_row + index_of_loop(loop, buffer.shape[1]) * of_loop, place + count
                shape, strides = (1, heads, 2, end - start, head_dim), (of_row, of_head, of_part, of_token, 1)
                own = (count, heads, 2, head_dim), (of_token, of_head, of_part, 1), first + place * of_token
                mask = None if count == 1 else causal_mask(place - start, count, window)
                spans.append(Span(count, (shape, strides, first + start * of_token), own, mask))
        return self.spans_by_kind[kind]

    def write_spans(self, buffer: torch.Tensor, spans: list[Span], stored: torch.Tensor):
        """Write the new tokens, [tokens, heads, 2, head_dim], of spans whose loop makes keys and values."""
        writes, start = set(self.writing), 0
        for span, states in zip(spans, stored.split([span.count for span in spans])):
            if start in writes:
                buffer.as_strided(*span.own).copy_(states)
            start += span.count

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

    def masks(self, as_bias: torch.dtype | None) -> dict[str, torch.Tensor | None]:
        """Return what each token may see, [rows, 1, 1, tokens so far], for each kind of attention.

        as_bias: dtype of the masks for eager attention, which adds its mask to the scores.
        """
        masks = {"full_attention": self.mask(None)}
        config = self.cache.model_config
        if config.has_windows:
            masks["sliding_attention"] = self.mask(config.sliding_window)
        if as_bias is not None:
            closed = torch.finfo(as_bias).min
            for kind, mask in masks.items():
                if mask is not None:
                    masks[kind] = torch.zeros_like(mask, dtype=as_bias).masked_fill_(~mask, closed)
        return masks

    def mask(self, window: int | None) -> torch.Tensor | None:
        sees_all = self.place is not None and (window is None or self.end <= window)
        if sees_all and self.padding.mask is None:
            return None
        device = self.cache.buffers[0].device
        rows, places = on_device([self.rows, self.places], device).unbind(0)
        return visible(rows, places, self.end, window, self.padding)


def attend_row_by_row(views: list[RowView], queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
    """Compute attention of the tokens of all views, [tokens, heads, 1, head_dim], to what each sees, of any length.

    For a single query in bfloat16, or on 8-bit keys and values, a row is first copied to floats. All rows use the same
    memory, which therefore stays in the processor's cache.
    """
    new, outputs, start = None, [], 0  # new: [tokens, heads, 2, head_dim]
    if keys is not None and values is not None:
        new = torch.cat([keys, values], dim=2)
    exact, grouped = is_slow_single_query(queries), queries.shape[1] != views[0].cache.buffers[slot].shape[2]
    spans = [view.spans(slot) for view in views]
    counts = [span.count for of_view in spans for span in of_view]
    in_floats = queries.to(wide_dtype(queries)) if exact else queries
    of_spans = iter(zip(queries.split(counts), in_floats.split(counts)))
    for view, its_spans in zip(views, spans):
        buffer, end = view.cache.buffers[slot], start + len(view.rows)
        if new is not None and view.writing:
            view.write_spans(buffer, its_spans, view.cache.as_stored(new[start:end]))
        start = end
        for span, (its_queries, its_floats) in zip(its_spans, of_spans):
            held = buffer.as_strided(*span.seen)
            if span.count > 1:
                outputs.append(attend_to_span(its_queries, held, span.mask, scaling, grouped))
                continue
            if view.cache.is_int8:
                steps = view.in_floats(steps_of(held), wide_dtype(queries))
                outputs.append(attend_to_int8(its_floats, steps, sizes_of(held), None, scaling))
                continue
            keys, values = (view.in_floats(held, its_floats.dtype) if exact else held).unbind(2)
            outputs.append(scaled_dot_product_attention(its_floats, keys, values, scale=scaling, enable_gqa=grouped))
    return torch.cat(outputs).to(queries.dtype)


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

    def row_attention(self, *states_slot_and_scaling) -> torch.Tensor:
        if all(view.can_go_by_row for view in self.views):
            return attend_row_by_row(self.views, *states_slot_and_scaling)
        *states, slot, scaling = states_slot_and_scaling  # queries, keys, values
        none = [None] * len(self.views)
        outputs = []
        for view, *of_view in zip(
            self.views, *(none if state is None else state.split(self.sizes) for state in states)
        ):
            attend = view.attend if view.can_go_by_row else view.attend_by_itself
            outputs.append(attend(*of_view, slot, scaling))
        return torch.cat(outputs)
