"""What models are worth at every depth, side by side."""
