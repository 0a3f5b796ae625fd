"""The colours of all pages and charts, in light and dark mode, and the style rules of charts.

A page puts STYLE before its own rules, sets the width of `svg.chart`, and uses the variables: --paper (background of
text), --panel (background of a box), --ink, --quiet (less important text), --line (rules and grids), --accent (links),
--c0 to --c7 (unordered names) and --q0 to --q11 (ordered values such as loops, from few to many). The mode follows the
reader's system.
"""

NAMED = {
    "light": ["#0b62c4", "#b8420b", "#0a7d55", "#8a3aa8", "#a16a00", "#c2255c", "#0b7285", "#5f5f5f"],
    "dark": ["#6cb2ff", "#ff9d66", "#4fd1a0", "#d59bf0", "#f0c04f", "#ff8fb3", "#5fd0e0", "#b8b8b8"],
}
# contrast to the paper increases along each ramp, so that the order is also visible in grey
RAMP = {
    "light": ["#d08700", "#d9603b", "#b83a6b", "#7d2a86", "#3a1766"],
    "dark": ["#8f6ad0", "#d0608f", "#f0805f", "#f7b24f", "#fff0a0"],
}
GROUND = {
    "light": {"paper": "#ffffff", "panel": "#f4f6f8", "ink": "#1b2026", "quiet": "#56606a", "line": "#d9dee3"},
    "dark": {"paper": "#14181c", "panel": "#1f252b", "ink": "#e8ebee", "quiet": "#a5afb8", "line": "#39424b"},
}
ACCENT = {"light": "#0b62c4", "dark": "#6cb2ff"}
STEPS = 12


def between(stops: list[str], place: float) -> tuple[int, int, int]:
    """Return the colour at a place from 0 to 1 on a scale of colours."""
    at = place * (len(stops) - 1)
    below = min(int(at), len(stops) - 2)
    pair = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops[below : below + 2]]
    return tuple(round(a + (at - below) * (b - a)) for a, b in zip(*pair))


def variables(theme: str) -> str:
    colors = GROUND[theme] | {"accent": ACCENT[theme]} | {f"c{i}": color for i, color in enumerate(NAMED[theme])}
    for i in range(STEPS):
        colors[f"q{i}"] = "#{:02x}{:02x}{:02x}".format(*between(RAMP[theme], i / (STEPS - 1)))
    return "; ".join(f"--{name}: {color}" for name, color in colors.items())


COLORS = f"""
:root {{ color-scheme: light dark; {variables("light")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables("dark")} }} }}
"""

CHART = """
.chart text { font: 11px system-ui, sans-serif; fill: var(--quiet) }
.chart .title { font-size: 13px; font-weight: 600; fill: var(--ink) } .chart .key { fill: var(--ink) }
.chart .end { text-anchor: end } .chart .middle { text-anchor: middle }
.chart .grid { stroke: var(--line); stroke-width: 1; fill: none }
.chart .line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round }
.chart .dashed { stroke-dasharray: 5 4 } .chart .rule { stroke: var(--quiet); stroke-dasharray: 2 3; fill: none }
.chart .dot, .chart .bar { fill: currentColor } .chart .halo { fill: transparent }
.ink { color: var(--ink) }
.chart .halo:hover { fill: currentColor; fill-opacity: .25 }
""" + "\n".join(f".{kind}{i} {{ color: var(--{kind}{i}) }}" for kind, n in (("c", 8), ("q", STEPS)) for i in range(n))

STYLE = COLORS + CHART
