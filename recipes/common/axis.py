"""The scale of one axis of a chart, and ticks whose labels do not overlap."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def written(value: float, digits: int = 4, before_power: int = 3) -> str:
    """Format a number for readers: 1,500, 2.02, 0.0031, 3.1×10⁻⁷. before_power: digits before a power of ten, if
    `digits` are not fewer."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    if value == 0:
        return "0"
    size = int(f"{value:.{max(0, digits - 1)}e}".partition("e")[2])  # exponent of the rounded number
    if not -4 <= size < 6:
        mantissa, _, size = f"{value:.{max(0, min(digits, before_power) - 1)}e}".partition("e")
        head, size = (mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa), int(size)
        power = f"10{str(size).translate(SUPERSCRIPTS)}"
        return power if head == "1" else f"−{power}" if head == "-1" else f"{head}×{power}".replace("-", "−")
    text = f"{value:,.{max(0, digits - 1 - size)}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def alike(values: list[float], digits: int = 4) -> list[str]:
    """Format numbers that are read together: if their sizes are similar, all get the same number of decimals, or
    before powers of ten as many as tell the numbers apart."""
    texts, sizes = [written(value, digits) for value in values], [abs(value) for value in values if value]
    if not sizes or max(sizes) > 100 * min(sizes):
        return texts
    if any(text[-1] in "⁰¹²³⁴⁵⁶⁷⁸⁹" for text in texts):
        needed = digits_that_part(values, min(digits, 3))
        return [written(value, max(digits, needed), needed) for value in values]
    most = max(len(text.partition(".")[2]) for text in texts)
    decimals = min(most, max(0, digits - 1 - math.floor(math.log10(max(sizes)) + 1e-9)))
    return [f"{value:,.{decimals}f}".replace("-", "−") if value else "0" for value in values]


def digits_that_part(values: list[float], fewest: int) -> int:
    """Return how many significant digits, up to three more than `fewest`, it takes that rounding moves no value by
    more than a hundredth of the least distance between two values."""
    ordered = sorted({*values})
    gap = min((b - a for a, b in zip(ordered, ordered[1:])), default=math.inf)
    enough = (
        digits
        for digits in range(fewest, fewest + 3)
        if all(abs(float(f"{value:.{digits - 1}e}") - value) <= gap / 100 for value in ordered)
    )
    return next(enough, fewest + 3)


def width_of(text: str, size: float = 11) -> float:
    """Estimate the width of a text, rather too large than too small: no fonts are available to measure it."""
    return sum(0.35 if letter in " .,:;|il'()" else 0.95 if letter in "mwMW@—" else 0.62 for letter in text) * size


@dataclass
class Axis:
    """Maps values between `low` and `high` to places between `start` and `end`."""

    values: Iterable[float]
    start: float
    end: float
    log: bool = False
    whole: bool = False  # only whole numbers are ticks
    at: list[float] | None = None  # requested ticks; those without room are left out
    margin: float = 0.04
    low: float = field(init=False)
    high: float = field(init=False)

    def __post_init__(self):
        scaled = [self.scaled(value) for value in self.values]
        low, high = min(scaled), max(scaled)
        least = 0.6 if self.log else 1.0 if self.whole else abs(high) * 0.02 or 1.0  # noise must not look like a trend
        if high - low < least:
            middle = (low + high) / 2
            low, high = middle - least / 2, middle + least / 2
        around = self.margin * (high - low)
        touches_zero = not self.log and not self.whole and 0 <= min(scaled) <= 0.02 * high
        self.low, self.high = (0.0 if touches_zero else low - around), high + around

    def scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def place(self, value: float) -> float:
        return self.start + (self.scaled(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def candidates(self) -> list[list[float]]:
        """Return sets of ticks, from many to few ticks."""
        if self.at is not None:
            ticks = sorted(set(self.at))
            return [ticks[::every] for every in range(1, len(ticks) + 1)]
        if self.log:
            first, last = math.floor(self.low), math.ceil(self.high)
            decades = range(first, last + 1)
            sets = [[m * 10.0**d for d in decades for m in steps] for steps in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))]
            return sets + [[10.0**d for d in decades[::every]] for every in range(2, len(decades) + 1)]
        size = 10 ** math.floor(math.log10(self.high - self.low))
        steps = [s * size for s in (0.05, 0.1, 0.2, 0.5, 1, 2, 5)]
        steps = [step for step in steps if not self.whole or step >= 1 and step % 1 == 0] or [1.0]
        return [
            [n * step for n in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]
            for step in steps
        ]

    def ticks(self, room: float | None = None, most: int = 7) -> list[tuple[float, str]]:
        """Return the largest set of ticks without overlaps, as (place, label). room: space for each label, by default
        its width."""
        for ticks in self.candidates():
            inside = [tick for tick in ticks if self.low - 1e-9 <= self.scaled(tick) <= self.high + 1e-9]
            labels = map(written, inside) if self.log else alike(inside)
            places = list(zip(map(self.place, inside), labels))
            rooms = [room or width_of(text) + 8 for _, text in places]
            apart = all(
                abs(b[0] - a[0]) >= (ra + rb) / 2 for a, b, ra, rb in zip(places, places[1:], rooms, rooms[1:])
            )
            if places and apart and len(places) <= most:
                return places
        return [(self.place(value), written(value)) for value in self.at or [] if value == min(self.at)]
