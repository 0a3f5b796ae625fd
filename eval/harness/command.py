"""lm-eval at every depth, from one pass of the model."""

import csv
import inspect
import io
import json
import logging
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lm_eval import evaluator, simple_evaluate
from lm_eval._cli import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, setup_logging

from looped_eval.common.curves import Curves, chance_of, draw, metrics_of, more_is_better, of_few_questions, table
from looped_eval.common.findings import best_depths
from looped_eval.common.model_folder import results_folder, training_run
from looped_eval.common.task_names import TASKS, tasks_of
from looped_recipes.common.command_line import device_of, folder, say_result, typed
from looped_recipes.common.files import check_writable, write_whole
from looped_recipes.common.provenance import commit, provenance

from .looped_lm import LoopedLM, Loops, mean_of, name_of
from .question import check_question, join_depths, parse_thresholds, refuse_depths_in


OPTIONS = ("batch_size", "max_batch_size", "device")  # that the model takes


def as_lm_eval_spells(arguments: list[str]) -> list[str]:
    """Spell options as lm-eval does: --batch-size becomes --batch_size, --output becomes --output_path, and
    --num-loops goes into --model_args."""
    spelt, rest = [], list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if re.fullmatch(r"--[a-z][a-z-]*", name):
            name = {"--output": "--output_path"}.get(name, "--" + name[2:].replace("-", "_"))
        if name == "--num_loops":
            name, equals, value = "--model_args", " ", f"num_loops={value if equals else rest.pop(0) if rest else ''}"
        spelt += [name, value] if equals == " " else [f"{name}{equals}{value}"]
    return [join_depths(argument) for argument in spelt]


def check_limit(limit: float | None):
    if limit is not None and not limit > 0:
        raise ValueError(f"--limit {limit:g} must be above 0: 100 takes so many documents of each task, 0.1 a tenth")


def check(config: EvaluatorConfig):
    """Refuse wrong arguments before the model is loaded; `asked_tasks` checks the names of tasks."""
    if "pretrained" not in config.model_args:
        raise ValueError("--model looped needs a model: --model_args pretrained=DIR")
    if beside := [name for name in OPTIONS if name in config.model_args]:
        raise ValueError(f"--model_args {beside[0]}={config.model_args[beside[0]]}: write it as --{beside[0]}")
    check_limit(config.limit)
    if config.output_path:
        try:
            folder(config.output_path)
        except ArgumentTypeError as error:
            raise ValueError(f"--output: {error}") from None
    refuse_depths_in(config.gen_kwargs, "gen_kwargs")
    if config.wandb_args or getattr(config, "trackio_args", None):  # trackio_args exists since lm-eval 0.4.12
        raise ValueError("wandb_args and trackio_args take one set of results, not one per depth: use output_path")
    known = inspect.signature(check_question).parameters
    asked = {name: value for name, value in config.model_args.items() if name in known}
    for threshold in parse_thresholds(asked.get("exit_threshold")):
        check_question(**{**asked, "exit_threshold": threshold})


def default_output(arguments: dict | None) -> str | None:
    """Return the folder for results about a model of a training run."""
    pretrained = (arguments or {}).get("pretrained")
    is_in_run = pretrained is not None and training_run(pretrained) is not None
    return str(results_folder(pretrained) / "lm_eval") if is_in_run else None


def options_of(config: EvaluatorConfig) -> dict:
    """Return the arguments with which lm-eval's command would call `simple_evaluate`."""
    names = set(inspect.signature(simple_evaluate).parameters) - {"model", "model_args", "use_cache"}
    options = {name: getattr(config, name) for name in names if hasattr(config, name)}
    options["cache_requests"] = False
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    return {**options, **config.cache_requests, **dict(zip(seeds, config.seed or [None] * 4))}


@contextmanager
def told_of_one_depth(is_first: bool):
    """Show lm-eval's messages for the first depth only, since they are the same for all depths. Replace lm-eval's
    function for the git commit, which prints git's error in a folder that is no repository."""
    logger, asks_git = logging.getLogger("lm_eval"), evaluator.get_git_commit_hash
    level, evaluator.get_git_commit_hash = logger.level, commit
    if not is_first:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        evaluator.get_git_commit_hash = asks_git


def asked_tasks(config: EvaluatorConfig) -> tuple[TaskManager, list]:
    """Return the task manager and the names of the tasks; if files are named, what lm-eval reads from them."""
    names = config.tasks.split(",") if isinstance(config.tasks, str) else ",".join(config.tasks).split(",")
    if any(name.endswith(".yaml") or Path(name).is_dir() for name in names):
        return config.process_tasks(config.metadata), config.tasks
    return tasks_of(names, config.include_path, config.metadata)


def check_tasks(manager: TaskManager, tasks: list):
    """Refuse, before a model is loaded, tasks whose files set depths or exits, and groups and tags with such tasks."""
    for task in tasks:
        entry = None if isinstance(task, dict) else manager.task_index.get(task)
        config = task if isinstance(task, dict) else (entry and entry.cfg) or {}
        refuse_depths_in(config.get("generation_kwargs") or {}, f"the generation_kwargs of task {config.get('task')}")
        members = config.get("task") if isinstance(config.get("task"), list) else []
        tagged = sorted(entry.tags) if entry and task in manager.all_tags else []  # a task's `tags` are no members
        check_tasks(manager, [member for member in (*members, *tagged) if member != task])


def results_by_depth(lm: LoopedLM, model_args: dict, tracker_args: dict, **options) -> dict[int, dict]:
    """Return lm-eval's results at each depth, saved if there is an output_path. Only the first process has results."""
    by_depth = {}
    for depth in lm.depths:
        path = tracker_args.get("output_path")
        at_depth = {"output_path": str(Path(path) / f"loops_{depth}")} if path else {}
        tracker = EvaluationTracker(**{**tracker_args, **at_depth})
        arguments = {**model_args, "num_loops": depth}
        with told_of_one_depth(depth == lm.depths[0]):
            results = simple_evaluate(lm.at(depth), model_args=arguments, evaluation_tracker=tracker, **options)
        if results is None:
            continue
        results["config"]["model"] = tracker.general_config_tracker.model_source = "looped"
        made_by = provenance()
        made_by["package_versions"] = made_by.pop("versions")  # lm-eval's `versions` are those of the tasks
        results |= made_by
        samples = results.pop("samples", None)
        if lm.rule is not None:
            add_loops(lm, results["results"], samples or {})
        tracker.save_results_aggregated(results, samples)
        for task in samples or ():
            tracker.save_results_samples(task, samples[task])
        by_depth[depth] = results
    return by_depth


def add_loops(lm: LoopedLM, results: dict, samples: dict[str, list[dict]]):
    """Add to the results of each task its mean loops, and to each sample the loops and tokens of its answers, in the
    order of their arguments."""
    for task, loops in lm.loops.items():
        if task in results:
            results[task]["mean_loops"] = mean_of(loops.values())
        for sample in samples.get(task, ()):
            of_answers = [loops[name_of(arguments)] for arguments in sample["arguments"]]
            sample |= {name: [getattr(answer, name) for answer in of_answers] for name in Loops._fields}


def curves_of(results: dict[int, dict], series: str = "") -> Curves:
    """Return every metric of every task over depth with its standard error, and the mean loops if tokens exit: of all
    tasks together, and of each of several."""
    curves: Curves = {}
    for depth, found in results.items():
        for measure, point in metrics_of(found):
            curves.setdefault(measure, {}).setdefault(series, {})[depth] = point
        if found["config"].get("mean_loops") is not None:
            means = {f"mean loops of {task}": metrics.get("mean_loops") for task, metrics in found["results"].items()}
            means = {measure: mean for measure, mean in means.items() if mean is not None}
            means = {"mean loops": found["config"]["mean_loops"], **(means if len(means) > 1 else {})}
            for measure, mean in means.items():
                curves.setdefault(measure, {}).setdefault(series, {})[depth] = (mean, None)
    return curves


def exit_rows(results: dict[int, dict]) -> Iterator[dict]:
    """Yield every metric of every task at every depth, beside its exits and mean loops."""
    for depth, found in results.items():
        for measure, (value, error) in metrics_of(found):
            task, _, metric = measure.partition(" ")
            names = ("exit_criterion", "exit_threshold", "exit_selection")
            exits = {name: found["config"].get(name) for name in names}
            loops = found["results"].get(task, {}).get("mean_loops")
            of_metric = {"task": task, "metric": metric, "mean_loops": loops, "value": value, "stderr": error}
            yield {**exits, "num_loops": depth, **of_metric}


def write_exits(rows: list[dict], path: Path):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def chances(curves: Curves, results: dict[int, dict]) -> dict[str, float]:
    """Return {measure: score of guessing} for the measures where it is known."""
    configs = next(iter(results.values())).get("configs")
    return {measure: level for measure in curves if (level := chance_of(measure, configs)) is not None}


def show(curves: Curves, chance: dict[str, float], output: str | None):
    """Print the table over depth; with an output folder, write depth.md and depth.svg beside lm-eval's results."""
    if curves:
        print(table(curves))
    if curves and output:
        write_whole(Path(output) / "depth.md", table(curves))
        draw(curves, Path(output) / "depth.svg", chance)
    if output:
        print(f"written: {output}")


def main(arguments: list[str]):
    if arguments and Path(arguments[0]).is_dir():
        raise ValueError(
            f"{arguments[0]!r} is no command of lm-eval: name the model so, --model looped --model_args "
            f"pretrained={arguments[0]} --tasks ..."
        )
    setup_logging()
    sys.argv[1:] = as_lm_eval_spells(arguments)  # lm-eval parses sys.argv
    cli = HarnessCLI()
    args = cli.parse_args()
    if args.command == "run":
        written = EvaluatorConfig.load_yaml_config(args.config) if args.config else {}  # arguments go before it
        include_path = args.include_path or written.get("include_path")
        if include_path and not Path(include_path).is_dir():
            raise ValueError(f"--include_path {include_path}: there is no such folder (looked from {Path.cwd()})")
        args.include_path = [path for path in (TASKS, include_path) if path]  # the last folder has precedence
        if args.model == "looped":  # lm-eval asks here already where samples are to be written
            args.output_path = args.output_path or written.get("output_path") or default_output(args.model_args)
    config = EvaluatorConfig.from_cli(args) if args.command == "run" else None
    if config is None or config.model != "looped":
        return cli.execute(args)
    device_of(getattr(args, "device", None))  # config.device is cuda:0 where none is given, even without a GPU
    check(config)
    run = training_run(config.model_args["pretrained"])
    if not config.output_path:  # of a model that a file behind --config names
        config.output_path = default_output(config.model_args)
    if config.output_path:
        check_writable(Path(config.output_path), "with --output")
    if config.output_path and (table_before := Path(config.output_path) / "depth.md").is_file():
        print(f"note: {table_before} and depth.svg will be replaced; --output names another folder")
    options = options_of(config)
    options["task_manager"], options["tasks"] = asked_tasks(config)
    check_tasks(options["task_manager"], options["tasks"])
    setup = {name: options[name] for name in OPTIONS if options[name] is not None}
    thresholds = parse_thresholds(config.model_args.get("exit_threshold"))
    arguments = config.model_args
    lm = LoopedLM(**{**arguments, "exit_threshold": thresholds[0]}, answers=config.use_cache, **setup)
    curves, rows = {}, []
    for threshold in thresholds:
        name = f"threshold {threshold}" if len(thresholds) > 1 else ""
        path = config.output_path and str(Path(config.output_path, name.replace(" ", "_")))
        token = {"token": os.environ.get("HF_TOKEN", "")}
        tracker_args = {**token, **config.hf_hub_log_args, **({"output_path": path} if path else {})}
        if name:
            lm.rule, arguments = replace(lm.rule, threshold=threshold), {**arguments, "exit_threshold": threshold}
        results = results_by_depth(lm, arguments, tracker_args, **options)
        if not results:
            continue
        if config.show_config:
            print(json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False))
        for measure, of_series in curves_of(results, name).items():
            curves.setdefault(measure, {}).update(of_series)
        rows += exit_rows(results)
    if not results:  # only the first process has results
        return
    if config.output_path and lm.rule is not None and rows:
        write_exits(rows, Path(config.output_path) / "exits.csv")
    show(curves, chances(curves, results), config.output_path)
    is_in_run = run is not None and Path(config.output_path).resolve().is_relative_to(run)  # where the report looks
    first = next(iter(results.values()))
    exits_stop = lm.rule is None or lm.rule.selection == "stop"
    found = best_depths(curves, more_is_better(first), few=of_few_questions(first), exits_stop=exits_stop)
    say_result(found, *([typed("looped report", os.path.relpath(run))] if is_in_run else []))
