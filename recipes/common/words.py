"""How sentences count."""


def counted(count: int | str, noun: str) -> str:
    """1 loop, 2 loops."""
    return f"{count} {noun}{'s' * (str(count) != '1')}"
