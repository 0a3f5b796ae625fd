"""One training run: a function of its recipe.

Which tokens, depths and noise a step sees depends on (seed, step, row of the global batch), so a run resumes bit for
bit after any interruption, and the number of processes does not matter.
"""

import json
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path
from signal import SIGTERM
from typing import NamedTuple

import torch
from accelerate.utils import set_seed
from tqdm import tqdm

from looped_recipes.common.checksums import check_folder
from looped_recipes.common.files import append_line, remove_leftovers
from looped_recipes.common.flops import sizes, training_flops_per_token
from looped_recipes.common.hardware import reference_rate
from looped_recipes.common.metrics import MetricsLog
from looped_recipes.common.orphans import end_with
from looped_recipes.common.provenance import own_command, provenance
from looped_recipes.data.shards import prepare, rows_of_step
from looped_recipes.data.sources import looks_like_path
from looped_recipes.engine.checkpoint import (
    METRICS,
    check_space,
    load_checkpoint,
    read_marker,
    save_checkpoint,
    sound_checkpoint,
)
from looped_recipes.engine.distributed import (
    bare,
    fill_missing_gradients,
    gradients_may_be_missing,
    make_accelerator,
    to_shards,
)
from looped_recipes.engine.distributed import prepare as distribute
from looped_recipes.engine.ending import ending
from looped_recipes.engine.export import export_model
from looped_recipes.engine.finite import ADVICE, Divergence, nonfinite_part
from looped_recipes.engine.interruption import Interrupted, Interruption
from looped_recipes.engine.monitor import Monitor, StateNorms
from looped_recipes.engine.optimizers import (
    apply_step_settings,
    build_optimizers,
    build_schedulers,
    set_learning_rates,
)
from looped_recipes.engine.peers import main_process_first
from looped_recipes.engine.publish import create_repository, model_card, push
from looped_recipes.engine.resume import (
    comparable,
    compared_settings,
    differing,
    may_change,
    other_versions,
    refuse_lost_run,
    shown,
)
from looped_recipes.engine.saving import error_of_saving, from_all_processes, on_main_process, only_run
from looped_recipes.engine.taper import Taper
from looped_recipes.engine.validation import depths_in_one_pass, validate
from looped_recipes.settings.recipe import Recipe, RecipeError
from looped_recipes.settings.run_checks import check_run
from modeling_looped import (
    LoopedForCausalLM,
    balanced_ranks,
    curriculum,
    depths_of_step,
    generator_of,
    initial_state_of_step,
)


class MicroBatch(NamedTuple):
    number: int  # what dropout is seeded with
    batch: dict[str, torch.Tensor]
    depths: list[int]
    noise: torch.Tensor | None


class Pretraining:
    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        training = recipe.training
        self.output = Path(training.output_dir)
        config = check_run(recipe)
        gaps = gradients_may_be_missing(config, recipe.depths_vary, recipe.backprop_loops(config))
        self.accelerator = make_accelerator(
            find_unused_parameters=gaps, log_with=recipe.logging.trackers or None, project_dir=str(self.output)
        )
        self.check_batches()
        self.check_trackers()
        self.check_start()
        if "TORCHELASTIC_RUN_ID" in os.environ:  # one of several processes of a launcher
            end_with(os.getppid())
        self.data = main_process_first(lambda is_main: prepare(recipe.data, check=is_main))

        set_seed(training.seed)
        self.model = self.build_model()
        self.config = self.model.config
        num_rows = len(self.data.train)
        self.backprop_loops = recipe.backprop_loops(self.config)
        self.flops_per_token = training_flops_per_token(
            self.config, recipe.data.sequence_length, recipe.mean_depth(self.config), self.backprop_loops
        )
        self.total_steps = recipe.num_steps(sizes(self.config), self.flops_per_token, num_rows)
        self.check_groups()
        self.model.train()
        if training.gradient_checkpointing:
            # its name from transformers 5.23 on, and before
            getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)()
        if training.compile:
            compile_blocks([*self.model.model.prelude, *self.model.model.core, *self.model.model.coda])
        self.model, self.optimizers = distribute(
            self.accelerator,
            self.model,
            lambda model: build_optimizers(model, recipe.optimizer, self.total_steps),
        )
        self.bare = bare(self.model)
        self.schedulers = build_schedulers(self.optimizers, recipe.schedule, self.total_steps)
        tapers = self.config.readout_norm == "taper"
        self.taper = Taper(self.bare.model.norm, recipe, self.total_steps) if tapers else None
        self.monitor = Monitor()
        self.step = 0
        self.best = self.last_validation = math.inf  # best: of the checkpoints that were evaluated
        self.evaluated_at = None
        self.num_skipped = 0
        self.read_ahead: tuple[int, list[dict[str, torch.Tensor]]] = (-1, [])  # a step, and its rows on the CPU
        self.interruption = Interruption()
        self.signal = 0  # that came to any of the processes
        self.metrics = MetricsLog(self.output / "metrics.jsonl", self.accelerator)

    # Setting up

    def check_batches(self):
        training, world = self.recipe.training, self.accelerator.num_processes
        if training.rows_per_step % world:
            raise RecipeError(
                f"training.rows_per_step={training.rows_per_step} is not a multiple of the {world} processes; "
                "change one"
            )

    def check_groups(self):
        training, (world, _) = self.recipe.training, self.place
        if self.has_dropout and training.rows_per_step % (training.micro_batch_size * world):
            raise RecipeError(
                f"with dropout the {world} processes share whole micro batches, but training.rows_per_step="
                f"{training.rows_per_step} is not a multiple of {world} times training.micro_batch_size="
                f"{training.micro_batch_size}: lower training.micro_batch_size, or use fewer processes"
            )

    def check_trackers(self):
        """accelerate leaves out, without a word, trackers that are not installed."""
        found = {str(getattr(tracker, "value", tracker)) for tracker in self.accelerator.log_with}
        missing = [name for name in self.recipe.logging.trackers if name not in found]
        if missing:
            raise RecipeError(
                f"logging.trackers={self.recipe.logging.trackers}: {', '.join(missing)} is not installed; install it "
                f"(pip install {' '.join(missing)}), or leave it out"
            )

    def check_start(self):
        dense = self.recipe.dense.path
        if dense is not None and not is_model(dense):
            raise RecipeError(
                f"dense.path={dense!r} holds no model of transformers (looked from {Path.cwd()}): make that one "
                "first, or name another"
            )
        start = self.recipe.training.initialize_from
        if start is not None and not is_model(start):
            raise RecipeError(
                f"training.initialize_from={start!r} holds no saved model (looked from {Path.cwd()}): train that one "
                "first, or name another"
            )

    def build_model(self) -> LoopedForCausalLM:
        recipe, tokenizer = self.recipe, self.data.tokenizer
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        fields = {**special, "max_position_embeddings": max(recipe.data.sequence_length, self.trained_positions())}
        if recipe.dense.path is not None:
            model = self.looped_dense_model()
        elif recipe.training.initialize_from is not None:
            check_folder(recipe.training.initialize_from)
            model = LoopedForCausalLM.from_pretrained(recipe.training.initialize_from, **self.changes_to_start())
        else:
            if "vocab_size" not in recipe.model and "preset" not in recipe.model:
                fields["vocab_size"] = -(-len(tokenizer) // 64) * 64
            model = LoopedForCausalLM(recipe.model_config(**fields))
        if len(tokenizer) > model.config.vocab_size:
            raise RecipeError(
                f"the tokenizer has {len(tokenizer)} entries, but the model's vocab_size is "
                f"{model.config.vocab_size}: raise model.vocab_size, or use a smaller data.tokenizer_vocab_size"
            )
        if recipe.training.freeze_all_but_gate:
            if model.exit_gate is None:
                raise RecipeError("training.freeze_all_but_gate needs a model with an exit gate: set model.exit_gate")
            model.requires_grad_(False)
            model.exit_gate.requires_grad_(True)
        return model

    def looped_dense_model(self) -> LoopedForCausalLM:
        """With weights in fp32, as all that is trained here."""
        path = self.recipe.dense.path
        check_folder(path)
        try:
            return LoopedForCausalLM.from_dense(path, dtype=torch.float32, **self.recipe.dense_options())
        except ValueError as error:
            raise RecipeError(f"dense.path={path!r}: {error}") from error

    def trained_positions(self) -> int:
        """Positions that the recipe or its preset asks for; learned ones are as many as asked for, no more."""
        if "max_position_embeddings" in self.recipe.model or "preset" in self.recipe.model:
            return self.recipe.model_config().max_position_embeddings
        return 0

    def changes_to_start(self) -> dict:
        """Fields of the recipe's model that change a saved model, e.g. its loss; a gate that is new starts fresh."""
        changes = {key: value for key, value in self.recipe.model.items() if key != "preset"}
        if "num_loops" in changes:  # the depth of this training, also where that before had another
            changes["trained_num_loops"] = changes["num_loops"]
        return {**changes, "strict": "exit_gate" not in changes}

    # One step

    def depth_settings(self, step: int) -> tuple[float, int | None]:
        """The mean depth, and the number of loops with gradients."""
        depth, mean = self.recipe.depth, self.recipe.mean_depth(self.config)
        if depth.curriculum is None:
            return mean, self.backprop_loops
        shape, target = depth.curriculum, depth.curriculum_target
        return curriculum(shape, target, depth.curriculum_steps, step, mean, self.backprop_loops)

    def depths(self, step: int) -> list[int]:
        """Of every row of the step."""
        depth, training = self.recipe.depth, self.recipe.training
        mean, window = self.depth_settings(step)
        return depths_of_step(
            depth.sampler,
            mean,
            training.seed,
            step,
            range(training.rows_per_step),
            per=depth.per,
            backprop_loops=window,
            split=depth.split,
            maximum=depth.maximum,
            rows_per_draw=depth.rows_per_draw,
        )

    def micro_batches(self, step: int):
        """This process's rows of a step; every process makes equally many."""
        depths = self.depths(step)  # of the rows of the global batch
        if self.read_ahead[0] != step:
            self.read_rows(step)
        for (number, rows), batch in zip(self.rows_of_micro_batches(depths), self.read_ahead[1]):
            batch = {key: value.to(self.accelerator.device, non_blocking=True) for key, value in batch.items()}
            yield MicroBatch(number, batch, [depths[row] for row in rows], self.noise(step, rows))

    def read_rows(self, step: int):
        """The rows of a step, where a GPU copies them from without waiting. Called while it still computes the step
        before."""
        training, pin = self.recipe.training, self.accelerator.device.type == "cuda"
        data_rows = rows_of_step(training.seed, step, training.rows_per_step, len(self.data.train))
        batches = []
        for _, rows in self.rows_of_micro_batches(self.depths(step)):
            batch = self.data.train.batch([data_rows[row] for row in rows])
            batches.append({key: value.pin_memory() if pin else value for key, value in batch.items()})
        self.read_ahead = step, batches

    def rows_of_micro_batches(self, depths: list[int]) -> list[tuple[int, list[int]]]:
        """(number, rows of the global batch) of this process's micro batches.

        What dropout draws belongs to a whole micro batch, so with dropout all processes together make the same ones
        however many they are.
        """
        size, world, index = self.recipe.training.micro_batch_size, *self.place
        if not self.has_dropout:
            mine = balanced_ranks(depths, world)[index]
            return list(enumerate(mine[start : start + size] for start in range(0, len(mine), size)))
        groups = [list(range(start, start + size)) for start in range(0, len(depths), size)]
        mine = balanced_ranks([sum(depths[row] for row in rows) for rows in groups], world)[index]
        return [(number, groups[number]) for number in mine]

    @property
    def place(self) -> tuple[int, int]:
        return self.accelerator.num_processes, self.accelerator.process_index

    @property
    def has_dropout(self) -> bool:
        return any(getattr(self.config, f"{place}_dropout") for place in ("attention", "residual", "embedding"))

    def noise(self, step: int, rows: list[int]):
        if self.config.state_init != "normal":
            return None
        length = self.recipe.data.sequence_length
        return initial_state_of_step(self.bare, self.recipe.training.seed, step, rows, length, self.accelerator.device)

    def go_to(self, step: int):
        """What of the model follows the number of steps that are done."""
        self.step = step
        if self.taper is not None:
            self.taper.move_to(step, self.taper_terms)

    @torch.no_grad()
    def taper_terms(self) -> torch.Tensor:
        """What the taper is fitted to: the rows of this step, without dropout."""
        total = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        self.model.eval()
        for _, batch, depths, noise in self.micro_batches(self.step):
            arguments = {"num_loops": depths, "initial_state": noise, "output_logits": False, "use_cache": False}
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            outputs = self.model(**inputs, **arguments, output_loop_readout_states=True)
            total += self.taper.fit_terms(outputs.loop_readout_states, batch["labels"])
        self.model.train()
        to_shards(self.model)
        return self.accelerator.reduce(total, reduction="sum")

    def train_step(self, step: int, watch: bool) -> dict:
        """Forward, backward and update on all rows of a step; `watch` measures the states and gradients too."""
        accelerator, recipe = self.accelerator, self.recipe
        micro_batches = list(self.micro_batches(step))
        _, window = self.depth_settings(step)
        labelled = sum((part.batch["labels"][:, 1:] != -100).sum() for part in micro_batches)
        labelled = accelerator.reduce(labelled, reduction="sum").clamp(min=1)
        total, watch_states = torch.zeros((), device=accelerator.device), watch and depths_in_one_pass(self.config)
        norms = StateNorms(max(self.depths(step)), accelerator.device)
        for i, (number, batch, depths, noise) in enumerate(micro_batches):
            set_seed(generator_of("dropout", recipe.training.seed, step, number).initial_seed() % 2**32)
            last = i == len(micro_batches) - 1
            with accelerator.no_sync(self.model) if not last else nullcontext():
                outputs = self.model(
                    **batch,
                    num_loops=depths if len(set(depths)) > 1 else depths[0],
                    backprop_loops=window,
                    initial_state=noise,
                    # gradients are averaged over processes, so each divides by its share of the labels
                    num_items_in_batch=labelled / accelerator.num_processes,
                    output_logits=False,
                    output_loop_hidden_states=watch_states,
                    use_cache=False,
                )
                accelerator.backward(outputs.loss)
            total += outputs.loss.detach()
            if watch_states:
                norms.add([state.detach() for state in outputs.loop_hidden_states])
            del outputs
        # signals go along, so that all processes leave after the same step
        told = torch.stack([total, torch.full_like(total, self.interruption.number)])
        told = accelerator.reduce(told, reduction="sum")
        metrics = {"loops": sum(self.depths(step)) / recipe.training.rows_per_step}
        if self.taper is not None:
            metrics["taper_gate"] = self.taper.gate(step)
        if watch:
            metrics.update(
                norms.metrics(lambda sums: accelerator.reduce(sums, reduction="sum")) if watch_states else {}
            )
            metrics.update(self.monitor.measure_weights(self.bare))
        fill_missing_gradients(self.optimizers)
        clip = math.inf if recipe.optimizer.clip is None else recipe.optimizer.clip  # infinity leaves them as they are
        norm = accelerator.clip_grad_norm_(self.model.parameters(), clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm, device=told.device)
        if step + 1 < self.total_steps:
            self.read_rows(step + 1)
        # the one time in a step that the CPU waits for the GPU
        loss, signal, norm = torch.cat([told.double(), norm.double()[None]]).tolist()
        loss /= accelerator.num_processes
        self.signal = (self.interruption.number or SIGTERM) if signal else 0
        metrics = {"loss": loss, **metrics}
        if recipe.optimizer.clip is not None:
            metrics["gradient_norm"] = norm
        scaler = getattr(accelerator, "scaler", None)  # of fp16: leaves out such gradients by itself
        if not (math.isfinite(loss) and (math.isfinite(norm) or scaler is not None)):
            return self.skip_step(step, metrics, norm)
        apply_step_settings(self.optimizers, step, recipe.optimizer, self.total_steps)
        set_learning_rates(self.schedulers, step)
        metrics["lr"] = self.optimizers[0].param_groups[0]["lr"]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_processes == 1:  # nobody else to agree with
            self.signal = self.interruption.number
        return metrics

    def skip_step(self, step: int, metrics: dict, gradient_norm: float) -> dict:
        """No update from what is no number: the run stops, or leaves the step out if the recipe says so."""
        training, loss = self.recipe.training, metrics["loss"]
        what = f"the gradient norm of step {step} is {gradient_norm}"
        if not math.isfinite(loss):
            what = f"the loss of step {step} is {loss}"
        if self.num_skipped >= training.skip_nonfinite_steps:
            rows = rows_of_step(training.seed, step, training.rows_per_step, len(self.data.train))
            left_out = f" after {self.num_skipped} steps that were left out" if self.num_skipped else ""
            raise Divergence(f"{what} on training rows {rows}{left_out}; the checkpoints are good. {ADVICE}")
        self.num_skipped += 1
        self.accelerator.print(f"{what}: left out, {self.num_skipped} of {training.skip_nonfinite_steps} at most")
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    # The run

    def train(self):
        with only_run(self.output):
            return self.run()

    def run(self):
        self.start()
        quiet = not self.accelerator.is_main_process
        with (
            self.interruption,
            tqdm(total=self.total_steps, initial=self.step, disable=quiet, dynamic_ncols=True) as bar,
        ):
            self.take_steps(bar)
        if self.recipe.logging.trackers:
            self.accelerator.end_training()
        if self.step == self.total_steps:
            return self.finish()
        reached = f"step {self.step} of {self.total_steps} is saved in {self.output / 'checkpoints'}"
        if not self.signal:
            self.accelerator.print(f"left off as training.stop_after says: {reached}")
            return self.output
        again = own_command() if self.accelerator.num_processes == 1 else "the same launch again"
        self.accelerator.print(f"interrupted by signal {self.signal}: {reached}; to go on: {again}")
        raise Interrupted(self.signal)

    @property
    def leaves_off(self) -> bool:
        """Before the end, with nothing done that a run which is not interrupted would not do."""
        return bool(self.signal) or self.step >= (self.recipe.training.stop_after or self.total_steps)

    def take_steps(self, bar):
        recipe = self.recipe
        peak = reference_rate(self.accelerator) * self.accelerator.num_processes
        tokens = recipe.training.rows_per_step * recipe.data.sequence_length
        clock, since = time.perf_counter(), 0
        while self.step < self.total_steps and not self.leaves_off:
            step = self.step
            watch = step % recipe.logging.monitor_every == 0
            metrics = self.train_step(step, watch)
            self.go_to(step + 1)
            since += 1
            for message in self.monitor.warnings(metrics) if "loss" in metrics else ():
                if self.accelerator.is_main_process:
                    bar.write(f"step {step}: {message}")
            done = self.step == self.total_steps
            if recipe.training.skip_nonfinite_steps:
                metrics["skipped_steps"] = self.num_skipped
            if watch or done or self.step % recipe.logging.every == 0:
                speed = tokens * since / (time.perf_counter() - clock)
                clock, since = time.perf_counter(), 0
                metrics.update(tokens_per_second=speed, mfu=speed * self.flops_per_token / peak)
                self.log(step, metrics)
                bar.set_postfix_str(
                    f"loss {metrics.get('loss', math.nan):.3f}, {speed:.0f} tok/s, MFU {metrics['mfu']:.0%}, "
                    f"{metrics['loops']:.1f} loops"
                )
            bar.update(1)
            if done or self.step % recipe.evaluation.every == 0:
                self.evaluate()
                clock = time.perf_counter()
            if done or self.leaves_off or self.step % recipe.training.save_every == 0:
                self.save()
                clock = time.perf_counter()

    def start(self):
        """Continue from the newest whole checkpoint, or begin."""
        recipe = self.recipe
        found = sound_checkpoint(self.output / "checkpoints")
        if found is not None and not recipe.training.resume:
            raise RecipeError(
                f"training.resume=false, but {self.output} holds {found.name}: choose another training.output_dir, or "
                "remove that run"
            )
        check_space(self.output / "checkpoints", self.model, self.optimizers)
        if found is None:
            on_main_process(lambda: refuse_lost_run(self.output), self.output)
            self.go_to(0)
        else:
            found = self.go_on_from_newest(found)
        if recipe.training.push_to_hub:
            on_main_process(lambda: create_repository(recipe.training.push_to_hub), self.output)
        on_main_process(lambda: self.write_beginning(found), self.output)
        if recipe.logging.trackers:
            purge = {"tensorboard": {"purge_step": self.step}}  # what an interrupted run told beyond its checkpoint
            self.accelerator.init_trackers(recipe.logging.project, flat(recipe.to_dict()), init_kwargs=purge)

    def write_beginning(self, checkpoint: Path | None):
        remove_leftovers(self.output)
        self.metrics.start(self.step, None if checkpoint is None else checkpoint / METRICS)
        self.recipe.save(self.output / "recipe.yaml")
        append_line(self.output / "provenance.jsonl", json.dumps({"step": self.step, **provenance()}))  # each launch

    def compared_settings(self) -> dict:
        settings = compared_settings(self.recipe, comparable(self.config.to_dict()), self.data)
        settings["precision"] = self.accelerator.mixed_precision
        settings["rows_of_dropout"] = self.recipe.training.micro_batch_size if self.has_dropout else None
        return comparable(settings)

    def go_on_from_newest(self, found: Path) -> Path:
        """Load the newest checkpoint whose numbers are numbers; where it lies."""
        refused = {}
        while True:
            self.go_on_from(found)
            bad = self.nonfinite_part()
            if bad is None:
                said = f"; changed: {shown(self.changes)}" if self.changes else ""
                self.accelerator.print(f"continuing from {found} at step {self.step}{said}")
                return found
            refused[found] = f"{bad} is not finite"
            found = sound_checkpoint(self.output / "checkpoints", refused)

    def nonfinite_part(self) -> str | None:
        """Of the weights and moments on all processes."""
        parts = from_all_processes(lambda: nonfinite_part(self.model, self.optimizers), self.output)
        return next((part for part in parts if part is not None), None)

    def go_on_from(self, checkpoint: Path):
        own, marker = self.compared_settings(), read_marker(checkpoint)
        for name in {"precision", "rows_of_dropout"} - marker["config"].keys():  # not written down by older versions
            own.pop(name)
        changes = differing(marker["config"], own)
        resume = self.recipe.training.resume
        extra = load_checkpoint(checkpoint, self.model, self.optimizers, own, lambda name: may_change(name, resume))
        self.go_to(extra["step"])
        self.best, self.num_skipped = extra["best"], extra.get("skipped_steps", 0)
        self.monitor.load_state_dict(extra["monitor"])
        self.changes = changes
        other = other_versions(marker.get("made_by", {}))
        if other:
            self.accelerator.print(
                f"{checkpoint} was made with {other}: steps may be rounded differently from here on"
            )

    def save(self):
        bad = self.nonfinite_part()
        if bad is not None:
            raise Divergence(
                f"{bad} is not finite after step {self.step - 1}: it is not saved, and the checkpoints before are "
                f"good. {ADVICE}"
            )
        is_best = self.evaluated_at == self.step and self.last_validation < self.best
        if is_best:
            self.best = self.last_validation
        extra = {
            "step": self.step,
            "best": self.best,
            "monitor": self.monitor.state_dict(),
            "skipped_steps": self.num_skipped,
        }
        for tracker in self.accelerator.trackers:
            getattr(tracker.tracker, "flush", int)()
        save_checkpoint(
            self.output / "checkpoints",
            self.step,
            self.model,
            self.optimizers,
            extra,
            keep_last=self.recipe.training.keep_last,
            is_best=is_best and self.recipe.training.keep_best,
            config=self.compared_settings(),
            metrics=self.metrics.path,
        )

    def log(self, step: int, metrics: dict):
        try:
            self.metrics.write(step, metrics)
        except OSError as error:
            raise error_of_saving(self.metrics.path, error) from error

    def evaluate(self):
        """Cross-entropy and bits per byte on the validation rows, at every depth from one pass."""
        metrics = validate(self.accelerator, self.model, self.config, self.recipe, self.data.validation)
        self.last_validation, self.evaluated_at = metrics["validation/loss"], self.step
        self.log(self.step - 1, metrics)
        if not math.isfinite(self.last_validation):
            raise Divergence(
                f"the validation loss after step {self.step - 1} is {self.last_validation}; the checkpoints before "
                f"are good. {ADVICE}"
            )
        limit = self.recipe.training.max_loss
        if self.step == self.total_steps and limit is not None and not self.last_validation <= limit:
            said = f"the run ends at {self.last_validation:.4f}, above training.max_loss={limit}: diverged"
            self.accelerator.print(said)

    def export(self, checkpoint: Path, path: Path):
        """A model of one checkpoint."""
        self.go_on_from(checkpoint)
        self.export_to(path)

    def export_to(self, path: Path):
        name = self.recipe.training.push_to_hub or self.output.absolute().name
        card = model_card(self.recipe, self.config, self.metrics.path, name, self.step)
        self.data.tokenizer.model_max_length = self.config.max_position_embeddings
        export_model(path, self.model, self.data.tokenizer, readme=card)

    def finish(self) -> Path:
        final = self.output / "final"
        repository = self.recipe.training.push_to_hub
        self.export_to(final)
        if repository:
            address = on_main_process(lambda: push(final, repository), final)
            self.accelerator.print(f"pushed to {address}")
        if self.accelerator.is_main_process:
            print(f"saved {final}; {ending(self.metrics.path, self.config.trained_depth)}")
        return final


def compile_blocks(blocks):
    """Each by itself, all with one code, of which sections, row counts and gradients want variants: beyond torch's
    limit of 8 the rest would run uncompiled."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for block in blocks:
        block.compile()


def is_model(name: str) -> bool:
    """Whether a folder holds a saved model; of a name on the Hub, that is not looked up."""
    return not looks_like_path(name) or (Path(name) / "config.json").is_file()


def flat(nested: dict, prefix: str = "") -> dict:
    result = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[prefix + key] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return result
