"""Checks the project on one GPU: tests, benchmarks, one real training, evidence."""
