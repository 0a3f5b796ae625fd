"""Training runs on one page."""
