"""Runs the papers' measurements on models, and writes the results of each and one page of all."""

import argparse
import inspect
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from looped_eval.common.model_folder import results_folder, training_run
from looped_eval.common.page import Section, numbers, to_html
from looped_eval.common.progress import progress
from looped_eval.common.run_folder import runs_in
from looped_recipes.common.chart import save_charts
from looped_recipes.common.command_line import say_result, typed
from looped_recipes.common.files import check_writable, write_whole
from looped_recipes.common.provenance import finite, provenance, rounded, write_json

from . import page
from .model_and_text import DiagnoseError, ModelAndText, open_model_and_text
from .options import FILES, parse


GIVEN = ("model", "batch", "config", "classes")  # fields of ModelAndText that measures may take


class Measure(NamedTuple):
    function: Callable
    quick: dict = {}  # options in `looped diagnose all`
    monitored: str | None = None  # prefix of its metrics in a run's metrics.jsonl

    def defaults(self) -> dict:
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    @property
    def reads_a_model(self) -> bool:
        return not {"model", "config"}.isdisjoint(inspect.signature(self.function).parameters)

    def __call__(self, of: ModelAndText | None, **options) -> dict:
        wanted = [name for name in inspect.signature(self.function).parameters if name in GIVEN] if of else []
        return self.function(*(getattr(of, name) for name in wanted), **options)


LITTLE = {"loops": [1, 2, 4, 8], "seeds": 1, "steps": 3, "num_tokens": 64}
QUICK = {  # options in `all`
    "residual_norm": LITTLE,
    "loop_cosine": {"copies": 8, "steps": 3, "num_tokens": 64},
    "update_size": LITTLE,
    "lr_transfer": {"loops": [1, 4], "rates": [2.5e-4, 1e-3, 4e-3], "steps": 10, "rows_per_step": 2},
}
MONITORED = {  # prefixes of metrics in a run's metrics.jsonl
    "norm_trajectory": "residual_norm/",
    "spectral": "spectral_radius",
    "state_dynamics": "state_change",
    "gradient_norms": "gradient_norm/",
}
MEASURES = {
    name: Measure(getattr(import_module(f".{file}", __package__), name), QUICK.get(name, {}), MONITORED.get(name))
    for file, names in FILES.items()
    for name in names
}


def training_series(records: list[dict], prefix: str) -> dict[str, dict]:
    """Return {metric: {"step": [...], "value": [...]}} from a run's records."""
    series = {}
    for record in records:
        for key, value in record.items():
            if key.startswith(prefix):
                points = series.setdefault(key, {"step": [], "value": []})
                points["step"].append(record["step"])
                points["value"].append(value)
    return series


def run_measure(
    name: str, of: ModelAndText | None, folder: Path, beside: dict[str, dict], command: str | None = None, **options
) -> tuple[dict, Path]:
    """Measure, write and draw. Return the result and the path of its picture."""
    measure, picture = MEASURES[name], folder / f"{name}.svg"
    result = finite(measure(of, **options))
    used = {**measure.defaults(), **options}
    series = training_series(of.records, measure.monitored) if measure.monitored else {}
    if series:
        result["training"] = series
    asked = {
        "measure": name,
        **(of.where if of else {}),
        "options": used,
    }
    write_json(folder / f"{name}.json", {**asked, "result": result}, command, digits=6)
    save_charts(page.charts_of(name, result, beside), picture)
    return result, picture


def run_all(of: ModelAndText, folder: Path, command: str | None = None) -> tuple[list[str], Path]:
    """Run all measures of a model and write a page. Return the findings at its beginning, and its path."""
    results, left_out = {}, {}
    measures = {name: measure for name, measure in MEASURES.items() if measure.reads_a_model}
    bar = progress(measures.items(), "measures")
    for name, measure in bar:
        try:
            results[name], _ = run_measure(name, of, folder, {}, command, **measure.quick)
            bar.write(f"{name}: {' '.join(page.findings(name, results[name]))}")
        except ValueError as reason:
            left_out[name] = str(reason)
            bar.write(f"{name}: left out, {reason}")
    where = Section("How it was measured", [numbers({**of.where, **provenance(command)})])
    path = folder / "index.html"
    title = "A fresh model, before any training" if of.is_fresh else "What this looped model does"
    found = page.headlines(results)
    write_whole(path, to_html(title, [*page.sections(results, left_out), where], found))
    return found, path


def read_others(paths: list[str]) -> dict[str, dict]:
    """Return {model: result} of the depth_curve.json files of other models."""
    found = {}
    for path in paths:
        name, result = read_result(path)
        if name in found:
            raise DiagnoseError(f"--beside {path}: another of these files is of {name!r} too: name one of them")
        found[name] = result
    return found


def read_result(path: str) -> tuple[str, dict]:
    """Return the model's name and the result in a depth_curve.json."""
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise DiagnoseError(f"{path!r} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("measure") != "depth_curve":
        raise DiagnoseError(f"{path!r} holds no depth curve; `looped diagnose depth_curve MODEL` makes one")
    return content["model"], content["result"]


def models_and_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words into models, a sweep replaced by its runs, and field=value words, which change configs."""
    overrides = [word for word in words[1:] if "=" in word and not Path(word).exists()]
    named = [word for word in words if word not in overrides]
    return [str(run) for word in named for run in runs_in(Path(word))], overrides


def main(arguments: list[str]):
    args = parse(arguments)
    if args.measure != "all" and not MEASURES[args.measure].reads_a_model:
        measure(args, None, Path(args.output or "runs/eval/theorems/diagnose"), {})
        return
    targets, overrides = models_and_overrides(args.model)
    beside = read_others(getattr(args, "beside", []))
    if len(targets) == 1:
        measure_model(args, targets[0], overrides, beside)
        return
    if args.output:
        raise DiagnoseError(f"--output {args.output} is the folder of one model, but {len(targets)} are measured")
    results = {}
    for target in targets:
        print(f"\n{target}")
        try:
            results[target] = measure_model(args, target, overrides, beside)
        except ValueError as reason:
            print(f"left out: {reason}")
    if not results:
        raise DiagnoseError(f"none of the {len(targets)} models could be measured: the reasons are above")
    if args.measure != "all":
        print(f"\n{page.side_by_side(results).markdown()}")
    runs = [target for target in results if training_run(target) is not None]
    then = [typed("looped report", *runs)] if runs else []
    say_result(f"{args.measure} of {len(results)} of {len(targets)} models.", *then)
    if missing := [target for target in targets if target in args.model and target not in results]:
        raise DiagnoseError(f"{', '.join(missing)}: left out, for the reason above")


def measure_model(args: argparse.Namespace, target: str, overrides: list[str], beside: dict[str, dict]) -> dict:
    """Run one measure on a model and return its result, or run all and return {}."""
    names = ("text", "tokenizer", "rows", "length", "seed", "state_seed", "dtype", "trust_remote_code")
    of = open_model_and_text(target, overrides, **{name: getattr(args, name) for name in names})
    folder = Path(args.output) if args.output else results_folder(target) / "diagnose"
    check_writable(folder, "with --output")
    print(f"text: {of.where['text']}")
    if args.measure != "all":
        return measure(args, of, folder, beside, typed("looped diagnose all", target, *overrides))
    found, path = run_all(of, folder, args.command)
    print(f"\nthe page: {path}")
    say_result(" ".join(found), *report_of(target))
    return {}


def measure(
    args: argparse.Namespace, of: ModelAndText | None, folder: Path, beside: dict[str, dict], *then: str
) -> dict:
    options = {name: getattr(args, name) for name in MEASURES[args.measure].defaults() if hasattr(args, name)}
    result, picture = run_measure(args.measure, of, folder, beside, args.command, **options)
    print(json.dumps(rounded({key: value for key, value in result.items() if not isinstance(value, (dict, list))}, 4)))
    print(folder / f"{args.measure}.json", picture, sep="\n")
    say_result(" ".join(page.findings(args.measure, result)), *then)
    return result


def report_of(target: str) -> list[str]:
    run = training_run(target)
    return [] if run is None else [typed("looped report", os.path.relpath(run))]
