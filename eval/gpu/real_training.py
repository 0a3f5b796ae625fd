"""One real training by its recipe: utilisation as it logs it, time in checkpoints, whether all losses are numbers."""

import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from looped_recipes.common.metrics import read_metrics
from looped_recipes.common.provenance import ROOT

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
    """What of a recipe is told by where it runs."""
    found = [f"data.source={setting.text}", f"data.cache_dir={setting.out / 'shards'}"]
    return [*found, f"training.output_dir={folder}", *(tiny if setting.tiny else [])]


def prepare_to_train(setting: Setting):
    """What accelerate reads, before it is imported."""
    if setting.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if setting.device == "cuda" else "no"


def train(setting: Setting) -> dict:
    prepare_to_train(setting)
    from looped_recipes.engine.training import Pretraining
    from looped_recipes.settings.recipe import load_recipe

    class TimedPretraining(Pretraining):
        saving = 0.0

        def save(self):
            start = time.perf_counter()
            super().save()
            self.saving += time.perf_counter() - start

    folder = model_folder(setting)
    steps = ["training.steps=4", "training.save_every=2", "evaluation.every=2"]
    run = TimedPretraining(
        load_recipe(ROOT / "recipes" / "gpu" / "real.yaml", overrides(setting, folder, [*TINY, *steps]))
    )
    first, start = run.step, time.perf_counter()
    run.train()
    seconds = time.perf_counter() - start
    records = read_metrics(folder / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    return {
        "steps": run.step - first,
        "seconds": seconds,
        "seconds_in_checkpoints": run.saving,
        "checkpoint_share": run.saving / seconds,
        "mfu_as_logged": statistics.median([record["mfu"] for record in records if "mfu" in record]),
        "tokens_per_second": statistics.median(
            [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
        ),
        "finite": int(all(map(math.isfinite, losses))),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        **{name: value for record in records for name, value in record.items() if name.startswith("validation/loss")},
    }
