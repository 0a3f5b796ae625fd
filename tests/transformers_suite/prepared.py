"""Prepares the server of ranks as run.py prepares itself: see ranks.py."""

import os

import run


run.prepare(os.environ["LOOPED_SUITE_TESTS"])
