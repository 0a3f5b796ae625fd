"""Passes over tokens of rows at different places and loops: the parts from which decoding of single rows is built.

`continuous.py` and `speculation.py` decide which rows, of one batch or of several, run which loop of which token; this
file runs it. The batch itself, its prompt and its cache: `row_engine.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from .checks import check_length
from .context import PassContext, context_of_tokens
from .depth import one_or_each
from .row_graphs import RowGraphs
from .row_pages import PagedView
from .row_view import JointView, RowView
from .tensors import on_device


TOKENS_OF_COPIES = 32  # the most prompt tokens in a pass where attention copies what each token sees


class TokensOfEngine(NamedTuple):
    """Tokens of the batch of one engine: the row of each (a row may have several) and its place in the cache."""

    engine: Any  # a `RowEngine`, whose file imports this one
    rows: list[int]
    places: list[int]

    @property
    def positions(self) -> list[int]:
        return [place + self.engine.shifts[row] for row, place in zip(self.rows, self.places)]


@dataclass
class Tokens:
    """Tokens of a pass, from one or several engines of one model, and the tensors that all their loops read,
    [tokens, 1, ...] each."""

    groups: list[TokensOfEngine]  # one per engine
    ids: torch.Tensor
    embedded: torch.Tensor
    # two tables for each kind in `trunk.ropes`, [tokens, 1, 2 * number of kinds, 1, head_dim]
    rotary: torch.Tensor | None = None

    @property
    def model(self):
        """The causal LM of all groups."""
        return self.groups[0].engine.model

    @property
    def trunk(self):
        return self.model.model

    def run_loop(self, loops: list[int], state: torch.Tensor) -> torch.Tensor:
        """Run one loop, from h_t to H_{t+1}. loops: t of each token."""
        if go_one_by_one(self.groups):
            return self.one_by_one(Tokens.run_loop, loops, state)
        if (graphs := graphs_of(self.groups)) and (found := graphs.loop(self, loops, state)) is not None:
            return found
        depths = one_or_each([group.engine.limits[row] for group in self.groups for row in group.rows])
        return self.trunk.one_loop(state, self.embedded, one_or_each(loops), depths, self.context(loops))

    def run_all_loops(self, num_loops: int) -> torch.Tensor:
        """Run all loops, which the tokens begin and end together: from h_0 to H of the last loop."""
        return self.trunk.loop_in_step(self.embedded, num_loops, self.context([0] * len(self.ids)))

    def read_logits(self, loops: list[int], state: torch.Tensor) -> torch.Tensor:
        """Return the logits of H after `loops` loops. The coda's keys and values stay if these are a token's last
        loops; otherwise a later read overwrites them."""
        if len(self.trunk.coda) and go_one_by_one(self.groups):
            return self.one_by_one(Tokens.read_logits, loops, state)
        if (graphs := graphs_of(self.groups)) and (found := graphs.read(self, state)) is not None:
            return found
        return self.model.logits(self.trunk.readout(self.run_coda(state), loops))

    def run_coda(self, state: torch.Tensor) -> torch.Tensor:
        return self.trunk.run_coda(state, self.context([0] * len(state)) if len(self.trunk.coda) else None)

    def one_by_one(self, run: Callable, loops: list[int], state: torch.Tensor) -> torch.Tensor:
        """Call `run` with each group alone, and return the results of all, concatenated."""
        ends = list(accumulate(len(group.rows) for group in self.groups))
        found = []
        for group, start, end in zip(self.groups, [0, *ends], ends):
            rotary = None if self.rotary is None else self.rotary[start:end]
            part = Tokens([group], self.ids[start:end], self.embedded[start:end], rotary)
            found.append(run(part, loops[start:end], state[start:end]))
        return torch.cat(found)

    def context(self, loops: list[int]) -> PassContext:
        return context_of_tokens(self.trunk, self.ids, self.rotary, self.view(loops))

    def view(self, loops: list[int]) -> Any:
        """Return a view of the caches: a RowView, JointView or PagedView."""
        if self.groups[0].engine.decodes_in_pages:
            return PagedView([(group.engine.cache, group.rows, group.places) for group in self.groups], loops)
        views, start = [], 0
        for engine, rows, places in self.groups:
            end = start + len(rows)
            views.append(RowView(engine.cache, engine.padding, rows, loops[start:end], places))
            start = end
        return views[0] if len(views) == 1 else JointView(views)


def go_one_by_one(groups: list[TokensOfEngine]) -> bool:
    """Return whether several groups run one after the other, each by its own graphs. One pass without graphs takes
    longer: it launches the kernels one by one, and those of attention for each group."""
    graphs = [group.engine.graphs for group in groups]
    return len(graphs) > 1 and all(each is not None and each.serve_loops for each in graphs)


def graphs_of(groups: list[TokensOfEngine]) -> RowGraphs | None:
    """Return the graphs for a pass over these groups; only passes over one engine have any."""
    return groups[0].engine.graphs if len(groups) == 1 else None


def joined(all_tokens: list[Tokens]) -> Tokens:
    """Join tokens of one model for one pass."""
    if len(all_tokens) == 1:
        return all_tokens[0]
    ids, embedded = (torch.cat([getattr(tokens, name) for tokens in all_tokens]) for name in ("ids", "embedded"))
    tables = [tokens.rotary for tokens in all_tokens if tokens.rotary is not None]
    groups = [group for tokens in all_tokens for group in tokens.groups]
    return Tokens(groups, ids, embedded, torch.cat(tables) if tables else None)


def enter(groups: list[TokensOfEngine], ids: torch.Tensor) -> Tokens:
    """Run embedding and prelude of new tokens, [tokens, 1]."""
    sizes = [len(group.rows) for group in groups]
    if go_one_by_one(groups):
        return joined([enter([group], its) for group, its in zip(groups, ids.split(sizes))])
    trunk = groups[0].engine.trunk
    check_length(trunk.config, max(max(group.places) for group in groups) + 1)
    on_host = [group.positions for group in groups]
    positions = on_device([position for of_group in on_host for position in of_group], ids.device)[:, None]
    x = trunk.embed(trunk.embed_tokens(ids), positions)
    tables = [
        group.engine.rotary(x, its, max(of_group))
        for group, its, of_group in zip(groups, positions.split(sizes), on_host)
    ]
    rotary = torch.cat([table for table in tables if table is not None]) if trunk.ropes else None
    tokens = Tokens(groups, ids, x, rotary)
    if (graphs := graphs_of(groups)) and (found := graphs.enter(groups[0], ids, positions, rotary)) is not None:
        tokens.embedded = found
        return tokens
    tokens.embedded = trunk.run_prelude(x, tokens.context([0] * len(ids)) if len(trunk.prelude) else None)
    return tokens
