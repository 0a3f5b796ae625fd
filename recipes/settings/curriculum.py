"""A mean depth, and loops with gradients, that grow over the first steps of a run."""

import math


def curriculum(
    shape: str, target: str, ramp_steps: int, step: int, mean: float, backprop_loops: int | None
) -> tuple[float, int | None]:
    """The mean depth and the number of loops with gradients at `step`, on the way to `mean` and `backprop_loops`.

    A depth is made of t loops without gradients and s with (Parcae). Up to `ramp_steps` those that `target` names,
    t ("forward"), s ("backward") or both, are ceil(f t) and max(1, ceil(f s)), where with p = step / ramp_steps
    f = p ("linear") or f = 1 - sqrt(1 - p) ("sqrt"). With "total" the mean is max(1, ceil(f (t + s))), and as many
    loops of it as there are up to s have gradients (retrofitted recurrence).
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
