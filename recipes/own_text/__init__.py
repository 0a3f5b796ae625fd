"""Your own text in ten minutes."""
