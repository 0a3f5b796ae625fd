"""The first look: a task on which loops tell, and a small text model, on one page."""
