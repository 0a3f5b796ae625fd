"""Tasks for lm-eval: generated tasks that need depth, and the tasks of the papers."""
