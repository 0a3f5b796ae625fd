"""Read a sweep file and check it before anything is trained: entries of settings, their names, and what to plot."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .paths import recipe_file
from .recipe import RecipeError, as_number
from .yaml_files import read_yaml, shortly


MOST_RUNS = 10_000
LONGEST_NAME = 200  # bytes; file systems take 255
JOBS = "jobs"  # folder of the scripts and logs of a cluster's jobs
WRITTEN = ("results.jsonl", "results.svg", "optima.json", JOBS)  # names beside the folders of the runs
OUTPUT = "training.output_dir"


class Plot(NamedTuple):
    """What is drawn: the names of settings."""

    x: str
    curve: str
    panel: list[str]


class SweepFile(NamedTuple):
    path: Path
    recipe: str
    set: dict  # settings of all runs
    entries: list[dict]  # settings of each run, and optionally a name and another recipe
    plot: Plot | None

    @property
    def folder(self) -> Path:
        return Path("runs") / checked_name(self.path.name.removesuffix(".yaml").removesuffix(".sweep"), self.path)


def read_sweep(path: str | Path, overrides: Sequence[str] = ()) -> SweepFile:
    path = recipe_file(path)
    raw = read_yaml(path, "sweep")
    unknown = set(raw) - {"recipe", "set", "grid", "runs", "plot"}
    if unknown or "recipe" not in raw or ("grid" in raw) == ("runs" in raw):
        raise RecipeError(
            f"{path} must hold recipe, one of grid and runs, and may hold set and plot; got "
            f"{', '.join(map(str, raw)) or 'nothing'}"
        )
    entries = combinations(raw["grid"], path) if "grid" in raw else listed(raw["runs"], path)
    if not entries:
        raise RecipeError(f"{path} holds no run: grid and runs need at least one value or entry")
    changes = {} if raw.get("set") is None else raw["set"]
    check_settings("set", changes, path, named=False)
    for entry in entries:
        check_settings("grid" if "grid" in raw else "runs", entry, path, named="runs" in raw)
    everywhere = [key for key in changes if all(key in entry for entry in entries)]
    if everywhere:
        raise RecipeError(f"{path}: set has {', '.join(everywhere)}, which every run sets anew: take it out of set")
    refuse_swept(entries, overrides, path)
    plot = None if raw.get("plot") is None else checked_plot(raw["plot"], entries, path)
    return SweepFile(path, checked_recipe(raw["recipe"], path), changes, entries, plot)


def combinations(grids, path: Path) -> list[dict]:
    entries = []
    for grid in grids if isinstance(grids, list) else [grids]:
        if not isinstance(grid, dict) or not grid or not all(isinstance(values, list) for values in grid.values()):
            raise RecipeError(f"{path}: a grid must hold a list of values for each setting, got {shortly(grid)}")
        if len(entries) + math.prod(map(len, grid.values())) > MOST_RUNS:
            raise RecipeError(f"{path}: its grids hold more than {MOST_RUNS} runs: make them smaller")
        entries += [dict(zip(grid, map(as_number, values))) for values in itertools.product(*grid.values())]
    return entries


def listed(runs, path: Path) -> list[dict]:
    if not isinstance(runs, list) or not all(isinstance(entry, dict) for entry in runs):
        raise RecipeError(
            f"{path}: runs must be a list of settings, e.g. - {{name: a, depth.per: batch}}; got {shortly(runs)}"
        )
    if len(runs) > MOST_RUNS:
        raise RecipeError(f"{path}: more than {MOST_RUNS} runs: make them fewer")
    return [{key: value if key == "name" else as_number(value) for key, value in entry.items()} for entry in runs]


def check_settings(place: str, settings, path: Path, named: bool):
    if not isinstance(settings, dict):
        raise RecipeError(f"{path}: {place} must hold section.key: value pairs, got {shortly(settings)}")
    for key in settings:
        if key == OUTPUT:
            raise RecipeError(
                f"{path}: {key} in {place} would have no effect, a run is written to runs/<sweep>/<name>: take it "
                f"out, or pass {OUTPUT}=FOLDER behind the sweep"
            )
        is_setting = isinstance(key, str) and all(key.partition("."))
        if not is_setting and not (place != "set" and key == "recipe") and not (named and key == "name"):
            raise RecipeError(f"{path}: {shortly(key)} in {place} is no setting: write section.key, e.g. optimizer.lr")


def refuse_swept(entries: list[dict], overrides: Sequence[str], path: Path):
    """Refuse overrides of settings in which the runs differ: overrides win, so the runs' names would be wrong."""
    keys = {key for entry in entries for key in entry}
    for override in overrides:
        key = override.partition("=")[0]
        if key in keys:
            raise RecipeError(
                f"{override!r} would overrule what the runs of {path} differ in: change it in the sweep, or run its "
                "recipe with looped pretrain"
            )


def checked_plot(plot, entries: list[dict], path: Path) -> Plot:
    if not isinstance(plot, dict) or set(plot) - {"x", "curve", "panel"} or not {"x", "curve"} <= set(plot):
        raise RecipeError(f"{path}: plot must hold x and curve, and may hold panel; got {shortly(plot)}")
    panel = [] if plot.get("panel") is None else plot["panel"]
    if not isinstance(panel, list):
        raise RecipeError(f"{path}: panel of plot must be a list of settings, got {shortly(panel)}")
    for key in (plot["x"], plot["curve"], *panel):
        if not isinstance(key, str) or not all(key in entry for entry in entries):
            raise RecipeError(f"{path}: plot names {shortly(key)}, which is not a setting of every run")
    xs = [entry[plot["x"]] for entry in entries]
    if not all(is_number(x) and x > 0 for x in xs):
        raise RecipeError(
            f"{path}: x of plot must be numbers above 0, got {plot['x']} in {shortly(xs)}: leave plot out, `looped "
            "report` on the folder of the runs has a table with every value; or name it in curve or panel"
        )
    curves = [entry[plot["curve"]] for entry in entries]
    if not all(map(is_number, curves)) and not all(isinstance(value, (str, bool)) for value in curves):
        raise RecipeError(f"{path}: curve of plot must be all numbers or all words, got {shortly(curves)}")
    panels = [entry[key] for key in panel for entry in entries]
    if any(isinstance(value, (list, dict)) for value in panels):
        raise RecipeError(f"{path}: panel of plot must be numbers or words, got {shortly(panels)}")
    check_replicas(plot["x"], [plot["curve"], *panel], entries, path)
    return Plot(plot["x"], plot["curve"], panel)


def check_replicas(x: str, keys: list[str], entries: list[dict], path: Path):
    """Refuse points with different numbers of replicas, which a fit can not use. Replicas are runs of one point that
    differ only in settings that are not plotted, such as seeds."""
    curves = defaultdict(Counter)
    for entry in entries:
        curves[tuple(entry[key] for key in keys)][entry[x]] += 1
    for values, counts in curves.items():
        if len(set(counts.values())) > 1:
            curve = ", ".join(f"{key}={value}" for key, value in zip(keys, values))
            found = ", ".join(f"{count} at {value:g}" for value, count in sorted(counts.items()))
            raise RecipeError(
                f"{path}: plot needs equally many runs at every {x}, but {curve} has {found}: add the runs that are "
                "missing, or leave plot out"
            )


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked_recipe(name, path: Path) -> str:
    if not isinstance(name, str) or not name.strip():
        raise RecipeError(f"{path}: recipe must name a recipe, got {shortly(name)}")
    return name


def checked_name(name, path: Path) -> str:
    """Return `name` if it can name a folder inside the folder of the sweep."""
    wrong = None
    if not isinstance(name, str):
        wrong = "is no text: put it in quotes"
    elif not name or not name.isprintable() or name != name.strip():
        wrong = "must be printable, and have no space around it"
    elif name.startswith(".") or set(name) & set("/\\"):
        wrong = "would be another folder: leave out slashes, and a dot at the beginning"
    elif name in WRITTEN:
        wrong = "is of the sweep itself: choose another"
    elif len(name.encode()) > LONGEST_NAME:
        wrong = f"is longer than {LONGEST_NAME} bytes: give the runs names of their own"
    if wrong:
        raise RecipeError(f"{path}: the name {shortly(name)} {wrong}")
    return name


def is_sweep(path) -> bool:
    return str(path).endswith(".sweep.yaml")
