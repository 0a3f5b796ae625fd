"""The checkpoints of one run: finding the one to continue from, and saving new ones."""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from looped_recipes.common.files import append_line, remove_leftovers
from looped_recipes.common.metrics import MetricsLog
from looped_recipes.common.provenance import provenance
from looped_recipes.settings.recipe import FOLDER, LAUNCHES, Recipe, RecipeError

from .background import Background
from .checkpoint import (
    METRICS,
    check_space,
    load_checkpoint,
    read_marker,
    save_checkpoint,
    sound_checkpoint,
)
from .finite import ADVICE, Divergence, nonfinite_part
from .monitor import Monitor
from .resume import (
    VALIDATION,
    differing,
    may_change,
    other_versions,
    refuse_lost_run,
    shown,
    with_later_fields,
)
from .saving import from_all_processes, on_main_process
from .trackers import name_of_run


@dataclass
class Progress:
    """The progress of a run."""

    step: int = 0  # completed steps
    num_skipped: int = 0  # steps without an update because their loss or gradients were not finite
    best: float = math.inf  # the lowest validation loss of a checkpoint; not every checkpoint has one
    last_validation: float = math.inf
    evaluated_at: int | None = None  # completed steps at the last validation
    total_steps: int | None = None  # length of the whole run; unknown before the first step


class RunCheckpoints:
    def __init__(
        self,
        recipe: Recipe,
        accelerator,
        model,
        optimizers: list,
        monitor: Monitor,
        metrics: MetricsLog,
        tokenizer,
        compared: dict,  # settings that must agree before a run goes on
    ):
        self.recipe, self.accelerator, self.model, self.optimizers = recipe, accelerator, model, optimizers
        self.monitor, self.metrics, self.tokenizer, self.compared = monitor, metrics, tokenizer, compared
        self.output = Path(recipe.training.output_dir)
        self.folder = self.output / "checkpoints"
        training = recipe.training
        self.background = Background(training.timeout_minutes) if training.save_in_background else None

    def start(self) -> tuple[Progress, Path | None]:
        """Load the newest complete checkpoint. Without one, begin at step 0."""
        found = sound_checkpoint(self.folder)
        if found is not None and not self.recipe.training.resume:
            raise RecipeError(
                f"training.resume=false, but {self.output} holds {found.name}: choose another training.output_dir, or "
                "remove that run"
            )
        check_space(self.folder, self.model, self.optimizers)
        if found is not None:
            return self.load_newest(found)
        on_main_process(lambda: refuse_lost_run(self.output), self.output)
        return Progress(), None

    def write_beginning(self, step: int, checkpoint: Path | None) -> str:
        """Write the files of the run for `step`, before the run begins or continues from a checkpoint. Return the name
        of the run in trackers."""
        for folder in (self.output, self.folder):
            remove_leftovers(folder)
        self.metrics.start(step, None if checkpoint is None else checkpoint / METRICS)
        self.recipe.save(self.output / "recipe.yaml")
        launches = self.output / LAUNCHES
        name = name_of_run(launches)
        append_line(launches, json.dumps({"step": step, "run": name, FOLDER: str(Path.cwd()), **provenance()}))
        return name

    def load_newest(self, found: Path) -> tuple[Progress, Path]:
        """Load the newest checkpoint with finite weights and moments. Return its progress and its path."""
        refused = {}
        while True:
            progress, changes = self.load(found)
            bad = self.nonfinite_part()
            if bad is None:
                said = f"; changed: {shown(changes)}" if changes else ""
                self.accelerator.print(f"continuing from {found} at step {progress.step}{said}")
                return progress, found
            refused[found] = f"{bad} is not finite"
            found = sound_checkpoint(self.folder, refused)

    def nonfinite_part(self) -> str | None:
        """Describe a weight or moment that is not finite on any process; None if all are finite."""
        parts = from_all_processes(lambda: nonfinite_part(self.model, self.optimizers), self.output)
        return next((part for part in parts if part is not None), None)

    def load(self, checkpoint: Path) -> tuple[Progress, list]:
        """Load a checkpoint. Return its progress, and the settings that have changed since."""
        marker = read_marker(checkpoint)
        changes = differing(with_later_fields(marker["config"]), self.compared)
        may = partial(may_change, resume=self.recipe.training.resume)
        extra = load_checkpoint(
            checkpoint, self.model, self.optimizers, self.compared, may, as_of_now=with_later_fields
        )
        self.monitor.load_state_dict(extra["monitor"])
        if "scaler" in extra:
            self.accelerator.scaler.load_state_dict(extra["scaler"])
        other = other_versions(marker["made_by"])
        if other:
            self.accelerator.print(
                f"{checkpoint} was made with {other}: steps may be rounded differently from here on"
            )
        is_other_loss = any(name.startswith(VALIDATION) for name, _, _ in changes)
        progress = Progress(
            step=extra["step"],
            num_skipped=extra["skipped_steps"],
            best=math.inf if is_other_loss else extra["best"],
            total_steps=extra["total_steps"],
        )
        return progress, changes

    def save(self, progress: Progress):
        bad = self.nonfinite_part()
        if bad is not None:
            raise Divergence(
                f"{bad} is not finite after step {progress.step - 1}: it is not saved, and the checkpoints before are "
                f"good. {ADVICE}"
            )
        is_best = progress.evaluated_at == progress.step and progress.last_validation < progress.best
        if is_best:
            progress.best = progress.last_validation
        extra = {
            "best": progress.best,
            "monitor": self.monitor.state_dict(),
            "skipped_steps": progress.num_skipped,
            "total_steps": progress.total_steps,
        }
        if (scaler := getattr(self.accelerator, "scaler", None)) is not None:  # scaler of fp16
            extra["scaler"] = scaler.state_dict()
        self.metrics.flush(progress.step)
        save_checkpoint(
            self.folder,
            progress.step,
            self.model,
            self.optimizers,
            extra,
            keep_last=self.recipe.training.keep_last,
            is_best=is_best and self.recipe.training.keep_best,
            config=self.compared,
            metrics=self.metrics.path,
            tokenizer=self.tokenizer,
            background=self.background,
        )

    def wait(self):
        """Wait until the checkpoints written in the background are complete."""
        if self.background is not None:
            self.background.wait()
