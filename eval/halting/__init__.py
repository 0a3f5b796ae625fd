"""Exit thresholds for a budget of perplexity, or of loops."""
