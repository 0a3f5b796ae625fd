"""Recipes that turn dense models into looped ones, and a small example that a CPU trains."""
