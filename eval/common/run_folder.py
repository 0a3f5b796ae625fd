"""Reads the output folder of a run of looped pretrain."""

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from looped_recipes.common.metrics import divergence_of, last_by_number, read_lines


LOSS_AT, BITS_AT = "validation/loss_at_", "validation/bits_per_byte_at_"

MARKS = ("config.json", "metrics.jsonl")  # files that mark a folder as a model or a run


class RunError(ValueError):
    """Raised for a folder without a run to report on."""


@dataclass
class RunFolder:
    folder: Path
    name: str

    def __post_init__(self):
        if self.folder.name == "final" and (self.folder.parent / "metrics.jsonl").is_file():
            self.folder = self.folder.parent
        if not self.folder.is_dir():
            raise RunError(f"there is no folder {self.folder}; `looped pretrain RECIPE` makes one")
        if not (self.folder / "metrics.jsonl").is_file():
            raise RunError(
                f"{self.folder} holds no metrics.jsonl: it is no output folder (training.output_dir) of "
                "looped pretrain"
            )
        if not self.records:
            raise RunError(f"{self.folder}/metrics.jsonl holds no whole line: the run has logged nothing yet")

    def results(self, name: str) -> Path:
        """Return the path of a result about this model."""
        return self.folder / "eval" / name

    def own_files(self, pattern: str) -> list[Path]:
        """Return the matching files of this run, without those in folders of other models or runs inside it."""
        of_others = {path.parent for name in MARKS for path in self.folder.rglob(name)}
        of_others -= {self.folder, self.folder / "final"}
        return [path for path in self.folder.rglob(pattern) if not of_others & set(path.parents)]

    @cached_property
    def lines(self) -> tuple[list[dict], list[int]]:
        """Records of metrics.jsonl, and the numbers of its lines that hold no record."""
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def records(self) -> list[dict]:
        return self.lines[0]

    @property
    def unread_lines(self) -> int:
        return len(self.lines[1])

    @cached_property
    def recipe(self) -> dict:
        path = self.folder / "recipe.yaml"
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {} if path.is_file() else {}

    @cached_property
    def config(self) -> dict:
        path = self.folder / "final" / "config.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def setting(self, key: str, default=None):
        section, _, name = key.partition(".")
        return (self.recipe.get(section) or {}).get(name, default)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric."""
        found = [(record["step"], record[name]) for record in self.records if record.get(name) is not None]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, name: str):
        return next((record[name] for record in reversed(self.records) if record.get(name) is not None), None)

    def last_by_number(self, prefix: str) -> dict[int, float]:
        return last_by_number(self.records, prefix)

    @property
    def trained_loops(self) -> int | None:
        saved = self.config.get("trained_num_loops") or self.config.get("num_loops")
        return self.setting("model.num_loops") if saved is None else saved

    @property
    def steps(self) -> int:
        return max(record["step"] for record in self.records) + 1

    @property
    def tokens_per_step(self) -> int | None:
        rows, length = self.setting("training.rows_per_step"), self.setting("data.sequence_length")
        return rows * length if rows and length else None

    @cached_property
    def operations(self):
        """Return the operations of its recipe (settings/operations.py); None if the recipe or the sizes of the model
        are not known."""
        from looped_recipes.settings.operations import Operations
        from looped_recipes.settings.recipe import RecipeError, recipe_of_run
        from modeling_looped import LoopedConfig

        if not self.recipe:
            return None
        try:
            recipe = recipe_of_run(self.folder)
            if not self.config and recipe.start is not None:
                return None
            config = LoopedConfig.from_pretrained(self.folder / "final") if self.config else recipe.model_config()
        except RecipeError:  # a recipe of another version
            return None
        return Operations(recipe, config)

    @cached_property
    def num_parameters(self) -> int | None:
        if not self.config:
            return None
        from looped_recipes.common.flops import sizes
        from modeling_looped import LoopedConfig

        return sizes(LoopedConfig.from_pretrained(self.folder / "final")).total

    @cached_property
    def status(self) -> str:
        """Whether the run has finished, has not finished, or has diverged, and at which step."""
        for record in self.records:
            for key in ("loss", "validation/loss"):
                if record.get(key) is not None and not math.isfinite(record[key]):
                    return f"diverged: {key} is {record[key]} at step {record['step']}"
        loss = self.last("validation/loss") if self.config else None  # a limit is for the end of a run
        if (why := divergence_of(self.folder, loss, self.setting("training.max_loss"))) is not None:
            return f"diverged: {why}"
        return "finished" if self.config else f"not finished: {self.steps} steps so far"


def name_of(folder: str | Path) -> str:
    """Return the name of a model's folder, that of the run for its final model."""
    path = Path(os.path.abspath(folder))  # a link is called as it is named
    return (path.parent if path.name == "final" else path).name


def open_runs(folders) -> list[RunFolder]:
    """Open runs. A run is named by its folder, or by the whole path if two folders have the same name. The folder of a
    sweep is replaced by its runs."""
    folders = [run for folder in folders for run in runs_in(Path(folder))]
    names = list(map(name_of, folders))
    unique = len(set(names)) == len(names)
    return [RunFolder(folder, name if unique else str(folder)) for folder, name in zip(folders, names)]


def runs_in(folder: Path) -> list[Path]:
    """Return the runs of a sweep, or the folder itself."""
    if (folder / "metrics.jsonl").exists():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/metrics.jsonl")) or [folder]


def folders_of(argument: str) -> list[str]:
    """Split A1,A2,A3 into the seeds of a model; a comma may also be in the name of a single folder."""
    named = [argument] if Path(argument).exists() else argument.split(",")
    if not all(named):
        raise ValueError(f"{argument} has an empty name between commas: name a folder for each seed")
    if len(set(named)) < len(named):
        raise ValueError(f"{argument} names one folder twice: name each seed once")
    return named
