"""The code beside a saved model: two files, made of all those files of the family that a model needs.

A model that is opened by its name asks the Hub for each file of its code, and transformers warns of each.
"""

import ast
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill


HOME = Path(__file__).parents[1]
CONFIG, MODELS = "configuration_looped", "modeling_looped"  # what auto_map names
WIDTH = 119

HEAD = '''{license}"""{title} of a looped language model, for a Python that does not have the package modeling-looped.

Version {version} of that package wrote it beside the weights: files of the package, one after the other, each under
its name. Changes belong there: its next save writes this file anew.
"""

'''


def write_code(folder: str | PathLike):
    """Write both files, the same on every system. They take the place of older ones once both are whole."""
    with TemporaryDirectory(prefix=".code-", dir=folder) as written:
        for name, text in saved_code().items():
            (Path(written) / f"{name}.py").write_bytes(text.encode())
        for file in Path(written).iterdir():
            os.replace(file, Path(folder) / file.name)


@cache
def saved_code() -> dict[str, str]:
    """Return the text of both files by name. The one of the config runs alone where only a config is opened."""
    parts = {CONFIG: in_order("configuration_looped")}
    parts[MODELS] = [part for part in in_order("auto_classes") if part not in parts[CONFIG]]
    home = {part: name for name, those in parts.items() for part in those}
    version = re.findall('^__version__ = "(.*)"$', text_of("__init__"), re.MULTILINE)[0]
    said = {"license": text_of(CONFIG).partition('"""')[0], "version": version}
    titles = {CONFIG: "The config", MODELS: "The classes"}
    return {name: HEAD.format(title=titles[name], **said) + merged(those, home) for name, those in parts.items()}


def in_order(part: str, before: tuple[str, ...] = ()) -> list[str]:
    """Return a file and what it imports at its top, after `before`, in the order in which Python runs them."""
    found = list(before)
    for _, module in imports_of_ours(tree_of(part).body):
        if module not in found:
            found = in_order(module, tuple(found))
    return [*found, part]


@cache
def text_of(part: str) -> str:
    return (HOME / f"{part}.py").read_text("utf-8")


@cache
def tree_of(part: str) -> ast.Module:
    return ast.parse(text_of(part))


def imports_of_ours(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.ImportFrom, str]]:
    """Yield imports from files of the family, each with the name of that file."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            yield node, node.module


def is_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"


def merged(parts: list[str], home: dict[str, str]) -> str:
    """Return the text of one file. home: the file of each part. No two parts give one name to different things."""
    written: set[str] = set()
    bodies = [f"# ---- {part}.py ----\n# {body(part, home, written)}" for part in parts]
    return "\n\n\n".join(["\n".join(imports(parts, home)), *bodies]) + "\n"


def imports(parts: list[str], home: dict[str, str]) -> Iterator[str]:
    """Yield what these parts import at their tops, but for each other."""
    modules: set[str] = set()
    names: dict[str, set[str]] = {}
    for node in (node for part in parts for node in tree_of(part).body):
        if isinstance(node, ast.Import):
            modules.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module:
            source = f".{home[node.module]}" if node.level else node.module
            names.setdefault(source, set()).update(map(ast.unparse, node.names))
    names.pop(f".{home[parts[0]]}", None)
    yield from sorted(modules)
    for source in sorted(names, key=lambda each: (each.startswith("."), each)):
        line = f"from {source} import {', '.join(sorted(names[source]))}"
        yield line if len(line) <= WIDTH else in_brackets(line)


def in_brackets(line: str) -> str:
    start, _, names = line.partition(" import ")
    return f"{start} import (\n{fill(names, WIDTH, initial_indent='    ', subsequent_indent='    ')}\n)"


def body(part: str, home: dict[str, str], written: set[str]) -> str:
    """Return the text of a part without its license and its imports. written: what stands in the file already."""
    lines = text_of(part).splitlines()
    for node, instead in changes(part, home, written):
        start, end = node.lineno - 1, node.end_lineno or node.lineno
        lines[start:end] = [lines[start][: node.col_offset] + instead, *[""] * (end - start - 1)]
    lines[: tree_of(part).body[0].lineno] = []
    said = (ast.get_docstring(tree_of(part)) or "").replace("\n", "\n# ").replace("# \n", "#\n")
    return f"{said}\n\n\n" + re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n")


def changes(part: str, home: dict[str, str], written: set[str]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the statements that do not stay as they are, and what stands there instead."""
    for node in tree_of(part).body:
        is_docstring = node is tree_of(part).body[0]
        statement = ast.unparse(node) if isinstance(node, ast.Assign) else None
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom) or is_all(node) or statement in written:
            yield node, ""
        elif statement is not None:
            written.add(statement)
    for node, module in imports_of_ours(ast.walk(tree_of(part))):
        if node.col_offset:  # within a function
            names = ", ".join(map(ast.unparse, node.names))
            yield node, "pass" if home[module] == home[part] else f"from .{home[module]} import {names}"
