"""Charts of the demo as SVG, without a library: legible in light and dark, on a page and by themselves."""

from html import escape


WIDTH, HEIGHT = 360, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 78, 52, 50
LIGHT = ["#93a4b2", "#6f8fb0", "#3f78b8", "#0b57c2"]  # of the series, from easy to hard
DARK = ["#64727e", "#6d8cae", "#6ba3e0", "#8ec2ff"]


def series(colours: list[str]) -> str:
    return "\n".join(
        f".chart .line{number} {{ stroke: {colour} }} .chart .dot{number} {{ fill: {colour} }}"
        for number, colour in enumerate(colours, start=1)
    )


STYLE = f"""
.chart {{ font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1d2329 }}
.chart .title {{ font-weight: 600; font-size: 15px }} .chart .soft {{ fill: #5a636c }}
.chart .grid {{ stroke: #d9dee2 }} .chart .name {{ paint-order: stroke; stroke: #fff; stroke-width: 5 }}
.chart .line {{ fill: none; stroke-width: 2.5 }}
.chart .other {{ stroke: #c2410c; stroke-dasharray: 5 4 }} .chart .other-text {{ fill: #b03a09 }}
{series(LIGHT)}
@media (prefers-color-scheme: dark) {{
.chart {{ fill: #e8ebee }} .chart .soft {{ fill: #a3adb6 }} .chart .grid {{ stroke: #3a424a }}
.chart .name {{ stroke: #14181c }}
.chart .other {{ stroke: #ff9d66 }} .chart .other-text {{ fill: #ff9d66 }}
{series(DARK)}
}}
"""


class Chart:
    """Values over a few named places, from `low` to `high`."""

    def __init__(self, title: str, places: list[str], low: float, high: float, below: str):
        self.places, self.low, self.high, self.parts = places, low, high, []
        self.text(8, 20, title, "title")
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, below, "soft", "middle")
        for place in places:
            self.text(self.x(place), HEIGHT - BOTTOM + 20, place, "", "middle")

    def x(self, place: str) -> float:
        step = (WIDTH - LEFT - RIGHT) / len(self.places)
        return LEFT + step * (self.places.index(place) + 0.5)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start"):
        self.parts.append(
            f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def grid(self, ticks: dict[float, str]):
        for value, name in ticks.items():
            y = self.y(value)
            self.parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            self.text(LEFT - 8, y + 5, name, "soft", "end")

    def line(self, values: dict[str, float], number: int):
        points = [(self.x(place), self.y(value)) for place, value in values.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline class="line line{number}" points="{path}"/>')
        self.parts += [f'<circle class="dot{number}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points]

    def bars(self, values: dict[str, float], digits: int = 1):
        for number, (place, value) in enumerate(values.items(), start=1):
            x, y = self.x(place), self.y(value)
            height = HEIGHT - BOTTOM - y
            self.parts.append(
                f'<rect class="dot{number}" x="{x - 18:.1f}" y="{y:.1f}" width="36" height="{height:.1f}" rx="3"/>'
            )
            self.text(x, y - 7, f"{value:.{digits}f}", "", "middle")

    def level(self, value: float, words: list[str]):
        """A dashed line over the whole width, named beside it."""
        self.parts.append(f'<path class="line other" d="M{LEFT} {self.y(value):.1f}H{WIDTH - RIGHT}"/>')
        for row, each in enumerate(words):
            self.text(WIDTH - RIGHT + 5, self.y(value) + 5 + 16 * (row - (len(words) - 1) / 2), each, "other-text")


def svg(charts: list[Chart], label: str) -> str:
    """Side by side."""
    width = WIDTH * len(charts)
    groups = "\n".join(
        f'<g transform="translate({WIDTH * i} 0)">{"".join(chart.parts)}</g>' for i, chart in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'aria-label="{escape(label, quote=True)}"><style>{STYLE}</style>\n{groups}\n</svg>\n'
    )


def hardest(found: dict) -> str:
    """The hops of the questions that the one-loop model answers least."""
    return min(found["control"], key=found["control"].get)


def accuracy_chart(found: dict) -> Chart:
    accuracy, loops = found["accuracy"], list(next(iter(found["accuracy"].values())))
    chart = Chart("Right answers after so many loops", loops, 0, 1, "loops")
    chart.grid({0: "0 %", 0.5: "50 %", 1: "100 %"})
    for number, values in enumerate(accuracy.values(), start=1):
        chart.line(values, number)
    hops = hardest(found)
    chart.level(found["control"][hops], ["one-loop", "model,", f"{hops} hops"])
    label_lines(chart, {hops: values[loops[0]] for hops, values in accuracy.items()})
    return chart


def label_lines(chart: Chart, starts: dict[str, float]):
    """Lines are named where they begin, those that begin together by one name."""
    places = []
    for hops, value in sorted(starts.items(), key=lambda item: -item[1]):
        if places and places[-1][1] - chart.y(value) > -16:
            places[-1][0].append(hops)
        else:
            places.append(([hops], chart.y(value)))
    for hops, y in places:
        word = "hop" if hops == ["1"] else "hops"
        chart.text(LEFT + 2, min(y + 22, HEIGHT - BOTTOM - 4), f"{', '.join(hops)} {word}", "soft name")


def exits_chart(found: dict) -> Chart:
    sure = f"{found['certainty']:.0%}".replace("%", " %")
    chart = Chart(f"Loops until {sure} sure of the answer", list(found["exit_loops"]), 0, found["loops"], "hops")
    chart.grid({loop: str(loop) for loop in range(found["loops"] + 1)})
    chart.bars(found["exit_loops"])
    return chart


def depth_chart(found: dict) -> Chart:
    bits = found["bits_per_byte"]
    low, high = min(bits.values()), max(bits.values())
    room = max(high - low, 0.02) * 0.25
    chart = Chart("Text: bits per byte, less is better", list(bits), low - room, high + room, "loops")
    chart.grid({value: f"{value:.2f}" for value in (low, high)})
    chart.line(bits, 4)
    trained = chart.x(str(found["loops"]))
    chart.parts.append(f'<path class="grid" d="M{trained:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
    chart.text(trained, TOP - 6, "trained", "soft", "middle")
    return chart


def picture(found: dict) -> str:
    """The two charts of the questions, for a README."""
    return svg([accuracy_chart(found), exits_chart(found)], "Right answers over loops, and loops over hops")
