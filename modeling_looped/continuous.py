"""Decoding in continuous depth: every row at its own token and its own loop.

At each tick the core runs once for all rows, of one batch or of several. A row whose token exits emits it and begins
its next token at the next tick, while others still loop. So no row waits for the one that loops longest, and the
weights, whose reading is what decoding costs, are read once a tick for all.
"""

from collections.abc import Mapping

import torch

from .engine import RowEngine, Tokens, enter, joined_rows, read_logits, run_loop
from .exit_criteria import INITIAL


def decode_continuously(engine: RowEngine):
    """`_sample` of transformers, in continuous depth."""
    decoder = ContinuousDecoder(engine)
    while not decoder.is_done:
        tick([decoder])
    return decoder.output()


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
    """The rows of one batch. What it asks of the model, `tick` asks for several together."""

    def __init__(self, engine: RowEngine):
        self.engine, self.selector, self.rule = engine, engine.selector, engine.rule
        self.loops = [0] * engine.num_rows  # that the token of each row has run
        self.held = RowTensors(engine.num_rows)  # of that token: state, ids, embedded, rotary
        self.memory = RowTensors(engine.num_rows, INITIAL)  # of the criterion
        self.starting = self.selector.running()  # rows whose next token begins with the next tick
        self.error: BaseException | None = None  # of a streamer, a processor or a criterion: of this batch alone
        if engine.warm_state is not None:
            self.held["state"] = engine.warm_state

    @property
    def is_done(self) -> bool:
        return self.error is not None or not self.selector.running()

    def output(self):
        if self.error is not None:
            raise self.error
        return self.engine.output()

    def progress(self) -> tuple:
        """What a tick changes until it emits tokens."""
        return self.emitted(), list(self.loops), self.starting, dict(self.held), dict(self.memory)

    def emitted(self) -> tuple:
        return list(self.selector.lengths), list(self.selector.waiting)

    def go_back(self, progress: tuple):
        """To where a tick began that failed before it emitted tokens of these rows."""
        emitted, loops, starting, *tensors = progress
        if emitted != self.emitted():
            return
        self.loops, self.starting = loops, starting
        for mine, before in zip((self.held, self.memory), tensors):
            mine.clear()
            mine.update(before)

    def new_tokens(self) -> Tokens:
        for row in self.starting:
            self.loops[row] = 0
        places = self.engine.last_places(self.starting)
        return Tokens(self.engine, self.starting, places, self.selector.last_tokens(self.starting))

    def begin(self, tokens: Tokens):
        rows, self.starting = tokens.rows, []
        self.held.put(rows, {"ids": tokens.ids, "embedded": tokens.embedded, "rotary": tokens.rotary})
        if self.engine.warm_state is None:
            self.held.put(rows, {"state": self.engine.trunk.initial_state(tokens.embedded, None)})
        self.memory.clear_rows(rows)

    def tokens(self, rows: list[int]) -> Tokens:
        held = self.held.take(rows)
        places = self.engine.last_places(rows)
        return Tokens(self.engine, rows, places, held["ids"], held["embedded"], held.get("rotary"))

    def rows_to_read_out(self, rows: list[int], state: torch.Tensor) -> list[int]:
        """Rows whose logits are needed after this loop: of those that exit, and of those that may. state: H."""
        for row in rows:
            self.loops[row] += 1
        self.ends = [row for row in rows if self.loops[row] >= self.engine.limits[row]]
        reads = [] if self.rule is None else [row for row in rows if row not in self.ends]
        self.due = [row for row in reads if self.rule is not None and self.rule.reads_at(self.loops[row])]
        if self.reads_logits:
            return [row for row in rows if row in self.ends or row in self.due]
        stops = self.stopping(rows, state, [], None)
        return [row for row in rows if row in self.ends or row in stops]

    @property
    def reads_logits(self) -> bool:
        return self.rule is not None and self.rule.criterion.needs == "logits"

    def stopping(self, rows: list[int], state: torch.Tensor, read_out: list[int], logits) -> list[int]:
        """Rows that are due and exit, by what their criterion reads."""
        if not self.due or self.rule is None:
            return []
        score, memory = self.rule.criterion.after_loop(
            self.engine.model,
            of_rows(self.due, rows, state)[:, 0],
            lambda: of_rows(self.due, read_out, logits),
            self.memory.take(self.due),
        )
        self.memory.put(self.due, memory)
        passed = zip(self.due, self.rule.exits(score).tolist())
        return [row for row, passes in passed if passes and self.rule.checks_at(self.loops[row])]

    def emit(self, rows: list[int], state: torch.Tensor, read_out: list[int], logits: torch.Tensor | None) -> bool:
        """The tokens of rows that exit, if any; rows that have got theirs begin the next. logits: of `read_out`."""
        exits = read_out
        if self.reads_logits:
            stops = self.stopping(rows, state, read_out, logits)
            exits = [row for row in rows if row in self.ends or row in stops]
        if not exits or logits is None:
            return False
        loops = [self.loops[row] for row in exits]
        self.engine.cache.leave_in_deeper_loops(exits, loops, self.engine.last_places(exits))
        emitted = self.selector.emit(exits, of_rows(exits, read_out, logits), loops)
        self.starting = [row for row in emitted if self.selector.unfinished[row]]
        return True


def tick(decoders: list[ContinuousDecoder]):
    """One loop of every running row of all of them; tokens of those that exit."""
    beginning = [decoder for decoder in decoders if decoder.starting]
    if beginning:
        parts = [decoder.new_tokens() for decoder in beginning]
        for decoder, part, embedded in zip(beginning, parts, split(enter(parts), parts)):
            part.embedded = embedded
            decoder.begin(part)

    parts = [decoder.tokens(decoder.selector.running()) for decoder in decoders]
    state = joined_rows([decoder.held.take(part.rows)["state"] for decoder, part in zip(decoders, parts)])
    state = run_loop(parts, [decoder.loops[row] for decoder, part in zip(decoders, parts) for row in part.rows], state)
    for decoder, part, of in zip(decoders, parts, split(decoders[0].engine.trunk.to_next_loop(state), parts)):
        decoder.held.put(part.rows, {"state": of})
    emit_exiting_rows(decoders, parts, split(state, parts))  # at last: a tick that fails before can be run again


def emit_exiting_rows(decoders: list[ContinuousDecoder], parts: list[Tokens], states) -> bool:
    """Check the rows that are due, and emit the tokens of those that exit; whether there are any. states: H."""
    read_out = [decoder.rows_to_read_out(part.rows, of) for decoder, part, of in zip(decoders, parts, states)]

    reading = [i for i, rows in enumerate(read_out) if rows]
    logits: list[torch.Tensor | None] = [None] * len(decoders)
    if reading:
        read = [decoders[i].tokens(read_out[i]) for i in reading]
        loops = [decoders[i].loops[row] for i in reading for row in read_out[i]]
        chosen = joined_rows([of_rows(read_out[i], parts[i].rows, states[i]) for i in reading])
        for i, of_part in zip(reading, split(read_logits(read, loops, chosen)[:, -1], read)):
            logits[i] = of_part
    emitted = False
    for decoder, part, of, rows, of_part in zip(decoders, parts, states, read_out, logits):
        try:
            emitted = decoder.emit(part.rows, of, rows, of_part) or emitted
        except BaseException as error:  # the others go on
            decoder.error = error
            if not isinstance(error, Exception):
                raise
    return emitted


def split(tensor: torch.Tensor, parts: list[Tokens]) -> tuple[torch.Tensor, ...]:
    """The rows of each part."""
    return tensor.split([len(part.rows) for part in parts])


def of_rows(wanted: list[int], held: list[int], tensor: torch.Tensor) -> torch.Tensor:
    """The parts of `wanted` rows, of a tensor that has a part of each of `held`."""
    return tensor if wanted == held else tensor[[held.index(row) for row in wanted]]
