"""Many runs from one file: `python -m recipes.sweep recipes/residual_scaling/transfer.sweep.yaml [key=value ...]`.

    recipe: 12_layers.yaml            # what every run starts from
    set: {training.max_loss: 4.0}     # what every run changes
    grid: {model.num_loops: [1, 2]}   # one run per combination,
    runs: [{name: a, depth.per: batch}]  # or one per entry; both may name another recipe for some runs
    plot: {x: optimizer.lr, curve: model.num_loops, panel: [...]}

Runs that are done are not run again; a run that diverges is recorded and left out of the plot. Launch with
`accelerate launch -m recipes.sweep ...` for several GPUs. Results: runs/<sweep>/results.jsonl, one line per run with
its last metrics, and, with `plot`, a PNG of the final validation loss against x, with a star at each curve's optimum
(residual scaling, figure 5).
"""

import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import yaml

from .config import Recipe, RecipeError, as_number, load_recipe
from .metrics import read_metrics
from .pretrain import Divergence, Pretraining


DIVERGED = "diverged.txt"


class Run(NamedTuple):
    name: str
    settings: dict  # what sets it apart
    path: Path  # of the recipe
    overrides: list[str]
    recipe: Recipe


def is_sweep(path) -> bool:
    return str(path).endswith(".sweep.yaml")


def load_sweep(path: str | Path, overrides=()) -> list[Run]:
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"there is no sweep {path}")
    raw = yaml.safe_load(path.read_text()) or {}
    unknown = set(raw) - {"recipe", "set", "grid", "runs", "plot"}
    if unknown or "recipe" not in raw or ("grid" in raw) == ("runs" in raw):
        raise RecipeError(
            f"{path} must hold recipe, one of grid and runs, and may hold set and plot; got {sorted(raw)}"
        )
    if "grid" in raw:
        names = list(raw["grid"])
        entries = [dict(zip(names, values)) for values in itertools.product(*raw["grid"].values())]
    else:
        entries = raw["runs"]
    runs = []
    for entry in entries:
        entry = {key: as_number(value) for key, value in entry.items()}
        own_base = entry.pop("recipe", None)
        base = path.parent / (own_base or raw["recipe"])
        described = [f"{key.split('.')[-1]}={value}" for key, value in entry.items() if key != "name"]
        name = entry.pop("name", None) or "_".join(([Path(own_base).stem] if own_base else []) + described)
        folder = Path("runs") / path.name.removesuffix(".sweep.yaml") / name
        changes = {**(raw.get("set") or {}), **entry, "training.output_dir": str(folder)}
        arguments = [f"{key}={json.dumps(value)}" for key, value in changes.items()] + list(overrides)
        recipe = load_recipe(base, arguments)
        if any(argument.startswith("training.output_dir=") for argument in overrides):
            recipe.training.output_dir = str(Path(recipe.training.output_dir) / name)
            arguments.append(f"training.output_dir={recipe.training.output_dir}")
        runs.append(Run(name, entry, base, arguments, recipe))
    if len({run.name for run in runs}) != len(runs):
        raise RecipeError(f"{path}: two runs have the same name; give them names of their own")
    return runs


def outcome(run: Run) -> dict | None:
    """The run's settings, final validation loss and last metrics; None if it is not done."""
    folder = Path(run.recipe.training.output_dir)
    records = read_metrics(folder / "metrics.jsonl")
    result = {"name": run.name, **run.settings, "loss": None}
    if (folder / DIVERGED).exists():
        result["diverged"] = (folder / DIVERGED).read_text()
    elif (folder / "final" / "config.json").exists():
        result["loss"] = next((r["validation/loss"] for r in reversed(records) if "validation/loss" in r), None)
    else:
        return None
    last = {}
    for record in records:
        last.update(record)
    return {**result, "metrics": last}


def run_all(runs: list[Run]) -> list[dict]:
    results = []
    for run in runs:
        if outcome(run) is None:
            try:
                Pretraining(run.recipe).train()
            except Divergence as divergence:
                (Path(run.recipe.training.output_dir) / DIVERGED).write_text(str(divergence))
        results.append(outcome(run))
        print(json.dumps({key: value for key, value in results[-1].items() if key != "metrics"}))
    return results


def optima(results: list[dict], x: str, curve: str) -> dict:
    """Per curve, the x with the least loss."""
    best = {}
    for result in results:
        if result["loss"] is not None and (result[curve] not in best or result["loss"] < best[result[curve]]["loss"]):
            best[result[curve]] = result
    return {key: result[x] for key, result in sorted(best.items())}


def panels_of(results: list[dict], plot: dict) -> dict[tuple, list[dict]]:
    """Results by the values of the settings that `panel` names."""
    panels = defaultdict(list)
    for result in results:
        panels[tuple(result.get(key) for key in plot.get("panel", []))].append(result)
    return dict(panels)


def draw(results: list[dict], plot: dict, path: Path):
    """A panel for each combination of the settings that `panel` names; the last of them goes along a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = panels_of(results, plot)
    columns = len({panel[-1:] for panel in panels})
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.5 * columns, 3.6 * rows), squeeze=False, sharex=True, sharey=True
    )
    for axis, (panel, members) in zip(axes.flat, panels.items()):
        for value in sorted({result[plot["curve"]] for result in members}):
            points = sorted(
                (r[plot["x"]], r["loss"]) for r in members if r[plot["curve"]] == value and r["loss"] is not None
            )
            if points:
                (line,) = axis.plot(*zip(*points), marker="o", label=f"{plot['curve'].split('.')[-1]} = {value}")
                best = min(points, key=lambda point: point[1])
                axis.plot(*best, marker="*", markersize=14, color=line.get_color())
        axis.set(xscale="log", title=", ".join(map(str, panel)))
        if axis.lines:  # else all of them diverged
            axis.legend()
    for axis in axes[-1]:
        axis.set_xlabel(plot["x"])
    for axis in axes[:, 0]:
        axis.set_ylabel("validation loss")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str]):
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
    runs = load_sweep(arguments[0], arguments[1:])
    results = run_all(runs)
    folder = Path(runs[0].recipe.training.output_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    plot = yaml.safe_load(Path(arguments[0]).read_text()).get("plot")
    if plot:
        draw(results, plot, folder / "results.png")
        for panel, members in panels_of(results, plot).items():
            best = ", ".join(f"{value}: {x:g}" for value, x in optima(members, plot["x"], plot["curve"]).items())
            print(f"best {plot['x']} by {plot['curve']} {', '.join(map(str, panel))}: {best or 'all diverged'}")
        print(f"drawn: {folder / 'results.png'}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RecipeError as error:
        raise SystemExit(f"RecipeError: {error}") from None
