"""The runs that a sweep file describes. This file imports nothing that only training needs, which takes many seconds
on a busy machine: a sweep that can not be run is refused before."""

import json
from pathlib import Path
from typing import NamedTuple

from looped_recipes.settings.paths import named_in
from looped_recipes.settings.recipe import Recipe, RecipeError, load_recipe
from looped_recipes.settings.run_checks import check_run
from looped_recipes.settings.sweep_files import OUTPUT, SweepFile, checked_name, checked_recipe, read_sweep
from modeling_looped.optimization import depth_correction


class Run(NamedTuple):
    name: str
    settings: dict  # what distinguishes it from other runs: settings, and the recipe where the sweep names several
    path: Path  # path of the recipe
    recipe: Recipe
    same_as: str | None = None  # name of an earlier run with the same computation


def load_sweep(path: str | Path, overrides=()) -> list[Run]:
    return runs_of(read_sweep(path, overrides), overrides)


def runs_of(sweep: SweepFile, overrides=()) -> list[Run]:
    runs, first_of = {}, {}
    for entry in sweep.entries:
        said = {key: value for key, value in entry.items() if key != "name"}
        settings = {key: value for key, value in said.items() if key != "recipe"}
        own = checked_recipe(entry["recipe"], sweep.path) if entry.get("recipe") is not None else None
        name = checked_name(entry["name"] if "name" in entry else described(own, settings), sweep.path)
        if name in runs:
            raise RecipeError(
                f"{sweep.path}: two runs have the name {name!r}: take one of them out, or give them names of their own"
            )
        base = named_in(sweep.path, own or sweep.recipe)
        changes = {**sweep.set, **settings, OUTPUT: str(sweep.folder / name)}
        recipe = load_recipe(base, overrides, changes)
        if any(override.startswith(f"{OUTPUT}=") for override in overrides):
            recipe.training.output_dir = str(Path(recipe.training.output_dir) / name)
        first = first_of.setdefault(computation(recipe), name)
        runs[name] = Run(name, said, base, recipe, None if first == name else first)
    return list(runs.values())


def described(recipe: str | None, settings: dict) -> str:
    """Make a name for an unnamed run from its recipe and settings; slashes become underscores."""
    words = [Path(recipe).stem] if recipe else []
    words += [f"{key.split('.')[-1]}={value}" for key, value in settings.items()]
    return "_".join(words).replace("/", "_").replace("\\", "_")


def computation(recipe: Recipe) -> str:
    """Return a text that is equal for recipes with the same computation: output folders are ignored, and residual
    scaling settings count by their factors, not by their names."""
    content, config = recipe.to_dict(), recipe.model_config()
    content["training"]["output_dir"] = None
    model = config.to_dict()
    if config.residual_depth == "trained":
        for name in ("residual_scaling", "residual_scale", "residual_reference_layers"):
            model.pop(name)
        correct = content["optimizer"].pop("correct_for_depth")
        outside = config.residual_factor(1) if config.num_prelude_layers or config.num_coda_layers else None
        core = config.residual_factor(config.trained_depth)
        model["factors"] = [core, outside, depth_correction(config) if correct else 1.0]
    return json.dumps({**content, "model": model}, sort_keys=True, default=str)


def checked_sweep(path: str, overrides: list[str]) -> tuple[SweepFile, list[Run]]:
    """Read a sweep file. Refuse it if a run of it can not be trained or would have no result."""
    sweep = read_sweep(path, overrides)
    runs = runs_of(sweep, overrides)
    for run in runs:
        if run.recipe.training.stop_after is not None:
            raise RecipeError(
                f"training.stop_after={run.recipe.training.stop_after} would leave run {run.name!r} of {sweep.path} "
                "without a result: leave it out, a sweep that is interrupted goes on with the same command"
            )
        check_run(run.recipe)
    from .optimizers import refuse_idle_rate  # takes seconds

    for run in runs:
        refuse_idle_rate(run.recipe, {*run.settings, *(override.partition("=")[0] for override in overrides)})
    return sweep, runs
