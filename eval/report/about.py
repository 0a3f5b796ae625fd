"""Facts about a run, as for a model card, the settings in which runs differ, and helpers that all sections share."""

import math

from looped_eval.common import curves
from looped_eval.common.page import Missing, Section, Table, Text
from looped_eval.common.run_folder import BITS_AT, LOSS_AT, RunFolder
from looped_recipes.common.axis import written
from looped_recipes.common.command_line import typed
from looped_recipes.common.metrics import depth_of_loss
from looped_recipes.common.replicas import settings_of
from looped_recipes.common.words import counted


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


def facts(run: RunFolder) -> dict[str, str]:
    """Return the facts about a run that a model card states."""
    tokens = run.tokens_per_step and run.steps * run.tokens_per_step
    optimizer, schedule = run.setting("optimizer.name"), run.setting("schedule.name")
    trained = run.trained_loops
    sampler, most = run.setting("depth.sampler", "fixed"), run.setting("depth.maximum")
    most = f", none above {most}" if most else ""
    depth = trained if run.operations is None else run.operations.mean_depth
    flops = run.operations.of_run(run.steps) if tokens and run.operations and run.config else None
    losses, bits = run.last_by_number(LOSS_AT), run.last_by_number(BITS_AT)
    read = depth_of_loss(losses, trained or 0) if losses else trained
    where = "" if read == trained else f" after {counted(read, 'loop')}"
    speed = run.last("tokens_per_second")
    return {
        "state": run.status,
        "made by": pretrain(run) if run.recipe else "–",
        "parameters": number(run.num_parameters),
        "architecture": architecture(run.config),
        "depth in training": f"{sampler}, mean {'–' if depth is None else written(depth)}{most}",
        "data": f"{run.setting('data.source', '–')}, {number(tokens)} tokens seen",
        "training FLOPs": f"{written(flops)}, {written(flops / tokens)} a token" if flops else "–",
        "training": f"{number(run.steps)} steps, {optimizer or '–'}, {schedule or '–'} schedule, "
        f"seed {run.setting('training.seed', '–')}",
        "training loss at the end": number(run.last("loss")),
        "validation loss": number(losses.get(read, run.last("validation/loss"))) + where,
        "bits per byte": number(bits.get(read)) + where,
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
            unread = counted(run.unread_lines, "line")
            blocks.append(Text(f"{run.name}: metrics.jsonl has {unread} that could not be read: left out."))
    return Section("Runs" if len(runs) > 1 else "The run", blocks)


def differences(runs: list[RunFolder]) -> Section | None:
    """Return a table of the settings in which the runs differ."""
    if len(runs) < 2:
        return None
    settings = [settings_of(run.recipe) for run in runs]
    keys = sorted({key for each in settings for key in each})
    rows = [
        [key, *(number(each.get(key)) for each in settings)]
        for key in keys
        if any(each.get(key) != settings[0].get(key) for each in settings)
    ]
    words = "Settings that differ" if rows else "These runs have the same settings."
    return Section("Comparison", [Table([words, *(run.name for run in runs)], rows) if rows else Text(words)])


def pretrain(run: RunFolder) -> str:
    return typed("looped pretrain", run.folder / "recipe.yaml")


def missing(words: str, command: str) -> Missing:
    return Missing(f"{words} This makes it:", command)


def depth_table(found: curves.Curves) -> Table:
    """Return a table with a row for each measure and run, and a column for each depth."""
    depths, rows = curves.rows_over_depth(found)
    return Table(["measure", "run", *(counted(k, "loop") for k in depths)], rows)
