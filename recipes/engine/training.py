"""One training run, determined by its recipe.

The tokens, depths and noise of a step depend on (seed, step, row of the global batch), so a run resumes bit for bit
after any interruption, and the number of processes does not matter.
"""

import math
import os
from pathlib import Path
from signal import SIGTERM

import torch
from accelerate.utils import set_seed

from looped_recipes.common.checksums import write_checksums
from looped_recipes.common.metrics import MetricsLog, why_diverged
from looped_recipes.common.orphans import end_with
from looped_recipes.common.progress import progress_bar
from looped_recipes.common.provenance import own_command
from looped_recipes.data.shards import prepare
from looped_recipes.engine.batches import Batches
from looped_recipes.engine.beginning import build_model, check_launch, note_on_vocabulary, precision_of
from looped_recipes.engine.checkpoint import read_marker, step_name
from looped_recipes.engine.compiling import begin_step, take_options
from looped_recipes.engine.distributed import (
    bare,
    distribute,
    gradients_may_be_missing,
    make_accelerator,
    to_shards,
)
from looped_recipes.engine.ending import ending
from looped_recipes.engine.export import export_model
from looped_recipes.engine.finite import ADVICE, Divergence
from looped_recipes.engine.interruption import Interrupted, Interruption
from looped_recipes.engine.monitor import Monitor
from looped_recipes.engine.optimizers import build_optimizers, rate_factor
from looped_recipes.engine.peers import main_process_first
from looped_recipes.engine.profiling import Profile
from looped_recipes.engine.publish import create_repository, model_card, push
from looped_recipes.engine.reports import StepReports
from looped_recipes.engine.resume import compared_settings, with_later_fields
from looped_recipes.engine.run_checkpoints import Progress, RunCheckpoints
from looped_recipes.engine.saving import CheckpointError, error_of_saving, on_main_process, only_run
from looped_recipes.engine.step import Steps
from looped_recipes.engine.taper import Taper
from looped_recipes.engine.trackers import start_trackers
from looped_recipes.engine.validation import validate
from looped_recipes.settings.operations import Operations
from looped_recipes.settings.recipe import Recipe
from looped_recipes.settings.relations import check_schedule
from looped_recipes.settings.run_checks import check_run, note_on_windows
from looped_recipes.settings.sections import ScheduleConfig


MUCH = 1.5  # a rise of the learning rate that is told
RESULTS = ("recipe.yaml", "metrics.jsonl")  # files of a finished run for which checksums are stored


class Pretraining:
    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        training = recipe.training
        self.output = Path(training.output_dir)
        config = check_run(recipe)
        gaps = gradients_may_be_missing(config, recipe.depths_vary, recipe.backprop_loops(config))
        self.accelerator = make_accelerator(
            find_unused_parameters=gaps,
            timeout_minutes=training.timeout_minutes,
            log_with=recipe.logging.trackers or None,
            project_dir=str(self.output),
        )
        check_launch(recipe, self.accelerator)
        for note in (precision_of(self.accelerator), note_on_windows(recipe, config)):
            if note is not None:
                self.accelerator.print(note)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a launcher started this process
            end_with(os.getppid())
        self.data = main_process_first(lambda is_main: prepare(recipe.data, check=is_main))
        self.accelerator.print(self.data.told(recipe.data.max_documents))

        set_seed(training.seed)
        self.model = build_model(recipe, self.data.tokenizer)
        self.config = self.model.config
        if (note := note_on_vocabulary(recipe, self.config, self.data.tokenizer)) is not None:
            self.accelerator.print(note)
        self.data.tokenizer.model_max_length = self.config.max_position_embeddings
        self.operations = Operations(recipe, self.config)
        self.total_steps = self.operations.num_steps(len(self.data.train))
        check_schedule(recipe.schedule, recipe.depth, self.total_steps)
        self.batches = Batches(recipe, self.model, self.data.train, self.accelerator)
        self.model.train()
        take_options(self.model, training, self.accelerator.mixed_precision)
        self.model, self.optimizers = distribute(
            self.accelerator,
            self.model,
            lambda model: build_optimizers(model, recipe.optimizer, self.total_steps),
        )
        self.bare = bare(self.model)
        self.steps = Steps(recipe, self.accelerator, self.model, self.optimizers, self.batches, self.total_steps)
        tapers = self.config.readout_norm == "taper"
        self.taper = Taper(self.bare.model.norm, recipe, self.total_steps) if tapers else None
        self.monitor = Monitor()
        self.progress = Progress()
        self.interruption = Interruption()
        self.signal = 0  # number of a signal that any of the processes received
        self.metrics = MetricsLog(self.output / "metrics.jsonl", self.accelerator)
        precision, has_dropout = self.accelerator.mixed_precision, self.batches.has_dropout
        compared = compared_settings(recipe, self.config, self.data, precision, has_dropout)
        self.checkpoints = RunCheckpoints(
            recipe,
            self.accelerator,
            self.model,
            self.optimizers,
            self.monitor,
            self.metrics,
            self.data.tokenizer,
            compared,
        )

    @property
    def step(self) -> int:
        return self.progress.step

    def go_to(self, step: int):
        """Set the number of completed steps, and the parts of the model that depend on it."""
        self.progress.step = step
        if self.taper is not None:
            self.taper.move_to(step, self.taper_terms)

    @torch.no_grad()
    def taper_terms(self) -> torch.Tensor:
        """Return the sums to which the taper is fitted, over the rows of this step, without dropout."""
        total = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        self.model.eval()
        for _, batch, _, depths, noise in self.batches.of_step(self.step):
            begin_step(self.recipe.training.compile == "cuda_graphs")
            arguments = {"num_loops": depths, "initial_state": noise, "output_logits": False, "use_cache": False}
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            outputs = self.model(**inputs, **arguments, output_loop_readout_states=True)
            total += self.taper.fit_terms(outputs.loop_readout_states, batch["labels"])
        self.model.train()
        to_shards(self.model)
        return self.accelerator.reduce(total, reduction="sum")

    # The run

    def train(self):
        with only_run(self.output):
            return self.run()

    def run(self):
        self.start()
        quiet = not self.accelerator.is_main_process
        with (
            self.interruption,
            progress_bar(total=self.total_steps, initial=self.step, disable=quiet) as bar,
        ):
            try:
                self.take_steps(bar)
            finally:
                self.checkpoints.wait()
        self.metrics.finish()
        if self.step == self.total_steps:
            return self.finish()
        reached = f"step {self.step} of {self.total_steps} is saved in {self.output / 'checkpoints'}"
        if not self.signal:
            self.accelerator.print(f"left off as training.stop_after says: {reached}")
            return self.output
        again = own_command() if self.accelerator.num_processes == 1 else "the same launch again"
        self.accelerator.print(f"interrupted by signal {self.signal}: {reached}; to go on: {again}")
        raise Interrupted(self.signal)

    def start(self):
        """Continue from the newest complete checkpoint, or begin at step 0."""
        recipe = self.recipe
        self.progress, found = self.checkpoints.start()
        if self.step > self.total_steps:
            raise CheckpointError(
                f"{self.output} holds a run of {self.step} steps, more than the {self.total_steps} of this recipe: "
                "choose another training.output_dir, or name as many steps or more"
            )
        if self.taper is not None:
            self.taper.check_length(self.step, self.progress.total_steps or self.total_steps)
        if found is not None:
            self.say_jump(found)
        self.progress.total_steps = self.total_steps
        self.go_to(self.step)
        if recipe.training.push_to_hub:
            on_main_process(lambda: create_repository(recipe.training.push_to_hub), self.output)
        name = on_main_process(lambda: self.checkpoints.write_beginning(self.step, found), self.output)
        if recipe.logging.trackers:
            on_main_process(lambda: start_trackers(self.accelerator, recipe, self.step, name), self.output)

    def say_jump(self, checkpoint: Path):
        """Say that a run of more steps than before goes on at a higher rate than the one to which it had come down."""
        before = self.progress.total_steps or self.total_steps
        if self.step >= self.total_steps or before >= self.total_steps:
            return
        old = ScheduleConfig(**with_later_fields(read_marker(checkpoint)["config"])["schedule"])
        same = min(self.step, before - 1)
        was = rate_factor(old, before, same)
        now = rate_factor(self.recipe.schedule, self.total_steps, self.step)
        if now > MUCH * was:
            self.accelerator.print(
                f"the learning rate rises: of {before} steps, step {same} had {was:.1%} of its full value; of "
                f"{self.total_steps}, step {self.step} has {now:.1%}. To go on from before the decay, put the newer "
                f"folders of {self.output / 'checkpoints'} aside and launch again"
            )

    @property
    def leaves_off(self) -> bool:
        """Whether the run stops here, after a signal or at stop_after. Such a run does nothing extra except saving."""
        return bool(self.signal) or self.step >= (self.recipe.training.stop_after or self.total_steps)

    @property
    def has_steps_to_take(self) -> bool:
        return self.step < self.total_steps and not self.leaves_off

    def is_due(self, every: int) -> bool:
        """Return whether the step is a multiple of `every`, or the last one."""
        return self.step % every == 0 or self.step == self.total_steps

    @property
    def exports(self) -> bool:
        """Whether the model of this step is exported to a separate folder, in addition to final/."""
        every = self.recipe.training.export_every
        return every is not None and self.step > 0 and self.step % every == 0

    @property
    def export_folder(self) -> Path:
        return self.output / step_name(self.step)

    def take_steps(self, bar):
        recipe = self.recipe
        if self.has_steps_to_take:
            self.steps.begin()
        reports = StepReports(self.steps, self.monitor, self.progress, self.log, bar, self.operations)
        first = self.step + recipe.logging.profile_from
        profile = Profile(self.output / "profile", first, recipe.logging.profile_steps)
        if self.exports and not on_main_process((self.export_folder / "config.json").is_file, self.output):
            self.export_to(self.export_folder)  # the run stopped between its checkpoint and this export
        while self.has_steps_to_take:
            with profile.of_step(self.step):
                self.take_step(self.step, reports)
            evaluates = self.is_due(recipe.evaluation.every)
            if evaluates or self.exports or self.leaves_off or self.is_due(recipe.training.save_every):
                reports.read_held()
                self.hear(reports)
                if evaluates:
                    self.evaluate()
                if self.leaves_off or self.is_due(recipe.training.save_every):
                    self.save()
                if self.exports:
                    self.export_to(self.export_folder)
                reports.start_clock()
        profile.write()

    def take_step(self, step: int, reports: StepReports):
        watch = step % self.recipe.logging.monitor_every == 0
        report = self.steps.compute(step, self.monitor if watch else None, self.interruption)
        if self.taper is not None:
            report.known["taper_gate"] = self.taper.gate(step)
        if self.steps.reads_behind:
            self.steps.update()
            reports.hold(report)
        elif reports.read(report):
            self.steps.update()
        else:
            self.steps.end()
        self.hear(reports)
        self.go_to(step + 1)

    def hear(self, reports: StepReports):
        """Record signals: with one process at once, with several from their reports, so that all end together."""
        told = reports.signals if self.accelerator.num_processes > 1 else self.interruption.number
        self.signal = (self.interruption.number or SIGTERM) if told else 0

    def save(self):
        self.checkpoints.save(self.progress)

    def log(self, step: int, metrics: dict):
        try:
            self.metrics.write(step, metrics)
        except OSError as error:
            raise error_of_saving(self.metrics.path, error) from error

    def evaluate(self):
        """Log cross-entropy and bits per byte on the validation rows at every depth."""
        metrics = validate(self.accelerator, self.model, self.config, self.recipe, self.data.validation)
        loss = metrics["validation/loss"]
        self.progress.last_validation, self.progress.evaluated_at = loss, self.step
        self.log(self.step - 1, metrics)
        if not math.isfinite(loss):
            raise Divergence(
                f"the validation loss after step {self.step - 1} is {loss}; the checkpoints before are good. {ADVICE}"
            )
        why = why_diverged(loss, self.recipe.training.max_loss)
        if self.step == self.total_steps and why is not None:
            self.accelerator.print(f"{why}: diverged")

    def export_to(self, path: Path):
        card = model_card(self.recipe, self.config, self.metrics.path, path, self.step)
        export_model(path, self.model, self.data.tokenizer, readme=card)

    def finish(self) -> Path:
        final = self.output / "final"
        repository = self.recipe.training.push_to_hub
        on_main_process(lambda: write_checksums(self.output, RESULTS), self.output)
        self.export_to(final)
        if repository:
            address = on_main_process(lambda: push(final, repository), final)
            self.accelerator.print(f"pushed to {address}")
        if self.accelerator.is_main_process:
            print(f"saved {final}; {ending(self.metrics.path, self.config.trained_depth)}")
        return final
