"""Scoring all depths from one pass, against lm-eval's own model in a run for each: `python -m eval.harness_benchmark`.

Multiple-choice requests, contexts of 64 to 256 tokens and continuations of 2 to 16. Prints one JSON line of ratios:

over_stock          one pass for all depths / lm-eval's `hf` at full depth, which runs the head at every position
over_one_depth      one pass for all depths / `looped` at full depth alone
over_runs           one pass for all depths / lm-eval's `hf` at every depth, one after the other
"""

import argparse
import json
import random
import shlex
import sys

import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from .benchmark import build, commit, in_turns, looped_config, processor
from .looped_lm import LoopedLM


def requests_of(args) -> list[tuple[str, list[int], list[int]]]:
    generator = random.Random(0)
    return [
        (
            str(number),
            generator.choices(range(3, args.vocab), k=generator.randint(64, 256)),
            generator.choices(range(3, args.vocab), k=generator.randint(2, 16)),
        )
        for number in range(args.requests)
    ]


def measure(args) -> dict[str, float]:
    model = build(args, looped_config(args)).eval()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>")), pad_token="<pad>"
    )
    requests, setup = requests_of(args), {"tokenizer": tokenizer, "batch_size": args.batch}
    stock = HFLM(model, **setup)
    every, deepest = (LoopedLM(model, num_loops=loops, **setup) for loops in (f"1..{args.loops}", args.loops))

    def stock_at(depth: int):
        model.config.num_loops = depth
        stock._loglikelihood_tokens(requests, disable_tqdm=True)

    def one_pass():
        every.score_tokens(requests, disable_tqdm=True)

    of_all, of_stock = in_turns(one_pass, lambda: stock_at(args.loops), args.repeats)
    again, alone = in_turns(one_pass, lambda: deepest.score_tokens(requests, disable_tqdm=True), args.repeats)
    last, runs = in_turns(one_pass, lambda: [stock_at(k) for k in range(1, args.loops + 1)], args.repeats)
    return {"over_stock": of_all / of_stock, "over_one_depth": again / alone, "over_runs": last / runs}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ff", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=2, help="unique layers")
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    line = {
        "benchmark": "harness",
        **{name: round(ratio, 3) for name, ratio in measure(args).items()},
        "command": f"python -m eval.harness_benchmark {shlex.join(sys.argv[1:])}".strip(),
        "commit": commit(),
        "hardware": processor(),
        "dtype": args.dtype,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
