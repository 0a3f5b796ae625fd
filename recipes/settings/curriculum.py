"""The growth of the mean depth, and of the loops with gradients, over the first steps of a run."""

import math


def curriculum(
    shape: str, target: str, ramp_steps: int, step: int, mean: float, backprop_loops: int | None
) -> tuple[float, int | None]:
    """Return the mean depth and the number of loops with gradients at `step`, which grow to `mean`, `backprop_loops`.

    A depth consists of t loops without gradients and s loops with gradients (Parcae). Before `ramp_steps`, `target`
    reduces t ("forward"), s ("backward") or both to ceil(f t) and max(1, ceil(f s)), where p = step / ramp_steps and
    f = p ("linear") or f = 1 - sqrt(1 - p) ("sqrt"). With "total" the mean is max(1, ceil(f (t + s))), and the last s
    of these loops, or all if they are fewer, have gradients (retrofitted recurrence).
    """
    if step >= ramp_steps:
        return mean, backprop_loops
    factor = RAMPS[shape](step / ramp_steps)
    with_gradients = mean if backprop_loops is None else min(backprop_loops, mean)
    if target == "total":
        mean = max(1, math.ceil(factor * mean))
        return mean, None if backprop_loops is None else min(backprop_loops, mean)
    without = mean - with_gradients
    if target in ("forward", "both"):
        without = math.ceil(factor * without)
    if target in ("backward", "both"):
        with_gradients = max(1, math.ceil(factor * with_gradients))
        backprop_loops = None if backprop_loops is None else with_gradients
    return without + with_gradients, backprop_loops


RAMPS = {"linear": lambda progress: progress, "sqrt": lambda progress: 1 - math.sqrt(1 - progress)}
