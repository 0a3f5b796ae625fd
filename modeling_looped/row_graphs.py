"""One loop of rows that decode apart, as a CUDA graph: recorded once, replayed for all loops of all tokens.

A loop of a few rows is dozens of small kernels in every layer, and a GPU computes them faster than a processor can
launch them. A graph launches them at once. All that it reads stays where it is: the state, what the tokens are, and
where each row stands (its row in the cache, its loop and its place). So that many tokens share a graph, it attends to
more places than are filled, under a mask.

Graphs live as long as a generation. Models whose loops differ in more than what they read, and those that others watch
or have changed, run kernel by kernel, as all do with LOOPED_CUDA_GRAPHS=0 in the environment.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from .context import PassContext, rotary_by_kind
from .overrides import has_global_hooks, is_changed
from .row_view import attend_to_all, visible
from .switches import is_switched_on
from .tensors import on_device


DEVICES = {"cuda"}
SWITCH = "LOOPED_CUDA_GRAPHS"
LENGTH_STEP = 256  # places by which the attention of a graph is longer than that of the one before
AFTER = 1  # loops of a kind that run without a graph: most calls that end soon need none
KNOWN_PACKAGES = {"torch", "transformers", "peft", __name__.partition(".")[0]}


def can_have_graphs(engine) -> bool:
    """Whether loops of this engine's rows are the same kernels on other numbers."""
    trunk, cache = engine.trunk, engine.cache
    config, device = trunk.config, engine.model.device.type
    if device not in DEVICES or not is_switched_on(SWITCH, "loops as CUDA graphs"):
        return False
    has_plain_rows = config._attn_implementation == "sdpa" and not engine.is_paged and not cache.is_int8
    loops_are_alike = trunk.loop_embedding is None and trunk.num_loop_sets is None and not config.shares_keys
    one_factor = len(set(map(trunk._residual_factor, engine.limits))) == 1
    is_watched = engine.model.training or has_global_hooks() or torch.is_autocast_enabled(device)
    if not (has_plain_rows and loops_are_alike and one_factor and config.attention_softcap is None) or is_watched:
        return False
    sections = [trunk.injection, trunk.change_gate, *trunk.core, *(table for _, table in trunk._value_tables())]
    return all(is_plain(part, device) for section in sections if section is not None for part in section.modules())


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

    length: of the places that attention reads.
    """

    def __init__(self, cache, padding, where: torch.Tensor, length: int):
        self.cache, self.padding, self.length = cache, padding, length
        self.rows, self.loops, self.places = where.unbind()  # in the cache, at which stored loop, at which place
        self.masks_by_window = {}

    def attend(self, queries, keys, values, slot: int, scaling: float) -> torch.Tensor:
        buffer, window = self.cache.buffers[slot], self.cache.windows[slot]
        loops = self.loops % buffer.shape[1]  # as `index_of_loop`
        buffer[self.rows, loops, :, :, self.places] = torch.cat([keys, values], dim=2)
        if window not in self.masks_by_window:
            self.masks_by_window[window] = visible(self.rows, self.places, self.length, window, self.padding)
        keys, values = buffer[..., : self.length, :][self.rows, loops].unbind(2)
        return attend_to_all(queries, keys, values, self.masks_by_window[window], scaling)


class LoopGraphs:
    """Of the rows of one engine, as many as run now."""

    def __init__(self, engine):
        self.trunk, self.cache, self.padding, self.depth = engine.trunk, engine.cache, engine.padding, engine.limits[0]
        self.made_for: tuple | None = None
        self.inputs: dict[str, torch.Tensor] = {}  # of all graphs
        self.graphs: dict[int, Recording | Repeated] = {}  # by the loop that they were recorded at
        self.runs: Counter[int] = Counter()

    def run(self, tokens, loops: list[int], state: torch.Tensor) -> torch.Tensor | None:
        """H_{t+1} of rows at `loops`; None where they do not run as a graph, or not yet."""
        (batch,) = tokens.batches
        loop = self.loop_like_all(loops)
        if loop is None or len(set(batch.rows)) < len(batch.rows):
            return None
        cache, end = self.cache, max(batch.places) + 1
        cache.reserve(end)
        length = min(-(-end // LENGTH_STEP) * LENGTH_STEP, cache.capacity)
        made_for = len(loops), length, cache.buffers[0].data_ptr()
        if made_for != self.made_for:
            self.made_for = made_for
            self.inputs.clear(), self.graphs.clear(), self.runs.clear()
        self.runs[loop] += 1
        if self.runs[loop] <= AFTER:
            return None
        stored = [cache.model_config.stored_loop(each) for each in loops]
        where = on_device([batch.rows, stored, batch.places], state.device)
        self.take(state=state, embedded=tokens.embedded, ids=tokens.ids, rotary=tokens.rotary, where=where)
        if loop not in self.graphs:
            self.graphs[loop] = record(lambda: self.run_loop(loop, length), state.device)
        return self.graphs[loop].replay()

    def loop_like_all(self, loops: list[int]) -> int | None:
        """One that runs as these do; None if they differ."""
        if not self.trunk.looks_at_first:
            return 1
        are_first = {loop == 0 for loop in loops}
        return None if len(are_first) == 2 else int(not are_first.pop())

    def take(self, **inputs: torch.Tensor | None):
        for name, given in inputs.items():
            if given is not None and name in self.inputs:
                self.inputs[name].copy_(given)
            elif given is not None:
                self.inputs[name] = given.clone()

    def run_loop(self, loop: int, length: int) -> torch.Tensor:
        state, embedded, ids, where = (self.inputs[name] for name in ("state", "embedded", "ids", "where"))
        trunk, view = self.trunk, StaticView(self.cache, self.padding, where, length)
        context = PassContext(
            num_rows=len(state),
            masks=dict.fromkeys(trunk.layer_types),
            position_ids=None,
            position_embeddings=rotary_by_kind(trunk, self.inputs.get("rotary")),
            value_embeddings=trunk.value_embeddings(ids) if trunk.config.value_embeddings else {},
            cache=view,
            site=trunk.site,
            options={"row_attention": view.attend},
        )
        return trunk.core_pass(state, embedded, loop, self.depth, context)


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
