"""The recipes and sweeps of the project, each sweep read once."""

import functools
from pathlib import Path

from looped_recipes.engine.sweep_runs import Run, load_sweep


RECIPES = Path(__file__).parent.parent / "recipes"


@functools.cache
def runs_of_sweep(path: Path) -> list[Run]:
    """The runs of a sweep, for tests that change none of them."""
    return load_sweep(path)
