"""A run of a few steps that takes a moment, what it leaves, and whether another run left the same."""

import contextlib
import io
import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from looped_recipes.common.errors import CommandError
from looped_recipes.engine.training import Pretraining
from looped_recipes.settings.recipe import RecipeError, load_recipe
from tests.faults.campaign import Outcome


STEPS, HALF = 6, 3
RECIPE = {
    "model": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_core_layers": 1,
              "num_prelude_layers": 0, "num_coda_layers": 0, "num_loops": 2, "vocab_size": 128},
    "data": {"tokenizer": "word", "tokenizer_vocab_size": 128, "sequence_length": 16, "validation_fraction": 0.2},
    "schedule": {"name": "constant"},
    "training": {"steps": STEPS, "rows_per_step": 2, "micro_batch_size": 2, "save_every": 2, "keep_last": 2},
    "evaluation": {"every": 2, "rows": 2},
    "logging": {"every": 1, "monitor_every": 3},
}  # fmt: skip
TIMED = ("tokens_per_second", "mfu")
REFUSALS = (RecipeError, CommandError)  # errors in words of this project


class Runs:
    """Runs of one recipe in folders of their own; the undisturbed one is `whole`."""

    def __init__(self, folder: Path):
        torch.set_num_threads(1)  # as the processes that are forked from this one
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        draw = random.Random(0)
        words = ["".join(draw.choice("abcdefgh") for _ in range(4)) for _ in range(60)]
        documents = [" ".join(draw.choice(words) for _ in range(40)) for _ in range(40)]
        source = folder / "source.jsonl"
        if not source.exists():  # a newer one would be prepared anew
            source.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(json.dumps({**RECIPE, "data": {**RECIPE["data"], "source": str(source)}}))
        self.whole, self.half, self.nothing = (folder / name for name in ("whole", "half", "nothing"))
        if not self.nothing.is_dir():  # else they are there
            self.train(self.whole)
            self.train(self.half, f"training.stop_after={HALF}")
            self.nothing.mkdir()

    def train(self, place: Path, *overrides: str) -> str:
        """Train in `place`/run with data in `place`/shards; what was printed."""
        places = [f"training.output_dir={place / 'run'}", f"data.cache_dir={place / 'shards'}"]
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
            Pretraining(load_recipe(self.recipe, [*places, *overrides])).train()
        return said.getvalue()

    def copy(self, of: Path, name: str) -> Path:
        place = self.folder / name
        shutil.rmtree(place, ignore_errors=True)
        return Path(shutil.copytree(of, place))

    def outcome_of_training(self, place: Path) -> tuple[Outcome, str]:
        """How a run goes on, and what was seen where that is not good."""
        try:
            said = self.train(place)
        except REFUSALS as error:
            return ("refused", str(error)) if str(error) else ("traceback", repr(error))
        except Exception as error:
            return "traceback", f"{type(error).__name__}: {error}"
        wrong = self.why_other(place)
        return ("silent", f"{wrong}; it said: {said}") if wrong else ("right", said)

    def why_other(self, place: Path) -> str | None:
        """What of a finished run is not bit for bit that of the undisturbed one; None if nothing is."""
        expected, found = (load_file(each / "run" / "final" / "model.safetensors") for each in (self.whole, place))
        if expected.keys() != found.keys():
            return "other tensors"
        for name, tensor in expected.items():
            if not torch.equal(found[name], tensor):
                return f"tensor {name}"
        expected, found = (metrics_of(each) for each in (self.whole, place))
        for before, after in zip(expected, found):
            if before != after:
                return f"metrics {after} for {before}"
        return None if len(expected) == len(found) else f"{len(found)} lines of metrics for {len(expected)}"


def metrics_of(place: Path) -> list[dict]:
    """Of whole lines: the last one may be on its way."""
    *lines, _ = (place / "run" / "metrics.jsonl").read_text().split("\n")
    return [{key: value for key, value in json.loads(line).items() if key not in TIMED} for line in lines]


def files_of(place: Path) -> list[Path]:
    """Sorted, so that a draw from them is the same everywhere."""
    return sorted(path for path in place.rglob("*") if path.is_file() and path.name != ".lock")
