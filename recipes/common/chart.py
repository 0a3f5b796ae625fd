"""Charts as SVG: lines over numbers, bars of names, a matrix. Every value is shown under the pointer.

    chart = Chart("2 loops are best", "loops", "bits per byte", [Line("held out", [(1, 2.05), (2, 2.02)])])
    chart.svg()                              # inside a page that has chart_style.STYLE
    save_charts([chart], "depth.svg")        # a picture of its own

A chart is 360 units wide and is scaled to the width of its place; it is legible at 340 pixels. Values that are not
finite, or not above 0 on a logarithmic axis, are left out; `is_empty` tells that a chart has no finite values.
"""

import math
from dataclasses import dataclass, field, replace
from html import escape

from looped_recipes.common.axis import Axis, alike, width_of, written
from looped_recipes.common.chart_style import STEPS, STYLE
from looped_recipes.common.files import write_whole


WIDTH, RIGHT, PLOT = 360, 12, 170
MANY = 300  # points of a line; more can not be distinguished
ROOM_FOR_A_VALUE = 30  # least side of a matrix cell in which the value is written


def ordered(i: int, count: int) -> str:
    """Return the colour class of the i-th of `count` ordered items, such as loops."""
    return f"q{round(i * (STEPS - 1) / max(1, count - 1))}"


def named(i: int) -> str:
    """Return the colour class of the i-th of unordered items, such as runs."""
    return f"c{i % 8}"


@dataclass
class Line:
    name: str
    points: list[tuple[float, float]]
    color: str = "c0"
    dashed: bool = False
    joined: bool = True
    dots: bool = True
    errors: list[float | None] | None = None
    labels: list[str] | None = None  # beside the points; those without room are left out


def fits(value: float | None, log: bool) -> bool:
    """Whether a value has a place on an axis."""
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def wrapped(text: str, width: float, size: float) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        lines[-1:] = [longer] if not lines[-1] or width_of(longer, size) <= width else [lines[-1], word]
    return lines


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def heading(title: str) -> tuple[list[str], float]:
    """Return the lines of a title as SVG texts, and the height below them."""
    lines = wrapped(title, WIDTH - 8, 13) if title else []
    return [text(4, 14 + 16 * i, line, "title") for i, line in enumerate(lines)], 16.0 * len(lines) + 6


def drawing(parts: list[str], height: float, label: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a long line to the lowest and highest point of each interval."""
    if len(points) <= MANY:
        return points
    size, kept = 2 * len(points) // MANY + 1, []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return sorted({points[0], *kept, points[-1]})


@dataclass
class Chart:
    title: str
    x: str
    y: str
    lines: list[Line]
    log_x: bool = False
    log_y: bool = False
    levels: dict[str, float] = field(default_factory=dict)  # dotted horizontal lines: chance, a limit
    marks: dict[str, float] = field(default_factory=dict)  # dotted vertical lines: the trained depth
    x_ticks: list[float] | None = None
    whole_x: bool = False
    ends: tuple[float, ...] = ()  # values that the vertical axis always includes

    def fits(self, x, y) -> bool:
        return fits(x, self.log_x) and fits(y, self.log_y)

    def rules(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the levels and marks that have a place on their axis."""
        sides = ((self.levels, self.log_y), (self.marks, self.log_x))
        levels, marks = ({name: at for name, at in named.items() if fits(at, log)} for named, log in sides)
        return levels, marks

    def shown(self) -> list[Line]:
        kept = []
        for line in self.lines:
            count = len(line.points)
            columns = zip(line.points, line.errors or [None] * count, line.labels or [""] * count)
            rows = [row for row in columns if self.fits(*row[0])]
            if rows:
                points, errors, labels = map(list, zip(*rows))
                errors = [error if fits(error, False) else None for error in errors]
                kept.append(replace(line, points=points, errors=errors, labels=labels))
        return kept

    @property
    def is_empty(self) -> bool:
        return not self.shown()

    def keys(self, lines: list[Line]) -> list[tuple[str, str, str]]:
        """Return (class, colour, words) for the legend: of lines, if there are several, and of dotted lines."""
        kinds = ["dot" if not line.joined else "line dashed" if line.dashed else "line" for line in lines]
        of_lines = [(kind, line.color, line.name) for kind, line in zip(kinds, lines) if line.name]
        levels, marks = self.rules()
        rows = of_lines if len(lines) > 1 or levels or marks else []
        in_order = [row for row in rows if row[1][0] == "q"]
        if len(in_order) > 8:  # a few entries of an ordered scale are enough
            few = [in_order[i * (len(in_order) - 1) // 4] for i in range(5)]
            rows = few + [row for row in rows if row not in in_order]
        dotted = [f"{name} ({written(at)})" for name, at in (*levels.items(), *marks.items())]
        return rows + [("rule", "", words) for words in dotted]

    def svg(self) -> str:
        lines = self.shown()
        parts, top = heading(self.title)
        x = 4.0
        for kind, color, words in self.keys(lines):
            words = words if width_of(words) < WIDTH - 40 else words[: int((WIDTH - 40) / 7)] + "…"
            if x + 24 + width_of(words) > WIDTH and x > 4:
                x, top = 4.0, top + 16
            sign = f'<path class="{kind}" d="M{x:.0f} {top + 8:.0f}h16"/>'
            if kind == "dot":
                sign = f'<circle class="dot" cx="{x + 10:.0f}" cy="{top + 8:.0f}" r="3"/>'
            parts.append(f'<g class="{color}">{sign}</g>')
            parts.append(text(x + 20, top + 12, words, "key"))
            x += 32 + width_of(words)
        top += 36 if x > 4 else 18  # room for the name of the vertical axis, which is above it
        parts.append(text(4, top - 7, self.y))
        body, height = self.plot(lines, top)
        return drawing(parts + body, height, self.title or f"{self.y} over {self.x}")

    def plot(self, lines: list[Line], top: float) -> tuple[list[str], float]:
        bottom = top + PLOT
        levels, marks = self.rules()
        ys = [y for line in lines for _, y in line.points]
        ys += [y + sign * e for line in lines for (_, y), e in zip(line.points, line.errors) if e for sign in (-1, 1)]
        ys = [y for y in (*ys, *levels.values(), *self.ends) if fits(y, self.log_y)]
        up = Axis(ys, bottom, top + 4, self.log_y)
        labels = up.ticks(room=26)
        left = max(24.0, max((width_of(words) for _, words in labels), default=0) + 10)
        xs = [x for line in lines for x, _ in line.points] + list(marks.values())
        across = Axis(xs, left, WIDTH - RIGHT, self.log_x, self.whole_x, self.x_ticks)
        parts = []
        for y, words in labels:
            parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(text(left - 5, y + 4, words, "end"))
        for x, words in across.ticks():
            parts.append(f'<path class="grid" d="M{x:.1f} {bottom}v4"/>')
            parts.append(text(min(x, WIDTH - width_of(words) / 2), bottom + 16, words, "middle"))
        parts.append(f'<path class="grid" d="M{left:.1f} {bottom}H{WIDTH - RIGHT}"/>')
        parts.append(text((left + WIDTH) / 2, bottom + 32, self.x, "middle"))
        for name, level in levels.items():
            parts.append(self.rule(f"M{left:.1f} {up.place(level):.1f}H{WIDTH - RIGHT}", name, level))
        for name, mark in marks.items():
            parts.append(self.rule(f"M{across.place(mark):.1f} {top}V{bottom}", name, mark))
        dots = [(across.place(x), up.place(y)) for line in lines if len(line.points) <= 40 for x, y in line.points]
        taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
        for line in lines:
            parts += self.drawn(line, across, up, taken)
        return parts, bottom + 40

    @staticmethod
    def rule(path: str, name: str, value: float) -> str:
        return f'<path class="rule" d="{path}"><title>{escape(name)}: {written(value)}</title></path>'

    def drawn(self, line: Line, across: Axis, up: Axis, taken: list) -> list[str]:
        places = [(across.place(x), up.place(y)) for x, y in line.points]
        parts = [f'<g class="{line.color}">']
        if line.joined and len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in thinned(places))
            parts.append(f'<polyline class="line{" dashed" * line.dashed}" points="{path}"/>')
        for (x, y), (_, value), error in zip(places, line.points, line.errors):
            if error:
                ends = [up.place(max(value + sign * error, 10**up.low if up.log else -math.inf)) for sign in (-1, 1)]
                parts.append(f'<path class="line" d="M{x:.1f} {ends[0]:.1f}V{ends[1]:.1f}"/>')
            if line.dots and len(places) <= 40 or not line.joined:
                parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{3 if len(places) <= 25 else 2}"/>')
        every = max(1, len(places) // 60)
        for (x, y), values, error in list(zip(places, line.points, line.errors))[::every]:
            said = f"{self.x} {written(values[0])}, {self.y} {written(values[1])}"
            said = f"{line.name + ': ' if line.name else ''}{said}{f' ± {written(error)}' if error else ''}"
            place = f'cx="{x:.1f}" cy="{y:.1f}"'
            parts.append(f'<circle class="halo" {place} r="8"><title>{escape(said)}</title></circle>')
        for (x, y), label in zip(places, line.labels):
            parts += placed(label, x, y, up.start, taken)
        return [*parts, "</g>"]


def placed(label: str, x: float, y: float, bottom: float, taken: list) -> list[str]:
    """Place a label beside a point so that it overlaps no other label or point; return [] if there is no room."""
    wide = width_of(label)
    for left, base in ((x + 6, y - 5), (x - wide - 6, y - 5), (x + 6, y + 13), (x - wide - 6, y + 13)):
        right, top, low = left + wide, base - 10, base + 3
        free = all(right < a or c < left or low < b or d < top for a, b, c, d in taken)
        if label and free and left > 40 and right < WIDTH and low < bottom:
            taken.append((left, top, right, low))
            return [text(left, base, label, "key")]
    return []


def box(color: str, x: float, y: float, wide: float, high: float, said: str, strength: float = 1.0) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill-opacity="{strength:.2f}"'
    return f'<g class="{color}"><rect class="bar" {place}><title>{escape(said)}</title></rect></g>'


@dataclass
class Bars:
    """A horizontal bar for every name, with its value; horizontal, so that names have room."""

    title: str
    y: str
    values: dict[str, float]
    colors: dict[str, str] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)
    log: bool = False  # for values of very different sizes
    ends: tuple[float, ...] = ()

    def shown(self) -> dict[str, float]:
        return {name: v for name, v in self.values.items() if v is not None and math.isfinite(v)}

    @property
    def is_empty(self) -> bool:
        return not self.shown()

    def svg(self) -> str:
        values, (parts, top) = self.shown(), heading(self.title)
        log = self.log and min(values.values()) > 0
        levels = {name: level for name, level in self.levels.items() if fits(level, log)}
        names = {name: name if width_of(name) < 150 else name[:22] + "…" for name in values}
        left = 12 + max(map(width_of, names.values()))
        ends = [*values.values(), *levels.values(), *self.ends]
        ends.append(min(ends) / 3 if log else 0.0)
        labels = [written(v, 3) for v in values.values()] if log else alike(list(values.values()), 3)
        axis = Axis(ends, left, WIDTH - 8 - max(map(width_of, labels)), log, margin=0)
        dotted = "".join(f"; dotted: {name} ({written(level)})" for name, level in levels.items())
        said = wrapped(f"{self.y}{', logarithmic' if log else ''}{dotted}", WIDTH - 8, 11)
        parts += [text(4, top + 12 + 14 * i, line) for i, line in enumerate(said)]
        top += 8 + 14 * len(said)
        start = left if log else axis.place(0)
        for i, ((name, value), label) in enumerate(zip(values.items(), labels)):
            y, end = top + 22 * i, axis.place(value)
            parts.append(text(left - 6, y + 14, names[name], "end key"))
            wide, said = max(abs(end - start), 1.5), f"{name}: {written(value, 6)}"
            parts.append(box(self.colors.get(name, "c0"), min(start, end), y + 3, wide, 15, said))
            parts.append(text(max(start, end) + 5, y + 14, label))
        for name, level in levels.items():
            parts.append(Chart.rule(f"M{axis.place(level):.1f} {top:.0f}V{top + 22 * len(values):.0f}", name, level))
        return drawing(parts, top + 22 * len(values) + 8, self.title or self.y)


@dataclass
class Matrix:
    """Values from -1 to 1 for every pair: the stronger the colour, the further from 0. Others are left out."""

    title: str
    axis: str  # name of the items in rows and columns, which are numbered from 1
    values: list[list[float]]

    @property
    def is_empty(self) -> bool:
        return not any(fits(value, False) for row in self.values for value in row)

    def svg(self) -> str:
        parts, top = heading(self.title)
        parts.append(text(4, top + 12, f"{self.axis} against {self.axis}"))
        for i, (color, words) in enumerate((("c0", "below 0"), ("c1", "above 0: alike"))):
            parts += [box(color, 190 + 70 * i, top + 3, 10, 10, words), text(204 + 70 * i, top + 12, words)]
        top, count = top + 22, len(self.values)
        size, left = min(44.0, 290 / count), 40
        strength = 0.5 if size >= ROOM_FOR_A_VALUE else 1.0  # paler if the value is written on it
        for i, row in enumerate(self.values):
            for j, value in enumerate(row):
                if not fits(value, False):
                    continue
                said = f"{self.axis} {i + 1} and {j + 1}: {written(value, 3)}"
                color = "c1" if value > 0 else "c0"
                shade = strength * min(abs(value), 1)
                parts.append(box(color, left + size * j, top + size * i, size, size, said, shade))
                if size >= ROOM_FOR_A_VALUE:
                    middle = left + size * (j + 0.5), top + size * (i + 0.5) + 4
                    parts.append(text(*middle, f"{value:.2f}".replace("-", "−"), "key middle"))
        ends = Axis([1, count], size / 2, size * (count - 0.5), whole=True, margin=0) if count > 1 else None
        for place, words in ends.ticks(room=16) if ends else []:
            parts.append(text(left - 6, top + place + 4, words, "end"))
            parts.append(text(left + place, top + size * count + 14, words, "middle"))
        return drawing(parts, top + size * count + 22, self.title)


def on_one_scale(charts: list) -> list:
    """Give charts or bars of the same quantity the same scale, so that they can be compared, and return them."""
    values = []
    for chart in charts:
        shown = chart.shown()
        values += shown.values() if isinstance(shown, dict) else [y for line in shown for _, y in line.points]
    for chart in charts:
        chart.ends = (min(values), max(values)) if values else ()
    return charts


def stacked(charts: list, columns: int = 1) -> str:
    """Draw the charts that are not empty as one SVG, in rows of `columns` charts."""
    shown = [chart.svg() for chart in charts if not chart.is_empty]
    parts, top = [], 8.0
    for start in range(0, len(shown), columns):
        row = shown[start : start + columns]
        heights = [float(svg.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()[1]) for svg in row]
        for column, (svg, height) in enumerate(zip(row, heights)):
            place = f'x="{8 + column * (WIDTH + 24)}" y="{top:.0f}" width="{WIDTH}" height="{height:.0f}"'
            parts.append(svg.replace("<svg ", f"<svg {place} ", 1))
        top += max(heights) + 12
    wide = columns * (WIDTH + 24) - 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {top:.0f}" width="{max(2 * WIDTH, wide)}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" style="fill: var(--paper)"/>{"".join(parts)}</svg>\n'
    )


def save_charts(charts: list, path, columns: int = 1):
    """Save charts as one SVG file, in rows of `columns` charts."""
    svg = stacked(charts, columns)
    write_whole(path, svg.encode(errors="replace"))  # file names may contain bytes that are not valid text
