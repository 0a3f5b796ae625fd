"""Evaluation and measurements of trained models: `looped benchmark`."""
