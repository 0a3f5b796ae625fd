"""Runs of a sweep in recipes/gpu, each with its last loss and its norms, or with how it diverged."""

from collections.abc import Iterator

from looped_recipes.common.metrics import read_metrics
from looped_recipes.common.provenance import ROOT

from .pieces import Measurement, Setting
from .real_training import TINY, overrides, prepare_to_train


TINY_RUN = [*TINY, "training.steps=4", "training.save_every=4", "evaluation.every=4", "evaluation.loops=[1,2]"]
NORMS = ("residual_norm", "state_norm")


def measurements(setting: Setting, sweep: str) -> Iterator[Measurement]:
    prepare_to_train(setting)
    from looped_recipes.engine.sweep_runs import load_sweep

    path = ROOT / "recipes" / "gpu" / f"{sweep}.sweep.yaml"
    runs = load_sweep(path, overrides(setting, setting.out / "runs" / sweep, tiny_run(sweep)))
    for run in runs[:2] if setting.tiny else runs:
        yield Measurement(run.name, lambda run=run: train(run))


def tiny_run(sweep: str) -> list[str]:
    """Return the settings of a tiny run. Only the sweep `rdm` has a prelude and a coda; others stay without them."""
    outside = "num_prelude_layers", "num_coda_layers"
    kept = [line for line in TINY_RUN if sweep == "rdm" or not any(name in line for name in outside)]
    return [*kept, "model.num_loops=2", "schedule.warmup_steps=0", "data.stride=null"]


def train(run) -> dict:
    from looped_recipes.engine.sweeps import outcome, run_all

    run_all([run])
    found = outcome(run) or {}
    records = read_metrics(f"{run.recipe.training.output_dir}/metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    norms = {name: value for record in records for name, value in record.items() if name.startswith(NORMS)}
    return {
        "validation_loss": found.get("loss"),
        "diverged": found.get("diverged"),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "largest_gradient": max((record.get("gradient_norm", 0.0) for record in records), default=None),
        **norms,
    }
