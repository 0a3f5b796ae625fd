"""What runs that differ only in their seed say together: mean losses, and what each setting changes."""

import json

from looped_eval.common.page import Explanation, Finding, Section, Table
from looped_eval.common.run_folder import RunFolder
from looped_recipes.common.metrics import why_diverged
from looped_recipes.common.replicas import Outcome, Replicas, settings_of
from looped_recipes.common.words import counted
from looped_recipes.settings.sections import deciding


def in_order_of_sweep(runs: list[RunFolder]) -> list[RunFolder]:
    """Sort runs as the sweep has them, whose first value of a setting is the one that others are compared with."""
    order: dict[object, int] = {}
    for path in dict.fromkeys(run.folder.parent / "results.jsonl" for run in runs):
        try:
            names = [json.loads(line)["name"] for line in path.read_text(encoding="utf-8").splitlines()]
            order |= {path.parent / name: i for i, name in enumerate(names)}
        except (OSError, ValueError, KeyError, TypeError):  # not there, or no results of a sweep
            continue
    return sorted(runs, key=lambda run: order.get(run.folder, len(order)))


def outcomes_of(runs: list[RunFolder]) -> list[Outcome]:
    """Return the ends of the runs that have ended; a diverged one has no loss."""
    found = []
    for run in in_order_of_sweep(runs):
        loss = run.last("validation/loss")
        above = loss is not None and why_diverged(loss, run.setting("training.max_loss")) is not None
        diverged = above or run.status.startswith("diverged")
        if run.recipe and (diverged or loss is not None and run.status == "finished"):
            found.append(Outcome(run.name, settings_of(deciding(run.recipe)), None if diverged else loss))
    return found


def sentences(runs: list[RunFolder]) -> list[str]:
    """Say what the settings change over seeds; [] if no two runs differ in their seed alone."""
    outcomes = outcomes_of(runs)
    replicas = Replicas(outcomes)
    if not replicas.several:
        return []
    ended = {outcome.name for outcome in outcomes}
    left_out = [run.name for run in runs if run.name not in ended]
    words = f"{counted(len(left_out), 'run')} without a last validation, in no mean: {', '.join(left_out)}."
    return replicas.sentences() + [words] * bool(left_out)


SEEDS = Explanation(
    "The mean of the last validation loss over seeds, with Student's interval of 95 %, for each combination of "
    "settings; and what a value of a setting changes against the first one, in pairs of runs with the same seed and "
    "the same other settings. Each seed counts once: its differences are averaged over the other settings.",
    "An interval without 0. Of twenty settings that change nothing, one has such an interval by chance.",
)


def over_seeds(runs: list[RunFolder]) -> Section | None:
    """Return a row for each combination of settings, and one for each value of a setting beside its first."""
    replicas = Replicas(outcomes_of(runs))
    if not replicas.several:
        return None
    head = [*(axis.name for axis in replicas.axes), "seeds", "mean loss, 95 %", "diverged"]
    blocks = [*map(Finding, sentences(runs)), Table(head, replicas.rows())]
    rows = [
        [each.axis, each.level, each.other, each.value, each.seeds, f"{each.used} of {each.of}"]
        for each in replicas.differences()
    ]
    if rows:
        head = ["setting", "value", "against", "difference of loss, 95 %", "seeds", "other settings"]
        blocks.append(Table(head, rows))
    return Section("Over seeds", [*blocks, SEEDS])
