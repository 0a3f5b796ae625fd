"""Sections of text, tables and pictures, as one self-contained HTML page or as Markdown."""

import base64
import io
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape

from looped_recipes.common.canvas import canvas


def one_line(words: str) -> str:
    return " ".join(words.split("\n"))


def in_markdown(words: str) -> str:
    """Words that are neither HTML nor a table's end, whatever a run is called."""
    return one_line(escape(words, quote=False)).replace("|", "\\|")


def writable(text: str) -> str:
    """Names of files may hold bytes that are no text."""
    return text.encode(errors="replace").decode()


@dataclass
class Table:
    head: list[str]
    rows: list[list[str]]

    def html(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.head)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'

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
    """A part of a section."""

    def html(self) -> str:
        return f"<h3>{escape(self.words)}</h3>"

    def markdown(self) -> str:
        return f"#### {in_markdown(self.words)}"


@dataclass
class Missing(Text):
    """What is not there, and the command that makes it."""

    command: str

    def html(self) -> str:
        return f'<p class="missing">{escape(self.words)} <code>{escape(self.command)}</code></p>'

    def markdown(self) -> str:
        return f"{in_markdown(self.words)} `{one_line(self.command).replace('`', ' ')}`"


@dataclass
class Image:
    png: bytes
    alt: str

    def html(self) -> str:
        return f'<img alt="{escape(self.alt)}" src="data:image/png;base64,{base64.b64encode(self.png).decode()}">'

    def markdown(self) -> str:
        return ""  # a model card is text


@dataclass
class Folded:
    """A long table or text behind a line that opens it."""

    title: str
    inside: Table | str

    def html(self) -> str:
        inside = f"<pre>{escape(self.inside)}</pre>" if isinstance(self.inside, str) else self.inside.html()
        return f"<details><summary>{escape(self.title)}</summary>{inside}</details>"

    def markdown(self) -> str:
        return ""


@dataclass
class Section:
    title: str
    blocks: list = field(default_factory=list)
    is_left_out: bool = False

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")

    def html(self) -> str:
        skipped = ' class="skipped"' if self.is_left_out else ""
        blocks = "\n".join(block.html() for block in self.blocks)
        return f'<h2 id="{self.anchor}"{skipped}>{escape(self.title)}</h2>\n{blocks}'


@contextmanager
def picture(blocks: list, alt: str, panels: int = 1):
    """Axes to draw on; what is drawn is added to the blocks, unless nothing is."""
    buffer, has_data = io.BytesIO(), False
    with canvas(buffer, panels, size=(4.8, 3.4), dpi=110) as axes:
        yield axes
        for axis in axes:
            if not axis.has_data():
                axis.remove()
                continue
            has_data = True
            if len(axis.get_legend_handles_labels()[1]) > 1:
                axis.legend(fontsize=8)
    if has_data:
        blocks.append(Image(buffer.getvalue(), alt))


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem }
h1, h2 { line-height: 1.2; font-weight: 600 } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; font-size: 14px } .wide { overflow-x: auto }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #eee }
td { font-variant-numeric: tabular-nums }
img { max-width: 100%; height: auto } pre { overflow-x: auto; background: #f6f6f6; padding: .8rem; font-size: 13px }
.missing, .skipped { color: #666 } code { background: #f6f6f6; padding: 0 .2rem }
"""


def to_html(title: str, sections: list[Section]) -> str:
    links = " · ".join(f'<a href="#{part.anchor}">{escape(part.title)}</a>' for part in sections)
    body = "\n".join(part.html() for part in sections)
    return document(title, STYLE, f"<h1>{escape(title)}</h1>\n<nav>{links}</nav>\n{body}")


def document(title: str, style: str, body: str) -> str:
    return writable(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>{body}</body></html>\n"
    )


def to_markdown(title: str, sections: list[Section]) -> str:
    parts = [f"## {in_markdown(title)}"]
    for section in sections:
        blocks = [words for block in section.blocks if (words := block.markdown())]
        parts += [f"### {in_markdown(section.title)}", *blocks] if blocks else []
    return writable("\n\n".join(parts) + "\n")


def single_numbers(result: dict, prefix: str = "") -> dict[str, object]:
    """The numbers and words of a result that are not in lists, named by their path."""
    found = {}
    for key, value in result.items():
        if isinstance(value, dict):
            found |= single_numbers(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            found[prefix + key] = value
    return found
