"""The rows that a step sees: a pure function of (seed, step), so that resuming needs only the step."""

import numpy as np


ROUNDS = 8
WORD = 2**64 - 1


def rows_of_step(seed: int, step: int, rows_per_step: int, num_rows: int) -> list[int]:
    """Return the rows of the global batch of `step`; every epoch goes through all rows once, in a different order.

    Each process takes a slice of the list, so the rows of a step do not depend on the number of processes.
    Nothing is stored: row i of an epoch is the image of i under a keyed bijection of [0, num_rows).
    """
    if num_rows < 1 or rows_per_step < 1 or step < 0:
        raise ValueError(f"need a step >= 0 and at least one row, got {step=}, {rows_per_step=}, {num_rows=}")
    position = step * rows_per_step + np.arange(rows_per_step, dtype=np.int64)
    epoch, place = np.divmod(position, num_rows)
    return _permute(place.astype(np.uint64), epoch.astype(np.uint64), seed, num_rows).tolist()


def _permute(place: np.ndarray, epoch: np.ndarray, seed: int, size: int) -> np.ndarray:
    """Apply a Feistel network on the least even number of bits that holds size - 1, again while the result >= size."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [_mix(_mix(np.full_like(epoch, seed & WORD)) ^ epoch)]  # one for each round, from seed and epoch
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
    """Mix 64 bits: every output bit depends on all input bits (finalizer of splitmix64); uint64 arithmetic wraps."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
