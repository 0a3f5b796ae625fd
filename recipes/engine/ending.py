"""The result of a finished run, in words."""

from pathlib import Path

from looped_recipes.common.metrics import depth_of_loss, last_validation, last_values, read_metrics
from looped_recipes.common.words import counted


LEAST_GAIN = 0.0005  # bits per byte; a better depth is mentioned only if its gain is larger


def ending(metrics: Path, trained_loops: int) -> str:
    """Return the number of steps, the losses, and held-out bits per byte at the trained and at the best depth."""
    records = read_metrics(metrics)
    last = last_values(records)
    said = f"trained {last.get('step', -1) + 1:,} steps"
    if "loss" in last:
        said += f": loss {last['loss']:.3f}"
    if "validation/loss" in last:
        said += f", held-out loss {last['validation/loss']:.3f}"
    if bits := last_validation(records, "bits_per_byte"):
        best = min(bits, key=bits.get)
        at = depth_of_loss(bits, trained_loops)
        said += f"; {bits[at]:.3f} bits per byte at {counted(at, 'loop')}"
        if bits[at] - bits[best] > LEAST_GAIN:
            said += f", {bits[best]:.3f} at {counted(best, 'loop')}"
    return said
