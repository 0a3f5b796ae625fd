"""Documents that come with every Python, for use without other text and without a network connection."""

import contextlib
import importlib
import inspect
import os
import sysconfig
import tokenize
from pathlib import Path
from pydoc_data.topics import topics

from looped_recipes.settings.recipe import RecipeError


NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
# modules written in C, whose documentation is only in the running interpreter
COMPILED = (
    "array",
    "binascii",
    "builtins",
    "cmath",
    "itertools",
    "math",
    "mmap",
    "sys",
    "time",
    "unicodedata",
    "zlib",
)


def library_files() -> list[tuple[str, Path]]:
    """Return the standard library's modules as (relative path, path), sorted, without tests and encoding tables."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files += [(path.relative_to(library).as_posix(), path) for path in paths]
    if not files:
        raise RecipeError(f"this Python has no library sources in {library}: set data.source to a file or a dataset")
    return sorted(files)


def embedded_documents() -> list[str]:
    """Return the language reference by topic, the docstrings of modules written in C, and the library's sources."""
    documents = [topics[name] for name in sorted(topics)]
    documents += [_describe(importlib.import_module(name)) for name in COMPILED]
    for _, path in library_files():
        with contextlib.suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as file:
            documents.append(file.read())
    return [text for text in documents if text.strip()]


def _describe(module) -> str:
    """Return the docstrings of a module, its callables and their methods, without text that differs between runs."""
    parts = [f"{module.__name__}\n\n{inspect.getdoc(module)}"]
    for name in sorted(vars(module)):
        member = vars(module)[name]
        if name.startswith("_") or not callable(member):
            continue
        parts.append(f"{module.__name__}.{name}\n\n{inspect.getdoc(member)}")
        if inspect.isclass(member):
            methods = [key for key in sorted(vars(member)) if not key.startswith("_")]
            parts += [f"{name}.{key}\n\n{inspect.getdoc(vars(member)[key])}" for key in methods]
    return "\n\n".join(parts) + "\n"
