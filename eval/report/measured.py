"""Results that other commands wrote into the folder of a run: lm-eval, early exit, diagnostics."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from statistics import NormalDist

from looped_eval.common import curves
from looped_eval.common.page import Charts, Finding, Folded, Heading, Section, Table, Text, single_numbers
from looped_eval.common.run_folder import RunFolder
from looped_eval.common.samples import WRITTEN_AT
from looped_eval.diagnose import page as diagnose_page
from looped_eval.diagnose.readings import READINGS
from looped_eval.halting import page as halting_page
from looped_recipes.common.command_line import typed
from looped_recipes.common.intervals import FEWEST
from looped_recipes.common.words import counted

from .about import depth_table, missing, number


TOLD_APART = {  # model arguments that are read from other fields of the results, or that change no result
    *curves.PLACE_AND_SPEED, "pretrained", "num_loops", "exit_criterion", "exit_threshold", "min_loops",
    "exit_selection", "dtype", "device", "answers", "trust_remote_code",
}  # fmt: skip


def results_of(run: RunFolder) -> tuple[curves.Curves, dict[str, float], set[tuple[str, str]], list[str]]:
    """Return lm-eval's metrics over depth, {task and metric: {setting: {depth: (value, standard error)}}}, the scores
    of guessing, which (metric, setting) are of few questions, and notes on unreadable files. setting: how it differs
    from other settings of the metric, in words."""
    found: dict[str, dict[tuple, dict[int, curves.Point]]] = {}
    chance, few, unread = {}, set(), []
    for path in sorted(run.own_files("results*.json"), key=time_of):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            measured = [
                (*point, setting_of(point[0].partition(" ")[0], content)) for point in curves.metrics_of(content)
            ]
            levels = {name: curves.chance_of(name, content.get("configs")) for name, *_ in measured}
            of_few = curves.of_few_questions(content)
        except (ValueError, KeyError, TypeError, AttributeError):
            unread.append(f"{path} holds no lm-eval results.")
            continue
        depth = depth_of_results(path.relative_to(run.folder), content) or run.trained_loops or 1
        for name, point, setting in measured:
            found.setdefault(name, {}).setdefault(setting, {})[depth] = point  # the newest file wins
        chance |= {name: level for name, level in levels.items() if level is not None}
        few |= {(name, setting) for name, _, setting in measured if name in of_few}
    said = {name: in_words(of_settings) for name, of_settings in found.items()}
    few = {(name, words) for name in said for setting, words in zip(found[name], said[name]) if (name, setting) in few}
    return said, chance, few, unread


def time_of(path: Path) -> tuple:
    """Return what orders results by time: the time in lm-eval's name for them, which copies keep. Others are older."""
    written = WRITTEN_AT.search(path.stem)
    return written[1] if written else "", path.stat().st_mtime, str(path)


def depth_of_results(path: Path, content: dict) -> int | None:
    """Return the depth of a result set: the one recorded in it, else that of its folder inside the run (loops_4)."""
    config = content.get("config") or {}
    if isinstance(config.get("num_loops"), int):
        return config["num_loops"]
    if (depth := arguments_of(config).get("num_loops", "")).isdecimal():
        return int(depth)
    for part in reversed(path.parts):
        if match := re.fullmatch(r"loops_(\d+)", part):
            return int(match[1])
    return None


def arguments_of(config: dict) -> dict[str, str]:
    """Return --model_args as a dict of strings. lm-eval records them in the form in which it got them."""
    given = config.get("model_args") or {}
    if isinstance(given, str):
        given = dict(argument.split("=", 1) for argument in given.split(",") if "=" in argument)
    return {name: str(value) for name, value in given.items() if value is not None}


def setting_of(task: str, content: dict) -> tuple[str, ...]:
    """Return the settings on which a result depends besides the model and its depth. Only results with equal settings
    form a curve."""
    config = content.get("config") or {}
    arguments = arguments_of(config)
    num_questions = ((content.get("n-samples") or {}).get(task) or {}).get("effective")
    limit, num_shots = config.get("limit"), (content.get("n-shot") or {}).get(task)
    names = ("exit_criterion", "exit_threshold", "min_loops", "exit_selection")
    exits = {name: config.get(name, arguments.get(name)) for name in names}
    exits = " ".join(f"{name}={value}" for name, value in exits.items() if value is not None)
    others = " ".join(f"{name}={value}" for name, value in sorted(arguments.items()) if name not in TOLD_APART)
    generated = config.get("gen_kwargs") or ""
    return (
        counted(num_questions, "question") if num_questions else "" if limit is None else f"--limit {limit:g}",
        "" if num_shots is None else counted(num_shots, "shot"),
        "with a chat template" if content.get("chat_template") else "",
        "with a system instruction" if content.get("system_instruction") else "",
        exits or "no exits",
        str(config.get("model_dtype") or "").removeprefix("torch."),
        others,
        generated and f"gen_kwargs {generated}",
    )


def in_words(of_settings: dict[tuple[str, ...], dict]) -> dict[str, dict]:
    """Name each setting by the parts in which the settings differ; a single setting has an empty name."""
    differs = [len({*parts}) > 1 for parts in zip(*of_settings)]
    return {
        ", ".join(part for part, told in zip(setting, differs) if told and part): points
        for setting, points in of_settings.items()
    }


def accuracy(runs: list[RunFolder]) -> Section:
    found: curves.Curves = {}
    chance: dict[str, float] = {}
    few, blocks = set(), []
    for run in runs:
        measures, levels, of_few, unread = results_of(run)
        chance |= levels
        blocks += map(Text, unread)
        for measure, of_settings in measures.items():
            for setting, points in of_settings.items():
                series = f"{run.name}, {setting}" if setting else run.name
                found.setdefault(measure, {})[series] = dict(sorted(points.items()))
                few |= {(measure, series)} if (measure, setting) in of_few else set()
        if not measures:
            blocks.append(missing(f"{run.name} has no lm-eval results.", harness(run)))
    if found:
        findings = [Finding(words) for words in above_chance(found, chance, few)]
        blocks = [*findings, Charts(curves.charts(found, chance)), depth_table(found), *blocks]
    return Section("Tasks over depth", blocks)


def above_chance(found: curves.Curves, chance: dict[str, float], few: Collection[tuple[str, str]] = ()) -> list[str]:
    """Say for each run how many accuracies are above guessing at their best depth: by more than the best of so many
    depths is by chance in about 1 of 40 cases. few: (measure, run) of few questions, which are left out, as are best
    accuracies without an error."""
    sentences = []
    for run in dict.fromkeys(name for series in found.values() for name in series):
        known = [measure for measure, series in found.items() if run in series and measure in chance]
        compared = above = 0
        for measure in known:
            points = found[measure][run].values()
            value, error = max(points, key=lambda point: (point[0], point[1] or 0.0))
            if error is None or (measure, run) in few:
                continue
            compared += 1
            above += value - NormalDist().inv_cdf(1 - 0.025 / len(points)) * error > chance[measure]
        if known:
            which = f"{above} of {compared} accuracies {'is' if above == 1 else 'are'}"
            left, why = len(known) - compared, f"of fewer than {FEWEST} questions or without a standard error"
            left_out = f"; {left} {'is' if left == 1 else 'are'} left out, {why}"
            sentences.append(f"{run}: {which} above chance at the best depth{left_out * (left > 0)}.")
    return sentences


def harness(run: RunFolder) -> str:
    model = f"pretrained={run.folder / 'final'},num_loops=1..{run.trained_loops or 4}"
    return typed("looped eval --model looped --model_args", model, "--tasks", "looped_offline")


def halting(runs: list[RunFolder]) -> Section:
    """Return the section on early exit: results of looped halting, and perplexity over mean loops."""
    blocks = []
    for run in runs:
        path = run.results("halting.json")
        if not path.is_file():
            command = typed("looped halting", run.folder)
            blocks.append(missing(f"{run.name} has no halting.json.", command))
            continue
        blocks += [Heading(run.name)] if len(runs) > 1 else []
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            parts = halting_page.sections(content)
            blocks += [*map(Finding, halting_page.findings(content)), *parts[0].blocks]
            blocks += [block for part in parts[1:] for block in (Heading(part.title), *part.blocks)]
        except (ValueError, KeyError, TypeError):  # written by another version, or incomplete
            blocks += left_behind(path)
    return Section("Early exit", blocks)


def diagnostics(runs: list[RunFolder]) -> list[Section]:
    """Return sections with numbers of several runs side by side, results on the trained models, and results on fresh
    models of their configs."""
    own, fresh, results = [], [], {}
    for run in runs:
        order = list(READINGS)
        files = sorted(
            run.results("diagnose").glob("*.json"),
            key=lambda path: (order.index(path.stem) if path.stem in order else len(order), path.stem),
        )
        if not files:
            own.append(missing(f"{run.name} has no diagnostics.", typed("looped diagnose all", run.folder)))
        suffix = f", {run.name}" if len(runs) > 1 else ""
        for path in files:
            try:
                result = json.loads(path.read_text(encoding="utf-8"))["result"]
                parts = [
                    (READINGS[part], diagnose_page.measured(part, result))
                    for part in diagnose_page.parts(path.stem, result)
                ]
            except (ValueError, KeyError, TypeError, AttributeError):  # written by another version, or incomplete
                own += [Heading(path.stem.replace("_", " ") + suffix), *left_behind(path)]
                continue
            results.setdefault(path.stem, {})[run.name] = result
            for reading, blocks in parts:
                (fresh if reading.fresh else own).extend([Heading(reading.title + suffix), *blocks])
    return [
        Section("Diagnostics side by side", side_by_side(results)),
        Section("Diagnostics", own),
        Section("Fresh models of these configs" if len(runs) > 1 else "Fresh models of this config", fresh),
    ]


def side_by_side(results: dict[str, dict[str, dict]]) -> list:
    """Tabulate the measures that several runs have. results: {measure: {run: result}}."""
    blocks = []
    for name, of_runs in results.items():
        if len(of_runs) > 1 and (table := diagnose_page.side_by_side(of_runs)).rows:
            title = READINGS[name].title if name in READINGS else name.replace("_", " ")
            blocks += [Heading(title), table]
    return blocks


def left_behind(path: Path) -> list:
    """Return tables of the rows and single numbers in a JSON that a measuring command wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return [Text(f"{path} could not be read: {error}")]
    content = content if isinstance(content, dict) else {"rows": content}
    result = content["result"] if isinstance(content.get("result"), dict) else content
    blocks = []
    for name, value in result.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            blocks.append(Text(name.replace("_", " ")))
            head = [key for key in value[0] if not isinstance(value[0][key], (dict, list))]
            blocks.append(Table(head, [[number(row.get(key)) for key in head] for row in value]))
    single = [[key, number(value)] for key, value in single_numbers(result).items()]
    return blocks + ([Folded("Numbers", Table(["", "value"], single))] if single else [])
