"""The `--help` text on recipes, read from the source of their sections, because importing the model takes seconds."""

import ast
import io
import re
import textwrap
from importlib.util import find_spec
from pathlib import Path
from tokenize import COMMENT, generate_tokens

from . import sections
from .paths import installed_recipes, installed_sweeps


WIDTH = 110


def help_of_recipes(about: str, arguments: list[str]) -> str:
    """Return `about` and all keys of a recipe; or, with a section or "recipes" among the arguments, those alone."""
    if "model" in arguments:
        return model_fields()
    if "recipes" in arguments:
        return all_installed()
    keys = {name: f"{name}\n{keys_of(section)}" for name, section in meanings().items()}
    if asked := [keys[name] for name in arguments if name in keys]:
        return "\n\n".join(asked)
    model = "model\n    preset, and every field of the model's config: `looped pretrain --help model` describes them"
    folders = sorted({name.partition("/")[0] for name in installed_recipes()})
    listed = indented(f"in the folders {', '.join(folders)}: `looped pretrain --help recipes` names each")
    return "\n\n".join([about.strip(), f"recipes\n{listed}", model, *keys.values()])


def all_installed() -> str:
    installed = {"recipes": installed_recipes(), "sweeps": installed_sweeps()}
    return "\n\n".join(f"{kind} that are installed\n{indented(', '.join(names))}" for kind, names in installed.items())


def indented(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def model_fields() -> str:
    return ast.get_docstring(config_class())


def config_class() -> ast.ClassDef:
    folder = Path(find_spec("modeling_looped").origin).parent
    module = ast.parse((folder / "configuration_looped.py").read_text(encoding="utf-8"))
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "LoopedConfig")


def keys_of(meanings: dict[str, tuple[str, str]]) -> str:
    lines = []
    for key, (default, meaning) in meanings.items():
        start = f"    {key}={default}"
        lines.append(textwrap.fill(f"{start:38}  {meaning}", WIDTH, subsequent_indent=" " * 40))
    return "\n".join(lines)


def meanings() -> dict[str, dict[str, tuple[str, str]]]:
    """Return {section: {key: (default, meaning)}}; the meaning is the comment beside or above the key."""
    text = Path(sections.__file__).read_text(encoding="utf-8")
    lines, names = text.splitlines(), {section.__name__: name for name, section in sections.SECTIONS.items()}
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            keys = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            found[names[node.name]] = {key.target.id: (default_of(key), meaning_of(key, lines)) for key in keys}
    return {name: found[name] for name in sections.SECTIONS}


def default_of(key: ast.AnnAssign) -> str:
    """Return the default of a key as a recipe would write it."""
    value = key.value
    if isinstance(value, ast.Call):  # field(default_factory=lambda: [...])
        factory = value.keywords[0].value
        return ast.unparse(factory.body) if isinstance(factory, ast.Lambda) else "[]"
    said = str(ast.literal_eval(value))
    return {"None": "null", "True": "true", "False": "false"}.get(said, said)  # as YAML writes them


def meaning_of(key: ast.AnnAssign, lines: list[str]) -> str:
    """Return the choices of a key, and the comments above and beside it. lines: the lines of the file."""
    first = key.lineno - 1
    while lines[first - 1].strip().startswith("#"):
        first -= 1
    own = io.StringIO("\n".join(line.strip() for line in lines[first : key.end_lineno]))
    words = " ".join(token.string.lstrip("# ") for token in generate_tokens(own.readline) if token.type == COMMENT)
    literal = re.search(r"Literal\[(.*?)\]", ast.unparse(key.annotation))
    if literal is None:
        return words
    choices = " | ".join(re.findall(r"'(.*?)'", literal[1]))
    return f"{choices}; {words}" if words else choices
