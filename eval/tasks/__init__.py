"""Tasks for lm-eval: synthetic ones that need depth, and those of the papers."""
