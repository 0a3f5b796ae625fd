"""Passes of rows that decode independently, as CUDA graphs: recorded once, replayed for other tokens.

A pass of a few rows consists of dozens of small kernels in every layer, and a GPU computes them faster than a
processor can launch them. A graph launches them at once. Its inputs stay at fixed addresses: the tokens, and for each
token its row in the cache, its loop and its place. So that many tokens share a graph, it attends to more places than
are filled, under a mask.

Graphs live as long as a generation. Models with hooks or changed methods run kernel by kernel, and so do all models
with LOOPED_CUDA_GRAPHS=0 in the environment.
"""

import gc
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils import logging

from .cache import index_of_loop
from .context import PassContext, context_of_tokens
from .overrides import PACKAGE, has_global_hooks, is_changed, sdpa_is_as_written
from .row_view import attend_to_all, visible
from .switches import is_switched_on
from .tensors import on_device


logger = logging.get_logger(__name__)

RECORDED_DEVICES = {"cuda"}
GRAPHS = "LOOPED_CUDA_GRAPHS"
LENGTH_STEP = 256  # the number of places that graphs attend to is a multiple of this
MOST = 64  # the most graphs of an engine: each takes some memory of the device
AFTER = 2  # passes of each kind that run before a graph is recorded: a short call needs none
WITHOUT_MEMORY = 100  # passes of a kind that run without a graph after a recording that ran out of memory
RECORDED_PACKAGES = "torch.", "transformers.", "peft.tuners.lora.", f"{PACKAGE}."


class CannotRecord(RuntimeError):
    pass


def can_have_graphs(model, is_int8: bool) -> bool:
    """Return whether all passes of this model launch the same kernels and differ only in the data."""
    config, device = model.config, model.device.type
    if device not in RECORDED_DEVICES or _failed or not is_switched_on(GRAPHS, "passes of rows as CUDA graphs"):
        return False
    if (
        not sdpa_is_as_written()
        or config._attn_implementation != "sdpa"
        or config.attention_softcap is not None
        or is_int8
    ):
        return False
    # these depend on loop numbers on the host, which a graph reads only when it is recorded
    if config.shares_keys or model.model.loop_embedding is not None:
        return False
    is_watched = model.training or has_global_hooks() or torch.is_autocast_enabled(device)
    return not is_watched and all(can_be_recorded(module, device) for module in model.modules())


def can_be_recorded(module: nn.Module, device: str) -> bool:
    """Return whether the module has no hooks or changes, and launches its kernels on the current stream of torch."""
    is_known = type(module).__module__.startswith(RECORDED_PACKAGES) and module._compiled_call_impl is None
    return (
        is_known
        and not is_changed(module)
        and all(
            type(weight) is nn.Parameter and type(weight.data) is torch.Tensor and weight.device.type == device
            for weight in module.parameters(recurse=False)
        )
    )


class StaticView:
    """View of the cache for the blocks, like `RowView`, but rows, loops and places are known only to the device.

    rows, loops, places: one entry for each token, as in `RowView`. rows is None if there is one token of every row;
    loops is one number if all tokens are at one loop. length: number of places that attention reads.
    """

    def __init__(self, cache, padding, rows: torch.Tensor | None, loops, places: torch.Tensor, length: int):
        self.cache, self.padding, self.length = cache, padding, length
        self.every_row = torch.arange(len(places), device=places.device) if rows is None else rows
        self.rows, self.loops, self.places = rows, loops, places
        self.masks_by_window = {}

    def go_to(self, loops: list[int]):
        self.loops = loops[0]  # the same for all tokens

    def row_attention(self, queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
        buffer, window = self.cache.buffers[slot], self.cache.windows[slot]
        new = torch.cat([keys, values], dim=2)
        loops = index_of_loop(self.loops, buffer.shape[1])
        if isinstance(loops, int):
            of_loop = buffer[:, loops]
            of_loop[self.every_row, :, :, self.places] = new
            seen = of_loop[..., : self.length, :]
            seen = seen if self.rows is None else seen[self.rows]
        else:
            buffer[self.every_row, loops, :, :, self.places] = new
            seen = buffer[..., : self.length, :][self.every_row, loops]
        if window not in self.masks_by_window:
            mask = visible(self.every_row, self.places, self.length, window, self.padding)
            self.masks_by_window[window] = mask
        keys, values = seen.unbind(2)
        return attend_to_all(queries, keys, values, self.masks_by_window[window], scaling)


class Standing(NamedTuple):
    """Rows, loops and places of tokens, one entry for each token."""

    rows: list[int]
    loops: list[int]
    places: list[int]


class Pass:
    """A kind of pass over a fixed number of tokens: its inputs, and its graph once it is recorded."""

    def __init__(self):
        self.runs = 0
        self.inputs: dict[str, torch.Tensor] = {}
        self.given: dict[str, torch.Tensor] = {}  # tensors last copied into `inputs`
        self.standing: Standing | None = None  # the contents of inputs["where"], if known
        self.graph: Recording | None = None

    def take(self, name: str, tensor: torch.Tensor | None):
        """Copy a tensor into the inputs, unless it is there already: callers never write these tensors in place."""
        if tensor is None or self.given.get(name) is tensor:
            return
        self.given[name] = tensor
        if name in self.inputs:
            self.inputs[name].copy_(tensor)
        else:
            self.inputs[name] = tensor.clone()


class RowGraphs:
    """Graphs of one engine. Each method runs a pass from what the host knows of its tokens, or returns None if the
    pass must run without a graph."""

    def __init__(self, engine):
        self.model, self.trunk, self.cache, self.padding = engine.model, engine.trunk, engine.cache, engine.padding
        self.depth = engine.limits[0]
        one_factor = len(set(map(self.trunk.residual_factor, engine.limits))) == 1
        self.loops_are_alike = one_factor and self.trunk.num_loop_sets is None  # except perhaps the first
        self.made_for = 0, 0  # the length of attention, and the capacity of the buffers, which move when they grow
        self.passes: dict[tuple, Pass] = {}

    @property
    def serve_loops(self) -> bool:
        return self.loops_are_alike and not _failed

    def enter(self, group, ids, positions, rotary) -> torch.Tensor | None:
        """Run embedding and prelude of ids and positions, [tokens, 1], which gives the input of every loop."""
        if not len(self.trunk.prelude):
            return None
        standing = Standing(group.rows, [0] * len(ids), group.places)
        inputs = {"ids": ids, "positions": positions, "rotary": rotary}
        return self.run("enter", standing, inputs, self._enter)

    def loop(self, tokens, loops: list[int], state: torch.Tensor) -> torch.Tensor | None:
        """Return H_{t+1} of tokens at `loops`, which may differ."""
        if not self.loops_are_alike:
            return None

        def one_loop(held: dict, view: StaticView) -> torch.Tensor:
            context = self.context(held, view)
            return self.trunk.core_pass(held["state"], held["embedded"], view.loops, self.depth, context)

        inputs = {"state": state, "embedded": tokens.embedded, "ids": tokens.ids, "rotary": tokens.rotary}
        (group,) = tokens.groups
        return self.run("loop", Standing(group.rows, loops, group.places), inputs, one_loop, moves="loops")

    def read(self, tokens, state: torch.Tensor) -> torch.Tensor | None:
        """Run coda and head. Return the logits, [tokens, 1, vocabulary]."""
        if not len(self.trunk.coda) or not self.trunk.reads_alike:
            return None

        def logits(held: dict, view: StaticView) -> torch.Tensor:
            after_coda = self.trunk.run_coda(held["state"], self.context(held, view))
            return self.model.logits(self.trunk.readout(after_coda, 1))

        (group,) = tokens.groups
        standing = Standing(group.rows, [0] * len(state), group.places)
        return self.run("read", standing, {"state": state, "ids": tokens.ids, "rotary": tokens.rotary}, logits)

    def token(self, group, ids, positions, rotary) -> torch.Tensor | None:
        """Run all loops of one token of each row together. Return logits of the next, [rows, 1, vocabulary]."""

        def logits(held: dict, view: StaticView) -> torch.Tensor:
            trunk, context = self.trunk, self.context(held, view)
            state = trunk.loop_in_step(self._enter(held, view), self.depth, context)
            view.loops = 0
            return self.model.logits(trunk.readout(trunk.run_coda(state, context), self.depth))

        standing = Standing(group.rows, [0] * len(ids), group.places)
        inputs = {"ids": ids, "positions": positions, "rotary": rotary}
        return self.run("token", standing, inputs, logits, moves="places")

    def _enter(self, held: dict, view: StaticView) -> torch.Tensor:
        view.loops = 0
        x = self.trunk.embed(self.trunk.embed_tokens(held["ids"]), held["positions"])
        return self.trunk.run_prelude(x, self.context(held, view))

    def run(
        self,
        kind: str,
        standing: Standing,
        inputs: dict[str, torch.Tensor | None],
        compute: Callable[[dict, StaticView], torch.Tensor],
        moves: str = "",
    ) -> torch.Tensor | None:
        """Return what `compute` returns for the inputs and a view of these tokens. moves: the field of `Standing`, if
        any, that the graph itself increases by one at the end of every pass."""
        if _failed:
            return None
        rows, _, places = standing
        cache, end = self.cache, max(places) + 1
        cache.reserve(end)
        length, capacity = self.made_for
        if length < end or capacity != cache.capacity:
            length = min(-(-end // LENGTH_STEP) * LENGTH_STEP, cache.capacity)
            self.made_for = length, cache.capacity
            self.passes.clear()
        are_all = rows == list(range(len(cache.buffers[0])))
        its = self.passes.setdefault((kind, len(rows), are_all), Pass())
        its.runs += 1
        if its.runs <= AFTER or (its.graph is None and self.num_graphs == MOST):
            return None
        for name, tensor in inputs.items():
            its.take(name, tensor)
        device = cache.buffers[0].device
        if its.graph is None:

            def of_view() -> torch.Tensor:
                where = its.inputs["where"]
                its_rows, loops, its_places = where.clone().unbind()
                view = StaticView(cache, self.padding, None if are_all else its_rows, loops, its_places, length)
                found = compute(its.inputs, view)
                if moves:
                    where[Standing._fields.index(moves)] += 1
                return found

            its.take("where", on_device(list(standing), device))
            try:
                its.graph = record(of_view, device)
            except CannotRecord as error:  # e.g. a kernel that waits for the device
                refuse_graphs(str(error))
                return None
            except torch.OutOfMemoryError:  # torch frees no cached memory while it records a graph
                its.runs = -WITHOUT_MEMORY
                torch.cuda.empty_cache()
                return None
            its.standing = None  # recording has increased `moves` too
        if its.standing != standing:
            its.take("where", on_device(list(standing), device))
        its.standing = None  # unknown if the replay fails
        found = its.graph.replay()
        moved = {moves: [number + 1 for number in getattr(standing, moves)]} if moves else {}
        its.standing = standing._replace(**moved)
        return found

    @property
    def num_graphs(self) -> int:
        return sum(each.graph is not None for each in self.passes.values())

    def context(self, held: dict, view: StaticView) -> PassContext:
        return context_of_tokens(self.trunk, held["ids"], held.get("rotary"), view)


_failed: list[str] = []  # why no more graphs are recorded in this process


def refuse_graphs(reason: str):
    """Record no more graphs: a failed recording leaves torch in a state in which later ones would fail too."""
    _failed.append(reason)
    logger.warning(f"Passes run kernel by kernel from here on, as one could not be recorded as a CUDA graph: {reason}")


class Room(NamedTuple):
    """Recording stream and memory of all graphs that are replayed on one stream. They share the memory, since no two
    are replayed at the same time."""

    lock: threading.RLock
    stream: torch.cuda.Stream
    handle: Any  # of the memory pool
    holder: torch.cuda.CUDAGraph  # keeps the memory: torch frees it when no graph is left


_rooms: dict[tuple[int, int], Room] = {}
_rooms_lock = threading.Lock()


def room_of_current_stream() -> Room:
    here = torch.cuda.current_stream()
    with _rooms_lock:
        key = here.device_index, here.cuda_stream
        if key not in _rooms:
            room = Room(threading.RLock(), torch.cuda.Stream(), torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph())
            capture(room, room.holder, lambda: torch.zeros(1, device=here.device))
            _rooms[key] = room
        return _rooms[key]


def capture(room: Room, graph: torch.cuda.CUDAGraph, function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Record `function` into `graph`. Return its output tensor, which every replay fills."""
    here = torch.cuda.current_stream()
    room.stream.wait_stream(here)
    try:
        with torch.cuda.stream(room.stream), no_garbage_collection():
            function()  # kernels set themselves up at their first run, which must not be part of a graph
            # a cuBLAS workspace outside the memory of the graphs would be freed for all of them along with one graph
            torch._C._cuda_clearCublasWorkspaces()
            try:
                graph.capture_begin(pool=room.handle, capture_error_mode="thread_local")
                try:
                    return function()
                finally:
                    graph.capture_end()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise CannotRecord(str(error)) from error
            finally:
                torch._C._cuda_clearCublasWorkspaces()
    finally:
        here.wait_stream(room.stream)


@contextmanager
def no_garbage_collection():
    """Suspend garbage collection: freeing a graph is not allowed while another one is recorded."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Recording:
    """A CUDA graph of the kernels of a function. A replay launches them at once, on the same tensors."""

    def __init__(self, function: Callable[[], torch.Tensor]):
        self.room, self.graph = room_of_current_stream(), torch.cuda.CUDAGraph()
        with self.room.lock:
            self.output = capture(self.room, self.graph, function)

    def replay(self) -> torch.Tensor:
        with self.room.lock:  # another graph may write where this one leaves its output
            self.graph.replay()
            return self.output.clone()


def record(function: Callable[[], torch.Tensor], device: torch.device) -> Recording:
    with torch.cuda.device(device):
        return Recording(function)
