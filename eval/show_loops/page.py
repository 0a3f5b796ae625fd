"""The page of `looped show`: text whose tokens are coloured by the loops they took. No scripts, no other files."""

from html import escape
from typing import NamedTuple

from looped_eval.common.page import Explanation, Raw, Section, Table, to_html
from looped_recipes.common.chart_style import between
from looped_recipes.common.words import counted


# from few loops to many, darker and darker, so that it is readable in grey too; the same for light and dark pages
SCALE = ["#fff1cc", "#fbd07f", "#f0a04b", "#c2414f", "#6b226e"]


class Token(NamedTuple):
    loops: int
    margins: list[float]  # top-1 minus top-2 logit after every loop, including loops that the token did not run


class Piece(NamedTuple):
    """The text of one token, or of several tokens that share a character."""

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
    threshold: float | None  # of the margin, if the margin is the criterion
    facts: dict[str, str]

    @property
    def tokens(self) -> list[Token]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def later(self) -> list[Token]:
        """The tokens that could exit: all but the first, which is read from the prompt's pass."""
        return self.tokens[1:]

    @property
    def mean_loops(self) -> float:
        """Of the tokens that could exit."""
        return sum(token.loops for token in self.later) / max(len(self.later), 1)

    def counts(self) -> dict[int, int]:
        """Return {loops: number of tokens that could exit and took this many}."""
        return {k: sum(token.loops == k for token in self.later) for k in range(1, self.num_loops + 1)}


def color(loops: float, num_loops: int) -> tuple[int, int, int]:
    return between(SCALE, (loops - 1) / max(num_loops - 1, 1))


def ink(background: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return a dark or a white text colour, whichever contrasts more."""
    red, green, blue = background
    return (0x14, 0x18, 0x1C) if 0.299 * red + 0.587 * green + 0.114 * blue > 121 else (255, 255, 255)


def css(background: tuple[int, int, int]) -> str:
    return "background:#{:02x}{:02x}{:02x};color:#{:02x}{:02x}{:02x}".format(*background, *ink(background))


def visible(text: str) -> str:
    """Replace control characters, except line ends, with visible symbols."""
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c != "\n" else "\u2421" if 127 <= ord(c) < 160 else c for c in text
    )


WIDTH, HEIGHT, SIDE = 240, 120, 26


def curve(token: Token, top: float, threshold: float | None) -> str:
    """Draw the margin over loops: solid for loops that the token ran, dashed for the others."""
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
    """Return the card that appears when the pointer is over a piece."""
    text = visible(piece.text).replace("\n", "↵").replace(" ", "␣")
    parts = [f'<span class="card"><b class="piece">{escape(text)}</b>']
    for token in piece.tokens:
        parts.append(f"<span>{counted(token.loops, 'loop')} of {shown.num_loops}</span>")
        parts.append(curve(token, top, shown.threshold))
    return "".join(parts) + "<small>logit margin over loops</small></span>"


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
    """Draw a bar for each depth: the number of tokens that exited there."""
    counts = shown.counts()
    most = max(counts.values(), default=0) or 1
    return "".join(
        f'<div class="bar"><span>{count}</span>'
        f'<div style="height:{4 + 56 * count / most:.0f}px;{css(color(k, shown.num_loops))}"></div><b>{k}</b></div>'
        for k, count in counts.items()
    )


STYLE = """
.bars { display: flex; flex-wrap: wrap; gap: 6px; align-items: flex-end; margin: 1rem 0 } .bar { text-align: center;
        min-width: 34px; font-size: 13px } .bar div { border-radius: 4px 4px 0 0 } .bar b { display: block }
.text { font: 15px/1.95 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
        overflow-wrap: anywhere; margin: 1rem 0; max-width: 58rem }
.prompt, .bar span { color: var(--quiet) } .t { outline: 0; cursor: default }
.t > span:first-child { border-radius: 4px; padding: 2px 0 } .t i { opacity: .6 }
.t:hover > span:first-child, .t:focus > span:first-child { box-shadow: 0 0 0 2px var(--ink) }
.card { display: none; position: fixed; right: 1.2rem; bottom: 1.2rem; z-index: 1; width: 240px; color: var(--ink);
        background: var(--panel); border: 1px solid var(--line); border-radius: 12px; padding: .9rem 1.1rem;
        font: 14px/1.4 system-ui, sans-serif; white-space: normal; text-align: center }
.t:hover .card, .t:focus:not(:hover) .card { display: block } .card > * { display: block }
.t:hover .card { z-index: 2 } .piece { font: 600 17px ui-monospace, Menlo, monospace; overflow-wrap: anywhere }
.card svg { margin: .3rem 0 } .card text { font: 11px system-ui, sans-serif; fill: var(--quiet); text-anchor: middle }
.card polyline { fill: none; stroke: var(--c5); stroke-width: 2 } .card .run, .card .exit { fill: var(--c5) }
.card polyline { fill: none } .card polyline.ahead { stroke: var(--quiet); stroke-dasharray: 3 3 }
.card circle.ahead { fill: var(--quiet) } .axis { stroke: var(--line) } .limit { stroke: var(--ink) }
.limit { stroke-dasharray: 2 3 }
"""
EXPLANATION = Explanation(
    "A token's colour says after how many loops it was written; the darker, the more. Under the pointer, or the "
    "finger: its logit margin over loops, from one pass over the whole text at full depth; dashed beyond its exit. "
    "The first token is read from the prompt's pass: it takes the loops of the prompt, and is not counted.",
    "Easy tokens, such as the rest of a word, take few loops, and hard ones more. Where all take the same, the "
    "criterion or its threshold tells nothing apart.",
)


def finding(shown: Shown) -> str:
    counts, total = shown.counts(), len(shown.later)
    usual = max(counts, key=counts.get)
    if not shown.tokens:
        return "No token was written."
    if not total:
        took = f"{counted(shown.tokens[0].loops, 'loop')} of {shown.num_loops}"
        return f"The only new token took the prompt's {took}: exits begin with the second."
    if counts[usual] == total:
        return f"Every token after the first took {counted(usual, 'loop')} of {shown.num_loops}."
    words = f"A token after the first took {shown.mean_loops:.2f} of {shown.num_loops} loops in the mean"
    return f"{words}; {counts[usual]} of {total} took {counted(usual, 'loop')}."


def page(shown: Shown) -> str:
    facts = [[name, value] for name, value in {"rule": shown.rule, **shown.facts}.items()]
    text = f'<span class="prompt">{escape(visible(shown.prompt))}</span>{spans(shown)}'
    sections = [
        Section("The text", [Raw(f'<div class="text">{text}</div>'), EXPLANATION]),
        Section("Tokens after the first by their loops", [Raw(f'<div class="bars">{legend(shown)}</div>')]),
        Section("How it was written", [Table(["", ""], facts)]),
    ]
    return to_html("Loops of every token", sections, [finding(shown)], STYLE)
