"""Exit thresholds for a budget of perplexity."""
