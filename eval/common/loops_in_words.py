"""What early exit saved, in words."""


def loops_in_words(mean: float, full: float) -> str:
    """E.g. "2.30 of 4 loops, 42 % of them saved"."""
    saved = f", {100 * (1 - mean / full):.0f} % of them saved" if mean < full else ""
    return f"{mean:.2f} of {full:g} loops{saved}"
