"""Compares models at every depth."""
