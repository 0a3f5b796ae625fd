"""Calls of `generate` that share every pass: they may come at any time, each with its own depth and exits.

    with SharedPasses(model, max_rows=8) as passes:
        passes.generate(ids, num_loops=4)                         # from any number of threads
        passes.generate(others, exit_criterion="kl", streamer=streamer)

Each call takes all arguments of `model.generate` and returns what it would return alone, up to rounding. At every tick
the core runs once for the rows of all calls and for parts of new prompts, so that a long prompt delays no other call.
A prompt that cannot run beside rows runs by itself, and lets a tick run after each loop of each of its parts. The
thread that has the turn runs the tick for all calls. A call without room waits. A call that fails, or whose streamer
raises, ends alone: the others go on. Calls that decode in other ways (beams, drafts) run beside them if there is room.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context

import torch
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from .continuous import ContinuousDecoder, tick
from .cpu import multiplying_as_in, repeated_products
from .depth import check_count
from .row_engine import PassesOfOthers
from .row_pages import Pages
from .row_table import RowTable
from .row_view import kernels_of_single_queries


# tokens of prompts in one pass: enough to keep the processor busy, few enough that rows in the same pass wait little
PROMPT_TOKENS, PROMPT_TOKENS_ON_CPU = 512, 128
FEW_TOKENS = 32  # up to this many prompt tokens take little longer than one token of every row
CHECK_SECONDS = 1  # between two calls of the `check` of a call that waits for room
_current: ContextVar["SharedPasses | None"] = ContextVar("shared_passes", default=None)
_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


class SharedPasses:
    """max_rows: the most sequences that are decoded at a time. max_tokens: the most tokens that these may have
    together (prompts and new tokens), which bounds the memory of their caches: slots x key/value heads x head_dim x 2
    numbers per token. prompt_tokens: the most prompt tokens in one pass, by default a number that suits the device; a
    prompt whose call sets `prefill_chunk_size` runs by itself, in parts of that length."""

    def __init__(self, model, max_rows: int = 8, max_tokens: int | None = None, prompt_tokens: int | None = None):
        self.model, self.max_rows = model, check_count("max_rows", max_rows)
        if (model.tp_size or 1) > 1:  # threads arrive in another order on every rank, whose passes would not match
            raise ValueError(
                f"requests share no passes under tensor parallelism (tp_size={model.tp_size}), whose ranks must run "
                "the same passes: call generate of the model with a batch of prompts"
            )
        if prompt_tokens is None:
            prompt_tokens = PROMPT_TOKENS_ON_CPU if model.device.type == "cpu" else PROMPT_TOKENS
        self.prompt_tokens = check_count("prompt_tokens", prompt_tokens)
        self.max_tokens = None if max_tokens is None else check_count("max_tokens", max_tokens)
        self.table, self.decoders = RowTable(), []  # their rows lie in the table in the same order
        self.pages = Pages(model.config)  # pages of the decoders, used where attention reads pages
        self.ticks = self.row_ticks = 0  # row_ticks / ticks: mean number of rows in a pass, without prompts
        self._entrance, self._turn = threading.Lock(), threading.Lock()
        self._turn_of: int | None = None  # the thread that has the turn
        self._beside: set[int] = set()  # threads that decode in other ways
        self._room, self._waiting = threading.Condition(), deque()
        self._rows = self._tokens = 0  # taken by calls
        self._context = copy_context()  # ticks run in it, and share its copies of weights for repeated products

    def __enter__(self) -> "SharedPasses":
        self._products = repeated_products(self.model)
        self._context.run(self._products.__enter__)
        return self

    def __exit__(self, *error):
        with self.turn():  # a call that still runs enters the context in its ticks
            self._context.run(self._products.__exit__, None, None, None)

    def generate(self, *args, check: Callable[[], None] | None = None, **kwargs):
        """Run `model.generate`. check: called while the call waits for room, before the prompt and between its loops,
        and after every token that transformers itself decodes, as with beams; it must return at once, and an exception
        ends this call."""
        outer = _current.set(self)
        try:
            # calls inside and outside of inference mode could not write the same tensors
            with checked_by(check), torch.inference_mode(False), multiplying_as_in(self._context):
                return self.model.generate(*args, **kwargs)
        finally:
            _current.reset(outer)

    @contextmanager
    def turn(self):
        """Give the turn to one thread at a time. Because of the second lock, a thread that ends its turn cannot take
        the next one before the thread that waits at the entrance."""
        self._take_turn()
        try:
            yield
        finally:
            if self._turn_of == threading.get_ident():  # not if interrupted while it waited to get the turn back
                self._end_turn()

    def _take_turn(self):
        with self._entrance:
            self._turn.acquire()
        self._turn_of = threading.get_ident()

    def _end_turn(self):
        self._turn_of = None
        self._turn.release()

    def give_way(self, tokens: int):
        """Let a waiting thread have a turn, after a loop over `tokens` tokens, and then take the turn again."""
        if tokens <= FEW_TOKENS:
            return
        self._end_turn()
        self._take_turn()
        check_call()

    def decode(self, make_engine, num_rows: int, max_length: int):
        """Replace `_sample` of transformers. make_engine: runs the prompt with `after_loop`, or leaves it to ticks."""
        with self.room(num_rows, num_rows * max_length):
            with self.turn():
                check_call()
                engine = make_engine(PassesOfOthers(self.prompt_tokens, self.give_way, self.pages))
                decoder = ContinuousDecoder(engine, self.table)
                self.decoders.append(decoder)
            try:
                while not decoder.is_done:
                    with self.turn():
                        if decoder.prompt is not None:
                            check_call()
                        if not decoder.is_done:
                            self.tick()
                with self.turn():
                    return decoder.output()
            finally:
                with self.turn():
                    self.remove(decoder)

    @contextmanager
    def beside(self, num_rows: int, max_length: int):
        """Take room for a call that decodes in another way."""
        here = threading.get_ident()
        with self.room(num_rows, num_rows * max_length):
            self._beside.add(here)
            try:
                yield
            finally:
                self._beside.remove(here)

    def remove(self, decoder: ContinuousDecoder):
        num_rows = decoder.engine.num_rows
        self.table.remove(decoder.first_row, num_rows)
        for later in self.decoders[self.decoders.index(decoder) + 1 :]:
            later.first_row -= num_rows
        self.decoders.remove(decoder)
        decoder.error = None  # its frames would keep the decoder and its cache until garbage is collected
        decoder.engine.release()

    def tick(self):
        self.ticks += 1
        self.run([decoder for decoder in self.decoders if not decoder.is_done])

    def run(self, decoders: list[ContinuousDecoder]):
        before, table = [decoder.progress() for decoder in decoders], dict(self.table)
        try:
            with kernels_of_single_queries(self.model.device):
                self.row_ticks += self._context.run(tick, self.table, decoders, self.prompt_tokens)
        except BaseException as error:
            went_on = [decoder for decoder, progress in zip(decoders, before) if not decoder.go_back(progress)]
            self.table.go_back(table, [row for decoder in went_on for row in decoder.rows_in_table()])
            if not isinstance(error, Exception):  # e.g. an interrupt: it ends the call of this thread
                raise
            if len(decoders) == 1:
                decoders[0].error = error
                return
            for decoder in decoders:  # running each by itself shows whose error it is
                self.run([decoder])

    def check_size(self, rows: int, tokens: int):
        """Refuse a call that will never find room."""
        if rows > self.max_rows:
            raise ValueError(
                f"{rows} sequences in one call are more than max_rows={self.max_rows}: pass fewer at a time"
            )
        if self.max_tokens is not None and not tokens <= self.max_tokens:  # NaN is refused
            raise ValueError(
                f"a request of {tokens} tokens, prompt and new ones, is more than max_tokens={self.max_tokens}: pass "
                "a shorter prompt or a smaller max_new_tokens"
            )

    @contextmanager
    def room(self, rows: int, tokens: int):
        """Wait until earlier calls have their room and there is room for these rows and tokens too."""
        self.check_size(rows, tokens)
        ticket = object()
        with self._room:
            self._waiting.append(ticket)
            try:
                while not self._room.wait_for(
                    lambda: self._waiting[0] is ticket and self._fits(rows, tokens), CHECK_SECONDS
                ):
                    check_call()
                self._rows, self._tokens = self._rows + rows, self._tokens + tokens
            finally:
                self._waiting.remove(ticket)
                self._room.notify_all()
        try:
            yield
        finally:
            with self._room:
                self._rows, self._tokens = self._rows - rows, self._tokens - tokens
                self._room.notify_all()

    def _fits(self, rows: int, tokens: int) -> bool:
        has_room = self.max_tokens is None or self._tokens + tokens <= self.max_tokens
        return has_room and self._rows + rows <= self.max_rows


@contextmanager
def checked_by(check: Callable[[], None] | None):
    """Let `check` be that of this thread's call."""
    outer = _check.set(check)
    try:
        yield
    finally:
        _check.reset(outer)


def check_call():
    """Call the `check` of this thread's call, which may raise, e.g. if no client waits for the output any more."""
    if (check := _check.get()) is not None:
        check()


class CallsCheck(StoppingCriteria):
    """Ends no sequence, but lets the `check` of this thread's call end the call."""

    def __call__(self, input_ids, scores, **kwargs):
        check_call()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def with_check(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """Return the criteria of a decoding loop of transformers, which takes no `check`, with one that calls it."""
    return criteria if _check.get() is None else StoppingCriteriaList([*criteria, CallsCheck()])


def shared_passes_of(model) -> SharedPasses | None:
    """Return the SharedPasses in which this call of `generate` is made, or None. A call made by a processor or
    streamer runs by itself: its thread already has the turn or room, and would wait for itself."""
    current, here = _current.get(), threading.get_ident()
    if current is None or current.model is not model or current._turn_of == here or here in current._beside:
        return None
    return current


def room_beside(model, num_rows: int, max_length: int):
    """Take room in the SharedPasses in which this call is made, if any."""
    shared = shared_passes_of(model)
    return nullcontext() if shared is None else shared.beside(num_rows, max_length)
