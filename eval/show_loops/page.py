"""The page of `eval.show_loops`: text whose tokens are coloured by the loops they took. No scripts, no other files."""

from html import escape
from typing import NamedTuple

from looped_eval.common.page import document


# from few loops to many, ever darker, so that it also reads in grey
SCALE = [(0xEA, 0xF6, 0xF2), (0xC3, 0xE5, 0xD3), (0xF3, 0xC8, 0x6B), (0xF4, 0x95, 0x55), (0xC8, 0x3E, 0x5C)]


class Token(NamedTuple):
    loops: int
    margins: list[float]  # top-1 minus top-2 logit after every loop, also those that it did not run


class Piece(NamedTuple):
    """Text of one token; of several where only together they are characters."""

    text: str
    tokens: list[Token]

    @property
    def loops(self) -> float:
        return sum(token.loops for token in self.tokens) / len(self.tokens)


class Shown(NamedTuple):
    prompt: str
    pieces: list[Piece]
    num_loops: int
    rule: str  # in words
    threshold: float | None  # of the margin, where that is the criterion
    facts: dict[str, str]

    @property
    def tokens(self) -> list[Token]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def mean_loops(self) -> float:
        return sum(token.loops for token in self.tokens) / max(len(self.tokens), 1)

    def counts(self) -> dict[int, int]:
        """{loops: tokens that took so many}"""
        return {k: sum(token.loops == k for token in self.tokens) for k in range(1, self.num_loops + 1)}


def color(loops: float, num_loops: int) -> tuple[int, int, int]:
    place = (loops - 1) / max(num_loops - 1, 1) * (len(SCALE) - 1)
    below = min(int(place), len(SCALE) - 2)
    return tuple(round(a + (place - below) * (b - a)) for a, b in zip(SCALE[below], SCALE[below + 1]))


def ink(background: tuple[int, int, int]) -> tuple[int, int, int]:
    """Dark or white, whichever reads better."""
    red, green, blue = background
    return (0x14, 0x18, 0x1C) if 0.299 * red + 0.587 * green + 0.114 * blue > 121 else (255, 255, 255)


def css(background: tuple[int, int, int]) -> str:
    return "background:#{:02x}{:02x}{:02x};color:#{:02x}{:02x}{:02x}".format(*background, *ink(background))


def visible(text: str) -> str:
    """Control characters as pictures of themselves; line ends stay."""
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c != "\n" else "\u2421" if 127 <= ord(c) < 160 else c for c in text
    )


WIDTH, HEIGHT, SIDE = 240, 120, 26


def curve(token: Token, top: float, threshold: float | None) -> str:
    """Margin over loops: solid as far as the token ran, dashed where it would have gone."""
    loops = len(token.margins)

    def x(loop):
        return SIDE + (loop - 1) / max(loops - 1, 1) * (WIDTH - 2 * SIDE)

    def y(margin):
        return HEIGHT - SIDE - min(margin / top, 1) * (HEIGHT - 2 * SIDE)

    def path(first, last):
        return " ".join(f"{x(k):.1f},{y(token.margins[k - 1]):.1f}" for k in range(first, last + 1))

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">']
    parts.append(f'<path class="axis" d="M{SIDE} {HEIGHT - SIDE}H{WIDTH - SIDE}"/>')
    if threshold is not None and threshold <= top:
        parts.append(f'<path class="limit" d="M{SIDE} {y(threshold):.1f}H{WIDTH - SIDE}"/>')
    parts.append(f'<polyline class="ahead" points="{path(token.loops, loops)}"/>')
    parts.append(f'<polyline class="run" points="{path(1, token.loops)}"/>')
    for k, margin in enumerate(token.margins, start=1):
        name = "exit" if k == token.loops else "run" if k < token.loops else "ahead"
        parts.append(
            f'<circle class="{name}" cx="{x(k):.1f}" cy="{y(margin):.1f}" r="{4.5 if name == "exit" else 2.5}"/>'
        )
        if loops <= 12 or k in (1, token.loops, loops):
            parts.append(f'<text x="{x(k):.1f}" y="{HEIGHT - 9}">{k}</text>')
    value = token.margins[token.loops - 1]
    parts.append(f'<text x="{x(token.loops):.1f}" y="{max(y(value) - 9, 11):.1f}">{value:.2f}</text></svg>')
    return "".join(parts)


def card(piece: Piece, top: float, shown: Shown) -> str:
    """What is seen of a piece under the pointer."""
    text = visible(piece.text).replace("\n", "↵").replace(" ", "␣")
    parts = [f'<span class="card"><b class="piece">{escape(text)}</b>']
    for token in piece.tokens:
        parts.append(f"<span>{plural(token.loops, 'loop')} of {shown.num_loops}</span>")
        parts.append(curve(token, top, shown.threshold))
    return "".join(parts) + "<small>logit margin over loops</small></span>"


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def spans(shown: Shown) -> str:
    top = max((margin for token in shown.tokens for margin in token.margins), default=1) or 1
    parts = []
    for piece in shown.pieces:
        text = escape(visible(piece.text)).replace("\n", "<i>↵</i>\n")
        style = css(color(piece.loops, shown.num_loops))
        parts.append(
            f'<span class="t" tabindex="0"><span style="{style}">{text}</span>{card(piece, top, shown)}</span>'
        )
    return "".join(parts)


def legend(shown: Shown) -> str:
    """A bar for each depth: how many tokens stopped there."""
    counts = shown.counts()
    most = max(counts.values(), default=0) or 1
    return "".join(
        f'<div class="bar"><span>{count}</span>'
        f'<div style="height:{4 + 56 * count / most:.0f}px;{css(color(k, shown.num_loops))}"></div><b>{k}</b></div>'
        for k, count in counts.items()
    )


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2329; background: #f4f5f6; margin: 0; padding: 2.5rem 1rem }
main { max-width: 58rem; margin: auto; background: #fff; border-radius: 14px; padding: 2rem 2.4rem;
       box-shadow: 0 1px 3px #0002, 0 12px 32px #0000000f }
header { display: flex; flex-wrap: wrap; gap: 1rem 3rem; align-items: flex-end; justify-content: space-between;
         border-bottom: 1px solid #e6e8ea; padding-bottom: 1.2rem }
h1 { font-size: 1.05rem; font-weight: 600; margin: 0 0 .3rem } h1 + p { margin: 0 } header small { color: #68717a }
.mean { font-size: 2.6rem; font-weight: 700; letter-spacing: -.02em; line-height: 1.1 }
.mean small { font-size: 1rem; font-weight: 400; letter-spacing: 0 }
.bars { display: flex; gap: 6px; align-items: flex-end } .bar { text-align: center; min-width: 34px; font-size: 12px }
.bar div { border-radius: 4px 4px 0 0 } .bar span { color: #68717a } .bar b { display: block }
.text { font: 15px/1.95 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
        overflow-wrap: anywhere; margin: 1.6rem 0 }
.prompt { color: #68717a } .t { outline: 0; cursor: default }
.t > span:first-child { border-radius: 4px; padding: 2px 0 }
.t:hover > span:first-child, .t:focus > span:first-child { box-shadow: 0 0 0 2px #1d2329 } .t i { opacity: .45 }
.card { display: none; position: fixed; right: 1.2rem; bottom: 1.2rem; z-index: 1; width: 240px; background: #fff;
        border-radius: 12px; padding: .9rem 1.1rem; box-shadow: 0 2px 6px #0002, 0 16px 40px #0003;
        font: 14px/1.4 system-ui, sans-serif; white-space: normal; text-align: center }
.t:hover .card, .t:focus:not(:hover) .card { display: block } .card > * { display: block }
.t:hover .card { z-index: 2 } .piece { font: 600 17px ui-monospace, Menlo, monospace; overflow-wrap: anywhere }
small { color: #68717a } footer { color: #68717a; font-size: 13px; border-top: 1px solid #e6e8ea; padding-top: 1rem }
svg { margin: .3rem 0 } svg text { font: 11px system-ui, sans-serif; fill: #68717a; text-anchor: middle }
polyline { fill: none; stroke: #c83e5c; stroke-width: 2 } .ahead { stroke: #b9c0c6; stroke-dasharray: 3 3 }
circle.run, circle.exit { fill: #c83e5c } circle.ahead { fill: #b9c0c6 } .axis { stroke: #d5d9dc }
.limit { stroke: #1d2329; stroke-dasharray: 2 3 }
"""


def page(shown: Shown) -> str:
    facts = " · ".join(f"{escape(name)} {escape(value)}" for name, value in shown.facts.items())
    body = (
        "<main><header>\n"
        f'<div><h1>Loops of every token</h1><p class="mean">{shown.mean_loops:.2f} '
        f"<small>of {shown.num_loops} loops, {plural(len(shown.tokens), 'token')}</small></p>"
        f"<small>{escape(shown.rule)}</small></div>\n"
        f'<div><div class="bars">{legend(shown)}</div><small>tokens by their loops</small></div></header>\n'
        f'<div class="text"><span class="prompt">{escape(visible(shown.prompt))}</span>{spans(shown)}</div>\n'
        "<footer>Colour: the loops that a token took. Under the pointer: its logit margin over loops, from one pass "
        f"over the whole text at full depth; dashed beyond its exit.<br>{facts}</footer>\n"
        "</main>"
    )
    return document("Loops of every token", STYLE, body)
