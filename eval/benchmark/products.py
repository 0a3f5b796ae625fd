"""What each way of cpu.py takes on this processor, over torch's, and all of them in decoding.

Called by `looped benchmark products`. As in decoding, weights are not in the fastest cache: many layers take turns.
"""

import torch
from torch import nn

from looped_eval.common.timing import in_turns, least_seconds
from modeling_looped.cpu import fast_paths, multiply_with_ordered, order
from modeling_looped.row_view import attend_to_all

from .models import build, greedy, looped_config, tokens


BYTES_OF_WEIGHTS, MOST_LAYERS = 2**25, 64


def products(args) -> dict:
    """Measure products per shape and number of rows, then attention and decoding."""
    shapes = {(args.width, args.width), (args.width, args.ff), (args.ff, args.width), (args.width, args.vocab)}
    report: dict = {f"{inner}_to_{outer}": of_shape(inner, outer, args) for inner, outer in sorted(shapes)}
    report["single_query_over_torch"] = {f"rows_{rows}": of_single_query(rows, args) for rows in args.batch_sizes}
    model = build(args, looped_config(args))
    report["decoding_over_torch"] = {f"rows_{rows}": of_decoding(model, rows, args) for rows in args.batch_sizes}
    return report


def over_torch(function, args) -> float:
    def by_torch():
        with fast_paths(False):
            function()

    fast, usual = in_turns(function, by_torch, args.repeats)
    return fast / usual


def of_decoding(model, rows: int, args) -> float:
    ids = tokens(args, batch=rows, length=args.prompt)
    settings = {"max_new_tokens": args.new_tokens, **greedy(ids)}
    return over_torch(lambda: model.eval().generate(ids, **settings), args)


def of_single_query(rows: int, args) -> float:
    """Measure the attention of one query per row to `--length` tokens."""
    shape, dtype = (rows, args.width // 64, args.length, 64), getattr(torch, args.dtype)
    query, keys, values = (torch.randn(shape, dtype=dtype) for _ in range(3))
    return over_torch(lambda: attend_to_all(query[:, :, :1], keys, values, None, 0.125), args)


@torch.no_grad()
def of_shape(inner: int, outer: int, args) -> dict:
    dtype = getattr(torch, args.dtype)
    count = min(MOST_LAYERS, max(1, BYTES_OF_WEIGHTS // (inner * outer * dtype.itemsize)))
    layers = [nn.Linear(inner, outer, bias=False, dtype=dtype) for _ in range(count)]
    ordered = [order(layer.weight) for layer in layers]
    report = {}
    for rows in args.batch_sizes:
        x = torch.randn(rows, inner, dtype=dtype)
        ways = {
            "torch": lambda x=x: [layer(x) for layer in layers],
            "weights_ordered": lambda x=x: [multiply_with_ordered(weight, None, x) for weight in ordered],
        }
        seconds, _ = least_seconds(ways, args.repeats)
        over_torch = {name: seconds[name] / seconds["torch"] for name in ways if name != "torch"}
        report[f"rows_{rows}"] = {"torch_microseconds": 1e6 * seconds["torch"] / count, **over_torch}
    return report
