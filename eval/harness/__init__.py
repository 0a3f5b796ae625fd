"""lm-eval at every depth from one pass."""
