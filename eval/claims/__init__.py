"""Quantitative claims of the papers, measured again, and what came out: one file per paper."""
