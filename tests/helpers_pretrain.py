"""Short runs of the smoke recipes: what to pass, and what they logged."""

from pathlib import Path

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


def monitored(model, outputs, depths: list[int]) -> dict[str, float]:
    """What a step logs of one batch, after its backward pass."""
    norms = StateNorms(max(depths), "cpu")
    norms.add(outputs.loop_hidden_states, outputs.initial_state, depths)
    return norms.metrics(lambda sums: sums) | Monitor().measure_weights(model)
