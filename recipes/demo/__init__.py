"""The demo: a task that needs several loops, and a small text model, shown on one page."""
