"""Scaling laws of many runs."""
