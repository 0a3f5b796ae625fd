"""Short runs of the smoke recipes: what to pass, and what they logged."""

from collections.abc import Callable
from pathlib import Path

import accelerate
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType

from looped_recipes.common.metrics import read_metrics
from looped_recipes.engine.monitor import Monitor, StateNorms
from tests.helpers_recipes import RECIPES


SMOKE = RECIPES / "smoke"


def smoke_settings(text, output, *more):
    """Overrides that train a smoke recipe on `text`."""
    return [
        f"data.source={text / 'train.jsonl'}",
        f"data.cache_dir={text / 'shards'}",
        "data.tokenizer_vocab_size=400",
        f"training.output_dir={output}",
        "training.steps=6",
        "training.save_every=3",
        "evaluation.every=3",
        "logging.every=1",
        *more,
    ]


def logged_losses(output):
    return [record["loss"] for record in read_metrics(Path(output) / "metrics.jsonl") if "loss" in record]


def logged_values(output, name):
    return [record[name] for record in read_metrics(Path(output) / "metrics.jsonl") if name in record]


def replace_wandb(monkeypatch, hear: Callable[[str, object], None]):
    """Let `hear` stand for Weights & Biases. It is called with "start" and the arguments of a run, "settings" and all
    of them, "log" and the step, and "end" and None."""

    class Tracker(GeneralTracker):
        name, requires_logging_directory = "wandb", False
        tracker = property(lambda self: None)

        def __init__(self, project, **arguments):
            super().__init__()
            hear("start", arguments)

        def store_init_configuration(self, values):
            hear("settings", values)

        def log(self, values, step):
            hear("log", step)

        def finish(self):
            hear("end", None)

    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", Tracker)
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: [LoggerType.WANDB])


def monitored(model, outputs, depths: list[int]) -> dict[str, float]:
    """What a step logs of one batch, after its backward pass."""
    norms = StateNorms(max(depths), "cpu")
    norms.add(outputs.loop_hidden_states, outputs.initial_state, depths)
    return norms.metrics(lambda sums: sums) | Monitor().measure_weights(model)
