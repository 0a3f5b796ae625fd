"""Which rows a step sees: a pure function of (seed, step), so that resuming needs nothing but the step."""

import numpy as np


ROUNDS = 8
WORD = 2**64 - 1


def rows_of_step(seed: int, step: int, rows_per_step: int, num_rows: int) -> list[int]:
    """Rows of the global batch of `step`; every epoch goes through all rows once, in an order of its own.

    Each process takes its slice of the list, so the rows of a step do not depend on how many processes there are.
    Nothing is stored: row i of an epoch is where a keyed bijection of [0, num_rows) sends i.
    """
    if num_rows < 1 or rows_per_step < 1 or step < 0:
        raise ValueError(f"need a step >= 0 and at least one row, got {step=}, {rows_per_step=}, {num_rows=}")
    position = step * rows_per_step + np.arange(rows_per_step, dtype=np.int64)
    epoch, place = np.divmod(position, num_rows)
    return _permute(place.astype(np.uint64), epoch.astype(np.uint64), seed, num_rows).tolist()


def _permute(place: np.ndarray, epoch: np.ndarray, seed: int, size: int) -> np.ndarray:
    """A Feistel network on the next even number of bits, repeated for what falls outside until it falls inside."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [_mix(_mix(np.full_like(epoch, seed & WORD)) ^ epoch)]  # of each round, from seed and epoch
    while len(keys) < ROUNDS:
        keys.append(_mix(keys[-1]))
    result, outside = place.copy(), np.arange(len(place))
    while len(outside):
        left, right = result[outside] >> half, result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key[outside]) & mask)
        result[outside] = left << half | right
        outside = outside[result[outside] >= size]
    return result


def _mix(x: np.ndarray) -> np.ndarray:
    """64 bits to 64 bits, each of which depends on all (the finalizer of splitmix64); uint64 arithmetic wraps."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
