"""Functions timed in turns, so that other load on the machine affects all equally."""

import math
import time

import torch


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
