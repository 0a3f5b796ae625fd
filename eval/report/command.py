"""Training runs on one page."""

import io
import json
import math
import re
from pathlib import Path

import yaml

from looped_eval.common import curves
from looped_eval.common.page import (
    Folded,
    Heading,
    Image,
    Missing,
    Section,
    Table,
    Text,
    picture,
    single_numbers,
    to_html,
    to_markdown,
)
from looped_eval.common.run_folder import BITS_AT, LOSS_AT, RunError, RunFolder, open_runs
from looped_recipes.common.canvas import as_label
from looped_recipes.common.command_line import say_result
from looped_recipes.common.files import write_whole

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
        f"{layers} layer{'s' * (layers != 1)} x {loops} loop{'s' * (loops != 1)}",
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
    return Section("Runs", blocks)


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


def training(runs: list[RunFolder]) -> Section:
    blocks = []
    with picture(blocks, "training and validation loss, and gradient norm, over steps", 2) as (loss, gradient):
        for i, run in enumerate(runs):
            color = f"C{i}"
            draw_series(loss, run, "loss", color=color, linewidth=1, alpha=0.6, label=as_label(run.name))
            draw_series(loss, run, "validation/loss", color=color, marker="o", markersize=4, linestyle="--")
            draw_series(gradient, run, "gradient_norm", color=color, linewidth=1, label=as_label(run.name))
        loss.set(xlabel="step", ylabel="loss", title="line: training; dots: validation")
        gradient.set(xlabel="step", ylabel="gradient norm before clipping", yscale="log")
    if not blocks:
        blocks.append(Text("No finite loss was logged."))
    return Section("Training", blocks)


def draw_series(axis, run: RunFolder, metric: str, **style):
    points = [(step, value) for step, value in zip(*run.series(metric)) if math.isfinite(value)]
    if points:
        axis.plot(*zip(*points), **style)


def over_depth(runs: list[RunFolder]) -> Section:
    """The last validation: cross-entropy and bits per byte at every depth."""
    measures = {"cross-entropy": LOSS_AT, "bits per byte": BITS_AT}
    found: curves.Curves = {}
    for measure, prefix in measures.items():
        for run in runs:
            values = {k: value for k, value in run.last_by_number(prefix).items() if math.isfinite(value)}
            if values:
                found.setdefault(measure, {})[run.name] = {k: (value, None) for k, value in values.items()}
    if not found:
        return Section(
            "Loss over depth", [missing("No validation was logged.", f"{pretrain(runs[0])} evaluation.every=100")]
        )
    blocks = [depth_table(found)]
    with picture(blocks, "held-out loss over loops", len(found)) as axes:
        for axis, (measure, series) in zip(axes, found.items()):
            for i, run in enumerate(runs):
                if run.name in series:
                    points = series[run.name]
                    axis.plot(list(points), [point[0] for point in points.values()], marker="o", color=f"C{i}")
                    axis.lines[-1].set_label(as_label(run.name))
                    if run.trained_loops:
                        axis.axvline(run.trained_loops, linestyle=":", color=f"C{i}", alpha=0.6)
            axis.set(xlabel="loops (dotted: as trained)", ylabel=f"held-out {measure}")
    return Section("Loss over depth", blocks)


def depth_table(found: curves.Curves) -> Table:
    """Rows: measure and run; columns: depths."""
    depths = sorted({k for series in found.values() for points in series.values() for k in points})
    rows = [
        [measure, name, *(curves.cell(*points[k]) if k in points else "" for k in depths)]
        for measure, series in found.items()
        for name, points in series.items()
    ]
    return Table(["measure", "run", *(f"{k} loop{'s' * (k != 1)}" for k in depths)], rows)


def norms(runs: list[RunFolder]) -> Section:
    blocks, rows = [], []
    with picture(blocks, "norm of the state over loops and over steps", 3) as (over_loops, over_steps, radius):
        for i, run in enumerate(runs):
            last = {k: v for k, v in run.last_by_number("residual_norm/loop_").items() if math.isfinite(v)}
            if last:
                over_loops.plot(list(last), list(last.values()), marker="o", color=f"C{i}", label=as_label(run.name))
                rows.append(
                    [run.name, *(number(run.last(m)) for m in ("residual_norm", "state_change", "spectral_radius"))]
                )
            draw_series(over_steps, run, "residual_norm", color=f"C{i}", label=as_label(run.name))
            draw_series(radius, run, "spectral_radius", color=f"C{i}", label=as_label(run.name))
        over_loops.locator_params(axis="x", integer=True)
        over_loops.set(xlabel="loop", ylabel="||h|| / sqrt(d) at the end")
        over_steps.set(xlabel="step", ylabel="||h|| / sqrt(d) after the last loop")
        radius.set(xlabel="step", ylabel="spectral radius of the injection")
    if not rows:
        return Section(
            "Norms of the state", [missing("None was logged.", f"{pretrain(runs[0])} logging.monitor_every=50")]
        )
    head = ["run", "norm after the last loop", "change in the last loop", "spectral radius"]
    return Section("Norms of the state", [Table(head, rows), *blocks])


def gradients(runs: list[RunFolder], layer: int | None = None, clipped: bool = False) -> Section | None:
    """State after the first and the last loop, and gradients of head, first MLP and one layer's MLP and attention.

    layer: counted from 1; None is the middle one. clipped: what clipping left of the gradients.
    """
    blocks = []
    with picture(blocks, "norm of the state over steps", 2) as (first, last):
        for i, run in enumerate(runs):
            depth = max(run.last_by_number("state_norm/loop_"), default=1)
            draw_series(first, run, "state_norm/loop_1", color=f"C{i}", label=as_label(run.name))
            draw_series(last, run, f"state_norm/loop_{depth}", color=f"C{i}", label=f"{run.name}, loop {depth}")
        first.set(xlabel="step", ylabel="||h|| after the first loop", yscale="log")
        last.set(xlabel="step", ylabel="||h|| after the last loop", yscale="log")
    with picture(blocks, "gradient norms of blocks over steps", 4) as axes:
        for i, run in enumerate(runs):
            for axis, block in zip(axes, gradient_blocks(run, layer)):
                steps, norms = run.series(f"gradient_norm/{block}")
                if clipped:
                    norms = [norm * share for norm, share in zip(norms, clip_shares(run, steps))]
                if norms:
                    axis.plot(steps, norms, color=f"C{i}", label=as_label(run.name), linewidth=1)
                axis.set(xlabel="step", ylabel=f"gradient of {block}", yscale="log")
    when = "after" if clipped else "before"
    return Section("Norms over training", [Text(f"Gradients {when} clipping."), *blocks]) if blocks else None


def gradient_blocks(run: RunFolder, layer: int | None) -> list[str]:
    """Head, first MLP, MLP and attention of `layer`."""
    pattern = re.compile(r"gradient_norm/core\.(\d+)\.mlp$")
    count = 1 + max(
        (int(match[1]) for record in run.records for key in record if (match := pattern.match(key))), default=0
    )
    if layer is not None and not 1 <= layer <= count:
        raise RunError(f"--layer {layer}: {run.name} has layers 1 to {count} in its metrics")
    at = count // 2 if layer is None else layer - 1
    return ["lm_head", "core.0.mlp", f"core.{at}.mlp", f"core.{at}.self_attn"]


def clip_shares(run: RunFolder, steps: list[int]) -> list[float]:
    """What clipping by the norm of all gradients left of them."""
    limit, totals = run.setting("optimizer.clip"), dict(zip(*run.series("gradient_norm")))
    return [1.0 if limit is None else min(1.0, limit / (totals[step] + 1e-6)) for step in steps]


# What other commands leave in the folder


def pretrain(run: RunFolder) -> str:
    return f"looped pretrain {run.folder / 'recipe.yaml'}"


def missing(words: str, command: str) -> Missing:
    return Missing(f"{words} This makes it:", command)


def results_of(run: RunFolder) -> tuple[dict[str, dict[int, curves.Point]], list[str]]:
    """lm-eval's metrics over depth, {task and metric: {depth: (value, standard error)}}, and files not understood."""
    found, unread = {}, []
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
    return found, unread


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
    blocks = []
    for run in runs:
        measures, unread = results_of(run)
        blocks += map(Text, unread)
        for measure, points in measures.items():
            found.setdefault(measure, {})[run.name] = dict(sorted(points.items()))
        if not measures:
            blocks.append(missing(f"{run.name} has no lm-eval results.", harness(run)))
    if found:
        buffer = io.BytesIO()
        curves.draw(found, buffer)
        blocks = [depth_table(found), Image(buffer.getvalue(), "lm-eval metrics over loops"), *blocks]
    return Section("Tasks over depth", blocks)


def harness(run: RunFolder) -> str:
    return (
        f"looped eval --model looped --model_args pretrained={run.folder / 'final'},"
        f"num_loops=1..{run.trained_loops or 4} --tasks TASK,... --output_path {run.folder / 'results'}"
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
        measured = left_behind(path)
        blocks += [Text(run.name), *measured] if len(runs) > 1 else measured
    return Section("Early exit", blocks)


def diagnostics(runs: list[RunFolder]) -> Section:
    blocks = []
    for run in runs:
        files = sorted(run.results("diagnose").glob("*.json"))
        if not files:
            command = f"looped diagnose all {run.folder}"
            blocks.append(missing(f"{run.name} has no diagnostics.", command))
        for path in files:
            title = path.stem.replace("_", " ") + (f", {run.name}" if len(runs) > 1 else "")
            blocks += [Heading(title), *left_behind(path)]
    return Section("Diagnostics", blocks)


def left_behind(path: Path) -> list:
    """What a measuring command wrote: its pictures, and the rows and single numbers of its JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return [Text(f"{path} could not be read: {error}")]
    content = content if isinstance(content, dict) else {"rows": content}
    result = content["result"] if isinstance(content.get("result"), dict) else content
    images = sorted(path.parent.glob(f"{path.stem}.png")) + sorted(path.parent.glob(f"{path.stem}_training.png"))
    blocks = [Image(image.read_bytes(), image.stem.replace("_", " ")) for image in images]
    for name, value in result.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            blocks.append(Text(name.replace("_", " ")))
            head = [key for key in value[0] if not isinstance(value[0][key], (dict, list))]
            blocks.append(Table(head, [[number(row.get(key)) for key in head] for row in value]))
    single = [[key, number(value)] for key, value in single_numbers(result).items()]
    return blocks + ([Folded("numbers", Table(["", "value"], single))] if single else [])


def recipes(runs: list[RunFolder]) -> Section:
    return Section(
        "Recipes", [Folded(run.name, yaml.safe_dump(run.recipe, sort_keys=False)) for run in runs if run.recipe]
    )


def sections_of(runs: list[RunFolder], layer: int | None = None, clipped: bool = False) -> list[Section]:
    parts = [about(runs), differences(runs), training(runs), over_depth(runs), norms(runs)]
    parts += [gradients(runs, layer, clipped), accuracy(runs), halting(runs), diagnostics(runs), recipes(runs)]
    return [part for part in parts if part is not None and part.blocks]


# Command line


def title_of(runs: list[RunFolder]) -> str:
    return ("This model: " if len(runs) == 1 else "These models: ") + ", ".join(run.name for run in runs)


def make_report(folders, output: str | Path | None = None) -> Path:
    """Writes the page of these runs, by default into the folder of the first; where it lies."""
    runs = open_runs(folders)
    output = Path(output or runs[0].folder / "report.html")
    write_whole(output, to_html(title_of(runs), sections_of(runs)))
    return output


def main(arguments: list[str]):
    args = parse(arguments)
    runs = open_runs(args.runs)
    sections = sections_of(runs, args.layer, args.clipped)
    output = Path(args.output or runs[0].folder / "report.html")
    write_whole(output, to_html(title_of(runs), sections))
    if args.markdown == "-":
        print(to_markdown(title_of(runs), sections))
    elif args.markdown:
        write_whole(args.markdown, to_markdown(title_of(runs), sections))
        print(f"Markdown: {args.markdown}")
    else:
        print(about(runs).blocks[0].markdown())
    say_result(f"the page: {output}", f"looped chat {runs[0].folder}")
