"""Speed and memory as ratios, measured in one run: `python -m eval.benchmark NAME [options]`.

train    tokens/s of a training step (forward, backward, AdamW) over transformers' Llama of the same unrolled depth
memory   peak memory of a per-loop training step over a terminal one
depths   time of one pass that gives the logits of every depth over one full-depth pass, beside what FLOPs predict
decode   all of the following, the last two if there is a --model
llama    tokens/s of cached greedy decoding over transformers' Llama of the same unrolled depth
exits    speed of decoding with early exit over what the FLOPs of the loops and checks that ran predict
speculation   speed of self-speculation over full depth, on the trained model --model
sharing  bytes of the cache and loss of decoding under each cache_sharing, on the trained model --model
serving  throughput and latency of requests that share passes, with early exit over full depth
harness  time to score multiple-choice requests at all depths over lm-eval's own model at one, and at each in turn

Each but `decode` prints one JSON line with the command, commit and hardware. The two sides of a ratio are timed in
turns, and the ratio is that of their least times, which what else the machine does disturbs least. For `exits` it is
the median over the turns, and is given twice: while all rows are at work, and to the end, where the last rows run by
themselves.
"""

import argparse
import gc
import json
import os
import subprocess
import sys

import torch
from transformers import LlamaConfig

from looped_eval.common.timing import in_turns
from looped_recipes.common.command_line import Parser
from looped_recipes.common.hardware import measured_rate

from .decoding import exits, sharing, speculation
from .harness import harness
from .models import RENAMED, add_arguments, build, looped_config, print_line, tokens
from .serving import serving


def unrolled_llama(args):
    return build(
        args,
        LlamaConfig(
            vocab_size=args.vocab,
            hidden_size=args.width,
            intermediate_size=args.ff,
            num_attention_heads=args.width // 64,
            num_hidden_layers=args.layers * args.num_loops,
            max_position_embeddings=4096,
            eos_token_id=None,
        ),
    )


def training_step(model, batch, **kwargs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        model(input_ids=batch, labels=batch, use_cache=False, **kwargs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


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
    settings = {
        "max_new_tokens": args.new_tokens,
        "min_new_tokens": args.new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    settings["attention_mask"] = torch.ones_like(prompt)
    ours, theirs = in_turns(
        lambda: looped.generate(prompt, **settings), lambda: llama.generate(prompt, **settings), args.repeats
    )
    return {"speedup_over_llama": theirs / ours}


def memory(args) -> dict:
    """Peak of the process (or the GPU) above the model itself, each in a fresh process."""
    peaks = {}
    for loss in ("terminal", "per_loop"):
        shape = [part for name in SHAPE for part in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
        logits = ["--with-logits"] * args.with_logits
        command = [sys.executable, "-m", "looped_eval.benchmark", "_memory", *shape, *logits, "--loss", loss]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[loss] = json.loads(result.stdout.splitlines()[-1])["peak"]
    return {"per_loop_over_terminal": peaks["per_loop"] / peaks["terminal"], **peaks}


def measure_memory(args) -> dict:
    model = build(args, looped_config(args, loop_loss=args.loss)).train()
    batch = tokens(args)
    step = training_step(model, batch, output_logits=args.with_logits)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    before = peak_bytes()
    step()
    return {"peak": peak_bytes() - (0 if torch.cuda.is_available() else before)}


def peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def depths(args) -> dict:
    model = build(args, looped_config(args)).eval()
    batch = tokens(args)
    settings = {"use_cache": False}

    @torch.no_grad()
    def one():
        model(batch, **settings)

    @torch.no_grad()
    def every():
        model(batch, output_loop_logits=True, output_logits=False, **settings)

    keep = torch.arange(args.length - args.continuation, args.length, device=args.device)

    @torch.no_grad()
    def every_at_continuation():
        model(batch, output_loop_logits=True, output_logits=False, logits_to_keep=keep, **settings)

    layer = 4 * args.width**2 + 3 * args.width * args.ff + args.width * args.length  # attention at half its square
    trunk, head = args.layers * args.num_loops * layer, args.vocab * args.width
    all_seconds, one_seconds = in_turns(every, one, args.repeats)
    some_seconds, full_seconds = in_turns(every_at_continuation, one, args.repeats)
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
    "exits": exits,
    "speculation": speculation,
    "sharing": sharing,
    "serving": serving,
    "harness": harness,
    "_memory": measure_memory,
}
SHAPE = ("device", "dtype", "width", "ff", "layers", "num_loops", "vocab", "batch_size", "length")
OF_DECODING = ("llama", "exits")
OF_TRAINED_MODELS = ("speculation", "sharing")


def main(arguments: list[str]):
    parser = Parser("eval.benchmark", __doc__, {**RENAMED, "--batches": "--batch-sizes"})
    parser.add_argument("which", choices=[*BENCHMARKS, "decode"])
    add_arguments(parser, layers=4, loops=4, batch=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--continuation", type=int, default=32, help="positions whose logits loglikelihood needs")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], help="exits, speculation: rows")
    parser.add_argument("--criteria", nargs="+", default=["logit_margin", "latent_diff", "gate"], help="exits")
    parser.add_argument("--exit-interval", type=int, default=1, help="exits: loops between checks")
    parser.add_argument("--model", help="speculation, sharing: folder of a trained model")
    text = "speculation: prompts, sharing: what is scored; by default Python's os.py"
    parser.add_argument("--text-file", default=os.__file__, help=text)
    parser.add_argument("--draft-loops", nargs="+", default=["auto", "1", "2"], help="speculation")
    parser.add_argument("--draft-tokens", type=int, help="speculation: the most in flight")
    parser.add_argument("--requests", type=int, default=32, help="harness, serving")
    parser.add_argument("--vllm", metavar="PYTHON", help="serving: of an environment with vLLM, which serves it too")
    parser.add_argument("--loss", default="terminal", help=argparse.SUPPRESS)
    parser.add_argument("--with-logits", action="store_true", help="memory: return the last logits as well")
    args = parser.parse_args(arguments)
    names = [args.which]
    if args.which == "decode":
        names = [*OF_DECODING, *(OF_TRAINED_MODELS if args.model else ())]
    for name in names:
        torch.manual_seed(0)
        print_line(name, BENCHMARKS[name](args), args, 3 if name == "harness" else 4)
