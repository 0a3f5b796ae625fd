"""What benchmarks share: models of a size, functions timed in turns, and the line that says what was measured."""

import json
import math
import platform
import shlex
import subprocess
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_looped import LoopedConfig, LoopedForCausalLM


def add_arguments(parser, layers: int, loops: int, batch: int):
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ff", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=layers, help="unique layers")
    parser.add_argument("--loops", type=int, default=loops)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--repeats", type=int, default=5)


def looped_config(args, **fields) -> LoopedConfig:
    return LoopedConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=args.ff,
        num_attention_heads=args.width // 64,
        num_core_layers=args.layers,
        num_loops=args.loops,
        max_position_embeddings=4096,
        eos_token_id=None,
        **fields,
    )


def build(args, config_or_class):
    model = (LlamaForCausalLM if isinstance(config_or_class, LlamaConfig) else LoopedForCausalLM)(config_or_class)
    return model.to(device=args.device, dtype=getattr(torch, args.dtype))


def tokens(args, batch=None, length=None):
    return torch.randint(3, args.vocab, (batch or args.batch, length or args.length), device=args.device)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def least_seconds(functions: dict, repeats: int, warm_ups=None) -> tuple[dict, dict]:
    """Least seconds of functions that take turns, and what they returned last. warm_ups: called before, untimed; by
    default the functions themselves."""
    for function in functions.values() if warm_ups is None else warm_ups:
        function()
    seconds, results = dict.fromkeys(functions, math.inf), {}
    for _ in range(repeats):
        for name, function in functions.items():
            start = now()
            results[name] = function()
            seconds[name] = min(seconds[name], now() - start)
    return seconds, results


def in_turns(first, second, repeats: int) -> tuple[float, float]:
    """Least seconds of two functions, called alternately after one warm-up each."""
    seconds, _ = least_seconds({"first": first, "second": second}, repeats)
    return seconds["first"], seconds["second"]


def commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def rounded(value, digits: int):
    if isinstance(value, dict):
        return {key: rounded(part, digits) for key, part in value.items()}
    return round(value, digits) if isinstance(value, float) else value


def print_line(name: str, result: dict, program: str, dtype: str, digits: int = 4):
    line = {
        "benchmark": name,
        **rounded(result, digits),
        "command": f"{program} {shlex.join(sys.argv[1:])}".strip(),
        "commit": commit(),
        "hardware": processor(),
        "dtype": dtype,
    }
    print(json.dumps(line), flush=True)
