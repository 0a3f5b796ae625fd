"""What each way of cpu.py to multiply few rows with weights takes on this processor, over torch's layer.

Called by `looped benchmark products`. As in decoding, weights are not in the fastest cache: many layers take turns.
"""

import torch
from torch import nn

from looped_eval.common.timing import least_seconds
from modeling_looped.cpu import multiply_weight_with_rows, multiply_with_ordered, order


BYTES_OF_WEIGHTS, MOST_LAYERS = 2**25, 64


@torch.no_grad()
def products(args) -> dict:
    """Per shape and number of rows."""
    shapes = {(args.width, args.width), (args.width, args.ff), (args.ff, args.width), (args.width, args.vocab)}
    return {f"{inner}_to_{outer}": of_shape(inner, outer, args) for inner, outer in sorted(shapes)}


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
            "weights_left": lambda x=x: [multiply_weight_with_rows(layer, x) for layer in layers],
            "weights_ordered": lambda x=x: [multiply_with_ordered(weight, None, x) for weight in ordered],
        }
        seconds, _ = least_seconds(ways, args.repeats)
        over_torch = {name: seconds[name] / seconds["torch"] for name in ways if name != "torch"}
        report[f"rows_{rows}"] = {"torch_microseconds": 1e6 * seconds["torch"] / count, **over_torch}
    return report
