"""Recipes and sweeps: read from YAML, with the range of every number and the settings that exclude each other."""
