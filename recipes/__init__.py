"""Training recipes, run from a clone: `looped demo`."""
