"""The subject of a diagnosis: a model, from a checkpoint or made from a config, and its input tokens."""

import dataclasses
import difflib
import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import yaml

from looped_eval.common.held_out import batch_as_trained, own_run, run_data
from looped_eval.common.model_folder import (
    check_vocabulary,
    joined_tokens,
    model_folder,
    named_tokenizer,
    training_run,
    unlearned_start,
)
from looped_recipes.common.metrics import read_metrics
from looped_recipes.data.sources import training_source
from looped_recipes.settings.recipe import load_recipe
from looped_recipes.settings.sections import SECTIONS, DataConfig
from looped_recipes.settings.yaml_files import read_yaml
from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.cross_entropy import IGNORE_INDEX

from .growth import built, random_tokens
from .readout_probes import token_classes


LENGTH = 128  # tokens in a row
ADVICE = "pass --text with a text that it was not trained on, or --text embedded"


class DiagnoseError(ValueError):
    """A model or text that cannot be diagnosed."""


@dataclass
class ModelAndText:
    model: LoopedForCausalLM
    batch: dict  # as in hooks.py, with an initial_state where one is drawn
    where: dict  # description of the model and the tokens
    records: list[dict]  # in the metrics.jsonl of the training run
    tokenizer: str | Path | None = None
    is_fresh: bool = False  # not trained

    @property
    def config(self) -> LoopedConfig:
        return self.model.config

    @cached_property
    def classes(self) -> dict[str, torch.Tensor] | None:
        """The class of each token, such as white space or words; None if tokens are random."""
        if self.tokenizer is None:
            return None
        return token_classes(named_tokenizer(str(self.tokenizer)), self.config.vocab_size)


def open_model_and_text(
    target: str,
    overrides: list[str] = (),
    text: str | None = None,
    tokenizer: str | None = None,
    rows: int = 16,
    length: int | None = None,
    seed: int = 0,
    state_seed: int | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> ModelAndText:
    """Open `target`: a saved model, a training run's folder, a config (JSON or YAML), or a preset's name.

    overrides: key=value, which change a config. Without a text, a trained model reads the held-out text of its run,
    and a fresh one the embedded corpus. Text is read with the model's tokenizer or the named one; a fresh model
    without a tokenizer reads random tokens. length: by default LENGTH, or that of the run's rows if these are shorter.
    """
    if rows < 1 or (length is not None and length < 2):
        raise DiagnoseError(f"at least 1 row and 2 tokens in each are needed, got rows={rows} and length={length}")
    folder = model_folder(target)
    if folder is not None and overrides:
        raise DiagnoseError(
            f"{overrides[0]!r} would change the trained model {target}; to make a fresh one, pass "
            f"{folder / 'config.json'}"
        )
    if folder is None:
        config = make_config(config_fields(target), overrides)
        model, made = built(config, seed), f"{target} {' '.join(overrides)}, initialised with seed {seed}".strip()
    else:
        model = LoopedForCausalLM.from_pretrained(folder, trust_remote_code=trust_remote_code)
        made = str(target)
    model = model.to(getattr(torch, dtype)).eval()
    run = training_run(target)
    from_run = text is None and folder is not None
    if length is None:
        length = min(LENGTH, run_data(run).sequence_length) if from_run and run is not None else LENGTH
    if model.config.position_embedding == "learned":
        length = min(length, model.config.max_position_embeddings)
    own = folder if folder is not None and (folder / "tokenizer_config.json").is_file() else None
    if from_run:
        batch, read = batch_as_trained(own_run(target, tokenizer, ADVICE), rows, length)
        tokenizer = own
    else:
        tokenizer = own if tokenizer is None else tokenizer
        batch, read = text_batch(model.config, tokenizer, text, rows, length, seed)
    if state_seed is not None:
        batch["initial_state"] = model.sample_initial_state(rows, length, torch.Generator().manual_seed(state_seed))
    where = {"model": made, "text": read, "rows": rows, "length": length, "state_seed": state_seed, "dtype": dtype}
    records = [] if run is None else read_metrics(run / "metrics.jsonl")
    return ModelAndText(model, batch, where, records, tokenizer, is_fresh=folder is None)


def config_fields(target: str) -> dict:
    path = Path(target)
    if path.suffix not in (".json", ".yaml", ".yml"):
        if target in LoopedConfig.preset_names():
            return {"preset": target}
        close = difflib.get_close_matches(target, LoopedConfig.preset_names(), n=1)
        raise DiagnoseError(
            f"{target!r} is no folder, no .json or .yaml file and no preset"
            + (f"; did you mean {close[0]!r}?" if close else f"; presets: {', '.join(LoopedConfig.preset_names())}")
        )
    fields = fields_of_json(path) if path.suffix == ".json" else fields_of_yaml(target)
    for derived in ("num_hidden_layers", "layer_types", "trained_num_loops"):  # a fresh model trains at num_loops
        fields.pop(derived, None)
    return fields


def fields_of_json(path: Path) -> dict:
    if not path.is_file():
        raise DiagnoseError(f"there is no config {str(path)!r}")
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise DiagnoseError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise DiagnoseError(f"{str(path)!r} must hold fields of LoopedConfig, got {type(fields).__name__}")
    return fields


def fields_of_yaml(path: str) -> dict:
    """Return the model fields of a recipe, found as `looped pretrain` finds it, or those in the file itself."""
    fields = read_yaml(path)
    if not fields.keys() & {"extends", "model", *SECTIONS}:
        return fields
    recipe = load_recipe(path)
    if recipe.dense.path is not None:
        raise DiagnoseError(f"{path!r} begins with the dense model {recipe.dense.path!r}: name its trained run")
    return dict(recipe.model)


def make_config(fields: dict, overrides: list[str]) -> LoopedConfig:
    known = [field.name for field in dataclasses.fields(LoopedConfig)]
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise DiagnoseError(f"{override!r} does not change the config: write field=value, e.g. num_loops=8{hint}")
        fields[key] = yaml.safe_load(value)
    preset = fields.pop("preset", None)
    try:
        return LoopedConfig(**fields) if preset is None else LoopedConfig.from_preset(preset, **fields)
    except TypeError as error:
        raise DiagnoseError(f"{' '.join(overrides)} makes no config: {error}") from error


def text_batch(config, tokenizer, text: str | None, rows: int, length: int, seed: int):
    """Return rows of documents, each with its start token, which is no target, and its end token; and the name of the
    text."""
    if tokenizer is None:
        if text is not None:
            raise DiagnoseError(
                f"{text!r} cannot be read without a tokenizer, and this model has none: pass --tokenizer"
            )
        return {"input_ids": random_tokens(config, rows, length, seed)}, f"random tokens with seed {seed}"
    tokenizer = named_tokenizer(str(tokenizer))
    check_vocabulary(tokenizer, config)
    documents = training_source(DataConfig(source=text or "embedded")).load()
    start = unlearned_start(tokenizer)
    ids = list(itertools.islice(joined_tokens(documents, tokenizer, start), rows * length))
    if len(ids) < rows * length:
        raise DiagnoseError(
            f"{text or 'the embedded corpus'!r} holds {len(ids)} tokens, fewer than {rows} rows of {length}: "
            "lower --rows or --length"
        )
    read = "embedded corpus (the training text of a demo model)" if text in (None, "embedded") else text
    batch = {"input_ids": torch.tensor(ids).view(rows, length)}
    if start is not None:
        batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == start, IGNORE_INDEX)
    return batch, read
