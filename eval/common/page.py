"""Sections of findings, charts, tables and text, as one standalone HTML page or as Markdown.

`to_html(title, sections, findings)` makes a page that begins with the findings. `document(title, body, style)` makes a
page with any other body in the same colours and fonts; the rules in `style` come after the common ones.
"""

import re
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from looped_recipes.common.axis import written
from looped_recipes.common.chart_style import STYLE as COLORS_AND_CHARTS


def one_line(words: str) -> str:
    return " ".join(words.split("\n"))


def in_markdown(words: str) -> str:
    """Escape HTML and the ends of table cells, which names of runs may contain."""
    return one_line(escape(words, quote=False)).replace("|", "\\|")


def writable(text: str) -> str:
    """Replace what cannot be encoded: names of files may hold bytes that are no text."""
    return text.encode(errors="replace").decode()


def in_cell(words: str) -> str:
    return escape(words).replace(" ± ", "&nbsp;±&nbsp;").replace(" %", "&nbsp;%")


@dataclass
class Table:
    head: list[str]
    rows: list[list[str]]
    wordy: bool = False  # cells of many words: on a phone, each row is shown as a card

    def html(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.head)
        rows = "".join(f"<tr>{''.join(map(self.cell, self.head, row))}</tr>" for row in self.rows)
        head = f"<thead><tr>{head}</tr></thead>" if any(self.head) else ""
        return f'<div class="wide"><table{self.kind}>{head}<tbody>{rows}</tbody></table></div>'

    @property
    def kind(self) -> str:
        return ' class="cards"' if self.wordy else ""

    def cell(self, name: str, words: str) -> str:
        label = f' data-name="{escape(name)}"' if self.wordy else ""
        return f"<td{label}>{in_cell(words)}</td>"

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(map(in_markdown, line)) + " |" for line in lines)


@dataclass
class Text:
    words: str

    def html(self) -> str:
        return f"<p>{escape(self.words)}</p>"

    def markdown(self) -> str:
        return in_markdown(self.words)


class Heading(Text):
    """The title of a part of a section."""

    def html(self) -> str:
        return f"<h3>{escape(self.words)}</h3>"

    def markdown(self) -> str:
        return f"#### {in_markdown(self.words)}"


@dataclass
class Missing(Text):
    """Says that a result is missing, and gives the command that makes it."""

    command: str

    def html(self) -> str:
        return f'<p class="missing">{escape(self.words)} <code>{escape(self.command)}</code></p>'

    def markdown(self) -> str:
        return f"{in_markdown(self.words)} `{one_line(self.command).replace('`', ' ')}`"


@dataclass
class Commands:
    """Commands, each with a description."""

    commands: list[tuple[str, str]]

    def html(self) -> str:
        items = (f"<dt><code>{escape(command)}</code></dt><dd>{escape(does)}</dd>" for command, does in self.commands)
        return f'<dl class="commands">{"".join(f"<div>{item}</div>" for item in items)}</dl>'

    def markdown(self) -> str:
        return "\n".join(f"- `{one_line(command)}`: {in_markdown(does)}" for command, does in self.commands)


@dataclass
class Raw:
    """HTML that is inserted unchanged."""

    body: str

    def html(self) -> str:
        return self.body

    def markdown(self) -> str:
        return ""


class Finding(Text):
    """A sentence that says what was measured here."""

    def html(self) -> str:
        return f'<p class="finding">{escape(self.words)}</p>'

    def markdown(self) -> str:
        return f"**{in_markdown(self.words)}**"


class Explanation(NamedTuple):
    """How to read a measure, shown beside its finding."""

    what: str
    healthy: str = ""
    paper: str = ""

    def rows(self) -> list[tuple[str, str]]:
        names = ("What it is", "What is healthy", "In the paper")
        return [(name, words) for name, words in zip(names, self) if words]

    def html(self) -> str:
        parts = [f"<div><dt>{name}</dt><dd>{escape(words)}</dd></div>" for name, words in self.rows()]
        return f"<dl>{''.join(parts)}</dl>"

    def markdown(self) -> str:
        return "\n".join(f"- {name}: {in_markdown(words)}" for name, words in self.rows())


@dataclass
class Charts:
    """Charts side by side as far as there is room; empty charts are left out."""

    charts: list

    def html(self) -> str:
        shown = [chart.svg() for chart in self.charts if not chart.is_empty]
        return f'<div class="charts">{"".join(f"<figure>{svg}</figure>" for svg in shown)}</div>' if shown else ""

    def markdown(self) -> str:
        return ""  # Markdown is for model cards, which have no charts


@dataclass
class Folded:
    """A long table or text that is hidden until its title is clicked."""

    title: str
    inside: Table | str

    def html(self) -> str:
        inside = f"<pre>{escape(self.inside)}</pre>" if isinstance(self.inside, str) else self.inside.html()
        return f"<details><summary>{escape(self.title)}</summary>{inside}</details>"

    def markdown(self) -> str:
        return ""


MANY_PARTS = 3
MANY_SECTIONS = 6


@dataclass
class Section:
    title: str
    blocks: list = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")

    def html(self, folded: bool = False) -> str:
        """Return HTML, with a list of contents if there are many parts. folded: on a phone, show findings only."""
        links, blocks, inside = [], [], []
        for block in self.blocks:
            if folded and isinstance(block, (Charts, Table, Explanation)) or inside and isinstance(block, Folded):
                inside.append(block)
                continue
            if isinstance(block, Heading):
                anchor = f"{self.anchor}-{len(links) + 1}"
                links.append((anchor, block.words))
                block = Raw(f'<span id="{anchor}"></span>{block.html()}')
            blocks += [on_a_phone_folded(inside), block.html()]
            inside = []
        blocks.append(on_a_phone_folded(inside))
        inner = [contents(links, f"parts of {self.title}")] if len(links) > MANY_PARTS else []
        return "\n".join([f'<h2 id="{self.anchor}">{escape(self.title)}</h2>', *inner, *filter(None, blocks)])


def on_a_phone_folded(blocks: list) -> str:
    """Fold these blocks on a phone; on wide screens they look like any others."""
    inside = "\n".join(html for block in blocks if (html := block.html()))
    name = "Charts and numbers" if any(isinstance(block, Charts) for block in blocks) else "Numbers"
    return f'<details class="phone"><summary>{name}</summary>{inside}</details>' if inside else ""


def contents(links: list[tuple[str, str]], label: str) -> str:
    """Return a list of links to (anchor, words)."""
    items = "".join(f'<li><a href="#{anchor}">{escape(words)}</a></li>' for anchor, words in links)
    return f'<nav aria-label="{escape(label)}"><ul>{items}</ul></nav>'


STYLE = (
    COLORS_AND_CHARTS
    + """
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem;
       margin: 0 auto; padding: 1.2rem 1rem 4rem; overflow-wrap: anywhere }
h1 { font-size: 1.35rem } h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; padding-top: .8rem;
       border-top: 1px solid var(--line) } h3 { font-size: 1rem; margin: 1.6rem 0 .4rem }
h1, h2, h3 { line-height: 1.25; font-weight: 650 } p { max-width: 46rem } a { color: var(--accent) }
.finding { font-size: 1.1rem; font-weight: 550; line-height: 1.4; margin: .5rem 0 1rem }
nav ul { list-style: none; padding: 0; margin: 1.2rem 0; display: flex; flex-wrap: wrap; gap: .3rem 1.3rem;
       font-size: 15px } .missing, small, footer { color: var(--quiet) }
dl { font-size: 15px; margin: .8rem 0; display: grid; gap: .6rem 1.8rem;
       grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)) }
dt { font-weight: 600 } dd { margin: 0 }
svg.chart { display: block; width: 100%; height: auto }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1.4rem 1.8rem;
       margin: 1rem 0; align-items: start } figure { margin: 0; max-width: 30rem }
.commands { grid-template-columns: 1fr } .commands dt { font-weight: 400 }
.wide { overflow-x: auto; margin: .8rem 0; background: var(--paper);
       background: linear-gradient(90deg, var(--paper) 50%, transparent) 0 0 / 2.5rem 100% no-repeat local,
       linear-gradient(270deg, var(--paper) 50%, transparent) 100% 0 / 2.5rem 100% no-repeat local,
       linear-gradient(90deg, var(--line), transparent) 0 0 / 1rem 100% no-repeat scroll,
       linear-gradient(270deg, var(--line), transparent) 100% 0 / 1rem 100% no-repeat scroll } /* more at this side */
table { border-collapse: collapse; font-size: 14px }
th, td { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line);
       overflow-wrap: normal } td { font-variant-numeric: tabular-nums; max-width: 28rem }
pre { overflow-x: auto; background: var(--panel); padding: .8rem; font-size: 13px; border-radius: 6px }
code { background: var(--panel); padding: .1rem .25rem; border-radius: 4px; font-size: .9em }
details { margin: .8rem 0 } summary { cursor: pointer; color: var(--quiet); padding: .2rem 0 }
@media (min-width: 40rem) { @supports selector(::details-content) {
  .phone { margin: 0 } .phone > summary { display: none }
  .phone::details-content { content-visibility: visible } } }
@media (max-width: 40rem) { .cards, .cards tbody, .cards tr, .cards td { display: block; max-width: none }
  .cards thead, .cards td:empty { display: none } .cards tr { border-bottom: 1px solid var(--line); padding: .6rem 0 }
  .cards td { border: 0; padding: .1rem 0 } .cards td::before { content: attr(data-name) ": "; color: var(--quiet) } }
"""
)


def to_html(title: str, sections: list[Section], findings: list[str] = (), style: str = "", opening: list = ()) -> str:
    """Return a page. findings: sentences that summarize it; opening: blocks between them and the contents.

    style: CSS rules for this page only.
    """
    links = contents([(part.anchor, part.title) for part in sections], "contents")
    first = "\n".join(block.html() for block in (*map(Finding, findings), *opening))
    body = "\n".join(part.html(folded=len(sections) >= MANY_SECTIONS) for part in sections)
    return document(title, f"<h1>{escape(title)}</h1>\n{first}\n{links}\n{body}", style)


def document(title: str, body: str, style: str = "") -> str:
    return writable(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>\n<body>{body}</body></html>\n"
    )


def to_markdown(title: str, sections: list[Section], findings: list[str] = ()) -> str:
    parts = [f"## {in_markdown(title)}", *(Finding(words).markdown() for words in findings)]
    for section in sections:
        blocks = [words for block in section.blocks if (words := block.markdown())]
        parts += [f"### {in_markdown(section.title)}", *blocks] if blocks else []
    return writable("\n\n".join(parts) + "\n")


def single_numbers(result: dict, prefix: str = "") -> dict[str, object]:
    """Return the numbers and words of a result that are not in lists, named by their paths."""
    found = {}
    for key, value in result.items():
        if isinstance(value, dict):
            found |= single_numbers(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            found[prefix + key] = value
    return found


def numbers(result: dict, digits: int = 4) -> Table:
    """Return a table of the single numbers and words of a result, one per row."""
    rows = [
        [name.replace("_", " ").replace(".", ", "), written(value, digits) if isinstance(value, float) else str(value)]
        for name, value in single_numbers(result).items()
        if value is not None
    ]
    return Table(["", ""], rows)
