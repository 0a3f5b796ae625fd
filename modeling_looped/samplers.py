"""Depths and initial noise of a training step, drawn outside the model.

Everything here is a function of (seed, step, row), where rows are numbered over the whole step: a run that is resumed,
also with another number of processes, draws the same numbers.
"""

import hashlib
import math
from collections.abc import Sequence

import torch


LOGNORMAL_SIGMA = 0.5  # Huginn


def generator_of(*key, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator seeded with a hash of `key`, so that neighbouring steps and rows draw independently."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def poisson(rate: float, generator: torch.Generator) -> int:
    return int(torch.poisson(torch.tensor(float(rate), dtype=torch.float64), generator=generator))


def fixed_depth(mean: float, least: int, generator: torch.Generator) -> int:
    return _whole(mean, "fixed")


def poisson_depth(mean: float, least: int, generator: torch.Generator) -> int:
    """max(least, Poisson(mean)) (Parcae)"""
    return max(least, poisson(mean, generator))


def poisson_lognormal_depth(mean: float, least: int, generator: torch.Generator) -> int:
    """Poisson(rate) + 1 (Huginn), where rate ~ LogNormal(ln mean - sigma^2 / 2, sigma) has mean `mean`."""
    noise = torch.randn((), generator=generator, dtype=torch.float64).item()
    rate = mean * math.exp(LOGNORMAL_SIGMA * noise - LOGNORMAL_SIGMA**2 / 2)
    return poisson(rate, generator) + 1


def uniform_depth(mean: float, least: int, generator: torch.Generator) -> int:
    """Every depth from `least` to 2 mean - least with equal probability, so that the mean is `mean`."""
    most = _whole(2 * mean, "uniform") - least
    return int(torch.randint(least, most + 1, (), generator=generator))


SAMPLERS = {
    "fixed": fixed_depth,
    "poisson": poisson_depth,
    "poisson_lognormal": poisson_lognormal_depth,
    "uniform": uniform_depth,
}


def depths_of_step(
    sampler: str,
    mean: float,
    seed: int,
    step: int,
    rows: Sequence[int],
    per: str = "sequence",
    backprop_loops: int | None = None,
    split: str = "total",
    maximum: int | None = None,
    rows_per_draw: int | None = None,
) -> list[int]:
    """Return the depth T of each of `rows`, which are numbers of rows in the step.

    per "sequence": one draw per row. "micro_batch": rows 0 to m - 1 of the step share a draw, the next m rows another,
    with m = `rows_per_draw`, however many rows a forward pass or a process takes. "batch": one draw for all rows.

    split "total" (Huginn; Parcae, algorithm 4): T ~ sampler(mean), at least 1. The model's `backprop_loops` sets how
    many of these loops carry gradients. split "prefix" (Parcae, algorithm 3): n ~ sampler(mean - k), which may be 0,
    and T = n + k with k = `backprop_loops`, so that no row is shallower than k. "poisson_lognormal" counts one loop
    more than its rate, so that its mean is `mean` + 1, as published.
    """
    check_draw(sampler, mean, per, backprop_loops, split, maximum, rows_per_draw)
    draw = SAMPLERS[sampler]
    suffix = backprop_loops if split == "prefix" and backprop_loops is not None else 0
    least = 0 if split == "prefix" else 1
    owners = [DRAWS[per](int(row), rows_per_draw) for row in rows]
    depths = {}
    for owner in dict.fromkeys(owners):
        depth = draw(mean - suffix, least, generator_of("depth", seed, step, owner)) + suffix
        depths[owner] = depth if maximum is None else min(depth, maximum)
    return [depths[owner] for owner in owners]


# the key of a row's draw: rows with the same key have the same depth
DRAWS = {
    "sequence": lambda row, rows_per_draw: row,
    "micro_batch": lambda row, rows_per_draw: ("micro_batch", row // rows_per_draw),
    "batch": lambda row, rows_per_draw: "batch",
}


def truncated_normal_(tensor: torch.Tensor, std: float, generator: torch.Generator | None) -> torch.Tensor:
    """Fill with normal noise cut at three standard deviations: the inverse distribution function of uniform numbers.
    torch's trunc_normal_ redraws numbers that lie outside, for which the host would wait for a GPU in every step."""
    most = math.erf(3 / math.sqrt(2))
    tensor.uniform_(-most, most, generator=generator).erfinv_()
    return tensor.mul_(math.sqrt(2) * std).clamp_(-3 * std, 3 * std)


def initial_state_of_step(
    model, seed: int, step: int, rows: Sequence[int], length: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return h_0 of each of `rows`, [rows, length, hidden].

    It is drawn on `device`, because a CPU needs longer to draw the noise of a row than a GPU to process the row. So
    the noise is the same on all devices of one kind, but differs between kinds.
    """
    model = getattr(model, "module", model)  # inside DDP
    generators = (generator_of("initial_state", seed, step, int(row), device=device) for row in rows)
    return torch.cat([model.sample_initial_state(1, length, generator) for generator in generators])


def _whole(number: float, sampler: str) -> int:
    if number != round(number):
        raise ValueError(
            f"sampler {sampler!r} draws whole loops, but its mean leads to {number}: choose a mean that is a "
            f"multiple of {'0.5' if sampler == 'uniform' else '1'}"
        )
    return round(number)


def check_draw(sampler, mean, per, backprop_loops, split, maximum, rows_per_draw):
    for name, value, known in (
        ("sampler", sampler, tuple(SAMPLERS)),
        ("per", per, tuple(DRAWS)),
        ("split", split, ("total", "prefix")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if per == "micro_batch" and (rows_per_draw is None or rows_per_draw < 1):
        raise ValueError(f"per='micro_batch' needs rows_per_draw, how many rows share a depth; got {rows_per_draw}")
    if not 1 <= mean < math.inf:
        raise ValueError(f"the mean depth must be at least 1, got {mean}")
    if maximum is not None and maximum < 1:
        raise ValueError(f"the maximum depth must be at least 1, got {maximum}")
    if split == "prefix":
        if backprop_loops is None:
            raise ValueError("split='prefix' draws the loops before the last backprop_loops: set backprop_loops")
        if not 1 <= backprop_loops <= mean:
            raise ValueError(
                "split='prefix' draws mean - backprop_loops loops, so backprop_loops must lie between 1 and the mean; "
                f"got backprop_loops={backprop_loops} and mean={mean}"
            )
        if maximum is not None and maximum < backprop_loops:
            raise ValueError(
                f"split='prefix' runs at least the last backprop_loops={backprop_loops} loops, more than the maximum "
                f"depth {maximum}: raise it"
            )
