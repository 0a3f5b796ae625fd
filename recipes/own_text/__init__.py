"""Train a looped model and a plain one on your own text, in ten minutes."""
