"""Chooses, streams and stops tokens as transformers does after a pass, for rows that need them at different times.

Where a processor or criterion may look at more than one row, rows get their tokens together: they wait for the last.
"""

from collections.abc import Callable

import torch
from transformers.generation import logits_process, stopping_criteria

from .tensors import members_by_number, on_device


# processors and criteria that treat every row by itself, so that they can be called with some of the rows
NAMES = """
    MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor TemperatureLogitsWarper RepetitionPenaltyLogitsProcessor
    TopPLogitsWarper TopKLogitsWarper MinPLogitsWarper TypicalLogitsWarper EpsilonLogitsWarper EtaLogitsWarper
    NoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor NoBadWordsLogitsProcessor ForcedBOSTokenLogitsProcessor
    ForcedEOSTokenLogitsProcessor InfNanRemoveLogitsProcessor ExponentialDecayLengthPenalty LogitNormalization
    SuppressTokensAtBeginLogitsProcessor SuppressTokensLogitsProcessor
"""
ROWWISE_PROCESSORS = tuple(getattr(logits_process, name) for name in NAMES.split() if hasattr(logits_process, name))
ROWWISE_CRITERIA = tuple(
    getattr(stopping_criteria, name)
    for name in ("MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria")
    if hasattr(stopping_criteria, name)
)
# criteria that look only at a row's last token, so that they can be called with rows of different lengths
LAST_TOKEN_CRITERIA = tuple(
    each for each in ROWWISE_CRITERIA if each.__name__ in ("EosTokenCriteria", "MaxTimeCriteria")
)


def first_batchwise_part(processors, criteria) -> str | None:
    """Return the class name of the first part that may look at more than one row, or None. Classes that are not in
    transformers declare by a true attribute `reads_rows_apart` that they do not."""
    for part, known in ((processors, ROWWISE_PROCESSORS), (criteria, ROWWISE_CRITERIA)):
        for each in part:
            if type(each) not in known and not getattr(each, "reads_rows_apart", False):
                return type(each).__name__
    return None


def cannot_stop(criterion, length: int) -> bool:
    """Return whether the criterion certainly stops no sequence of this length and has no warning to give. Calling it
    would make the host wait for a GPU."""
    if type(criterion) is not stopping_criteria.MaxLengthCriteria:
        return False
    known = criterion.max_position_embeddings
    return length < criterion.max_length and (known is None or length <= known)


class TokenSelector:
    """Holds the sequences so far, and appends the tokens that it chooses."""

    def __init__(self, input_ids, processors, criteria, config, streamer):
        self.processors, self.criteria, self.config, self.streamer = processors, criteria, config, streamer
        self.token_criteria: list[Callable[..., torch.Tensor]]
        self.token_criteria = [each for each in criteria if type(each) in LAST_TOKEN_CRITERIA]
        self.sequence_criteria = [each for each in criteria if type(each) not in LAST_TOKEN_CRITERIA]
        seed = getattr(config, "_seed", None)  # of this call alone, e.g. of a request to a server
        self.generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
        self.batchwise_part = first_batchwise_part(processors, criteria)
        self.waits_for_all = self.batchwise_part is not None  # rows get their tokens at the same time
        self.num_rows, self.prompt_length = input_ids.shape
        # the repetition penalty of transformers 5.23 has one number per row, to leave out its padding
        self.knows_rows = any(torch.is_tensor(getattr(each, "prompt_ignore_length", None)) for each in processors)
        pad = config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self.ids = torch.nn.functional.pad(input_ids.long(), (0, 64), value=self.pad)
        self.loops = torch.zeros_like(self.ids)  # loops that the new tokens took
        self.lengths = [self.prompt_length] * self.num_rows
        self.last = [self.pad] * self.num_rows  # last token of each row
        self.unfinished = [True] * self.num_rows
        self.waiting: dict[int, tuple[torch.Tensor, int]] = {}  # logits and loops of rows that wait for others
        self.streamed = self.prompt_length
        self.scores = [] if config.return_dict_in_generate and config.output_scores else None
        self.put_logits: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        self.logits = [] if config.return_dict_in_generate and config.output_logits else None
        if self.logits is not None and hasattr(streamer, "put_logits"):  # it takes them in place of the output
            self.logits, self.put_logits = None, streamer.put_logits

    def running(self) -> list[int]:
        return [row for row, runs in enumerate(self.unfinished) if runs and row not in self.waiting]

    def last_tokens(self, rows: list[int]) -> torch.Tensor:
        """Return the last tokens of `rows`, [rows, 1]."""
        return on_device([[self.last[row]] for row in rows], self.ids.device)

    def emit(self, rows: list[int], logits: torch.Tensor, loops: list[int], noise: torch.Tensor | None = None):
        """Emit the next token of `rows`, from logits [rows, vocabulary]. Return the rows that received one.

        loops: how many each token took. noise: see `choose`.
        """
        logits = logits.to(device=self.ids.device, dtype=torch.float32, copy=True)
        if self.waits_for_all:
            self.waiting |= {row: (of_row, taken) for row, of_row, taken in zip(rows, logits, loops)}
            if self.running():
                return []
            rows = sorted(self.waiting)
            logits, loops = torch.stack([self.waiting[row][0] for row in rows]), [self.waiting[row][1] for row in rows]
            self.waiting = {}
        if not self.processors and not self.config.do_sample:
            scores, tokens = logits, logits.argmax(-1)
        else:
            scores, tokens = self.choose_by_length(rows, logits, noise)
        self.keep(self.scores, rows, scores)
        self.keep(self.logits, rows, logits)
        if self.put_logits is not None:
            self.put_logits(tokens, logits)
        self.append(rows, tokens, loops)
        self.stream()
        return rows

    def choose_by_length(self, rows: list[int], logits: torch.Tensor, noise: torch.Tensor | None):
        """Return processed scores and tokens of `rows`."""
        all_scores, all_tokens = torch.empty_like(logits), self.ids.new_empty(len(rows))
        for length, members in self.by_length(rows):
            group, part = [rows[i] for i in members], logits[members]
            seen = group
            if group == self.running() and noise is None:  # as transformers does: with finished rows too
                seen = list(range(self.num_rows))
                if len(group) < self.num_rows:
                    whole = part.new_zeros(self.num_rows, part.shape[-1])
                    whole[group] = part
                    part = whole
            scores = self.process(seen, length, part)
            tokens = self.choose(scores, None if noise is None else noise[members])
            if len(seen) > len(group):
                scores, tokens = scores[group], tokens[group]
            all_scores[members], all_tokens[members] = scores.to(all_scores.dtype), tokens
        return all_scores, all_tokens

    def guess(self, rows: list[int], lengths: list[int], logits: torch.Tensor, noise: torch.Tensor | None):
        """Return the token that would be chosen after `lengths` tokens of each row, some of which are guesses, and its
        lead over the second best, in logits. Emit nothing. noise: see `choose`."""
        scores = logits.to(device=self.ids.device, dtype=torch.float32, copy=True)
        if self.processors:
            for length, members in members_by_number(lengths):
                scores[members] = self.process([rows[i] for i in members], length, scores[members])
        if noise is not None:
            scores = scores.log_softmax(-1) - noise.log()
        best = scores.topk(2)
        return best.indices[:, 0], best.values[:, 0] - best.values[:, 1]

    def write_guess(self, row: int, place: int, token: int):
        """Write a guessed token, for processors that score the tokens after it."""
        self.make_room(place + 1)
        self.ids[row, place] = token

    def process(self, rows: list[int], length: int, logits: torch.Tensor) -> torch.Tensor:
        """Return scores of `rows`, all of this length. Processors that keep a number per row get all rows."""
        if not self.processors:
            return logits
        if not self.knows_rows or rows == list(range(self.num_rows)):
            return self.processors(self.ids[self.index(rows), :length], logits)
        whole = logits.new_zeros(self.num_rows, logits.shape[-1])
        whole[rows] = logits
        return self.processors(self.ids[:, :length], whole)[rows]

    def by_length(self, rows: list[int]):
        """Group members of `rows` whose sequences are equally long, and can go to processors as one batch."""
        return members_by_number([self.lengths[row] for row in rows])

    def index(self, rows: list[int]) -> slice | torch.Tensor:
        """Return an index of `rows`, made once: a list would be converted at every tensor that it indexes."""
        return slice(None) if rows == list(range(self.num_rows)) else on_device(rows, self.ids.device)

    def choose(self, scores: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Choose a token for each row. noise: exponential, [rows, vocabulary]. The token of largest p / noise is a
        sample of p; with the same noise, similar distributions often give the same token."""
        if not self.config.do_sample:
            return scores.argmax(-1)
        p = scores.softmax(-1)
        if noise is not None:
            return (p / noise).argmax(-1)
        return torch.multinomial(p, num_samples=1, generator=self.generator).squeeze(1)

    def append(self, rows: list[int], tokens: torch.Tensor, loops: list[int]):
        """Append one token to each of `rows`, and find which rows stop."""
        ends = [self.lengths[row] for row in rows]
        self.make_room(max(ends) + 1)
        members, places, taken = on_device([rows, ends, loops], self.ids.device).unbind()
        self.ids[members, places], self.loops[members, places] = tokens, taken
        # all in one list, since copying it makes the host wait for the GPU
        found = [] if self.waits_for_all else [criterion(tokens[:, None], None) for criterion in self.token_criteria]
        said, *stopped = torch.stack([tokens, *found]).tolist()
        for row, token, end in zip(rows, said, ends):
            self.last[row], self.lengths[row] = token, end + 1
        for row, stop in zip(rows, self.stops(rows, [any(of_row) for of_row in zip(*stopped)])):
            self.unfinished[row] = not stop
            if stop:
                self.ids[row, self.lengths[row] :] = self.pad  # overwrites guesses

    def stops(self, rows: list[int], stopped: list[bool]) -> list[bool]:
        """Return which of `rows` end. stopped: for each row, whether a criterion of the last token ends it."""
        if self.waits_for_all:  # as transformers does: all rows, finished ones too
            scores = None if self.scores is None else tuple(self.scores)
            return self.criteria(self.ids[:, : self.lengths[rows[0]]], scores)[rows].tolist()
        stops = stopped or [False] * len(rows)
        for length, members in self.by_length(rows):
            for criterion in self.sequence_criteria:
                if cannot_stop(criterion, length):
                    continue
                sequences = self.ids[self.index([rows[i] for i in members]), :length]
                for i, stop in zip(members, criterion(sequences, None).tolist()):
                    stops[i] |= stop
        return stops

    def make_room(self, length: int):
        if length > self.ids.shape[1]:
            extra = max(64, length // 2)
            self.ids = torch.nn.functional.pad(self.ids, (0, extra), value=self.pad)
            self.loops = torch.nn.functional.pad(self.loops, (0, extra))

    def keep(self, kept: list | None, rows: list[int], values: torch.Tensor):
        """Keep scores or logits for the output: [rows, vocabulary] for every new token, zero for finished rows."""
        if kept is None:
            return
        for row, of_row in zip(rows, values):
            place = self.lengths[row] - self.prompt_length
            while len(kept) <= place:
                kept.append(values.new_zeros(self.num_rows, values.shape[-1]))
            kept[place][row] = of_row

    def stream(self):
        """Stream the positions that every running row has passed, one by one as a streamer expects them."""
        if self.streamer is None:
            return
        ready = min((self.lengths[row] for row in self.running()), default=max(self.lengths))
        for position in range(self.streamed, ready):
            if hasattr(self.streamer, "put_loops"):
                self.streamer.put_loops(self.loops[:, position].cpu())
            self.streamer.put(self.ids[:, position].cpu())
        self.streamed = max(self.streamed, ready)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sequences and the loops of their new tokens: 0 after the end of a row."""
        if self.streamer is not None:
            self.streamer.end()
        length = max(self.lengths)
        return self.ids[:, :length], self.loops[:, self.prompt_length : length]
