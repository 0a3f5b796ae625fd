"""Training: recipes, their data, and the runs that they describe; `looped demo`."""
