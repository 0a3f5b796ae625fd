"""Functions timed in turns, so that other load on the machine affects all equally."""

import math
import time

import torch

from .progress import progress


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def least_seconds(functions: dict, repeats: int, warm_ups=None) -> tuple[dict, dict]:
    """Call functions in turns; return the least seconds and the last result of each. warm_ups: functions that are
    called before without timing; by default the functions themselves."""
    warm_ups = list(functions.values() if warm_ups is None else warm_ups)
    seconds, results = dict.fromkeys(functions, math.inf), {}
    with progress(None, "timing", total=len(warm_ups) + repeats * len(functions)) as bar:
        for function in warm_ups:
            function()
            bar.update()
        for name, function in list(functions.items()) * repeats:
            start = now()
            results[name] = function()
            seconds[name] = min(seconds[name], now() - start)
            bar.update()
    return seconds, results


def in_turns(first, second, repeats: int) -> tuple[float, float]:
    """Return the least seconds of two functions, called alternately after one warm-up each."""
    seconds, _ = least_seconds({"first": first, "second": second}, repeats)
    return seconds["first"], seconds["second"]
