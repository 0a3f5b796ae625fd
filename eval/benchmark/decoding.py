"""What early exit, self-speculation and shared slots gain in decoding, and what they cost.

Called by `looped benchmark exits`, and `speculation` and `sharing` with `--model DIR`.
"""

import copy
import math
import statistics
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from looped_eval.common.hooks import hooks
from looped_eval.common.model_folder import open_config, open_tokenizer
from looped_eval.common.timing import least_seconds, now
from looped_eval.halting.calibration import never
from looped_eval.halting.measuring import mean_readouts
from looped_eval.halting.scoring import measure
from modeling_looped import LoopedCache, LoopedForCausalLM, continuous, graph_decoding
from modeling_looped.cache import ONE_SLOT
from modeling_looped.exit_criteria import CRITERIA, ExitRule
from modeling_looped.loop_parameters import count_in_a_loop
from modeling_looped.proposals import PassSeconds
from modeling_looped.row_graphs import can_have_graphs
from modeling_looped.row_passes import Tokens

from .models import build, greedy, looped_config, tokens
from .wider import widened


def exits(args) -> dict:
    """Measure, per batch size and criterion, achieved over predicted speed, and the cost of checks without exits."""
    model, report = exiting_model(args), {}
    for batch in args.batch_sizes:
        prompt = tokens(args, batch=batch, length=args.prompt)
        for criterion in args.criteria:
            report[f"batch_{batch}_{criterion}"] = measure_exits(model, prompt, criterion, args)
    return report


def exiting_model(args):
    model = build(args, looped_config(args, loop_loss="per_loop", exit_gate="raw", initializer_range=0.05)).eval()
    spread_gate(model, tokens(args, batch=8, length=args.prompt))
    return model


def passing_threshold(model, prompt: torch.Tensor, criterion: str) -> float:
    """Return a threshold that three checks in ten pass, so that rows exit at different loops."""
    ExitRule(criterion, 0).checked(model.config)  # refuses unknown names
    rows = torch.cat([prompt, prompt[:, :1]], dim=1)  # adds a last target, on which scores do not depend
    scores = measure(model, rows, model.config.num_loops, [criterion], len(rows)).scores[criterion][:-1]
    scores = scores[scores.isfinite()].float()
    if not len(scores):
        raise ValueError(
            f"num_loops={model.config.num_loops}: {criterion} has no score before the last loop; pass 3 loops or more"
        )
    return scores.quantile(0.7 if CRITERIA[criterion].exits_above else 0.3).item()


@torch.no_grad()
def spread_gate(model, ids: torch.Tensor):
    """Set the mean of gate logits to -1 and their deviation to 1. Those of a random gate are so far from 0 that all
    tokens exit at the same loop."""
    states = torch.stack(model(ids, output_loop_hidden_states=True, use_cache=False).loop_hidden_states)
    logits = model.gate(states.flatten(0, 1)).float()
    model.exit_gate.weight /= logits.std()
    model.exit_gate.bias.copy_((model.exit_gate.bias - logits.mean()) / logits.std() - 1)


def measure_exits(model, prompt, criterion: str, args) -> dict:
    """Measure the gain of exits while all rows are running, and until the last row has its tokens.

    The cost of checks without any exit is given twice: over the cost predicted from FLOPs, and without their time.
    """
    depth = model.config.num_loops
    settings = greedy(prompt)

    def decode(**how) -> Decoding:
        if "exit_criterion" in how:
            how["exit_interval"] = args.exit_interval
        how = {"max_new_tokens": args.new_tokens, **settings, **how}
        return timed(model, prompt, return_dict_in_generate=True, cache=copy.deepcopy(prefilled), **how)

    threshold = passing_threshold(model, prompt, criterion)
    rule = ExitRule(criterion, threshold, interval=args.exit_interval).checked(model.config)

    prefilled = model.generate(prompt, max_new_tokens=1, return_dict_in_generate=True, **settings).cache
    prefilled.crop(-1)
    exiting = {"exit_criterion": criterion, "exit_threshold": threshold}
    decode(max_new_tokens=4), decode(max_new_tokens=4, **exiting)  # warm-up
    turns = []
    for _ in range(args.repeats):
        plain, exits = decode(), decode(**exiting)
        never_exits = decode(exit_criterion=criterion, exit_threshold=never(criterion))
        if (never_exits.loops < depth).any():
            raise AssertionError(f"{criterion} exits at a threshold of {never(criterion)}, which it never reaches")
        at_work = plain.seconds_per_tick / exits.seconds_per_tick  # loops in the time of one loop at full depth
        to_the_end, never_costs = plain.seconds / exits.seconds, never_exits.seconds / plain.seconds
        full_cost = cost(model, None, plain.loops)
        turns.append(
            {
                "over_prediction": at_work
                * cost_per_loop(model, rule, exits.loops)
                / cost_per_loop(model, None, plain.loops),
                "over_full_by_mean_loops": at_work,
                "to_the_end_over_prediction": to_the_end * cost(model, rule, exits.loops) / full_cost,
                "to_the_end_over_full_by_mean_loops": to_the_end * exits.loops.sum() / plain.loops.sum(),
                "never_over_prediction": never_costs * full_cost / cost(model, rule, never_exits.loops),
                "never_but_for_checks": (never_exits.seconds - never_exits.check_seconds) / plain.seconds,
            }
        )
    loops = exits.loops.float()
    return {
        "threshold": threshold,
        "mean_loops": loops.mean().item(),
        # rows end at different times, and the last ticks run few rows
        "rows_at_work": (loops.sum(1).mean() / loops.sum(1).max()).item(),
        **{name: statistics.median(float(turn[name]) for turn in turns) for name in turns[0]},
    }


class Decoding(NamedTuple):
    seconds: float  # from the first loop after the pass of the prompt
    check_seconds: float  # part of `seconds` in checks after which no token exited
    seconds_per_tick: float  # of one loop of the whole batch, while no row has ended
    loops: torch.Tensor  # of every token but the first, which comes from the pass of the prompt


def timed(model, prompt, **how) -> Decoding:
    """Time a generation without the pass of the prompt, in which `how["cache"]` is copied."""
    with watched_loops(model, len(prompt)) as begun, watched_checks() as checks:
        result = model.generate(prompt, **how)
        end = now()
    (first, _), (last, _) = begun[0], begun[-1]
    loops = sum(number for _, number in begun[:-1])
    return Decoding(end - first, sum(checks), (last - first) / loops if loops else math.nan, result.token_loops[:, 1:])


@contextmanager
def watched_loops(model, num_rows: int):
    """Yield a list of (time, number of loops that begin), for loops of all rows after the pass of the prompt."""
    begun: list[tuple[float, int]] = []
    if not can_have_graphs(model, is_int8=False):  # else hooks would prevent graphs
        passes = []

        def begin_of_pass(table, arguments):
            passes.append(1)

        def begin_of_loop(block, arguments):
            if len(passes) > 1 and arguments[0].shape[:2] == (num_rows, 1):
                begun.append((now(), 1))

        trunk = model.model
        watching = [
            trunk.embed_tokens.register_forward_pre_hook(begin_of_pass),
            trunk.core[0].register_forward_pre_hook(begin_of_loop),
        ]
        with hooks(*watching):
            yield begun
        return

    def watched_loop(tokens, loops, state):
        if len(loops) == num_rows:
            begun.append((now(), 1))
        return run_loop(tokens, loops, state)

    def watched_token(engine, rows, depth):
        if len(rows) == num_rows:
            begun.append((now(), depth))
        return next_logits(engine, rows, depth)

    run_loop, next_logits = Tokens.run_loop, graph_decoding.next_logits
    with patch.object(Tokens, "run_loop", watched_loop), patch.object(graph_decoding, "next_logits", watched_token):
        yield begun


@contextmanager
def watched_checks():
    """Yield a list with the seconds of each check after which no token exits."""
    seconds, emit = [], continuous.emit_exiting_rows

    def watched(*arguments):
        start = now()
        emitted = emit(*arguments)
        if not emitted:
            seconds.append(now() - start)
        return emitted

    with patch.object(continuous, "emit_exiting_rows", watched):
        yield seconds


def cost(model, rule, loops: torch.Tensor) -> float:
    """Count multiplications with weights: of loops, of checks that need the head, and of the readout of each token."""
    core, head = count_in_a_loop(model.model), model.lm_head.weight.numel()
    readouts = 1.0 if rule is None else mean_readouts(rule, loops, model.config.num_loops)
    return float(loops.sum()) * core + loops.numel() * readouts * head


def cost_per_loop(model, rule, loops: torch.Tensor) -> float:
    return cost(model, rule, loops) / float(loops.sum())


def trained_model(args):
    if args.model is None:
        raise SystemExit("--model DIR: a trained model is needed, e.g. runs/demo of `make demo`; others tell nothing")
    try:
        folder, config = open_config(args.model)
        tokenizer = open_tokenizer(folder, None, config)
    except ValueError as error:
        raise SystemExit(f"--model: {error}") from None
    dtype = getattr(torch, args.dtype)
    if args.widen == 1:
        return LoopedForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval(), tokenizer
    model = widened(LoopedForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), args.widen)
    for parameter in model.parameters():  # not buffers: rotary frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    return model.to(args.device), tokenizer


def speculation(args) -> dict:
    """Compare greedy self-speculation with full depth on a trained model, per number of rows; tokens stay the same."""
    model, tokenizer = trained_model(args)
    model.generation_config.eos_token_id = None  # all rows take the same number of tokens
    ids = tokens_of_file(tokenizer, args, max(args.batch_sizes), args.prompt).to(args.device)
    return {f"rows_{rows}": measure_drafts(model, ids[:rows], args) for rows in args.batch_sizes}


def measure_drafts(model, ids: torch.Tensor, args) -> dict:
    """Measure each value of draft_loops, and the milliseconds of a pass by its number of tokens."""
    settings = {**greedy(ids), "max_new_tokens": args.new_tokens, "return_dict_in_generate": True}
    drafts = {f"draft_loops_{loops}": loops if loops == "auto" else int(loops) for loops in args.draft_loops}

    def drafting(loops):
        return lambda: model.generate(ids, draft_loops=loops, draft_tokens=args.draft_tokens, **settings)

    calls = {"plain": lambda: model.generate(ids, **settings), **{name: drafting(k) for name, k in drafts.items()}}
    with watched_passes() as passes:
        seconds, results = least_seconds(calls, args.repeats)
    plain = results["plain"].sequences
    report = {
        name: {
            "speedup": seconds["plain"] / seconds[name],
            "acceptance_rate": results[name].acceptance_rate,
            "passes_per_token": results[name].passes_per_token,
            "stopped_drafting": results[name].stopped_drafting,
            "same_tokens": torch.equal(results[name].sequences, plain),
        }
        for name in drafts
    }
    report["different_tokens"] = len(set(plain[:, ids.shape[1] :].flatten().tolist()))
    report["plain_milliseconds_per_loop"] = 1e3 * seconds["plain"] / args.new_tokens / model.config.num_loops
    report["milliseconds_of_a_pass"] = {tokens: 1e3 * least for tokens, least in sorted(passes.items())}
    return report


@contextmanager
def watched_passes():
    """Yield {number of tokens: least seconds of a pass of the pipeline, readouts included}."""
    least, add = {}, PassSeconds.add

    def watched(self, tokens: int, seconds: float):
        least[tokens] = min(least.get(tokens, seconds), seconds)
        add(self, tokens, seconds)

    with patch.object(PassSeconds, "add", watched):
        yield least


def tokens_of_file(tokenizer, args, rows: int, length: int) -> torch.Tensor:
    """Return [rows, length] tokens from the start of --text-file."""
    ids = tokenizer(Path(args.text_file).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    if len(ids) < rows * length:
        raise SystemExit(
            f"--text-file {args.text_file} has {len(ids)} tokens, but {rows} rows of {length} need {rows * length}: "
            "take a longer text, or fewer or shorter rows"
        )
    return ids[: rows * length].view(rows, length)


@torch.no_grad()
def sharing(args) -> dict:
    """Measure, for each policy of cache_sharing, the bytes of the cache and the loss of text fed token by token.

    The first half of the text is a prompt, fed in one pass; the loss is that of the second half.
    """
    model, tokenizer = trained_model(args)
    ids = tokens_of_file(tokenizer, args, args.batch_size, args.length + 1).to(args.device)
    report, half = {}, args.length // 2
    for policy in ("none", *ONE_SLOT, *(f"cyclic-{loops}" for loops in range(1, model.config.num_loops))):
        cache = LoopedCache(model.config, policy)
        model(ids[:, :half], cache=cache, use_cache=True, logits_to_keep=1)
        losses = []
        for place in range(half, args.length):
            logits = model(ids[:, place : place + 1], cache=cache, use_cache=True).logits[:, -1]
            losses.append(torch.nn.functional.cross_entropy(logits.float(), ids[:, place + 1]))
        report[policy] = {
            "loss": torch.stack(losses).mean().item(),
            "cache_bytes": sum(part.numel() * part.element_size() for slot in cache for part in slot[:2]),
        }
    return report
