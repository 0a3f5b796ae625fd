"""The runs of a sweep, one after the other, and the results of all runs together."""

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from looped_recipes.common.chart import Chart, Line, on_one_scale, ordered, save_charts
from looped_recipes.common.checksums import change_of
from looped_recipes.common.command_line import typed
from looped_recipes.common.files import write_whole
from looped_recipes.common.metrics import DIVERGED, divergence_of, last_values, read_metrics
from looped_recipes.common.optimum import in_words, optimum, shifts
from looped_recipes.common.provenance import provenance, write_json
from looped_recipes.common.replicas import Outcome, Replicas, settings_of
from looped_recipes.engine.checkpoint import named_checkpoints, read_marker
from looped_recipes.engine.peers import one_message
from looped_recipes.engine.resume import CODE, VALIDATION, checksum_of_code, comparable, differing, shown
from looped_recipes.engine.saving import CheckpointError, is_main_process, on_main_process
from looped_recipes.engine.training import RESULTS, Divergence, Pretraining
from looped_recipes.settings.recipe import Recipe, RecipeError, load_recipe
from looped_recipes.settings.sections import deciding
from looped_recipes.settings.sweep_files import Plot, SweepFile

from .sweep_runs import Run


OUTCOME = ("loss", "diverged", "metrics")


def refuse_other_recipe(run: Run):
    """Raise an error if the folder of a finished run contains the result of another recipe."""
    saved = Path(run.recipe.training.output_dir) / "recipe.yaml"
    if not saved.is_file():
        return
    recipe_before = load_recipe(saved)
    before, now = deciding_settings(recipe_before), deciding_settings(run.recipe)
    if (saved.parent / DIVERGED).exists():  # it may get to its end if it leaves out more steps
        for settings, recipe in ((before, recipe_before), (now, run.recipe)):
            settings["training"]["skip_nonfinite_steps"] = recipe.training.skip_nonfinite_steps
    if (compared := compared_of(run)) is not None:
        before[CODE], now[CODE] = compared.get(CODE), checksum_of_code(run.recipe)
    others = differing(before, now)
    if others:
        raise RecipeError(
            f"{saved.parent} holds the result of another recipe: {shown(others)}. Go back to that recipe, give the "
            "run another name, or remove that folder to train it again"
        )


def deciding_settings(recipe: Recipe) -> dict:
    """Return the settings that affect the final loss of a run."""
    return comparable({**deciding(recipe.to_dict()), "model": comparable(recipe.model_config().to_dict())})


def outcome(run: Run) -> dict | None:
    """Return the run's settings, final validation loss and last metrics. A diverged run has no loss but the reason.
    Return None if the run is not finished or its files are damaged: training rewrites them from its checkpoint."""
    folder = Path(run.recipe.training.output_dir)
    is_done = (folder / DIVERGED).exists() or (folder / "final" / "config.json").exists()
    if not is_done or any(change_of(folder / name) for name in RESULTS):
        return None
    refuse_other_recipe(run)
    records = read_metrics(folder / "metrics.jsonl")
    result = {"name": run.name, **run.settings, "loss": None}
    validations = [r for r in records if "validation/loss" in r]
    unread = records and (not validations or validations[-1]["step"] < records[-1]["step"])
    if unread and not (folder / DIVERGED).exists():
        return None  # the last validation is unreadable: training rewrites it from its checkpoint
    loss = validations[-1]["validation/loss"] if validations else math.nan
    why = divergence_of(folder, loss, run.recipe.training.max_loss)
    result |= {"loss": loss} if why is None else {"diverged": why}
    return {**result, "metrics": last_values(records)}


def compared_of(run: Run) -> dict | None:
    """Return the compared settings (resume.py) in the newest checkpoint of a run; None if there is none."""
    for path in reversed(named_checkpoints(Path(run.recipe.training.output_dir) / "checkpoints")):
        if (marker := read_marker(path)) is not None:
            return marker["config"]
    return None


def refuse_other_conditions(run: Run, compared: dict | None, seen: dict):
    """Refuse a run in another precision than the runs before, or on another text than those with the same settings of
    data. seen: {what is compared: (name of its first run, value)}; it is filled in."""
    if compared is None:
        return
    of_data = json.dumps(deciding_settings(run.recipe)["data"], sort_keys=True)
    found = {"precision": compared["precision"]}
    for split, section in (("training", "data"), ("validation", VALIDATION)):
        found[split, of_data] = compared[section]["sampled_rows"]
    for key, value in found.items():
        first, before = seen.setdefault(key, (run.name, value))
        if value != before:
            what = "precision" if key == "precision" else f"text of {key[0]}, with the same settings of data"
            raise RecipeError(
                f"runs {first!r} and {run.name!r} can not be compared, as they differ in their {what} ({before!r}, "
                f"{value!r}): go back to that of {first!r}, or remove the folders of the runs to train again"
            )


def train(run: Run, seen: dict | None = None):
    """Train a run, or go on with it. seen: of the other runs of the sweep (refuse_other_conditions)."""
    try:
        training = Pretraining(run.recipe)
        refuse_other_conditions(run, training.checkpoints.compared, {} if seen is None else seen)
        training.train()
    except Divergence as divergence:
        training.metrics.finish()  # else a tracker takes the next run, in this process, for the same one
        folder, why = Path(run.recipe.training.output_dir), str(divergence)
        on_main_process(lambda: write_whole(folder / DIVERGED, why), folder)
    except (RecipeError, CheckpointError) as error:
        raise type(error)(f"run {run.name!r}: {error}") from error


def run_all(runs: list[Run]) -> list[dict]:
    """Train the unfinished runs, one after the other, and return the results of all runs."""
    results, seen = {}, {}
    for run in runs:
        if run.same_as is None and outcome(run) is not None:
            refuse_other_conditions(run, compared_of(run), seen)
    for run in runs:
        if run.same_as is not None:
            shared = {key: results[run.same_as][key] for key in OUTCOME if key in results[run.same_as]}
            results[run.name] = {"name": run.name, **run.settings, "same_as": run.same_as, **shared}
        else:
            if outcome(run) is None:
                train(run, seen)
            results[run.name] = outcome(run)
        if is_main_process():
            print(json.dumps({key: value for key, value in results[run.name].items() if key != "metrics"}))
    return list(results.values())


def curves_of(results: list[dict], x: str, curve: str) -> dict:
    """Return {value of `curve`: {value of `x`: losses of its replicas}}, sorted, with strings last. The loss of a
    diverged run is None."""
    curves = defaultdict(lambda: defaultdict(list))
    for result in results:
        curves[result[curve]][result[x]].append(result["loss"])
    values = sorted(curves, key=lambda value: (isinstance(value, str), value))
    return {value: dict(sorted(curves[value].items())) for value in values}


def optima(results: list[dict], x: str, curve: str) -> dict:
    """Return for each curve the x with the lowest loss and its interval, or the reason why there is none."""
    curves = curves_of(results, x, curve)
    return {value: optimum(list(points), list(points.values())) for value, points in curves.items()}


def panels_of(results: list[dict], plot: Plot) -> dict[tuple, list[dict]]:
    """Group the results by the values of the settings that `panel` names."""
    panels = defaultdict(list)
    for result in results:
        panels[tuple(result[key] for key in plot.panel)].append(result)
    return dict(panels)


def charts_of(results: list[dict], plot: Plot) -> list[Chart]:
    """Return one chart for each combination of the settings that `panel` names, with a line for each value of `curve`.
    The name of a line contains its best x. A dashed line at the lowest loss shows the interval of the optimum. A
    diverged run has no point."""
    charts = []
    for panel, members in panels_of(results, plot).items():
        curves, lines = curves_of(members, plot.x, plot.curve), []
        for i, (value, losses) in enumerate(curves.items()):
            points = [(x, fmean(of_x)) for x, of_x in losses.items() if None not in of_x]
            if points:
                color = ordered(i, len(curves))
                best_x, least = min(points, key=lambda point: point[1])
                name = f"{plot.curve.split('.')[-1]} = {value}, best: {best_x:g}"
                interval = optimum(list(losses), list(losses.values())).get("interval") or ()
                lines.append(Line(name, points, color))
                lines.append(Line("", [(end, least) for end in interval], color, dashed=True, dots=False))
        charts.append(Chart(", ".join(map(str, panel)), plot.x, "validation loss", lines, log_x=True))
    return on_one_scale(charts)


def columns_of(results: list[dict], plot: Plot) -> int:
    """Return the number of columns of charts: one for each value of the last setting in `panel`."""
    return len({panel[-1:] for panel in panels_of(results, plot)})


def train_all(sweep: SweepFile, runs: list[Run]):
    """Train the runs of a sweep that are missing, one after the other, and write the results of all."""
    with one_message():
        results = run_all(runs)
    if is_main_process():
        folder = Path(runs[0].recipe.training.output_dir).parent
        write_results(sweep, folder, results)
        say_over_seeds(runs, results, folder)


def write_results(sweep: SweepFile, folder: Path, results: list[dict]):
    """Write the results of all runs and, where the sweep has a plot, the charts and the best values of x."""
    folder.mkdir(parents=True, exist_ok=True)
    made_by = provenance()
    write_whole(folder / "results.jsonl", "".join(json.dumps({**result, **made_by}) + "\n" for result in results))
    if (plot := sweep.plot) is not None:
        save_charts(charts_of(results, plot), folder / "results.svg", columns_of(results, plot))
        found = []
        for panel, members in panels_of(results, plot).items():
            best = optima(members, plot.x, plot.curve)
            found.append({**dict(zip(plot.panel, panel)), "best": best, "shift": shifts(best)})
            for value, of_curve in best.items():
                where = ", ".join(map(str, (*panel, f"{plot.curve} {value}")))
                print(f"best {plot.x}, {where}: {in_words(of_curve)}")
        write_json(folder / "optima.json", {"optima": found})
        print(f"drawn: {folder / 'results.svg'}")


def say_over_seeds(runs: list[Run], results: list[dict], folder: Path):
    """Say what each setting changes, over seeds, if combinations of settings have several."""
    found = Replicas(
        Outcome(run.name, settings_of(deciding(run.recipe.to_dict())), result["loss"])
        for run, result in zip(runs, results)
    )
    if found.several:
        print("\n".join(found.sentences()))
        print(f"the table: {typed('looped report', folder)}")
