"""What only the installed package can do; in the code beside a saved model the table stays empty."""

from collections.abc import Callable


# "public" and "dense" open models of foreign layouts, "config" reads their config.json, "code" writes the code beside
# a saved model; formats/ fills the table
OF_PACKAGE: dict[str, Callable] = {}
