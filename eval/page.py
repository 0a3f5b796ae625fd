"""A page of measures that needs no other file: numbers, figures inside, and why a measure was left out."""

import base64
import html
from pathlib import Path


STYLE = (
    "body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em}img{max-width:100%}"
    "td,th{padding:.1em .8em;text-align:left}.skipped{color:#777}"
)


def single_numbers(result: dict, prefix: str = "") -> dict[str, object]:
    """The numbers and words of a result that are not in lists, named by their path."""
    found = {}
    for key, value in result.items():
        if isinstance(value, dict):
            found |= single_numbers(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            found[prefix + key] = value
    return found


def shown(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))


def section(name: str, about: str, result: dict, figures: list[Path]) -> str:
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{shown(v)}</td></tr>" for k, v in single_numbers(result).items())
    images = "".join(
        f'<p><img alt="{name}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"></p>'
        for path in figures
    )
    return (
        f'<h2 id="{name}">{name}</h2><p>{html.escape(about)}</p>{images}'
        f"<details><summary>numbers</summary><table>{rows}</table></details>"
    )


def skipped(name: str, reason: str) -> str:
    return f'<h2 id="{name}" class="skipped">{name}</h2><p class="skipped">left out: {html.escape(reason)}</p>'


def page(title: str, where: dict, sections: list[str]) -> str:
    facts = "".join(f"<tr><th>{html.escape(k)}</th><td>{shown(v)}</td></tr>" for k, v in where.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1><table>{facts}</table>{''.join(sections)}</html>\n"
    )
