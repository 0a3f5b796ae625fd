"""Training recipes, run from a clone: `python -m recipes.demo`."""
