"""A server for many clients."""
