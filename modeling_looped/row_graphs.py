"""Passes of rows that decode apart as CUDA graphs: recorded once, replayed for other tokens.

A pass of a few rows is dozens of small kernels in every layer, and a GPU computes them faster than a processor can
launch them. A graph launches them at once. All that it reads stays where it is: what the tokens are, and where each
row stands (its row in the cache, its loop and its place). So that many tokens share a graph, it attends to more places
than are filled, under a mask.

Two kinds of pass are recorded: one loop of rows that may be at different loops, and all of a token where rows of one
depth go in step. Graphs live as long as a generation. Models that others watch or have changed run kernel by kernel,
as all do with LOOPED_CUDA_GRAPHS=0 in the environment.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .cache import index_of_loop
from .context import PassContext, rotary_by_kind
from .overrides import has_global_hooks, is_changed
from .row_view import attend_to_all, visible
from .switches import is_switched_on
from .tensors import on_device


DEVICES = {"cuda"}
SWITCH = "LOOPED_CUDA_GRAPHS"
LENGTH_STEP = 256  # places by which the attention of a graph is longer than that of the one before
AFTER = 1  # passes of a kind that run without a graph: a call that ends soon needs none
KNOWN_PACKAGES = {"torch", "transformers", "peft", __name__.partition(".")[0]}


def can_have_graphs(model, is_int8: bool) -> bool:
    """Whether passes of this model are the same kernels on other numbers."""
    config, device = model.config, model.device.type
    if device not in DEVICES or not is_switched_on(SWITCH, "passes of rows as CUDA graphs"):
        return False
    if config._attn_implementation != "sdpa" or config.attention_softcap is not None or is_int8:
        return False
    # numbers of the host, which are read once
    if config.shares_keys or model.model.loop_embedding is not None:
        return False
    is_watched = model.training or has_global_hooks() or torch.is_autocast_enabled(device)
    return not is_watched and all(is_plain(module, device) for module in model.modules())


def is_plain(module: nn.Module, device: str) -> bool:
    """Nobody watches its calls, and its kernels are launched where torch is told to."""
    is_known = type(module).__module__.partition(".")[0] in KNOWN_PACKAGES and module._compiled_call_impl is None
    return (
        is_known
        and not is_changed(module)
        and all(
            type(weight) is nn.Parameter and type(weight.data) is torch.Tensor and weight.device.type == device
            for weight in module.parameters(recurse=False)
        )
    )


class StaticView:
    """What the blocks see of the cache: as `RowView`, but where rows stand is known to the device alone.

    rows, loops, places: of each token, as for `RowView`. rows are None where the tokens are of all rows, one each;
    loops one number where all are at one. length: of the places that attention reads.
    """

    def __init__(self, cache, padding, rows: torch.Tensor | None, loops, places: torch.Tensor, length: int):
        self.cache, self.padding, self.length = cache, padding, length
        self.every_row = torch.arange(len(places), device=places.device) if rows is None else rows
        self.rows, self.loops, self.places = rows, loops, places
        self.masks_by_window = {}

    def attend(self, queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
        buffer, window = self.cache.buffers[slot], self.cache.windows[slot]
        new = torch.cat([keys, values], dim=2)
        if isinstance(self.loops, int):
            of_loop = buffer[:, index_of_loop(self.loops, buffer.shape[1])]
            of_loop[self.every_row, :, :, self.places] = new
            seen = of_loop[..., : self.length, :]
            seen = seen if self.rows is None else seen[self.rows]
        else:
            loops = self.loops % buffer.shape[1]  # as `index_of_loop`
            buffer[self.every_row, loops, :, :, self.places] = new
            seen = buffer[..., : self.length, :][self.every_row, loops]
        if window not in self.masks_by_window:
            mask = visible(self.every_row, self.places, self.length, window, self.padding)
            self.masks_by_window[window] = mask
        keys, values = seen.unbind(2)
        return attend_to_all(queries, keys, values, self.masks_by_window[window], scaling)


class Standing(NamedTuple):
    """Where rows stand, one entry for each."""

    rows: list[int]
    loops: list[int]
    places: list[int]


class RowGraphs:
    """Of one engine, for as many rows as run now."""

    moves = ""  # which of where rows stand a pass moves on by one

    def __init__(self, engine):
        self.model, self.trunk, self.cache, self.padding = engine.model, engine.trunk, engine.cache, engine.padding
        self.made_for: tuple | None = None
        self.inputs: dict[str, torch.Tensor] = {}  # of all graphs
        self.given: dict[str, torch.Tensor] = {}  # what was last copied there
        self.standing: Standing | None = None  # as inputs["where"] says it
        self.graphs: dict[int, Recording | Repeated] = {}  # by the loop that they were recorded at
        self.runs: Counter[int] = Counter()

    def replay(
        self, kind: int, standing: Standing, inputs: dict, run: Callable[[StaticView], torch.Tensor]
    ) -> torch.Tensor | None:
        """What `run` returns, of a view of these rows; None where it is to run without a graph.

        inputs: what it reads in `self.inputs`, beside where the rows stand.
        """
        rows, _, places = standing
        if len(set(rows)) < len(rows):
            return None
        cache, end = self.cache, max(places) + 1
        cache.reserve(end)
        length = min(-(-end // LENGTH_STEP) * LENGTH_STEP, cache.capacity)
        are_all = rows == list(range(len(cache.buffers[0])))
        made_for = len(rows), are_all, length, cache.buffers[0].data_ptr()
        if made_for != self.made_for:
            self.made_for, self.standing = made_for, None
            self.inputs.clear(), self.given.clear(), self.graphs.clear(), self.runs.clear()
        self.runs[kind] += 1
        if self.runs[kind] <= AFTER:
            return None
        for name, tensor in inputs.items():
            self.take(name, tensor)
        if kind not in self.graphs:

            def of_view() -> torch.Tensor:
                where = self.inputs["where"]
                its_rows, loops, its_places = where.clone().unbind()
                found = run(StaticView(cache, self.padding, None if are_all else its_rows, loops, its_places, length))
                where[Standing._fields.index(self.moves)] += 1
                return found

            self.stand(standing)
            self.graphs[kind] = record(of_view, cache.buffers[0].device)
            self.standing = None  # recording has moved on, too
        if standing != self.standing:
            self.stand(standing)
        found = self.graphs[kind].replay()
        self.standing = standing._replace(**{self.moves: [number + 1 for number in getattr(standing, self.moves)]})
        return found

    def stand(self, standing: Standing):
        self.take("where", on_device(list(standing), self.cache.buffers[0].device))

    def take(self, name: str, tensor: torch.Tensor | None):
        """None of these tensors is written in place."""
        if tensor is None or self.given.get(name) is tensor:
            return
        self.given[name] = tensor
        if name in self.inputs:
            self.inputs[name].copy_(tensor)
        else:
            self.inputs[name] = tensor.clone()

    def context(self, view: StaticView) -> PassContext:
        held, trunk = self.inputs, self.trunk
        return PassContext(
            num_rows=len(view.places),
            masks=dict.fromkeys(trunk.layer_types),
            position_ids=None,
            position_embeddings=rotary_by_kind(trunk, held.get("rotary")),
            value_embeddings=trunk.value_embeddings(held["ids"]) if trunk.config.value_embeddings else {},
            cache=view,
            site=trunk.site,
            options={"row_attention": view.attend},
        )


class LoopGraphs(RowGraphs):
    """One loop, of rows that may be at different loops."""

    moves = "loops"

    def __init__(self, engine):
        super().__init__(engine)
        self.depth = engine.limits[0]

    @staticmethod
    def serve(engine) -> bool:
        """Whether all loops are alike, or all but the first."""
        one_factor = len(set(map(engine.trunk._residual_factor, engine.limits))) == 1
        return one_factor and engine.trunk.num_loop_sets is None

    def run(self, tokens, loops: list[int], state: torch.Tensor) -> torch.Tensor | None:
        """H_{t+1} of rows at `loops`, as `run_loop`."""
        (batch,) = tokens.batches
        loop = self.loop_like_all(loops)
        if loop is None:
            return None
        inputs = {"state": state, "embedded": tokens.embedded, "ids": tokens.ids, "rotary": tokens.rotary}

        def run(view: StaticView) -> torch.Tensor:
            state, embedded = self.inputs["state"], self.inputs["embedded"]
            return self.trunk.core_pass(state, embedded, loop, self.depth, self.context(view))

        return self.replay(loop, Standing(batch.rows, loops, batch.places), inputs, run)

    def loop_like_all(self, loops: list[int]) -> int | None:
        """One that runs as these do; None if they differ."""
        if not self.trunk.looks_at_first:
            return 1
        are_first = {loop == 0 for loop in loops}
        return None if len(are_first) == 2 else int(not are_first.pop())


class TokenGraphs(RowGraphs):
    """All of a token, of rows in step: from its id to the logits of the next."""

    moves = "places"

    def run(self, rows: list[int], places: list[int], depth: int, inputs: dict) -> torch.Tensor | None:
        """Logits, [rows, 1, vocabulary]. inputs: ids and positions, [rows, 1], and rotary tables."""

        def run(view: StaticView) -> torch.Tensor:
            trunk, context = self.trunk, self.context(view)
            view.loops = 0
            embedded = trunk.run_prelude(
                trunk.embed(trunk.embed_tokens(self.inputs["ids"]), self.inputs["positions"]), context
            )
            state = trunk.initial_state(embedded, None)
            for loop in range(depth):
                view.loops = loop
                state = trunk.core_pass(trunk.to_next_loop(state) if loop else state, embedded, loop, depth, context)
            view.loops = 0
            return self.model.logits(trunk.readout(trunk.run_coda(state, context), depth))

        return self.replay(depth, Standing(rows, [0] * len(rows), places), inputs, run)


class Recording:
    """What a function launches on the tensors that it reads, launched again at once."""

    def __init__(self, function: Callable[[], torch.Tensor]):
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # of the current device
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # what kernels set up when they first run is not part of a graph
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.output = function()
            finally:
                self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.output.clone()


class Repeated:
    """The same where there are no graphs."""

    def __init__(self, function: Callable[[], torch.Tensor]):
        self.replay = function


def record(function: Callable[[], torch.Tensor], device: torch.device) -> Recording | Repeated:
    if device.type != "cuda":
        return Repeated(function)
    with torch.cuda.device(device):
        return Recording(function)
