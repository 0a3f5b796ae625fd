"""What runs that differ only in their seed say together: mean losses, and what each setting changes."""

import json
from pathlib import Path

from looped_eval.common.page import Explanation, Finding, Section, Table
from looped_eval.common.run_folder import RunFolder
from looped_recipes.common.replicas import Outcome, Replicas, settings_of
from looped_recipes.common.words import counted
from looped_recipes.settings.sections import deciding


def lines_of_sweeps(runs: list[RunFolder]) -> dict[Path, dict]:
    """Return {folder of a run: its line in the results of its sweep}, in the order of the sweep."""
    found: dict[Path, dict] = {}
    for path in dict.fromkeys(run.folder.parent / "results.jsonl" for run in runs):
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            found |= {path.parent / line["name"]: line for line in lines}
        except (OSError, ValueError, KeyError, TypeError):  # not there, or no results of a sweep
            continue
    return found


def settings_in(line: dict) -> dict[str, object]:
    return {key: value for key, value in line.items() if "." in key}


def outcomes_of(runs: list[RunFolder]) -> list[Outcome]:
    """Return the ends of the runs that have ended, in the order of their sweep, whose first value of a setting is the
    one that others are compared with; a diverged one has no loss.

    A run that the sweep did not train, as it is the same as another one, ends as that one did. It counts if each of
    its settings is known and has a value that a trained run has, too.
    """
    found = {}
    for run in runs:
        loss = run.last("validation/loss")
        diverged = run.status.startswith("diverged")
        if run.recipe and (diverged or loss is not None and run.status == "finished"):
            found[run.folder] = Outcome(run.name, settings_of(deciding(run.recipe)), None if diverged else loss)
    lines = lines_of_sweeps(runs)
    known = {(key, str(value)) for outcome in found.values() for key, value in outcome.settings.items()}
    for folder, line in lines.items():
        first = folder.parent / str(line.get("same_as"))
        if folder in found or first not in found or first not in lines:
            continue
        own, of_first = settings_in(line), settings_in(lines[first])
        if own.keys() >= of_first.keys() and known.issuperset((key, str(value)) for key, value in own.items()):
            found[folder] = found[first]._replace(name=line["name"], settings=found[first].settings | own)
    order = {folder: i for i, folder in enumerate(lines)}
    return [found[folder] for folder in sorted(found, key=lambda folder: order.get(folder, len(order)))]


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
