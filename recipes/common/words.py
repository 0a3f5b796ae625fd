"""How sentences count and measure."""


def counted(count: int | str, noun: str) -> str:
    """1 loop, 2 loops."""
    return f"{count} {noun}{'s' * (str(count) != '1')}"


def percent(share: float) -> str:
    """38 %, 1.2 %, 99.7 %: whole where it is neither small nor nearly all."""
    value = 100 * share
    return f"{value:{'.2g' if abs(value) < 10 else '.1f' if 99.5 <= value < 100 else '.0f'}} %"
