"""Run missing measurements, one seed at a time, and collect the numbers of seeds that are complete."""

import json
import subprocess
import sys
import time
from pathlib import Path

from looped_recipes.common.provenance import write_json

from .definition import Measurement, Setting


GRACE = 60  # seconds that a terminated training has to save a checkpoint


def run(measurements: list[Measurement], setting: Setting, minutes: float) -> list[str]:
    """Run one seed of all measurements, then the next seed, until the time is over. Return what is still missing."""
    end = time.monotonic() + 60 * minutes
    missing = [(m, seed) for seed in seeds_of(measurements) for m in measurements if seed in m.seeds]
    missing = [(m, seed) for m, seed in missing if m.read(setting.of(m.name, seed)) is None]
    left = [f"{measurement.name} with seed {seed}" for measurement, seed in missing]
    for measurement, seed in missing:
        for command in measurement.commands(setting, seed):
            print(f"{measurement.name}, seed {seed}: python -m {' '.join(command)}", flush=True)
            if end - time.monotonic() <= 0 or not run_command(command, end - time.monotonic()):
                return left
        left.pop(0)
    return left


def seeds_of(measurements: list[Measurement]) -> list[int]:
    return sorted({seed for measurement in measurements for seed in measurement.seeds})


def run_command(command: list[str], seconds: float) -> bool:
    """Run a command and return whether it ended within the time. A training that is terminated saves a checkpoint, and
    the next call resumes from there."""
    process = subprocess.Popen([sys.executable, "-m", *command])
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        stop(process)
        return False
    except BaseException:
        stop(process)
        raise
    if status:
        raise RuntimeError(f"python -m {' '.join(command)} ended with status {status}: see what it said above")
    return True


def stop(process: subprocess.Popen):
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()


def collect(measurements: list[Measurement], setting: Setting, results: Path) -> list[Path]:
    """Write one JSON for each measurement that has a complete seed. Seeds that are only in the JSON stay in it, and
    the JSON of other measurements is not touched."""
    written = []
    for measurement in measurements:
        found = {str(seed): measurement.read(setting.of(measurement.name, seed)) for seed in measurement.seeds}
        found = {seed: content for seed, content in found.items() if content is not None}
        if found:
            made_by = [content.pop("made_by") for content in found.values()]
            path = results / f"{measurement.name}.json"
            write_json(path, joined(provenance_of(measurement, setting, made_by), found, path), digits=6)
            written.append(path)
    return written


def joined(made: dict, found: dict[str, dict], path: Path) -> dict:
    """Add the seeds that are in the file but not in the folder."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"seeds": {}}
    kept = {seed: content for seed, content in before["seeds"].items() if seed not in found}
    if not kept:
        return {**made, "seeds": found}
    if before["command"] != made["command"]:
        raise ValueError(
            f"{path} holds other seeds, measured by `{before['command']}`, not by `{made['command']}`: move the file "
            "away, or measure with the same text"
        )
    one, other = losses_of_frequencies(kept), losses_of_frequencies(found)
    if one and other and one.isdisjoint(other):
        raise ValueError(
            f"{path} holds seeds of another text: the loss of its tokens by their frequencies alone is "
            f"{', '.join(sorted(one))}, and {', '.join(sorted(other))} for the new seeds. Move the file away, or "
            "measure with the same text"
        )
    commits = dict.fromkeys([*before["commit"].split(", "), *made["commit"].split(", ")])
    seeds = dict(sorted((kept | found).items(), key=lambda item: int(item[0])))
    return {**made, "commit": ", ".join(commits), "seeds": seeds}


def losses_of_frequencies(seeds: dict[str, dict]) -> set[str]:
    """Return the losses of token frequencies that seeds or their runs hold, to the digits that tell texts apart."""
    holders = [holder for content in seeds.values() for holder in (content, *content.get("runs", []))]
    losses = [holder.get("loss_of_frequencies") for holder in holders]
    return {f"{loss:.4f}" for loss in losses if loss is not None}


def provenance_of(measurement: Measurement, setting: Setting, made_by: list[dict]) -> dict:
    """Return the command that makes all numbers, with the commits, versions and hardware that the runs recorded."""
    reads_text = any(setting.text in part for command in measurement.commands(setting, 0) for part in command)
    text = f" --text {Path(setting.text).name}" if reads_text and setting.text != "embedded" else ""
    commits = list(dict.fromkeys(one["commit"] for one in made_by))
    beside = {} if measurement.beside is None else {"beside": measurement.beside}
    return {
        "command": f"looped claims run runs/claims --only {measurement.name}{text}",
        "commit": ", ".join(commits),
        "versions": made_by[-1]["versions"],
        "hardware": made_by[-1]["hardware"],
        **beside,
    }
