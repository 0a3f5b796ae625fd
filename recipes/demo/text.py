"""The text model of the demo: its loss at every depth, and samples of its text."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from looped_recipes.common.metrics import last_validation, read_metrics
from looped_recipes.demo.training import Trained, train
from looped_recipes.settings.recipe import Recipe, load_recipe


RECIPE = Path(__file__).with_name("text.yaml")
INSTEAD = {"training.output_dir": "say --output", "training.stop_after": "Ctrl-C stops it, and it goes on"}
PROMPT = 'def read(self, size=-1):\n    """'


def recipe_of(output: Path, settings: Sequence[str]) -> Recipe:
    for setting in settings:
        if (key := setting.partition("=")[0]) in INSTEAD:
            raise ValueError(f"{setting} would have no place in the demo: {INSTEAD[key]}")
    recipe = load_recipe(RECIPE, settings, {"training.output_dir": str(output)})
    trained = recipe.model_config().num_loops
    if missing := {1, trained} - set(recipe.evaluation.loops or (1, trained)):
        raise ValueError(
            f"evaluation.loops={recipe.evaluation.loops} lacks {missing.pop()}, and the demo compares 1 loop with the "
            f"{trained} that it trains: add it"
        )
    return recipe


def train_model(output: Path, settings: Sequence[str]) -> Trained:
    return train(recipe_of(output, settings))


def samples(folder: Path, depths: list[int]) -> dict[int, str]:
    """Generate text from the same prompt and seed at several depths."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt, written = tokenizer(PROMPT, return_tensors="pt"), {}
    for num_loops in depths:
        torch.manual_seed(0)
        options = {"max_new_tokens": 64, "do_sample": True, "temperature": 0.7, "top_k": 50}
        ids = model.generate(**prompt, num_loops=num_loops, **options)
        written[num_loops] = tokenizer.decode(ids[0], skip_special_tokens=True)
    return written


def measure(trained: Trained) -> dict:
    return {
        "parameters": trained.parameters,
        "loops": trained.loops,
        "steps": trained.steps,
        "bits_per_byte": last_validation(read_metrics(trained.metrics), "bits_per_byte"),
        "samples": samples(trained.final, sorted({1, trained.loops})),
    }
