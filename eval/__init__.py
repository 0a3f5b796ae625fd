"""Evaluation and measurements, run from a clone: `python -m eval.benchmark`."""
