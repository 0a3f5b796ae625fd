"""YAML for recipes and sweeps: keys are unique and have values, no number is octal or of base 60, an error is one line
with its place.

Plain YAML 1.1 reads 010 as 8 and 1:30 as 90, and silently takes the last of two equal keys.
"""

import copy
import difflib
import functools
import re
import reprlib
from collections.abc import Iterable
from pathlib import Path

import yaml

from .foreign_keys import place_of
from .paths import advice_on, recipe_file
from .sections import RecipeError


NESTING = 50  # of lists and mappings
LARGEST_FILE = 2**20  # bytes: recipes are written by hand


def shortly(value) -> str:
    """Return a `repr` of at most a few hundred characters, in one line."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = shortener.maxlong = 100
    shortener.maxlist = shortener.maxdict = 12
    shortener.maxlevel = 3
    return shortener.repr(value)


def refuse_unknown(given: Iterable, known: list[str], where: str, what: str, listed: Iterable[str] | None = None):
    """Refuse unknown keys. listed: the keys to name in the error if none is similar; by default all known ones."""
    for key in given:
        if key not in known:
            close, place = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5), place_of(str(key))
            advice = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(listed or known)}"
            advice = advice if place is None else f"here that is {place}"
            raise RecipeError(f"{where}: unknown {what}: {shortly(key)}; {advice}")


class StrictLoader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent, index):
        self.depth += 1
        if self.depth > NESTING:
            raise _error(f"lists and mappings are more than {NESTING} deep", self.peek_event())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error("a key must be a word", key)
            if self.depth > 1 and isinstance(value, yaml.ScalarNode) and value.value == "" and value.style is None:
                raise _error(f"{key.value!r} has no value: write one, or null", key)
            if key.value in lines:
                raise _error(f"{key.value!r} stands twice, first in line {lines[key.value]}: take one out", key)
            lines[key.value] = key.start_mark.line + 1
        return node


def _error(problem: str, node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _without(*tags: str) -> dict:
    """Return YAML's rules for the types of unquoted words, without those for `tags`."""
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers
    return {letter: [pair for pair in pairs if pair[0] not in tags] for letter, pairs in resolvers.items()}


INT, FLOAT, TIME = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))
StrictLoader.yaml_implicit_resolvers = _without(INT, FLOAT, TIME)
StrictLoader.add_implicit_resolver(INT, re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789"))
StrictLoader.add_implicit_resolver(
    FLOAT,
    re.compile(
        r"""([-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?
        |\.[0-9][0-9_]*([eE][-+][0-9]+)?
        |[-+]?\.(inf|Inf|INF)
        |\.(nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


@functools.lru_cache(maxsize=100)  # the runs of a sweep all begin with the text of one recipe
def _loaded(text: str):
    return yaml.load(text, StrictLoader)


def parse_yaml(text: str, where: str):
    """Return the value of a YAML text; an error names `where`, the line and the column."""
    try:
        return copy.deepcopy(_loaded(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise RecipeError(f"{where} is not YAML: {place}{error.problem or error.context}") from None
    # characters that YAML does not allow, numbers that Python can not parse, values that do not match their tag
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        said = " ".join(str(error).split())
        raise RecipeError(f"{where} is not YAML: {said}; write it as text, in quotes, or correct it") from None


def read_yaml(path: str | Path, kind: str = "recipe") -> dict:
    """Return the mapping in a file; an empty file gives an empty mapping."""
    try:
        path = recipe_file(path)
        if not path.is_file():
            raise RecipeError(f"there is no {kind} {path}: {advice_on(path, kind)}")
        if path.stat().st_size > LARGEST_FILE:
            raise RecipeError(f"{path} has {path.stat().st_size} bytes, which is no {kind}: name a YAML file")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not YAML: {error}; save it as UTF-8") from None
    except RecipeError:
        raise
    except (OSError, ValueError) as error:
        raise RecipeError(f"can not read {kind} {str(path)!r}: {error}; name a YAML file") from None
    raw = parse_yaml(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} must hold key: value pairs (of a {kind}), got {shortly(raw)}")
    return raw
