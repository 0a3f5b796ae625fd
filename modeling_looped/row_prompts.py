"""Prompts that run their loops in the same ticks as rows that decode.

Weights are read once for both. A long prompt enters in parts, so that it delays no other call: rows go on in every
pass, and prompts take turns. The tokens of a part run all their loops together; the next part then finds their keys
and values in the cache.
"""

from itertools import count, islice
from typing import NamedTuple

import torch

from .row_engine import RowEngine
from .row_passes import TOKENS_OF_COPIES, Tokens, TokensOfEngine, enter, joined
from .tensors import on_device


NUMBERS = count()


class Part(NamedTuple):
    """Tokens of a prompt that run together."""

    tokens: Tokens
    state: torch.Tensor  # h of the next loop; after the last loop, H
    loop: int
    depth: int

    @property
    def is_at_end(self) -> bool:
        """True after the last loop, when `state` is its H."""
        return self.loop == self.depth

    @property
    def size(self) -> int:
        return len(self.state)


class Prompt:
    """The prompts of a batch. A tick replaces its attributes and never changes their contents, so it can be undone."""

    def __init__(self, engine: RowEngine):
        self.engine, self.rows = engine, list(range(engine.num_rows))
        starts, depths = engine.padding.starts, engine.depths_of_prompts
        by_depth = sorted(self.rows, key=lambda row: depths[row])  # rows of one depth share parts
        self.left = [(row, place) for row in by_depth for place in range(starts[row], engine.prompt_length)]
        self.part: Part | None = None
        self.number = next(NUMBERS)  # rank among the prompts that wait for their next part
        self.logits: dict[int, torch.Tensor] = {}  # of each row, after its last token

    @property
    def is_done(self) -> bool:
        return not self.left and self.part is None

    def by_row(self) -> torch.Tensor:
        """Return the logits after each prompt, [rows, vocabulary]."""
        return torch.stack([self.logits[row] for row in self.rows])

    def begin_part(self, most_tokens: int) -> int:
        """Begin the next part. Return how many tokens it has."""
        depths = self.engine.depths_of_prompts
        depth = depths[self.left[0][0]]
        taken = [(row, place) for row, place in islice(self.left, most_tokens) if depths[row] == depth]
        rows, places = map(list, zip(*taken))
        ids = self.engine.selector.ids
        index = on_device([rows, places], ids.device).unbind()
        tokens = enter([TokensOfEngine(self.engine, rows, places)], ids[index][:, None])
        state = self.engine.trunk.initial_state(tokens.embedded, None)
        self.part, self.left = Part(tokens, state, 0, depth), self.left[len(taken) :]
        return len(taken)

    def after_loop(self, state: torch.Tensor):
        """Update the part after a loop. state: H of its tokens."""
        assert self.part is not None
        part = self.part._replace(loop=self.part.loop + 1)
        self.part = part._replace(state=state if part.is_at_end else self.engine.trunk.to_next_loop(state))

    def last_tokens(self, part: Part) -> list[int]:
        """Return the members of a part that the head reads: the last tokens of prompts."""
        (group,) = part.tokens.groups
        return [i for i, place in enumerate(group.places) if place == self.engine.prompt_length - 1]

    def end_part(self, part: Part, logits: torch.Tensor):
        """End a part. logits: of its `last_tokens`."""
        (group,) = part.tokens.groups
        self.engine.cache.leave_in_deeper_loops(group.rows, [part.depth] * part.size, group.places)
        ended = [group.rows[i] for i in self.last_tokens(part)]
        self.part, self.logits = None, {**self.logits, **dict(zip(ended, logits))}
        self.number = next(NUMBERS)  # behind prompts that came meanwhile

    def progress(self) -> tuple:
        return self.left, self.part, self.number, self.logits

    def go_back(self, progress: tuple):
        self.left, self.part, self.number, self.logits = progress


def begin_parts(prompts: list[Prompt], most_tokens: int):
    """Begin parts of waiting prompts in turn, as long as a pass has room for the rest of the next prompt, or half its
    room is free. Prompts that came meanwhile go before the next part of a long one."""
    if any(prompt.engine.copies_past for prompt in prompts):
        most_tokens = min(most_tokens, TOKENS_OF_COPIES)
    room = most_tokens - sum(prompt.part.size for prompt in prompts if prompt.part is not None)
    for prompt in sorted(prompts, key=lambda prompt: prompt.number):
        if prompt.part is not None:
            continue
        if room < min(len(prompt.left), (most_tokens + 1) // 2):
            return
        room -= prompt.begin_part(room)


def end_parts(prompts: list[Prompt]):
    """End the parts that have run all their loops, with one readout for all."""
    at_end = [(prompt, prompt.part) for prompt in prompts if prompt.part is not None and prompt.part.is_at_end]
    if not at_end:
        return
    tokens = joined([part.tokens for _, part in at_end])
    state = tokens.run_coda(torch.cat([part.state for _, part in at_end]))
    members, depths, counts, start = [], [], [], 0
    for prompt, part in at_end:
        read = prompt.last_tokens(part)
        members += [start + i for i in read]
        depths += [part.depth] * len(read)
        counts.append(len(read))
        start += part.size
    logits = state.new_empty(0)
    if members:
        read = state[on_device(members, state.device)]
        logits = tokens.model.logits(tokens.trunk.readout(read, depths))[:, -1]
    for (prompt, part), of_prompt in zip(at_end, logits.split(counts)):
        prompt.end_part(part, of_prompt)
