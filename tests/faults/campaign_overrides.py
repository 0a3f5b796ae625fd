"""Recipes in other encodings, and settings of a command line: read as they are written, or refused in one line."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from looped_recipes.settings.recipe import Recipe, RecipeError, load_recipe
from tests.faults.campaign import Trial


PIECES = [
    "runs",
    "a",
    "b c",
    " ",
    "  ",
    "\n",
    "\t",
    "\r",
    "#",
    " # ",
    ":",
    ": ",
    "-",
    "- ",
    "é",
    "日本",
    "🙂",
    "\ufeff",
]
PIECES += [
    "'",
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    "*",
    "&",
    "!",
    "|",
    ">",
    "%",
    "@",
    "`",
    "=",
    "\\",
    "$HOME",
    "~",
    "/",
    "\0",
]
PIECES += [
    "null",
    "yes",
    "1",
    "1e3",
    "0x1",
    "1:30",
    "2020-01-01",
    ".",
    "..",
    "x" * 300,
    "\u2028",
    "\x85",
    "\udcff",
    "\x1b",
]
FIELDS = ("training.output_dir", "data.source", "data.text_field", "data.start_token", "logging.project")
SECTIONS = {"training": {"steps": 6, "output_dir": "runs/größer"}, "data": {"source": "日本.jsonl"}}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "shift-jis", "cp437")
LINE_ENDS = ("\n", "\r\n", "\r", "\n\r", "\v", "\x85", "\u2028", "\0\n", "\n\n")


def trials(seed: int, folder: Path) -> Iterator[Trial]:
    draw = random.Random(seed)
    recipe = folder / "recipe.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        yield encoded(draw, recipe)
        recipe.write_text("training: {steps: 6}\n")
        for _ in range(9):
            yield overridden(draw, recipe)


def overridden(draw: random.Random, recipe: Path) -> Trial:
    key, text = draw.choice(FIELDS), "".join(draw.choices(PIECES, k=draw.randint(1, 4)))
    fault = f"{key}={text!r:.100}"
    section, _, name = key.partition(".")
    meant = {getattr(getattr(Recipe(), section), name)} if text.strip() in ("null", "~") else written(text)
    return judged(fault, lambda: load_recipe(recipe, [f"{key}={text}"]).to_dict()[section][name], meant)


def written(text: str) -> set:
    """What a person may have meant: the text, the text in its quotes, nothing, a path in the home folder."""
    text = text.strip()
    meant = {text, None} if text == "" else {text}
    meant |= {str(Path(text).expanduser())} if text.startswith("~/") else set()
    return meant | ({text[1:-1]} if text[:1] == text[-1:] and text[:1] in "'\"" else set())


def encoded(draw: random.Random, recipe: Path) -> Trial:
    encoding, end = draw.choice(ENCODINGS), draw.choice(LINE_ENDS)
    lines = [f"{name}:{end}" + "".join(f"  {key}: {value}{end}" for key, value in part.items())
             for name, part in SECTIONS.items()]  # fmt: skip
    recipe.write_bytes("".join(lines).encode(encoding, "replace"))
    meant = json.dumps(SECTIONS)

    def read() -> str:
        found = load_recipe(recipe).to_dict()
        return json.dumps({name: {key: found[name][key] for key in part} for name, part in SECTIONS.items()})

    return judged(f"a recipe in {encoding} with line ends {end!r}", read, {meant})


def judged(fault: str, read, meant: set) -> Trial:
    try:
        found = read()
    except RecipeError as error:
        said = str(error)
        good = said and "\n" not in said and len(said) < 3000
        return Trial(fault, "refused" if good else "traceback", "" if good else said[:300])
    except Exception as error:
        return Trial(fault, "traceback", f"{type(error).__name__}: {str(error)[:300]!r}")
    return Trial(fault, "right") if found in meant else Trial(fault, "silent", f"read as {found!r:.200}")
