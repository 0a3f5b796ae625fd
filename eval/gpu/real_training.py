"""One real training by its recipe: utilisation as logged, time in checkpoints, and whether all losses are finite.

checkpoint_share: the share of the time if checkpoints were as rare as in recipes by default; this short run saves more
often. If an earlier call took all steps, no checkpoint is timed.
"""

import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from looped_recipes.common.metrics import read_metrics
from looped_recipes.common.provenance import ROOT
from looped_recipes.settings.sections import TrainingConfig

from .pieces import Measurement, Setting


TINY = [
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_attention_heads=2",
    "model.num_prelude_layers=1",
    "model.num_core_layers=1",
    "model.num_coda_layers=1",
    "model.vocab_size=512",
    "data.tokenizer_vocab_size=512",
    "data.tokenizer_max_characters=200000",
    "data.max_documents=60",
    "data.sequence_length=64",
    "training.rows_per_step=4",
    "training.micro_batch_size=4",
    "training.compile=false",
    "evaluation.rows=4",
]


def measurements(setting: Setting) -> Iterator[Measurement]:
    yield Measurement("real", lambda: train(setting))


def model_folder(setting: Setting) -> Path:
    return setting.out / "runs" / "real"


def overrides(setting: Setting, folder: Path, tiny: list[str]) -> list[str]:
    """Return the settings of a recipe that depend on the call: text, folders, and sizes with --tiny."""
    found = [f"data.source={setting.text}", f"data.cache_dir={setting.out / 'shards'}"]
    return [*found, f"training.output_dir={folder}", *(tiny if setting.tiny else [])]


def prepare_to_train(setting: Setting):
    """Set the environment variables that accelerate reads at import."""
    if setting.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if setting.device == "cuda" else "no"


def train(setting: Setting) -> dict:
    prepare_to_train(setting)
    from looped_recipes.engine.training import Pretraining
    from looped_recipes.settings.recipe import load_recipe

    class TimedPretraining(Pretraining):
        def take_steps(self, bar):
            self.first, self.saves = self.step, []
            super().take_steps(bar)

        def save(self):
            start = time.perf_counter()
            super().save()
            self.saves.append(time.perf_counter() - start)

    folder = model_folder(setting)
    steps = ["training.steps=4", "training.save_every=2", "evaluation.every=2"]
    run = TimedPretraining(
        load_recipe(ROOT / "recipes" / "gpu" / "real.yaml", overrides(setting, folder, [*TINY, *steps]))
    )
    start = time.perf_counter()
    run.train()
    seconds = time.perf_counter() - start
    records = read_metrics(folder / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    speed = statistics.median([record["tokens_per_second"] for record in records if "tokens_per_second" in record])
    utilisations = [record["mfu"] for record in records if "mfu" in record]  # of a GPU whose rate is known
    of_step = run.recipe.training.rows_per_step * run.recipe.data.sequence_length / speed
    return {
        "steps": run.step - run.first,
        "seconds": seconds,
        "seconds_of_a_step": of_step,
        **(of_checkpoints(run.saves, run.step - run.first, of_step) if run.saves else {}),
        **({"mfu_as_logged": statistics.median(utilisations)} if utilisations else {}),
        "tokens_per_second": speed,
        "finite": int(all(map(math.isfinite, losses))),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        **{name: value for record in records for name, value in record.items() if name.startswith("validation/loss")},
    }


def of_checkpoints(saves: list[float], steps: int, of_step: float) -> dict:
    """Return the time of a checkpoint and its share of the training time.

    saves: seconds of each checkpoint. steps: number of steps that were taken. of_step: seconds of a step.
    """
    of_save = statistics.median(saves)
    return {
        "seconds_of_a_checkpoint": of_save,
        "checkpoint_share": of_save / (of_save + TrainingConfig().save_every * of_step),
        "checkpoint_share_of_this_run": sum(saves) / (sum(saves) + steps * of_step),
    }
