"""Training runs on one page."""

import json
import math
import re
from pathlib import Path

import yaml

from looped_eval.common import curves
from looped_eval.common.findings import best_depth
from looped_eval.common.page import (
    Charts,
    Explanation,
    Finding,
    Folded,
    Heading,
    Missing,
    Section,
    Table,
    Text,
    single_numbers,
    to_html,
    to_markdown,
)
from looped_eval.common.run_folder import BITS_AT, LOSS_AT, RunError, RunFolder, open_runs
from looped_eval.diagnose import page as diagnose_page
from looped_eval.diagnose.figures import layer_name
from looped_eval.diagnose.readings import READINGS
from looped_eval.halting import page as halting_page
from looped_recipes.common.axis import written
from looped_recipes.common.chart import Chart, Line, named, on_one_scale
from looped_recipes.common.command_line import say_result
from looped_recipes.common.files import write_whole
from looped_recipes.common.words import counted

from .options import parse


def number(value, digits: int = 4) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.{digits}g}" if abs(value) < 1 else f"{value:.{digits}f}"


# Sections


def facts(run: RunFolder) -> dict[str, str]:
    """What a model card says of a run."""
    tokens = run.tokens_per_step and run.steps * run.tokens_per_step
    optimizer, schedule = run.setting("optimizer.name"), run.setting("schedule.name")
    trained = run.trained_loops
    mean_depth = run.setting("depth.mean") or trained or "–"
    losses, bits = run.last_by_number(LOSS_AT), run.last_by_number(BITS_AT)
    speed = run.last("tokens_per_second")
    return {
        "state": run.status,
        "made by": f"looped pretrain {run.folder / 'recipe.yaml'}" if run.recipe else "–",
        "parameters": number(run.num_parameters),
        "architecture": architecture(run.config),
        "depth in training": f"{run.setting('depth.sampler', 'fixed')}, mean {mean_depth}",
        "data": f"{run.setting('data.source', '–')}, {number(tokens)} tokens seen",
        "training": f"{number(run.steps)} steps, {optimizer or '–'}, {schedule or '–'} schedule, "
        f"seed {run.setting('training.seed', '–')}",
        "training loss at the end": number(run.last("loss")),
        "validation loss": number(losses.get(trained, run.last("validation/loss"))),
        "bits per byte": number(bits.get(trained)),
        "tokens per second": number(round(speed) if speed and math.isfinite(speed) else None),
    }


def architecture(config: dict) -> str:
    if not config:
        return "–"
    layers, loops = config["num_core_layers"], config.get("trained_num_loops") or config["num_loops"]
    parts = [
        f"{counted(layers, 'layer')} × {counted(loops, 'loop')}",
        f"width {config['hidden_size']}",
        f"injection {config.get('injection', 'none')}",
    ]
    for side in ("prelude", "coda"):
        if config.get(f"num_{side}_layers"):
            parts.insert(1, f"{config[f'num_{side}_layers']} {side}")
    return ", ".join(parts)


def about(runs: list[RunFolder]) -> Section:
    columns = [facts(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    blocks = [Table(["", *(run.name for run in runs)], rows)]
    for run in runs:
        if run.unread_lines:
            blocks.append(
                Text(f"{run.name}: metrics.jsonl is cut off; its last {run.unread_lines} line(s) could not be read.")
            )
    return Section("Runs" if len(runs) > 1 else "The run", blocks)


def differences(runs: list[RunFolder]) -> Section | None:
    """Settings that are not the same in all runs."""
    if len(runs) < 2:
        return None
    settings = [
        {f"{part}.{key}": value for part, values in run.recipe.items() for key, value in (values or {}).items()}
        for run in runs
    ]
    keys = sorted({key for each in settings for key in each} - {"training.output_dir"})
    rows = [
        [key, *(number(each.get(key)) for each in settings)]
        for key in keys
        if any(each.get(key) != settings[0].get(key) for each in settings)
    ]
    words = "Settings that differ" if rows else "These runs have the same settings."
    return Section("Comparison", [Table([words, *(run.name for run in runs)], rows) if rows else Text(words)])


def series_of(runs: list[RunFolder], metric: str, dashed: bool = False, suffix: str = "") -> list[Line]:
    """A line for each run that logged it."""
    return [Line(run.name + suffix, list(zip(*run.series(metric))), named(i), dashed) for i, run in enumerate(runs)]


def said(words: str, run: RunFolder, runs: list[RunFolder]) -> Finding:
    """A sentence about one of the runs."""
    return Finding(f"{run.name}: {words}" if len(runs) > 1 else words[0].upper() + words[1:])


def training(runs: list[RunFolder]) -> Section:
    losses = series_of(runs, "loss", suffix=", training") + series_of(runs, "validation/loss", True, ", held out")
    charts = [
        Chart("Loss", "step", "cross-entropy", losses),
        Chart("Gradient before clipping", "step", "norm", series_of(runs, "gradient_norm"), log_y=True),
    ]
    findings = []
    for run in runs:
        known = [loss for loss in run.series("loss")[1] if math.isfinite(loss)]
        if known:
            words = f"the training loss went from {known[0]:.3f} to {known[-1]:.3f} in {run.steps:,} steps."
            findings.append(said(words, run, runs))
    return Section("Training", [*findings, Charts(charts)] if findings else [Text("No finite loss was logged.")])


DEPTH = Explanation(
    "What the last validation measured after every number of loops, also beyond the trained one.",
    "It falls until the trained depth and does not rise much beyond it; a flat curve makes no use of loops.",
    "Readout Blind Spot, table 11: 1 loop costs 0.00 nats beside 4 with normed readouts at every loop, 0.03 to 0.04 "
    "with raw ones, and 4 to 37 where only the last loop is trained.",
)
UNITS = {"bits per byte": BITS_AT, "cross-entropy": LOSS_AT}


def last_validation(run: RunFolder, prefix: str) -> dict[int, float]:
    return {k: value for k, value in run.last_by_number(prefix).items() if math.isfinite(value)}


def headlines(runs: list[RunFolder]) -> list[str]:
    """The best run, and the best depth of each."""
    return [*best_run(runs), *best_depths(runs)]


def best_depths(runs: list[RunFolder]) -> list[str]:
    found = []
    for run in runs:
        for unit, prefix in UNITS.items():
            if values := last_validation(run, prefix):
                found.append(said(best_depth(values, run.trained_loops, unit), run, runs).words)
                break
    return found


def best_run(runs: list[RunFolder]) -> list[str]:
    """Which run has the fewest bits per byte at its own depth, and where the difference may be chance."""
    known = [(bits, run) for run in runs if (bits := last_validation(run, BITS_AT).get(run.trained_loops)) is not None]
    if len(known) < 2:
        return []
    (least, first), (second, other) = sorted(known, key=lambda each: each[0])[:2]
    error = max(run.last("validation/bits_per_byte_error") or 0 for run in (first, other))
    unclear = "" if second - least > 2 * error else ": `looped budget` tells whether that is more than chance"
    errors = f" (each ± {error:.3f} over texts{unclear})" if error else ""
    fewer = f"{second - least:.3f} fewer than {other.name}"
    return [f"{first.name} needs the fewest bits per byte: {least:.3f}, {fewer}{errors}."]


def over_depth(runs: list[RunFolder]) -> Section:
    """The last validation: cross-entropy and bits per byte at every depth."""
    found: curves.Curves = {}
    for measure in ("cross-entropy", "bits per byte"):
        for run in runs:
            if values := last_validation(run, UNITS[measure]):
                found.setdefault(measure, {})[run.name] = {k: (value, None) for k, value in values.items()}
    if not found:
        return Section(
            "Loss over depth", [missing("No validation was logged.", f"{pretrain(runs[0])} evaluation.every=100")]
        )
    trained = {run.trained_loops for run in runs}
    charts = curves.charts(found, trained=trained.pop() if len(trained) == 1 else None)
    return Section("Loss over depth", [*map(Finding, best_depths(runs)), Charts(charts), depth_table(found), DEPTH])


def depth_table(found: curves.Curves) -> Table:
    """Rows: measure and run; columns: depths."""
    depths = sorted({k for series in found.values() for points in series.values() for k in points})
    rows = [
        [measure, name, *(curves.cell(*points[k]) if k in points else "" for k in depths)]
        for measure, series in found.items()
        for name, points in series.items()
    ]
    return Table(["measure", "run", *(counted(k, "loop") for k in depths)], rows)


NORMS = Explanation(
    "The size of the state, ‖h‖/√d, after each loop and while the model trained; the spectral radius is that of the "
    "map by which an injection takes over the state.",
    "One size over loops and over training, and a radius below 1.",
    "Residual Scaling, theorem 1: it grows with the number of loops N where residuals are not scaled, as √N under "
    "1/√N, and not under 1/N. Parcae, figure 3: runs whose radius exceeds 1 diverge.",
)


def norms(runs: list[RunFolder]) -> Section:
    rows, findings, over_loops = [], [], []
    for i, run in enumerate(runs):
        last = last_validation(run, "residual_norm/loop_")
        if not last:
            continue
        over_loops.append(Line(run.name, list(last.items()), named(i)))
        rows.append([run.name, *(number(run.last(m)) for m in ("residual_norm", "state_change", "spectral_radius"))])
        first, final, count = last[min(last)], last[max(last)], max(last)
        if count > 1 and first > 0:
            ratio = written(final / first, 3)
            words = f"at the end of training {count} loops leave the state at {ratio} times the size of the first."
            findings.append(said(words, run, runs))
    if not rows:
        return Section(
            "Norms of the state", [missing("None was logged.", f"{pretrain(runs[0])} logging.monitor_every=50")]
        )
    steps, radius = series_of(runs, "residual_norm"), series_of(runs, "spectral_radius")
    charts = [
        Chart("Over loops, at the end", "loops", "‖h‖/√d", over_loops, whole_x=True),
        Chart("After the last loop, over training", "step", "‖h‖/√d", steps),
        Chart("Injection", "step", "spectral radius", radius, levels={"stable below": 1}),
    ]
    head = ["run", "norm after the last loop", "change in the last loop", "spectral radius"]
    kept = [i for i in range(len(head)) if any(row[i] != "–" for row in rows)]
    table = Table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])
    return Section("Norms of the state", [*findings, Charts(charts), table, NORMS])


def gradients(runs: list[RunFolder], layer: int | None = None, clipped: bool = False) -> Section | None:
    """State after the first and the last loop, and gradients of head, first MLP and one layer's MLP and attention.

    layer: counted from 1; None is the middle one. clipped: what clipping left of the gradients.
    """
    last = []
    for i, run in enumerate(runs):
        depth = max(run.last_by_number("state_norm/loop_"), default=1)
        last.append(Line(run.name, list(zip(*run.series(f"state_norm/loop_{depth}"))), named(i)))
    first = series_of(runs, "state_norm/loop_1")
    charts = [
        Chart("State after the first loop", "step", "‖h‖", first, log_y=True),
        Chart("State after the last loop", "step", "‖h‖", last, log_y=True),
    ]
    drawn: dict[str, list[Line]] = {}
    for i, run in enumerate(runs):
        for block in gradient_blocks(run, layer):
            steps, norms = run.series(f"gradient_norm/{block}")
            if clipped:
                norms = [norm * share for norm, share in zip(norms, clip_shares(run, steps))]
            drawn.setdefault(block, []).append(Line(run.name, list(zip(steps, norms)), named(i)))
    charts += on_one_scale(
        [Chart(f"Gradient of {layer_name(b)}", "step", "norm", lines, log_y=True) for b, lines in drawn.items()]
    )
    when = "after" if clipped else "before"
    if all(chart.is_empty for chart in charts):
        return None
    return Section("Norms over training", [Text(f"Gradients {when} clipping."), Charts(charts)])


def gradient_blocks(run: RunFolder, layer: int | None) -> list[str]:
    """Head, first MLP, MLP and attention of `layer`."""
    pattern = re.compile(r"gradient_norm/core\.(\d+)\.mlp$")
    count = 1 + max(
        (int(match[1]) for record in run.records for key in record if (match := pattern.match(key))), default=0
    )
    if layer is not None and not 1 <= layer <= count:
        raise RunError(f"--layer {layer}: {run.name} has layers 1 to {count} in its metrics")
    at = count // 2 if layer is None else layer - 1
    return list(dict.fromkeys(["lm_head", "core.0.mlp", f"core.{at}.mlp", f"core.{at}.self_attn"]))


def clip_shares(run: RunFolder, steps: list[int]) -> list[float]:
    """What clipping by the norm of all gradients left of them."""
    limit, totals = run.setting("optimizer.clip"), dict(zip(*run.series("gradient_norm")))
    return [1.0 if limit is None else min(1.0, limit / (totals[step] + 1e-6)) for step in steps]


# What other commands leave in the folder


def pretrain(run: RunFolder) -> str:
    return f"looped pretrain {run.folder / 'recipe.yaml'}"


def missing(words: str, command: str) -> Missing:
    return Missing(f"{words} This makes it:", command)


def results_of(run: RunFolder) -> tuple[dict[str, dict[int, curves.Point]], dict[str, float], list[str]]:
    """lm-eval's metrics over depth, {task and metric: {depth: (value, standard error)}}, what guessing scores, and
    files that were not understood."""
    found, chance, unread = {}, {}, []
    for path in sorted(run.folder.rglob("results*.json"), key=lambda path: (path.stat().st_mtime, str(path))):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            tasks = {**content["results"], **content.get("groups", {})}
        except (ValueError, KeyError, TypeError):
            unread.append(f"{path} holds no lm-eval results.")
            continue
        depth = depth_of_results(path, content) or run.trained_loops or 1
        for task, metrics in tasks.items():
            for key, value in metrics.items():
                metric, _, kind = key.partition(",")
                if kind and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                    error = metrics.get(f"{metric}_stderr,{kind}")
                    name = f"{task} {metric}" + (f" ({kind})" if kind != "none" else "")
                    point = (value, error if isinstance(error, (int, float)) else None)
                    found.setdefault(name, {})[depth] = point  # the newest file wins
                    if (level := curves.chance_of(name, content.get("configs"))) is not None:
                        chance[name] = level
    return found, chance, unread


def depth_of_results(path: Path, content: dict) -> int | None:
    """The depth of a result set: of its folder (loops_4), or of the model's arguments."""
    for part in reversed(path.parts):
        if match := re.fullmatch(r"loops_(\d+)", part):
            return int(match[1])
    arguments = (content.get("config") or {}).get("model_args") or ""
    match = re.search(r"num_loops['\"]?\s*[=:]\s*(\d+)", str(arguments))
    return int(match[1]) if match else None


def accuracy(runs: list[RunFolder]) -> Section:
    found: curves.Curves = {}
    chance: dict[str, float] = {}
    blocks = []
    for run in runs:
        measures, levels, unread = results_of(run)
        chance |= levels
        blocks += map(Text, unread)
        for measure, points in measures.items():
            found.setdefault(measure, {})[run.name] = dict(sorted(points.items()))
        if not measures:
            blocks.append(missing(f"{run.name} has no lm-eval results.", harness(run)))
    if found:
        findings = [Finding(words) for words in above_chance(found, chance)]
        blocks = [*findings, Charts(curves.charts(found, chance)), depth_table(found), *blocks]
    return Section("Tasks over depth", blocks)


def above_chance(found: curves.Curves, chance: dict[str, float]) -> list[str]:
    """For each run: how many of the accuracies are two standard errors above guessing at their best depth."""
    sentences = []
    for run in dict.fromkeys(name for series in found.values() for name in series):
        known = [
            (max(series[run].values()), chance[m]) for m, series in found.items() if run in series and m in chance
        ]
        above = sum(value - 2 * (error or 0) > level for (value, error), level in known)
        if known:
            which = f"{above} of {len(known)} accuracies {'is' if above == 1 else 'are'}"
            sentences.append(f"{run}: {which} above chance at the best depth.")
    return sentences


def harness(run: RunFolder) -> str:
    return (
        f"looped eval --model looped --model_args pretrained={run.folder / 'final'},"
        f"num_loops=1..{run.trained_loops or 4} --tasks looped_offline --output {run.folder / 'results'}"
    )


def halting(runs: list[RunFolder]) -> Section:
    """Early exit: what looped halting measured, and perplexity against mean loops."""
    blocks = []
    for run in runs:
        path = run.results("halting.json")
        if not path.is_file():
            command = f"looped halting {run.folder}"
            blocks.append(missing(f"{run.name} has no halting.json.", command))
            continue
        blocks += [Heading(run.name)] if len(runs) > 1 else []
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            parts = halting_page.sections(content)
            blocks += [*map(Finding, halting_page.findings(content)), *parts[0].blocks]
            blocks += [block for part in parts[1:] for block in (Heading(part.title), *part.blocks)]
        except (ValueError, KeyError, TypeError):  # of another version, or not whole
            blocks += left_behind(path)
    return Section("Early exit", blocks)


def diagnostics(runs: list[RunFolder]) -> list[Section]:
    """Those of the models themselves, and those of fresh models of their configs."""
    own, fresh = [], []
    for run in runs:
        order = list(READINGS)
        files = sorted(
            run.results("diagnose").glob("*.json"),
            key=lambda path: (order.index(path.stem) if path.stem in order else len(order), path.stem),
        )
        if not files:
            own.append(missing(f"{run.name} has no diagnostics.", f"looped diagnose all {run.folder}"))
        suffix = f", {run.name}" if len(runs) > 1 else ""
        for path in files:
            try:
                result = json.loads(path.read_text(encoding="utf-8"))["result"]
                parts = [
                    (READINGS[part], diagnose_page.measured(part, result))
                    for part in diagnose_page.parts(path.stem, result)
                ]
            except (ValueError, KeyError, TypeError, AttributeError):  # of another version, or not whole
                own += [Heading(path.stem.replace("_", " ") + suffix), *left_behind(path)]
                continue
            for reading, blocks in parts:
                (fresh if reading.fresh else own).extend([Heading(reading.title + suffix), *blocks])
    return [
        Section("Diagnostics", own),
        Section("Fresh models of these configs" if len(runs) > 1 else "Fresh models of this config", fresh),
    ]


def left_behind(path: Path) -> list:
    """The rows and single numbers of a JSON that a measuring command wrote."""
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


def recipes(runs: list[RunFolder]) -> Section:
    return Section(
        "Recipes", [Folded(run.name, yaml.safe_dump(run.recipe, sort_keys=False)) for run in runs if run.recipe]
    )


def sections_of(runs: list[RunFolder], layer: int | None = None, clipped: bool = False) -> list[Section]:
    parts = [about(runs), differences(runs), training(runs), over_depth(runs), norms(runs)]
    parts += [gradients(runs, layer, clipped), accuracy(runs), halting(runs), *diagnostics(runs), recipes(runs)]
    return [part for part in parts if part is not None and part.blocks]


# Command line


def title_of(runs: list[RunFolder]) -> str:
    return ("This model: " if len(runs) == 1 else "These models: ") + ", ".join(run.name for run in runs)


def make_report(folders, output: str | Path | None = None) -> Path:
    """Writes the page of these runs, by default into the folder of the first; where it lies."""
    runs = open_runs(folders)
    output = Path(output or runs[0].folder / "report.html")
    write_whole(output, to_html(title_of(runs), sections_of(runs), headlines(runs)))
    return output


def main(arguments: list[str]):
    args = parse(arguments)
    runs = open_runs(args.runs)
    sections = sections_of(runs, args.layer, args.clipped)
    output = Path(args.output or runs[0].folder / "report.html")
    write_whole(output, to_html(title_of(runs), sections, headlines(runs)))
    if args.markdown == "-":
        print(to_markdown(title_of(runs), sections, headlines(runs)))
    elif args.markdown:
        write_whole(args.markdown, to_markdown(title_of(runs), sections, headlines(runs)))
        print(f"Markdown: {args.markdown}")
    else:
        print(about(runs).blocks[0].markdown())
    print(f"\nthe page: {output}")
    say_result("\n".join(headlines(runs)) or "No validation was logged yet.", *next_commands(runs[0]))


def next_commands(run: RunFolder) -> list[str]:
    """What the page of this run lacks, or else what its model is for."""
    lacking = {f"looped diagnose all {run.folder}": "diagnose", f"looped halting {run.folder}": "halting.json"}
    return [command for command, name in lacking.items() if not run.results(name).exists()] or [
        f"looped chat {run.folder}"
    ]
