"""How long decoding rows pause for another request's prompt: cut into parts, compared with the whole prompt at once.

Called by `looped benchmark long_prompt`.
"""

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

from modeling_looped.shared_passes import SharedPasses

from .models import build, greedy, looped_config, tokens


TOKENS_BEFORE = 3  # of each row before the long prompt arrives, with the one from its prompt
FEW = 8  # tokens in the prompt of each row


class Ends(Exception):
    """Raised to end the generation of the rows."""


class Times:
    """A streamer that records when tokens arrive."""

    def __init__(self, ends: threading.Event):
        self.ends, self.seconds, self.has_begun = ends, [], threading.Event()

    def put(self, value):
        self.seconds.append(time.perf_counter())
        if len(self.seconds) > TOKENS_BEFORE:
            self.has_begun.set()
        if self.ends.is_set():
            raise Ends

    def end(self):
        pass


class Whole(SharedPasses):
    """Runs a prompt in one part, without a turn for other rows in between."""

    def generate(self, *args, **kwargs):
        return super().generate(*args, prefill_chunk_size=self.prompt_tokens, **kwargs)

    def give_way(self, tokens: int):
        pass


def long_prompt(args) -> dict:
    if args.batch_size < 2:
        raise ValueError(f"--batch-size {args.batch_size}: the prompt of one row is to meet others, so pass 2 or more")
    model = build(args, looped_config(args)).eval()
    long = tokens(args, batch=1, length=args.prompt)
    few = [tokens(args, batch=1, length=FEW) for _ in range(args.batch_size - 1)]
    turns = []
    for _ in range(args.repeats):
        whole = pauses(Whole(model, args.batch_size, prompt_tokens=args.prompt), few, long)
        cut = pauses(SharedPasses(model, args.batch_size), few, long)
        turns.append(
            {
                "longest_pause_over_whole": cut["longest"] / whole["longest"],
                "longest_pause_in_tokens": cut["longest"] / cut["usual"],
                "longest_pause_in_tokens_whole": whole["longest"] / whole["usual"],
                "first_token_over_whole": cut["first"] / whole["first"],
                "tokens_meanwhile": cut["meanwhile"],
            }
        )
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def pauses(passes: SharedPasses, few: list[torch.Tensor], long: torch.Tensor) -> dict:
    """Measure the seconds between two tokens of a row, and until the first token after the long prompt."""
    ends = threading.Event()
    times = [Times(ends) for _ in few]

    def decode(prompt: torch.Tensor, streamer: Times):
        try:
            most = passes.model.config.max_position_embeddings - prompt.shape[1]
            passes.generate(prompt, streamer=streamer, max_new_tokens=most, **greedy(prompt))
        except Ends:
            pass

    with passes, ThreadPoolExecutor(len(few)) as pool:
        rows = [pool.submit(decode, *pair) for pair in zip(few, times)]
        try:
            for streamer in times:
                streamer.has_begun.wait()
            begun = time.perf_counter()
            passes.generate(long, max_new_tokens=1, **greedy(long))
            done = time.perf_counter()
        finally:
            ends.set()
        for row in rows:
            row.result()
    usual = [b - a for of_row in times for a, b in pairwise(of_row.seconds[1:]) if b < begun]
    waits = [b - a for of_row in times for a, b in pairwise(of_row.seconds[1:]) if b > begun]
    meanwhile = sum(begun < second < done for of_row in times for second in of_row.seconds)
    return {
        "longest": max(waits),
        "usual": statistics.median(usual),
        "first": done - begun,
        "meanwhile": meanwhile / len(few),
    }
