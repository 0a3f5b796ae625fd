"""How many loops each row of a batch runs, and which rows run at which tick.

A *tick* is one pass through the core. With one depth for all rows, tick t is loop t. Rows of different depths are
sorted, deepest first, so that the rows of a tick are always the first ones: views, no gathering. Rows either start
together and leave when they are done, or, where only the last loops carry gradients, join late and end together, so
that the ticks with gradients are the same for all rows.
"""

from collections.abc import Callable
from numbers import Integral
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch

from .compatibility import look_up
from .tensors import on_device


BlockMask: Any = look_up("torch.nn.attention.flex_attention", "BlockMask", ())


class Tick(NamedTuple):
    rows: int  # how many rows run: the first ones
    loop: int | list[int]  # the loop of each of these rows; one number if all are equal
    depth: int | list[int]  # the total number of loops of each of these rows; one number if all are equal
    has_gradient: bool
    next_rows: int  # how many of these rows also run at the next tick, 0 at the last


class DepthPlan(NamedTuple):
    depths: int | list[int]  # one for all rows, or per row, in the order of the batch
    order: torch.Tensor | None  # sorted row i is row order[i] of the batch; None if nothing was sorted
    inverse: torch.Tensor | None
    ticks: list[Tick]
    ends_together: bool

    @property
    def max_depth(self) -> int:
        return deepest(self.depths)

    @property
    def is_mixed(self) -> bool:
        return self.order is not None

    def sort(self, batched: Any) -> Any:
        """Return rows in sorted order. Values without batch rows (batch size 1, None, a number) stay unchanged."""
        if self.order is None:
            return batched
        has_rows = isinstance(batched, (torch.Tensor, BlockMask)) and batched.shape[:1] == self.order.shape
        return take_rows(batched, self.order) if has_rows else batched

    def unsort(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.inverse is None else tensor[on_device(self.inverse, tensor.device)]

    def first_state(self, state: torch.Tensor) -> torch.Tensor:
        """Return the sorted h_0 in the order of the batch; in rows whose first loop has no gradient it is detached, as
        H_1 is."""
        constant = max((tick.rows for tick in self.ticks if not tick.has_gradient), default=0)
        parts = state[:constant].detach(), state[constant:]
        return self.unsort(torch.cat([part for part in parts if len(part)]))  # an empty one would have gradients of 0

    def spread(self, states: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Turn states of the ticks, [rows of the tick, ...] in sorted order, into states of the loops, [batch, ...].

        A row that has finished keeps its last state.
        """
        if isinstance(self.depths, int):
            return tuple(states)
        depths = sorted(self.depths, reverse=True)
        of_rows = [state.unbind() for state in states]  # indexing would make a gradient of all rows for each row
        last_tick = len(self.ticks) - 1
        loops = []
        for loop in range(self.max_depth):
            rows = []
            for row, depth in enumerate(depths):
                own_loop = min(loop, depth - 1)
                tick = last_tick - (depth - 1 - own_loop) if self.ends_together else own_loop
                rows.append(of_rows[tick][row])
            loops.append(self.unsort(torch.stack(rows)))
        return tuple(loops)


def one_or_each(numbers: list[int]) -> int | list[int]:
    """Return one number if all are the same, else the list."""
    return numbers[0] if len(set(numbers)) == 1 else numbers


def one_or_rows(
    value: Callable[[Any], Any], numbers: int | list[int] | torch.Tensor, device, ndim: int = 1, dtype=None
) -> Any:
    """Apply `value` to each row's loop or depth. Return one value if all rows agree, else a tensor [rows, 1, ...] of
    `ndim` dimensions; always the tensor if `numbers` is one, since the host does not know its numbers."""
    if torch.is_tensor(numbers):
        return value(numbers).view(-1, *[1] * (ndim - 1))
    values = [value(number) for number in ([numbers] if isinstance(numbers, int) else numbers)]
    if len(set(values)) == 1:
        return values[0]
    return on_device(values, device, dtype).view(-1, *[1] * (ndim - 1))


def take_rows(batched: Any, rows: slice | torch.Tensor) -> Any:
    """Take the first rows (a slice), or rows by index, from a tensor or from flex attention's mask."""
    if not isinstance(batched, BlockMask):
        return batched[on_device(rows, batched.device) if torch.is_tensor(rows) else rows]
    taken = batched[rows]
    if torch.is_tensor(rows):  # the mask's function needs the rows' indices before they were taken
        rows = rows.to(batched.kv_indices.device)
        taken.mask_mod = lambda row, *place: batched.mask_mod(rows[row], *place)
    else:
        taken.mask_mod = batched.mask_mod
    return taken


def check_count(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def numpy_as_python(value):
    """Return numpy's numbers and arrays as Python's, and other values unchanged."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def read_depths(num_loops, batch_size: int) -> int | list[int]:
    """Read `num_loops` of a call (an int, or one per row): return one int if all rows have the same, else a list.

    One int is not compared with the batch size, so that a graph of the pass takes batches of any size.
    """
    advice = "num_loops is the number of loops to run: an int of at least 1, or one such int per sequence"
    if torch.is_tensor(num_loops):
        if num_loops.is_floating_point() or num_loops.dtype == torch.bool or num_loops.ndim > 1:
            raise TypeError(f"{advice}; got a {num_loops.dtype} tensor of shape {tuple(num_loops.shape)}")
        num_loops = num_loops.tolist()
    num_loops = numpy_as_python(num_loops)
    per_row = isinstance(num_loops, (list, tuple))
    depths = list(num_loops) if per_row else [num_loops]
    for depth in depths:
        if isinstance(depth, bool) or not isinstance(depth, Integral):
            raise TypeError(f"{advice}; got {num_loops!r}")
        if depth < 1:
            raise ValueError(f"{advice}; got {num_loops!r}")
    if per_row and len(depths) != batch_size:
        raise ValueError(f"{advice}; got {len(depths)} depths for a batch of {batch_size} sequences")
    depths = [index(depth) for depth in depths]  # else a compiler makes a second depth a symbol
    return one_or_each(depths)


def read_depth_per_row(num_loops, batch_size: int) -> list[int]:
    """Read `num_loops` as `read_depths` does, and return a list of one int per row."""
    return depth_per_row(read_depths(num_loops, batch_size), batch_size)


def depth_per_row(depths: int | list[int], batch_size: int) -> list[int]:
    return [depths] * batch_size if isinstance(depths, int) else depths


def depth_tensor(depths: int | list[int], batch_size: int, device) -> torch.Tensor:
    """Return the depths as a tensor, [batch]."""
    if isinstance(depths, int):
        return torch.full((batch_size,), depths, device=device)
    return on_device(depths, device)


def deepest(depths: int | list[int]) -> int:
    return depths if isinstance(depths, int) else max(depths)


def plan_depths(num_loops, batch_size: int, backprop_loops: int | None = None) -> DepthPlan:
    depths = read_depths(num_loops, batch_size)
    if backprop_loops is not None:
        check_count("backprop_loops", backprop_loops)
    longest = deepest(depths)
    first_with_gradient = 0 if backprop_loops is None else longest - backprop_loops
    if isinstance(depths, int):
        following = [batch_size] * (longest - 1) + [0]
        ticks = [Tick(batch_size, t, depths, t >= first_with_gradient, rows) for t, rows in enumerate(following)]
        return DepthPlan(depths, None, None, ticks, False)

    ends_together = backprop_loops is not None
    by_depth = sorted(range(batch_size), key=lambda row: -depths[row])
    deepest_first = [depths[row] for row in by_depth]
    needed = range(longest, 0, -1) if ends_together else range(1, longest + 1)  # least depth that runs at a tick
    counts = [sum(depth >= least for depth in depths) for least in needed]
    ticks = []
    for tick, (rows, following) in enumerate(zip(counts, [*counts[1:], 0])):
        loop = [tick - (longest - depth) for depth in deepest_first[:rows]] if ends_together else tick
        ticks.append(Tick(rows, loop, deepest_first[:rows], tick >= first_with_gradient, min(rows, following)))
    order = torch.tensor(by_depth)
    return DepthPlan(depths, order, order.argsort(), ticks, ends_together)
