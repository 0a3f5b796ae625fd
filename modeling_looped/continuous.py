"""Decoding in continuous depth: every row of a batch at its own token and its own loop.

At each tick the core runs once for all rows. A row whose token exits emits it and begins its next token at the next
tick, while others still loop. So no row waits for the one that loops longest, and the weights, whose reading is what
decoding costs, are read once a tick for the whole batch.
"""

from collections.abc import Mapping

import torch

from .engine import RowEngine, Tokens
from .exit_criteria import INITIAL


def decode_continuously(engine: RowEngine):
    """`_sample` of transformers, in continuous depth."""
    decoder = ContinuousDecoder(engine)
    starting = decoder.selector.running()
    while starting or decoder.selector.running():
        decoder.begin(starting)
        starting = decoder.tick()
    return decoder.engine.output()


class RowTensors(dict):
    """Named tensors of all rows of a batch, [rows, ...] each, of which some rows are read and written at a time.

    initial: by name, what rows hold that were not written yet, if not 0.
    """

    def __init__(self, num_rows: int, initial: dict[str, float] | None = None):
        super().__init__()
        self.num_rows, self.initial = num_rows, initial or {}

    def take(self, rows: list[int]) -> dict[str, torch.Tensor]:
        if len(rows) == self.num_rows or not self:
            return dict(self)
        index = torch.tensor(rows, device=next(iter(self.values())).device)
        return {name: tensor[index] for name, tensor in self.items()}

    def put(self, rows: list[int], tensors: Mapping[str, torch.Tensor | None]):
        for name, values in tensors.items():
            if values is None:
                continue
            if len(rows) < self.num_rows:
                index = torch.tensor(rows, device=values.device)
                if name not in self:
                    self[name] = values.new_full((self.num_rows, *values.shape[1:]), self.initial.get(name, 0))
                values = self[name].index_copy(0, index, values)  # not in place, so that two may be one tensor
            self[name] = values

    def clear_rows(self, rows: list[int]):
        for name, tensor in self.items():
            self[name] = tensor.index_fill(0, torch.tensor(rows, device=tensor.device), self.initial[name])


class ContinuousDecoder:
    def __init__(self, engine: RowEngine):
        self.engine, self.selector, self.rule = engine, engine.selector, engine.rule
        self.loops = [0] * engine.num_rows  # that the token of each row has run
        self.held = RowTensors(engine.num_rows)  # of that token: state, ids, embedded, rotary
        self.memory = RowTensors(engine.num_rows, INITIAL)  # of the criterion
        if engine.warm_state is not None:
            self.held["state"] = engine.warm_state

    def begin(self, rows: list[int]):
        """The next token of `rows`."""
        if not rows:
            return
        for row in rows:
            self.loops[row] = 0
        tokens = self.engine.enter(rows, self.selector.last_tokens(rows), self.engine.last_places(rows))
        self.held.put(rows, {"ids": tokens.ids, "embedded": tokens.embedded, "rotary": tokens.rotary})
        if self.engine.warm_state is None:
            self.held.put(rows, {"state": self.engine.trunk.initial_state(tokens.embedded, None)})
        self.memory.clear_rows(rows)

    def tick(self) -> list[int]:
        """One loop of every running row; those that emitted a token and go on."""
        rows = self.selector.running()
        held = self.held.take(rows)
        state, tokens = held.pop("state"), Tokens(rows, self.engine.last_places(rows), **held)
        state = self.engine.run_loop(tokens, [self.loops[row] for row in rows], state)
        for row in rows:
            self.loops[row] += 1
        exits = self.emit_exiting_rows(rows, state)
        self.held.put(rows, {"state": self.engine.trunk.to_next_loop(state)})
        return [row for row in exits if self.selector.unfinished[row]]

    def emit_exiting_rows(self, rows: list[int], state: torch.Tensor) -> list[int]:
        """Check the rows that are due, and emit the tokens of those that exit; the rows that have got theirs."""
        rule, stops, read_out, logits = self.rule, [], [], None
        ends = [row for row in rows if self.loops[row] >= self.engine.limits[row]]
        due = [row for row in rows if rule is not None and row not in ends and rule.reads(self.loops[row])]
        reads_logits = rule is not None and rule.criterion.needs == "logits"
        if reads_logits and (ends or due):  # one product with the head for both
            read_out = [row for row in rows if row in ends or row in due]
            logits = self.logits(read_out, of_rows(read_out, rows, state))
        if due:
            score, memory = rule.criterion.after_loop(
                self.engine.model,
                of_rows(due, rows, state)[:, 0],
                lambda: of_rows(due, read_out, logits),  # pyrefly: ignore[bad-argument-type]  asked for if made above
                self.memory.take(due),
            )
            self.memory.put(due, memory)
            passed = zip(due, rule.exits(score).tolist())
            stops = [row for row, passes in passed if passes and rule.checks(self.loops[row])]
        exits = [row for row in rows if row in ends or row in stops]
        if not exits:
            return exits
        if logits is None:
            read_out, logits = exits, self.logits(exits, of_rows(exits, rows, state))
        loops = [self.loops[row] for row in exits]
        self.engine.cache.leave_in_deeper_loops(exits, loops, self.engine.last_places(exits))
        return self.selector.emit(exits, of_rows(exits, read_out, logits), loops)

    def logits(self, rows: list[int], state: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary]"""
        held = self.held.take(rows)
        tokens = Tokens(rows, self.engine.last_places(rows), held["ids"], rotary=held.get("rotary"))
        return self.engine.logits(tokens, [self.loops[row] for row in rows], state)[:, -1]


def of_rows(wanted: list[int], held: list[int], tensor: torch.Tensor) -> torch.Tensor:
    """The parts of `wanted` rows, of a tensor that has a part of each of `held`."""
    return tensor if wanted == held else tensor[[held.index(row) for row in wanted]]
