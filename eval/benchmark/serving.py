"""Requests that share passes: throughput and latency with early exit, over those at full depth.

Called by `looped benchmark serving`.
"""

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch

from looped_eval.common.timing import now
from modeling_looped.exit_criteria import ExitRule
from modeling_looped.loop_parameters import count_in_a_loop
from modeling_looped.row_passes import Tokens
from modeling_looped.shared_passes import SharedPasses

from .decoding import cost_per_loop, exiting_model, passing_threshold
from .models import greedy, tokens
from .over_http import asked_over_http, quantile


class Served(NamedTuple):
    tokens_per_second: float
    loop_seconds: float  # per loop and row, in ticks without prompts
    latencies: list[float]  # seconds from arrival to the last token
    loops: torch.Tensor  # of every token but the first of each request
    rows_in_a_pass: float
    tokens_per_readout: float
    weights: int  # read by decoding: those of the loop once per pass, those of the head once per readout


def serving(args) -> dict:
    """Measure, per criterion, all requests at once, and random arrivals at four fifths of full depth's throughput.

    With --vllm, also measure both over HTTP, and vLLM at full depth.
    """
    model = exiting_model(args)
    rng, batch = random.Random(0), args.batch_size
    lengths = [
        # the first new token comes from the pass of the prompt
        (rng.randint(args.prompt // 2, args.prompt), max(2, rng.randint(*spread(args.new_tokens))))
        for _ in range(args.requests)
    ]
    asked = [(tokens(args, batch=1, length=length), new_tokens) for length, new_tokens in lengths]
    serve(model, asked[:batch], [0.0] * batch, batch, {})  # warm-up
    report, ways, arrivals = {}, {"full": {}}, []
    for criterion in args.criteria:
        threshold = passing_threshold(model, tokens(args, batch=8, length=args.prompt), criterion)
        how = {"exit_criterion": criterion, "exit_threshold": threshold, "exit_interval": args.exit_interval}
        ways[criterion] = how
        rule = ExitRule(criterion, threshold, interval=args.exit_interval).checked(model.config)
        turns = []
        for _ in range(args.repeats):
            at_once = [0.0] * len(asked)
            full, exits = (serve(model, asked, at_once, batch, each) for each in ({}, how))
            per_second = 0.8 * full.tokens_per_second / statistics.mean(new for _, new in asked)
            gaps = [rng.expovariate(per_second) for _ in asked]
            arrivals = [sum(gaps[: i + 1]) for i in range(len(gaps))]
            full_late, exits_late = (serve(model, asked, arrivals, batch, each) for each in ({}, how))
            gain = exits.tokens_per_second / full.tokens_per_second
            per_token = [float(served.loops.sum()) / len(served.loops) for served in (full, exits)]
            costs = [cost_per_loop(model, None, full.loops), cost_per_loop(model, rule, exits.loops)]
            turns.append(
                {
                    "throughput_over_full": gain,
                    "over_mean_loops": gain * per_token[1] / per_token[0],
                    # without prompts
                    "decoding_over_mean_loops": full.loop_seconds / exits.loop_seconds,
                    "over_prediction": gain * per_token[1] * costs[1] / (per_token[0] * costs[0]),
                    "decoding_over_prediction": full.loop_seconds * costs[1] / (exits.loop_seconds * costs[0]),
                    "weights_over_mean_loops": full.weights * per_token[1] / per_token[0] / exits.weights,
                    "rows_in_a_pass": exits.rows_in_a_pass,
                    "tokens_per_readout": exits.tokens_per_readout,
                    "latency_p50_over_full": quantile(exits_late.latencies, 0.5) / quantile(full_late.latencies, 0.5),
                    "latency_p99_over_full": quantile(exits_late.latencies, 0.99)
                    / quantile(full_late.latencies, 0.99),
                }
            )
        medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        report[criterion] = {"threshold": threshold, "mean_loops": exits.loops.float().mean().item(), **medians}
    if args.vllm is not None:
        report["over_http"] = asked_over_http(model, asked, arrivals, args, ways)
    return report


def spread(number: int) -> tuple[int, int]:
    return max(1, number // 2), max(1, 2 * number - number // 2)


def serve(model, asked: list, arrivals: list[float], max_rows: int, how: dict) -> Served:
    """Run the requests. arrivals: seconds from the start at which each request arrives."""
    with (
        SharedPasses(model, max_rows) as passes,
        ThreadPoolExecutor(len(asked)) as pool,
        timed_ticks(passes) as ticks,
        counted_readouts() as readouts,
    ):
        start = time.perf_counter()

        def run(i: int):
            time.sleep(max(0.0, start + arrivals[i] - time.perf_counter()))
            prompt, new_tokens = asked[i]
            settings = {"max_new_tokens": new_tokens, "return_dict_in_generate": True, **greedy(prompt)}
            result = passes.generate(prompt, **settings, **how)
            return result.token_loops[0, 1:].cpu(), time.perf_counter() - start - arrivals[i]

        results = list(pool.map(run, range(len(asked))))
        seconds = time.perf_counter() - start
    loops = torch.cat([of_tokens for of_tokens, _ in results])
    latencies = [latency for _, latency in results]
    speed, decoding = (len(loops) + len(asked)) / seconds, sum(tick.rows > 0 for tick in ticks)
    rows = passes.row_ticks / decoding
    weights = decoding * count_in_a_loop(model.model) + len(readouts) * model.lm_head.weight.numel()
    without_prompts = [tick for tick in ticks if not tick.has_prompts]
    loop_seconds = sum(tick.seconds for tick in without_prompts) / sum(tick.rows for tick in without_prompts)
    return Served(speed, loop_seconds, latencies, loops, rows, len(loops) / len(readouts), weights)


@contextmanager
def counted_readouts():
    """Yield a list with the number of rows of each readout of decoding."""
    readouts, read_logits = [], Tokens.read_logits

    def counted(tokens, loops, state):
        readouts.append(len(loops))
        return read_logits(tokens, loops, state)

    with patch.object(Tokens, "read_logits", counted):
        yield readouts


class Ticked(NamedTuple):
    seconds: float
    rows: int  # that decoded
    has_prompts: bool


@contextmanager
def timed_ticks(passes: SharedPasses):
    ticks, tick = [], passes.tick

    def timed():
        has_prompts, before, start = any(each.prompt for each in passes.decoders), passes.row_ticks, now()
        tick()
        ticks.append(Ticked(now() - start, passes.row_ticks - before, has_prompts))

    with patch.object(passes, "tick", timed):
        yield ticks
