"""What a finished run has come to, in words."""

from pathlib import Path

from looped_recipes.common.metrics import read_metrics
from looped_recipes.common.words import counted


LEAST_GAIN = 0.0005  # bits per byte that are worth another word
BITS_AT = "validation/bits_per_byte_at_"


def ending(metrics: Path, trained_loops: int) -> str:
    """Loss and held-out bits per byte of the last lines of metrics.jsonl."""
    last = {}
    for record in read_metrics(metrics):
        last.update(record)
    said = f"trained {last.get('step', -1) + 1:,} steps"
    if "loss" in last:
        said += f": loss {last['loss']:.3f}"
    if "validation/loss" in last:
        said += f", held-out loss {last['validation/loss']:.3f}"
    bits = {int(key.removeprefix(BITS_AT)): value for key, value in last.items() if key.startswith(BITS_AT)}
    if bits:
        best = min(bits, key=bits.get)
        at = max((depth for depth in bits if depth <= trained_loops), default=best)
        said += f"; {bits[at]:.3f} bits per byte at {counted(at, 'loop')}"
        if bits[at] - bits[best] > LEAST_GAIN:
            said += f", {bits[best]:.3f} at {counted(best, 'loop')}"
    return said
