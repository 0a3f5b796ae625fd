"""Curves from the training logs: losses, the last validation over depth, norms of states and gradients."""

import math
import re

from looped_eval.common import curves
from looped_eval.common.findings import best_depth
from looped_eval.common.page import Charts, Explanation, Finding, Section, Table, Text
from looped_eval.common.run_folder import BITS_AT, LOSS_AT, RunError, RunFolder
from looped_eval.diagnose.figures import layer_name
from looped_recipes.common.axis import written
from looped_recipes.common.chart import Chart, Line, named, on_one_scale
from looped_recipes.common.metrics import last_by_number

from . import seeds
from .about import depth_table, missing, number, pretrain


def series_of(runs: list[RunFolder], metric: str, dashed: bool = False, suffix: str = "") -> list[Line]:
    """Return a line of the metric for each run; empty where a run did not log it."""
    return [Line(run.name + suffix, list(zip(*run.series(metric))), named(i), dashed) for i, run in enumerate(runs)]


def said(words: str, run: RunFolder, runs: list[RunFolder]) -> Finding:
    """Return a sentence about one run, with its name if there are several runs."""
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
ONE_SEED = "Each of these runs is one seed, which has no interval: other seeds may order them otherwise."
UNITS = {"bits per byte": BITS_AT, "cross-entropy": LOSS_AT}


def finite_by_number(run: RunFolder, prefix: str) -> dict[int, float]:
    return {k: value for k, value in run.last_by_number(prefix).items() if math.isfinite(value)}


def headlines(runs: list[RunFolder]) -> list[str]:
    """Return sentences on the best run and on the best depth of each run; or, where runs are seeds of the same
    settings, on what the settings change."""
    if found := seeds.sentences(runs):
        return found
    best = best_run(runs)
    return [*best, *[ONE_SEED] * bool(best), *best_depths(runs)]


def best_depths(runs: list[RunFolder]) -> list[str]:
    found = []
    for run in runs:
        for unit, prefix in UNITS.items():
            if values := finite_by_number(run, prefix):
                found.append(said(best_depth(values, run.trained_loops, unit), run, runs).words)
                break
    return found


def best_run(runs: list[RunFolder]) -> list[str]:
    """Say which run has the fewest bits per byte at its trained depth, and whether the difference may be chance."""
    known = [
        (bits, run) for run in runs if (bits := finite_by_number(run, BITS_AT).get(run.trained_loops)) is not None
    ]
    if len(known) < 2:
        return []
    (least, first), (second, other) = sorted(known, key=lambda each: each[0])[:2]
    error = max(run.last("validation/bits_per_byte_error") or 0 for run in (first, other))
    unclear = "" if second - least > 2 * error else ": `looped budget` tells whether that is more than chance"
    errors = f" (each ± {error:.3f} over texts{unclear})" if error else ""
    fewer = f"{second - least:.3f} fewer than {other.name}"
    return [f"{first.name} needs the fewest bits per byte: {least:.3f}, {fewer}{errors}."]


def over_depth(runs: list[RunFolder]) -> Section:
    """Return the section on the last validation: cross-entropy and bits per byte at every depth."""
    found: curves.Curves = {}
    for measure in ("cross-entropy", "bits per byte"):
        for run in runs:
            if values := finite_by_number(run, UNITS[measure]):
                found.setdefault(measure, {})[run.name] = {k: (value, None) for k, value in values.items()}
    if not found:
        return Section(
            "Loss over depth", [missing("No validation was logged.", f"{pretrain(runs[0])} evaluation.every=100")]
        )
    trained = {run.trained_loops for run in runs}
    charts = curves.charts(found, trained=trained.pop() if len(trained) == 1 else None)
    return Section("Loss over depth", [*map(Finding, best_depths(runs)), Charts(charts), depth_table(found), DEPTH])


NORMS = Explanation(
    "The size of the state, ‖h‖/√d, after each loop and while the model trained; the spectral radius is that of the "
    "map by which an injection takes over the state, the correlation that of two tokens of a row after the last loop.",
    "One size over loops and over training, a radius below 1, and tokens that stay apart once more than their "
    "frequencies is learned.",
    "Residual Scaling, theorem 1: it grows with the number of loops N where residuals are not scaled, as √N under "
    "1/√N, and not under 1/N. Parcae, figure 3: runs whose radius exceeds 1 diverge. In a run of Huginn's that failed "
    "all tokens became alike.",
)


NORM_METRICS = {
    "residual_norm": "norm after the last loop",
    "state_change": "change in the last loop",
    "spectral_radius": "spectral radius",
    "token_correlation": "correlation of tokens",
}


def norms(runs: list[RunFolder]) -> Section:
    rows, findings, over_loops = [], [], []
    for i, run in enumerate(runs):
        last = finite_by_number(run, "residual_norm/loop_")
        if not last:
            continue
        over_loops.append(Line(run.name, list(last.items()), named(i)))
        rows.append([run.name, *(number(run.last(m)) for m in NORM_METRICS)])
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
    head = ["run", *NORM_METRICS.values()]
    kept = [i for i in range(len(head)) if any(row[i] != "–" for row in rows)]
    table = Table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])
    return Section("Norms of the state", [*findings, Charts(charts), table, NORMS])


def gradients(runs: list[RunFolder], layer: int | None = None, clipped: bool = False) -> Section | None:
    """Draw the norm of the state after the first and the last loop, and the gradient norms of the head, the first MLP,
    and one layer's MLP and attention.

    layer: counted from 1; None is the middle one. clipped: draw the gradients after clipping.
    """
    last = [Line(run.name, after_last_loops(run), named(i)) for i, run in enumerate(runs)]
    first = series_of(runs, "state_norm/loop_1")
    charts = [
        Chart("State after the first loop", "step", "‖h‖", first, log_y=True),
        Chart("State after the last loop", "step", "‖h‖", last, log_y=True),
    ]
    drawn: dict[str, list[Line]] = {}
    for i, run in enumerate(runs):
        for block in gradient_blocks(run, layer):
            steps, norms = run.series(f"gradient_norm/{block}")
            points = list(zip(steps, norms))
            if clipped:
                shares = clip_shares(run, steps)
                points = [(step, norm * shares[step]) for step, norm in points if step in shares]
            drawn.setdefault(block, []).append(Line(run.name, points, named(i)))
    charts += on_one_scale(
        [Chart(f"Gradient of {layer_name(b)}", "step", "norm", lines, log_y=True) for b, lines in drawn.items()]
    )
    when = "after" if clipped else "before"
    if all(chart.is_empty for chart in charts):
        return None
    return Section("Norms over training", [Text(f"Gradients {when} clipping."), Charts(charts)])


def after_last_loops(run: RunFolder) -> list[tuple[int, float]]:
    """Return (step, norm of the state after the last loop), of steps that may run different numbers of loops."""
    norms = ((record["step"], last_by_number([record], "state_norm/loop_")) for record in run.records)
    return [(step, of_loops[max(of_loops)]) for step, of_loops in norms if of_loops]


def gradient_blocks(run: RunFolder, layer: int | None) -> list[str]:
    """Return the names of the head, the first MLP, and the MLP and attention of `layer`."""
    pattern = re.compile(r"gradient_norm/core\.(\d+)\.mlp$")
    count = 1 + max(
        (int(match[1]) for record in run.records for key in record if (match := pattern.match(key))), default=0
    )
    if layer is not None and not 1 <= layer <= count:
        raise RunError(f"--layer {layer}: {run.name} has layers 1 to {count} in its metrics")
    at = count // 2 if layer is None else layer - 1
    return list(dict.fromkeys(["lm_head", "core.0.mlp", f"core.{at}.mlp", f"core.{at}.self_attn"]))


def clip_shares(run: RunFolder, steps: list[int]) -> dict[int, float]:
    """Return the factor by which clipping to the global norm scaled the gradients of each step. Steps without a finite
    norm are left out."""
    limit, totals = run.setting("optimizer.clip"), dict(zip(*run.series("gradient_norm")))
    if limit is None:
        return dict.fromkeys(steps, 1.0)
    return {step: min(1.0, limit / (totals[step] + 1e-6)) for step in steps if step in totals}
