"""Speed and memory as ratios, measured in one run: `looped benchmark NAME [options]`.

train    tokens/s of a training step (forward, backward, AdamW) over transformers' Llama of the same unrolled depth
memory   peak memory of a per-loop training step over a terminal one
depths   time of one pass that gives the logits of every depth over one full-depth pass, beside what FLOPs predict
decode   llama, bandwidth and exits; with a --model also speculation and sharing
llama    tokens/s of cached greedy decoding over transformers' Llama of the same unrolled depth
bandwidth   tokens/s of greedy decoding of one row over both limits of bandwidth, of memory and of the cache
graphs   speed of decoding on a GPU whose passes are CUDA graphs, over launching kernel by kernel
exits    speed of decoding with early exit over what the FLOPs of the loops and checks that ran predict
speculation   speed of self-speculation over full depth, on the trained model --model
sharing  bytes of the cache and loss of decoding under each cache_sharing, on the trained model --model
cache    bytes of the cache and time per token of decoding with `cache_dtype="int8"`, over those with the model's dtype
serving  throughput and latency of requests that share passes, with early exit over full depth
long_prompt   longest pause of rows that decode while a prompt of another request begins, over that if it is not cut
pages    time of a pass of many requests by pages under flex attention, over that by attention request by request
products  time of products of few rows, attention, decoding and training by the ways of cpu.py, over that by torch's
harness  time to score multiple-choice requests at all depths over lm-eval's own model at one, and at each in turn

Each but `decode` prints one JSON line with the command, commit and hardware. The two sides of a ratio are timed in
turns, and the ratio is that of their shortest times, which other load disturbs least. For `exits` it is
the median over the turns, and is given twice: while all rows are at work, and to the end, where the last rows run by
themselves.
"""

import argparse
import os

from looped_recipes.common.command_line import Parser


RENAMED = {"--loops": "--num-loops", "--batch": "--batch-size", "--batches": "--batch-sizes"}
BENCHMARKS = ["train", "memory", "depths", "decode", "llama", "bandwidth", "exits", "speculation", "sharing"]
BENCHMARKS += ["graphs", "cache", "serving", "long_prompt", "pages", "products", "harness", "_memory"]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("looped benchmark", __doc__, RENAMED)
    parser.add_argument("which", choices=BENCHMARKS, metavar="NAME")
    parser.add_device()
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ff", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=4, help="unique layers")
    parser.add_argument("--num-loops", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--continuation", type=int, default=32, help="positions whose logits loglikelihood needs")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 8], help="graphs, exits, speculation, cache, products: rows"
    )
    parser.add_argument("--criteria", nargs="+", default=["logit_margin", "latent_diff", "gate"], help="exits")
    parser.add_argument("--exit-interval", type=int, default=1, help="exits: loops between checks")
    parser.add_argument("--model", help="speculation, sharing: folder of a trained model")
    text = (
        "speculation, sharing: the model, this many times as wide, which computes the same at the cost of a large one"
    )
    parser.add_argument("--widen", type=int, default=1, metavar="TIMES", help=text)
    text = "speculation: prompts, sharing: what is scored; by default Python's os.py"
    parser.add_argument("--text-file", default=os.__file__, help=text)
    parser.add_argument("--draft-loops", nargs="+", default=["auto", "1", "2"], help="speculation")
    parser.add_argument("--draft-tokens", type=int, help="speculation: the most in flight")
    parser.add_argument("--requests", type=int, default=32, help="harness, serving")
    parser.add_argument("--vllm", metavar="PYTHON", help="serving: of an environment with vLLM, which serves it too")
    parser.add_argument("--loss", default="terminal", help=argparse.SUPPRESS)
    parser.add_argument("--with-logits", action="store_true", help="memory: return the last logits as well")
    return parser.parse_args(arguments)
