"""Speed and memory as ratios."""
