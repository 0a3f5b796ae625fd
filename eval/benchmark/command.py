"""Speed and memory as ratios, measured in one run."""

import gc
import json
import subprocess
import sys
from functools import partial

import torch

from looped_eval.common.timing import in_turns
from looped_recipes.common.command_line import check_counts
from looped_recipes.common.errors import CommandError
from looped_recipes.common.hardware import measured_rate

from .bandwidth import bandwidth
from .decoding import exits, sharing, speculation
from .graphs import graphs
from .harness import harness
from .kept_tokens import cache
from .long_prompt import long_prompt
from .models import build, greedy, looped_config, print_line, tokens, training_step, unrolled_llama
from .options import parse
from .pages import pages
from .products import products
from .serving import serving


def train(args) -> dict:
    batch = tokens(args)
    looped, llama = build(args, looped_config(args)).train(), unrolled_llama(args).train()
    ours, theirs = in_turns(
        training_step(looped, batch, output_logits=False), training_step(llama, batch), args.repeats
    )
    drop_in, _ = in_turns(training_step(looped, batch), lambda: None, args.repeats)
    layer = 4 * args.width**2 + 3 * args.width * args.ff
    flops = 6 * batch.numel() * (args.layers * args.num_loops * layer + args.vocab * args.width)
    flops += 12 * args.layers * args.num_loops * args.width * args.length * batch.numel() / 2  # causal attention
    # without bf16 units, a CPU takes seconds for larger products
    rate = measured_rate(args.device, getattr(torch, args.dtype), 1024 if args.device == "cpu" else 2048)
    return {
        "speedup_over_llama": theirs / ours,
        "speedup_with_logits_returned": theirs / drop_in,
        "utilisation_of_matmul_rate": flops / ours / rate,
        "llama_utilisation": flops / theirs / rate,
    }


def llama(args) -> dict:
    prompt = tokens(args, length=args.prompt)
    looped, llama = build(args, looped_config(args)).eval(), unrolled_llama(args).eval()
    settings = {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens, **greedy(prompt)}
    ours, theirs = in_turns(
        lambda: looped.generate(prompt, **settings), lambda: llama.generate(prompt, **settings), args.repeats
    )
    return {"speedup_over_llama": theirs / ours}


def memory(args) -> dict:
    """Measure the peak memory of a training step beyond that of the model; each loss runs in a fresh process."""
    peaks = {}
    for loss in ("terminal", "per_loop"):
        shape = [part for name in SHAPE for part in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
        logits = ["--with-logits"] * args.with_logits
        command = [sys.executable, "-m", "looped_eval.benchmark", "_memory", *shape, *logits, "--loss", loss]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            said = result.stderr.strip().splitlines() or ["it said nothing"]
            raise CommandError(f"memory of a {loss} loss could not be measured: {said[-1]}")
        peaks[loss] = json.loads(result.stdout.splitlines()[-1])["peak"]
    return {"per_loop_over_terminal": peaks["per_loop"] / peaks["terminal"], **peaks}


def measure_memory(args) -> dict:
    model = build(args, looped_config(args, loop_loss=args.loss)).train()
    batch = tokens(args)
    step = training_step(model, batch, output_logits=args.with_logits)
    gc.collect()
    on_gpu = args.device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = peak_bytes(on_gpu)
    step()
    return {"peak": peak_bytes(on_gpu) - before}


def peak_bytes(on_gpu: bool) -> int:
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def depths(args) -> dict:
    model, batch = build(args, looped_config(args)).eval(), tokens(args)

    @torch.no_grad()
    def one(**asked):  # returns nothing, so that logits do not stay in memory during the next pass
        model(batch, use_cache=False, **asked)

    every = partial(one, output_loop_logits=True, output_logits=False)
    keep = torch.arange(args.length - args.continuation, args.length, device=args.device)
    layer = 4 * args.width**2 + 3 * args.width * args.ff + args.width * args.length  # attention over half of all pairs
    trunk, head = args.layers * args.num_loops * layer, args.vocab * args.width
    all_seconds, one_seconds = in_turns(every, one, args.repeats)
    some_seconds, full_seconds = in_turns(partial(every, logits_to_keep=keep), one, args.repeats)
    ratio, predicted = all_seconds / one_seconds, (trunk + args.num_loops * head) / (trunk + head)
    return {
        "all_depths_over_one": ratio,
        "predicted_by_flops": predicted,
        "over_prediction": ratio / predicted,
        "all_depths_at_continuation_over_one": some_seconds / full_seconds,
    }


BENCHMARKS = {
    "train": train,
    "memory": memory,
    "depths": depths,
    "llama": llama,
    "bandwidth": bandwidth,
    "graphs": graphs,
    "exits": exits,
    "speculation": speculation,
    "sharing": sharing,
    "cache": cache,
    "serving": serving,
    "long_prompt": long_prompt,
    "pages": pages,
    "products": products,
    "harness": harness,
    "_memory": measure_memory,
}
IN_WORDS = {
    "train": "A training step is {speedup_over_llama:.2f} times as fast as that of transformers' Llama.",
    "llama": "Decoding is {speedup_over_llama:.2f} times as fast as with transformers' Llama.",
    "memory": "A loss at every loop takes {per_loop_over_terminal:.2f} times the memory of one at the last.",
    "long_prompt": "For a long prompt, rows that decode wait {longest_pause_over_whole:.2f} times as long as where it "
    "is not cut; its first token comes after {first_token_over_whole:.2f} times as long.",
    "depths": "The logits of every depth take {all_depths_over_one:.2f} times as long as those of the last, and "
    "{predicted_by_flops:.2f} times as many operations.",
}
COUNTS = "width ff layers num_loops vocab batch_size length repeats prompt new_tokens continuation requests widen"
SHAPE = ("device", "dtype", "width", "ff", "layers", "num_loops", "vocab", "batch_size", "length")
OF_DECODING = ("llama", "bandwidth", "exits")
OF_TRAINED_MODELS = ("speculation", "sharing")


def check(args):
    check_counts(args, COUNTS.split())
    if min(args.batch_sizes) < 1:
        raise ValueError(f"--batch-sizes must be at least 1 each, got {args.batch_sizes}")
    if args.which in ("decode", "bandwidth", "exits") and args.new_tokens < 2:
        raise ValueError("--new-tokens 1: the first is the prompt's, and is not timed: pass 2 or more")
    if args.which == "products" and args.device != "cpu":
        raise ValueError(f"products measures the ways of cpu.py, not --device {args.device}: pass --device cpu")
    if args.which == "depths" and args.continuation > args.length:
        raise ValueError(f"--continuation {args.continuation} must be at most --length {args.length}")


def main(arguments: list[str]):
    args = parse(arguments)
    check(args)
    names = [args.which]
    if args.which == "decode":
        names = [*OF_DECODING, *(OF_TRAINED_MODELS if args.model else ())]
    for name in names:
        torch.manual_seed(0)
        result = BENCHMARKS[name](args)
        print_line(name, result, args, 3 if name == "harness" else 4)
        if name in IN_WORDS:  # stdout has only lines of JSON
            print(IN_WORDS[name].format(**result), file=sys.stderr)
