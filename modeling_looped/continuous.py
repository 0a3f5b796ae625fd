"""Decoding in continuous depth: every row runs at its own token and its own loop.

At each tick the core runs once for all rows, of one batch or of several. A row whose token exits emits it and begins
its next token at the next tick, while other rows still loop. So no row waits for the one that loops longest, and the
weights, whose reading is the main cost of decoding, are read once per tick for all rows. The tensors of all rows lie
in one `RowTable`, in which each batch has a block of consecutive rows.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch

from .exit_criteria import ExitRule
from .row_engine import RowEngine
from .row_passes import Tokens, TokensOfEngine, enter, joined
from .row_prompts import Prompt, begin_parts, end_parts
from .row_table import RowTable
from .tensors import on_device, rows_of


TOKEN_FIELDS = ("ids", "embedded", "rotary")


def decode_continuously(engine: RowEngine):
    """Replace `_sample` of transformers: decode in continuous depth."""
    table = RowTable()
    decoder = ContinuousDecoder(engine, table)
    while not decoder.is_done:
        tick(table, [decoder])
    return decoder.output()


class ContinuousDecoder:
    """Decodes the rows of one batch. `tick` runs the model, for several decoders in one pass."""

    def __init__(self, engine: RowEngine, table: RowTable):
        self.engine, self.selector, self.rule = engine, engine.selector, engine.rule
        self.prompt = Prompt(engine) if engine.prompt_is_left else None  # until it has run
        self.loops = [0] * engine.num_rows  # loops that the current token of each row has run
        self.starting = self.running()  # rows whose next token begins with the next tick
        self.has_begun = False
        self.error: BaseException | None = None  # ends this batch alone, e.g. from a streamer or a processor
        self.first_row = table.add(engine.num_rows)  # index in the table
        table.put(self.rows_in_table(), {"state": engine.warm_state})

    def rows_in_table(self) -> list[int]:
        return list(range(self.first_row, self.first_row + self.engine.num_rows))

    def running(self) -> list[int]:
        """Return the rows that decode: none before the prompt has run."""
        return self.selector.running() if self.prompt is None else []

    @property
    def is_done(self) -> bool:
        return self.error is not None or (self.prompt is None and not self.running())

    def output(self):
        if self.error is not None:
            raise self.error
        return self.engine.output()

    def progress(self) -> tuple:
        """Return what a tick may change before it emits tokens, except the table; `go_back` restores it."""
        begun = self.starting, self.has_begun, list(self.loops)
        return self.emitted(), begun, self.prompt, self.prompt and self.prompt.progress()

    def emitted(self) -> tuple:
        return list(self.selector.lengths), list(self.selector.waiting)

    def go_back(self, progress: tuple) -> bool:
        """Restore `progress` after a tick that failed. Return False if it had already emitted tokens of these rows."""
        emitted, begun, prompt, of_prompt = progress
        if emitted != self.emitted():
            return False
        (self.starting, self.has_begun, self.loops), self.prompt = begun, prompt
        if prompt is not None:
            prompt.go_back(of_prompt)
        return True

    def new_tokens(self) -> tuple[TokensOfEngine, torch.Tensor]:
        """Return the last tokens of the rows that start, and their ids, [rows, 1]."""
        for row in self.starting:
            self.loops[row] = 0
        rows, self.starting, self.has_begun = self.starting, [], True
        return self.engine.at_last_tokens(rows), self.selector.last_tokens(rows)

    def emit(self, rows: list[int], logits: torch.Tensor):
        """Emit tokens for `rows`, whose current tokens exit. Rows that receive one begin with it at the next tick."""
        if self.prompt is None:
            emitted = self.engine.emit(rows, logits, [self.loops[row] for row in rows])
        else:
            self.prompt = None
            emitted = self.selector.emit(rows, logits, self.engine.depths_of_prompts)
        self.starting = [row for row in emitted if self.selector.unfinished[row]]


class RunningRow(NamedTuple):
    """A row of a pass: its decoder, and its number in the batch of that decoder."""

    decoder: ContinuousDecoder
    row: int

    @property
    def loops(self) -> int:
        return self.decoder.loops[self.row]


def in_table(running: list[RunningRow]) -> list[int]:
    return [each.decoder.first_row + each.row for each in running]


def by_decoder(running: list[RunningRow]) -> dict[ContinuousDecoder, list[int]]:
    rows: dict[ContinuousDecoder, list[int]] = {}
    for decoder, row in running:
        rows.setdefault(decoder, []).append(row)
    return rows


def tick(table: RowTable, decoders: list[ContinuousDecoder], prompt_tokens: int = 0) -> int:
    """Run one loop of all running rows of `decoders` and of parts of their prompts, and emit tokens of rows that exit.
    Return how many rows ran. prompt_tokens: the most prompt tokens in a pass."""
    trunk = decoders[0].engine.trunk
    waiting = decoders_that_wait(decoders)
    if starting := [decoder for decoder in decoders if decoder.starting and decoder not in waiting]:
        begin_tokens(table, starting)
    prompts = [decoder.prompt for decoder in decoders if decoder.prompt is not None]
    begin_parts(prompts, prompt_tokens)
    entering = [(prompt, prompt.part) for prompt in prompts if prompt.part is not None]

    running = [RunningRow(decoder, row) for decoder in decoders if decoder not in waiting for row in decoder.running()]
    rows = in_table(running)
    tokens, states = [part.tokens for _, part in entering], [part.state for _, part in entering]
    if running:
        tokens.append(tokens_at(table, running))
        states.append(table.take(rows, ["state"])["state"])
    loops = [part.loop for _, part in entering for _ in range(part.size)] + [each.loops for each in running]
    state = joined(tokens).run_loop(loops, torch.cat(states) if len(states) > 1 else states[0])
    *of_prompts, state = state.split([*(part.size for _, part in entering), len(running)])
    table.put(rows, {"state": trunk.to_next_loop(state) if running else None})
    for (prompt, _), of_prompt in zip(entering, of_prompts):
        prompt.after_loop(of_prompt)
    # emit last: emitted tokens cannot be taken back, while a tick that fails before this point is run again
    emit_exiting_rows(table, running, state)
    end_parts(prompts)
    ended = {decoder: decoder.prompt for decoder in decoders if decoder.prompt is not None and decoder.prompt.is_done}
    emit({decoder: prompt.rows for decoder, prompt in ended.items()}, [prompt.by_row() for prompt in ended.values()])
    return len(running)


def decoders_that_wait(decoders: list[ContinuousDecoder]) -> list[ContinuousDecoder]:
    """Return the decoders that do not begin yet. New rows without exits wait for the tick at which most rows without
    exits begin a token: from then on, both are read out together after every token."""
    of_fixed_depth = [decoder for decoder in decoders if decoder.rule is None]
    new = [decoder for decoder in of_fixed_depth if decoder.starting and not decoder.has_begun]
    if not new:
        return []
    begin_now, begin_later = 0, Counter()
    for decoder in of_fixed_depth:
        if decoder.has_begun:
            begin_now += len(decoder.starting)
            under_way = set(decoder.running()).difference(decoder.starting)
            begin_later.update(decoder.engine.limits[row] - decoder.loops[row] for row in under_way)
    return new if max(begin_later.values(), default=0) > begin_now else []


def begin_tokens(table: RowTable, decoders: list[ContinuousDecoder]):
    """Begin the next token of all rows that start: run embedding and prelude, and put the tensors into the table."""
    starting = [RunningRow(decoder, row) for decoder in decoders for row in decoder.starting]
    groups, ids = zip(*(decoder.new_tokens() for decoder in decoders))
    tokens, rows = enter(list(groups), torch.cat(ids)), in_table(starting)
    table.put(rows, {name: getattr(tokens, name) for name in TOKEN_FIELDS})
    cold = [i for i, each in enumerate(starting) if each.decoder.engine.warm_state is None]
    if cold:
        state = tokens.trunk.initial_state(rows_of(cold, tokens.embedded), None)
        table.put([rows[i] for i in cold], {"state": state})
    table.forget(rows)


def tokens_at(table: RowTable, running: list[RunningRow]) -> Tokens:
    groups = [decoder.engine.at_last_tokens(rows) for decoder, rows in by_decoder(running).items()]
    return Tokens(groups, **table.take(in_table(running), TOKEN_FIELDS))


def emit_exiting_rows(table: RowTable, running: list[RunningRow], state: torch.Tensor) -> bool:
    """Check the rows that are due and emit tokens for those that exit. Return whether any did. state: H."""
    exits: set[int] = set()  # indices into `running`
    due: dict[ExitRule, list[int]] = {}  # includes rows at their limit: if all rows are due, no indexing is needed
    for i, (decoder, row) in enumerate(running):
        decoder.loops[row] += 1
        if decoder.loops[row] >= decoder.engine.limits[row]:
            exits.add(i)
        if decoder.rule is not None and decoder.rule.scores_at(decoder.loops[row]):
            due.setdefault(decoder.rule, []).append(i)

    due = {rule: members for rule, members in due.items() if not exits.issuperset(members)}
    state = read_late_exits(table, running, state, due, exits)
    by_logits = {rule: due.pop(rule) for rule in list(due) if rule.criterion.needs == "logits"}
    for rule, members in due.items():
        exits.update(stopping(table, rule, running, members, state))
    reading = sorted({*exits, *chain(*by_logits.values())})
    if not reading:
        return False
    read = [running[i] for i in reading]
    logits = tokens_at(table, read).read_logits([each.loops for each in read], rows_of(reading, state))[:, -1]

    def logits_of(members: list[int]) -> torch.Tensor:
        return rows_of([reading.index(i) for i in members], logits)

    for rule, members in by_logits.items():
        exits.update(stopping(table, rule, running, members, state, logits_of(members)))
    if not exits:
        return False
    emitting = by_decoder([running[i] for i in sorted(exits)])
    emit(emitting, logits_of(sorted(exits)).split([len(rows) for rows in emitting.values()]))
    return True


def emit(rows: dict[ContinuousDecoder, list[int]], logits: Iterable[torch.Tensor]):
    for (decoder, of_decoder), its_logits in zip(rows.items(), logits):
        try:
            decoder.emit(of_decoder, its_logits)
        except BaseException as error:  # other decoders go on
            decoder.error = error
            if not isinstance(error, Exception):
                raise


def stopping(table: RowTable, rule: ExitRule, running: list[RunningRow], members: list[int], state, logits=None):
    """Return which members, indices into `running` of rows under one rule, exit. state: H of all running rows; logits:
    of the members."""
    score = score_after_loop(table, rule, running, members, state, logits)
    if not any(rule.checks_at(running[i].loops) for i in members):
        return []  # without waiting for the device
    passes = zip(members, rule.exits(score).tolist())
    return [i for i, passed in passes if passed and rule.checks_at(running[i].loops)]


def score_after_loop(table: RowTable, rule: ExitRule, running: list[RunningRow], members: list[int], state, logits):
    criterion, rows = rule.criterion, in_table([running[i] for i in members])
    remembered, model = table.take(rows, criterion.remembers), running[0].decoder.engine.model
    score, remembered = criterion.read(model, rows_of(members, state)[:, 0], lambda: logits, remembered)
    table.put(rows, remembered)
    return score


def read_late_exits(table: RowTable, running: list[RunningRow], state: torch.Tensor, due: dict, exits: set[int]):
    """Handle the rules that read back only every n-th check: remove them from `due`, and add the exits that they find
    to `exits`. Return H, in which tokens that passed a check at an earlier loop have the H of that loop."""
    late: dict[ExitRule, list[int]] = {}
    for i, (decoder, _) in enumerate(running):
        if decoder.rule is not None and decoder.rule.read_interval > 1:
            late.setdefault(decoder.rule, []).append(i)
    for rule, members in late.items():
        if rule in due:
            keep_first_exits(table, rule, running, due.pop(rule), state)
        kept = table.take(in_table([running[i] for i in members]), ("exit_loop", "exit_state"))
        if not kept or not any(i in exits or rule.is_fetched_at(running[i].loops) for i in members):
            continue
        loops = kept["exit_loop"].tolist()
        found = [number for number, loop in enumerate(loops) if loop]
        if not found:
            continue
        passed, then = [members[number] for number in found], rows_of(found, kept["exit_state"])
        for number in found:
            decoder, row = running[members[number]]
            decoder.loops[row] = loops[number]
        exits.update(passed)
        state = state.index_copy(0, on_device(passed, state.device), then)
        trunk = running[0].decoder.engine.trunk
        table.put(in_table([running[i] for i in passed]), {"state": trunk.to_next_loop(then)})
    return state


def keep_first_exits(
    table: RowTable, rule: ExitRule, running: list[RunningRow], members: list[int], state: torch.Tensor
):
    """Record, on the device, the loop at which each member first passed a check, and H after that loop."""
    its, loops = [running[i] for i in members], [running[i].loops for i in members]
    states = rows_of(members, state)
    logits = tokens_at(table, its).read_logits(loops, states)[:, -1] if rule.criterion.needs == "logits" else None
    score = score_after_loop(table, rule, running, members, state, logits)
    if not any(map(rule.checks_at, loops)):
        return
    now = on_device([loop if rule.checks_at(loop) else 0 for loop in loops], state.device)
    kept = table.take(in_table(its), ("exit_loop", "exit_state"))
    before, then = kept.get("exit_loop", torch.zeros_like(now)), kept.get("exit_state", states)
    passes = rule.exits(score).to(state.device)  # the head may be on another device
    is_first = passes & (before == 0)
    then = torch.where(is_first[:, None, None], states, then)
    table.put(in_table(its), {"exit_loop": torch.where(is_first, now, before), "exit_state": then})
