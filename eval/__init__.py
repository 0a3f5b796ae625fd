"""Evaluation and measurements: lm-eval at every depth, diagnostics, scaling laws, benchmarks, a server."""
