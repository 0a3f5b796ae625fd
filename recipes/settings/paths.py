"""Paths in recipes and commands: `~` is the home folder, and recipes of this package are found by name."""

import difflib
import glob
import os
from pathlib import Path


INSTALLED = Path(__file__).resolve().parents[1]  # the recipes that come with this package


def expanded(path: str | Path) -> Path:
    """Return `path` with a leading `~` or `~name` replaced by that home folder."""
    whole = os.path.expanduser(path)
    if whole.startswith("~"):
        raise ValueError(
            f"{str(path)!r}: there is no user of that name on this machine: write the full path, or ./~ for a "
            "name that begins so"
        )
    return Path(whole)


def matching(path: Path) -> list[Path]:
    """Return what is there of a name that may hold * and ?; brackets stand for themselves."""
    return [Path(found) for found in glob.glob(str(path).replace("[", "[[]"), recursive=True)]


def recipe_file(path: str | Path) -> Path:
    """Return `path`; or, if it does not exist, the recipe of that name that comes with this package."""
    path = expanded(path)
    return path if path.exists() else installed(path) or path


def named_in(file: Path, name: str) -> Path:
    """Return the recipe that a file names: beside the file, or in this package, whatever the current folder is."""
    near = file.parent / expanded(name)
    return near if near.exists() else installed(expanded(name)) or near


def installed(path: Path) -> Path | None:
    """Return the file of that name that comes with this package, with or without recipes/ before it."""
    parts = path.parts[1:] if path.parts[:1] == ("recipes",) else path.parts
    own = INSTALLED.joinpath(*parts)
    return own if own.is_file() else None


def installed_recipes() -> list[str]:
    """Return the names of this package's recipes. The files in accelerate/ are settings of launches, not recipes."""
    return [name for name in installed_files() if not name.startswith("accelerate/") and ".sweep." not in name]


def installed_sweeps() -> list[str]:
    return [name for name in installed_files() if name.endswith(".sweep.yaml")]


def installed_files() -> list[str]:
    return sorted(path.relative_to(INSTALLED).as_posix() for path in INSTALLED.rglob("*.yaml"))


def advice_on(path: Path, kind: str) -> str:
    """Return what to do about a recipe or sweep that is not there."""
    files = installed_sweeps() if kind == "sweep" else installed_recipes()
    folder = path.as_posix().removeprefix("recipes/").rstrip("/")
    if in_folder := [name for name in files if name.startswith(f"{folder}/")]:
        in_folder.sort(key=lambda name: name.count("/"))
        return f"{folder} is a folder of them: name one, such as {', '.join(in_folder[:8])}"
    if similar := similar_recipe(path, kind):
        return f"did you mean {similar!r}?"
    return "neither here nor among those that `looped pretrain --help recipes` lists"


def similar_recipe(path: Path, kind: str) -> str | None:
    """Return the recipe or sweep of this package that `path` may have meant; None if none is similar."""
    ending = ".sweep.yaml" if kind == "sweep" else ".yaml"
    files = installed_sweeps() if kind == "sweep" else installed_recipes()
    known = [name.removesuffix(ending) for name in files]
    typed = path.as_posix().removeprefix("recipes/").removesuffix(".yaml").removesuffix(".sweep")
    same = [name for name in known if typed in (name, name.rpartition("/")[2])]
    close = same or difflib.get_close_matches(typed, known, n=1, cutoff=0.75)
    return close[0] + ending if close else None
