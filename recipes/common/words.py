"""Format counts, percentages and sizes for sentences."""


def counted(count: int | str, noun: str) -> str:
    """Format a count with its noun: 1 loop, 2 loops."""
    return f"{count} {noun}{'s' * (str(count) != '1')}"


def percent(share: float) -> str:
    """Format a share: 38 %, 1.2 %, 99.7 %, as a whole number unless it is small or nearly 100 %."""
    value = 100 * share if share >= 1 else min(100 * share, 99.9)  # 100 only if the share is 1
    return f"{value:{'.2g' if abs(value) < 10 else '.1f' if 99.5 <= value < 100 else '.0f'}} %"


def in_bytes(size: float) -> str:
    """Format a number of bytes: 0.28 MB, 350 MB, 2.41 GB, 1,020 GB."""
    number, unit = (size / 1e6, "MB") if size < 1e9 else (size / 1e9, "GB")
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{digits}f} {unit}"
