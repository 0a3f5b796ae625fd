"""Evaluation and measurements, run from a clone: `looped benchmark`."""
