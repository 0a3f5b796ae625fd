"""Keys and values, in pages of one memory, of rows that decode independently, of one batch or of many requests.

Models with `attn_implementation="flex_attention"` decode this way: a single call in each layer attends for all rows,
whatever their loops and lengths, and reads keys and values without copies. A *line* is what one loop of one row has
seen, in all layers that this loop runs; its pages may lie anywhere. Rows of different lengths waste no memory, and a
request that ends leaves its pages to the next.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .cache import LoopedCache, index_of_loop
from .compatibility import look_up
from .depth import BlockMask
from .row_view import attend_to_all
from .tensors import on_device


flex_attention: Any = look_up("torch.nn.attention.flex_attention", "flex_attention")
PAGE = 128  # places in a page, which is a block of the kernel: it reads or skips whole blocks
WIDTHS = [4**i for i in range(12)]  # numbers of tokens for which there is a kernel


class Line:
    def __init__(self, number: int):
        self.number, self.pages = number, []

    def index(self, place: int) -> int:
        """Return where the memory holds this place."""
        return self.pages[place // PAGE] * PAGE + place % PAGE


class Pool:
    """Memory of the layers that loop, or of those that run once: keys and values by slot of the first loop,
    [2, heads, pages * PAGE, head_dim]. A page has the same index in all of these tensors."""

    def __init__(self):
        self.memory: dict[int, torch.Tensor] = {}
        # for each page: its line, the place at which it starts, and which of its places hold tokens, not padding
        self.tables: dict[str, torch.Tensor] = {}
        self.num_pages = 0
        self.free: list[int] = []

    def hold(self, slot: int, like: torch.Tensor):
        """Create the memory of a layer if it has none. like: keys, [rows, heads, length, head_dim]."""
        if not self.tables:
            numbers = torch.zeros(0, dtype=torch.long, device=like.device)
            self.tables = {"line": numbers, "start": numbers, "is_token": numbers.new_zeros(0, PAGE, dtype=torch.bool)}
        if slot not in self.memory:
            self.memory[slot] = like.new_zeros(2, like.shape[1], self.num_pages * PAGE, like.shape[-1])

    def reserve(self, lines: list[Line], length: int):
        """Take free pages until each line has pages for `length` places."""
        new = [(line, start) for line in lines for start in range(len(line.pages) * PAGE, length, PAGE)]
        if not new:
            return
        if len(new) > len(self.free):
            self.grow(len(new) - len(self.free))
        pages = [self.free.pop() for _ in new]
        device = self.tables["line"].device
        index, numbers, starts = on_device([pages, [line.number for line, _ in new], [at for _, at in new]], device)
        self.tables["line"].index_copy_(0, index, numbers)
        self.tables["start"].index_copy_(0, index, starts)
        self.tables["is_token"].index_fill_(0, index, True)
        for page, (line, _) in zip(pages, new):
            line.pages.append(page)

    def grow(self, missing: int):
        """Add pages, at least half as many as there are, so that copying stays rare. Layers grow one after the other:
        if memory runs out, `num_pages` is unchanged, and the next attempt keeps the layers that have already grown."""
        num_pages = self.num_pages + max(missing, self.num_pages // 2)
        for slot, held in self.memory.items():
            extra = num_pages * PAGE - held.shape[2]
            self.memory[slot] = torch.nn.functional.pad(held, (0, 0, 0, extra)) if extra > 0 else held
        for name, held in self.tables.items():
            self.tables[name] = torch.cat([held, held.new_zeros(num_pages - len(held), *held.shape[1:])])
        self.free.extend(range(num_pages - 1, self.num_pages - 1, -1))
        self.num_pages = num_pages

    def write(self, slot: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        """Write keys and values, [rows, heads, length, head_dim]. index: their places in the memory, row after row."""
        memory = self.memory[slot]
        states = torch.stack([keys, values]).to(memory.dtype)  # [2, rows, heads, length, head_dim]
        memory.index_copy_(2, index, states.transpose(1, 2).flatten(2, 3))

    def read(self, slot: int, index: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Read what `write` wrote at these indices, [2, rows, heads, length, head_dim]."""
        states = self.memory[slot].index_select(2, index)
        return states.unflatten(2, (num_rows, -1)).transpose(1, 2)


class Pages:
    """All pages of a model. Every batch that it decodes takes some of them."""

    def __init__(self, config):
        self.config = config
        self.outer, self.core = Pool(), Pool()
        self.num_lines = 0

    def pool_of(self, slot: int) -> Pool:
        return self.core if slot >= self.config.core_slot(0) else self.outer

    def new_line(self) -> Line:
        self.num_lines += 1
        return Line(self.num_lines)


class PagedRows:
    """Cache of the rows of a batch, used in place of a `LoopedCache`, with keys and values in pages.

    cache: holds the prompt; layout: the cache that defines the number of loops and the windows, maybe another one;
    has_token: [rows, length].
    """

    def __init__(self, pages: Pages, cache, layout: LoopedCache, has_token: torch.Tensor | None):
        self.pages, self.config, self.windows = pages, layout.model_config, layout.windows
        self.num_stored_loops, length = layout.num_stored_loops, int(cache.get_seq_length())
        num_rows = len(cache.layers[0].keys)
        self.lines = {
            pages.outer: [[pages.new_line()] for _ in range(num_rows)],
            pages.core: [[pages.new_line() for _ in range(self.num_stored_loops)] for _ in range(num_rows)],
        }
        self.capacity = length
        try:
            self.fill(cache, length, has_token)
        except BaseException:
            self.release()
            raise

    def fill(self, cache, length: int, has_token: torch.Tensor | None):
        for slot in range(self.config.core_slot(1)):
            self.pages.pool_of(slot).hold(slot, cache.layers[slot].keys)
        self.reserve(range(len(self.lines[self.pages.core])), length)
        if length == 0:
            return
        for slot in range(self.config.core_slot(self.num_stored_loops)):
            first_slot, loop = self.config.split_slot(slot)
            pool, held = self.pages.pool_of(first_slot), cache.layers[slot]
            # a static layer is longer than the tokens so far; a sliding one holds only its window
            keys, values = held.keys[..., :length, :], held.values[..., :length, :]
            index = self.index(pool, loop, length - keys.shape[2], length, keys.device)
            pool.write(first_slot, index, keys, values)
            if has_token is not None:
                pool.tables["is_token"].view(-1)[index] = has_token[:, length - keys.shape[2] : length].flatten()

    def reserve(self, rows, length: int):
        for pool, lines in self.lines.items():
            if pool.memory:
                pool.reserve([line for row in dict.fromkeys(rows) for line in lines[row]], length)
        self.capacity = max(self.capacity, length)

    def index(self, pool: Pool, loop: int, start: int, end: int, device) -> torch.Tensor:
        """Return where the memory holds the places from start to end of all rows, row after row."""
        places = range(start, end)
        return on_device([lines[loop].index(place) for lines in self.lines[pool] for place in places], device)

    def leave_in_deeper_loops(self, rows: list[int], loops: list[int], places: list[int]):
        """Copy the last keys and values of a token of each row, at its place, to the slots of loops it did not run."""
        pool, sources, targets = self.pages.core, [], []
        for row, ran, place in zip(rows, map(self.config.num_stored_loops, loops), places):
            lines = self.lines[pool][row]
            for line in lines[ran:]:
                sources.append(lines[ran - 1].index(place))
                targets.append(line.index(place))
        if not sources:
            return
        for memory in pool.memory.values():
            source, target = on_device([sources, targets], memory.device)
            memory.index_copy_(2, target, memory.index_select(2, source))

    def store_back(self, cache, length: int):
        """Append the tokens up to `length` of all rows to `cache`. If it has more loops, fill their slots too."""
        start = int(cache.get_seq_length())
        if start == length:  # no token was computed after the prompt
            return
        for slot, held in enumerate(cache.layers):
            first_slot, loop = self.config.split_slot(slot)
            pool = self.pages.pool_of(first_slot)
            lines = self.lines[pool]
            index = self.index(pool, min(loop, len(lines[0]) - 1), start, length, held.keys.device)
            cache.update(*pool.read(first_slot, index, len(lines)), slot)

    def release(self):
        """Return all pages to the pools, for other batches."""
        for pool, lines in self.lines.items():
            for line in (line for of_row in lines for line in of_row):
                pool.free.extend(line.pages)
                line.pages = []


class PagedView:
    """View of the caches for the blocks, during a pass over tokens of one or several `PagedRows`: `RowView` for pages.

    parts: for each batch its rows, and the place of the token of each row; loops: of all tokens, counted from 0.
    """

    def __init__(self, parts: list[tuple[PagedRows, list[int], list[int]]], loops: list[int]):
        self.pages, self.config = parts[0][0].pages, parts[0][0].config
        self.tokens = [(batch, row, place) for batch, rows, places in parts for row, place in zip(rows, places)]
        for batch, rows, places in parts:
            batch.reserve(rows, max(places) + 1)
        self.width = next(width for width in WIDTHS if width >= len(self.tokens))  # number of tokens of the kernel
        self.go_to(loops)

    def go_to(self, loops: list[int]):
        self.loops = list(map(self.config.stored_loop, loops))
        # tokens at loops that make keys and values; those computed for other tokens are not used
        self.writing = [i for i, loop in enumerate(loops) if self.config.makes_keys(loop)]
        self.own: dict[Pool, torch.Tensor] = {}  # where the memory holds the tokens that are written
        self.masks_of: dict[tuple[Pool, int | None], Any] = {}

    def line(self, pool: Pool, i: int) -> Line:
        batch, row, _ = self.tokens[i]
        lines = batch.lines[pool][row]
        return lines[index_of_loop(self.loops[i], len(lines))]

    def row_attention(self, queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
        """Write keys and values, and attend; [tokens, heads, 1, head_dim] each. keys and values are None where no
        token's loop makes any."""
        pool = self.pages.pool_of(slot)
        memory = pool.memory[slot]
        if keys is not None and self.writing:
            if pool not in self.own:
                own = [self.line(pool, i).index(self.tokens[i][2]) for i in self.writing]
                self.own[pool] = on_device(own, memory.device)
            if len(self.writing) < len(keys):
                keys, values = keys[self.writing], values[self.writing]
            pool.write(slot, self.own[pool], keys, values)
        kind = pool, self.tokens[0][0].windows[slot]
        if kind not in self.masks_of:  # the same in all layers of a kind
            self.masks_of[kind] = self.mask(*kind)
        attend = attend_to_copies if memory.device.type == "cpu" else attend_to_pages
        return attend(queries.to(memory.dtype), memory, self.masks_of[kind], scaling, self.config.attention_softcap)

    def mask(self, pool: Pool, window: int | None):
        """Build the mask: which pages each token reads, and which of their places it sees."""
        lines, lasts = [self.line(pool, i) for i in range(len(self.tokens))], [place for *_, place in self.tokens]
        firsts = [0 if window is None else max(0, last + 1 - window) for last in lasts]
        read = [line.pages[first // PAGE : last // PAGE + 1] for line, first, last in zip(lines, firsts, lasts)]
        device, longest = pool.tables["line"].device, max(map(len, read))
        rows = [
            [line.number, first, last, len(pages), *pages, *[0] * (longest - len(pages))]
            for line, first, last, pages in zip(lines, firsts, lasts, read)
        ]
        table = torch.zeros(self.width, 4 + pool.num_pages, dtype=torch.int32, device=device)
        table[: len(rows), : 4 + longest] = on_device(rows, device, torch.int32)
        numbers, firsts, lasts, counts = table.t()[:4].contiguous().unbind()
        line_of, start_of, is_token = (pool.tables[name] for name in ("line", "start", "is_token"))

        def sees(token, head, query, index):
            page = index // PAGE
            place = start_of[page] + index % PAGE
            within = (firsts[token] <= place) & (place <= lasts[token])
            return (line_of[page] == numbers[token]) & within & is_token[page, index % PAGE]

        return BlockMask.from_kv_blocks(
            counts[:, None, None],
            table[:, None, None, 4:].contiguous(),
            BLOCK_SIZE=PAGE,
            mask_mod=sees,
            seq_lengths=(1, pool.num_pages * PAGE),
            compute_q_blocks=False,  # only gradients need them
        )


def attend_to_pages(queries, memory, mask, scaling: float, softcap: float | None) -> torch.Tensor:
    """Attend by a kernel that is compiled once for all lengths, and for some numbers of tokens (`WIDTHS`). queries:
    [tokens, heads, 1, head_dim]; memory: of one layer of a pool."""
    wide = queries.new_zeros(len(mask.kv_num_blocks), *queries.shape[1:])
    wide[: len(queries)] = queries
    keys, values = memory.unsqueeze(1).unbind()
    torch._dynamo.mark_static(wide)
    for states in (keys, values):
        torch._dynamo.mark_static(states, [0, 1, 3])
    # a tensor, because the kernel takes no number that is dynamic in its compilation
    limit = None if softcap is None else queries.new_full((), softcap, dtype=torch.float32)
    return compiled_kernel()(wide, keys, values, mask, scaling, limit)[: len(queries)]


def kernel(queries, keys, values, mask, scaling: float, softcap: torch.Tensor | None):
    grouped = queries.shape[1] != keys.shape[1]
    cap = None if softcap is None else lambda score, *place: torch.tanh(score / softcap) * softcap
    return flex_attention(queries, keys, values, cap, mask, scaling, enable_gqa=grouped)


@functools.cache
def compiled_kernel() -> Callable:
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # for each of `WIDTHS`
    return torch.compile(kernel, dynamic=True)


def attend_to_copies(queries, memory, mask, scaling: float, softcap: float | None) -> torch.Tensor:
    """Attend like `attend_to_pages`, on CPUs: the kernel that torch compiles for CPUs fails where lengths vary."""
    count = len(queries)
    num_read = mask.kv_num_blocks[:count, 0, 0, None]
    columns = torch.arange(int(num_read.max()))
    pages = mask.kv_indices[:count, 0, 0, : len(columns)]
    index = (pages[..., None] * PAGE + torch.arange(PAGE)).flatten(1)  # [tokens, places]
    seen = mask.mask_mod(torch.arange(count)[:, None], 0, 0, index)
    seen &= (columns < num_read).repeat_interleave(PAGE, dim=1)
    copies = memory.unflatten(2, (-1, PAGE)).index_select(2, pages.flatten()).unflatten(2, (count, -1))
    keys, values = copies.flatten(3, 4).transpose(1, 2)
    return attend_to_all(queries, keys, values, seen[:, None, None], scaling, softcap)
