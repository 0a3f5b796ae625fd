"""Compare settings before a run continues from a checkpoint.

Refused if different: the model, the tokens, their order and depths, the type of optimizer, the precision. Learning
rates, other optimizer settings, the schedule and the code of a class of one's own may be changed on purpose
(`training.resume=changed`); the length of the run and its validation may change at any time. Changes are printed,
as are different versions of code and libraries. All other settings (logging, saving, compiling, processes, and without
dropout micro batches) change steps only by rounding and are not compared.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
import yaml

from looped_recipes.common.metrics import read_metrics
from looped_recipes.common.provenance import commit, versions
from looped_recipes.settings.model_file import code_of
from looped_recipes.settings.recipe import Recipe
from looped_recipes.settings.sections import (
    COMPARED_TRAINING,
    OF_LENGTH,
    DenseConfig,
    DepthConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)
from modeling_looped import LoopedConfig

from .saving import CheckpointError


NUM_SAMPLED_ROWS = 64
OF_TEXT = {"data.rows", "data.sampled_rows", "tokenizer"}  # dotted names of what the documents determine
OF_OPTIMIZERS = ("optimizer.name", "optimizer.muon_value_gates")  # which type of optimizer a parameter has
CODE = "code of training.model_file"  # the compared checksum
VALIDATION = "validation"  # the compared section that tells which validation losses can be compared
VOLATILE = {"transformers_version", "_name_or_path", "architectures", "auto_map", "dtype"}  # fields of model configs


def compared_settings(recipe: Recipe, config: LoopedConfig, data, precision: str, has_dropout: bool) -> dict:
    """Return all compared settings, in sections. data: the result of `shards.prepare`."""
    dense = {} if recipe.dense.path is None else {"dense": dataclasses.asdict(recipe.dense)}
    settings = {
        **dense,
        "model": comparable(config.to_dict()),
        CODE: checksum_of_code(recipe),
        "data": {
            "sequence_length": recipe.data.sequence_length,
            "stride": recipe.data.stride or recipe.data.sequence_length,
            "document_masking": recipe.data.document_masking,
            "token_field_masked_by_ends": masked_by_ends(recipe, data),
            "rows": len(data.train),
            "sampled_rows": sample_of_rows(data.train),
        },
        "tokenizer": data.manifest["tokenizer"]["sha256"],
        "depth": dataclasses.asdict(recipe.depth),
        "optimizer": dataclasses.asdict(recipe.optimizer),
        "schedule": dataclasses.asdict(recipe.schedule),
        "training": {name: getattr(recipe.training, name) for name in COMPARED_TRAINING},
        VALIDATION: {
            "loops": recipe.evaluation.loops,
            "rows": min(recipe.evaluation.rows, len(data.validation)),
            "sampled_rows": sample_of_rows(data.validation),
        },
        "precision": precision,
        "rows_of_dropout": recipe.training.micro_batch_size if has_dropout else None,
    }
    return comparable(settings)


def masked_by_ends(recipe: Recipe, data) -> bool | None:
    """Return whether tokens that are taken as they are, and so in all rows the same, are masked behind the token that
    ends a document. None if not, as in checkpoints from before this was compared."""
    is_taken = recipe.data.token_field is not None and recipe.data.document_masking
    return True if is_taken and data.train.start_ends else None


def checksum_of_code(recipe: Recipe) -> str | None:
    """Return the checksum of the user's own code; None where there is none, or no longer."""
    code = None if recipe.training.model_file is None else code_of(recipe.training.model_file)
    return None if code is None else xxhash.xxh3_64_hexdigest(code)


def sample_of_rows(rows) -> str:
    """Return a hash of rows spread over the data set. It depends on the text only, not on where the files are."""
    digest = hashlib.sha256()
    for index in sorted(set(np.linspace(0, len(rows) - 1, NUM_SAMPLED_ROWS).astype(int).tolist())):
        digest.update(rows.tokens(index).tobytes())
    return digest.hexdigest()[:16]


def may_change(name: str, resume: bool | str) -> bool:
    """Return whether a run may continue although the setting with this dotted name has changed."""
    if name in {f"training.{key}" for key in OF_LENGTH} or name.startswith(VALIDATION):
        return True
    return may_change_on_purpose(name) and resume == "changed"


def may_change_on_purpose(name: str) -> bool:
    return name.startswith(("optimizer.", "schedule.", CODE)) and name not in OF_OPTIMIZERS


def comparable(config: dict) -> dict:
    """Convert a config to plain JSON values, without fields that depend on how and with which version the model was
    loaded."""
    config = {key: value for key, value in config.items() if key not in VOLATILE}
    if config.get("trained_num_loops") == config.get("num_loops"):  # one change of depth is told once
        config.pop("trained_num_loops", None)
    return json.loads(json.dumps(config, default=str, sort_keys=True))


def with_later_fields(saved: dict) -> dict:
    """Return the settings of a checkpoint with the fields that were added after it was written, at their defaults,
    which are what the code did before."""
    defaults = {
        "dense": dataclasses.asdict(DenseConfig()),
        "depth": dataclasses.asdict(DepthConfig()),
        "optimizer": dataclasses.asdict(OptimizerConfig()),
        "schedule": dataclasses.asdict(ScheduleConfig()),
        "training": {name: getattr(TrainingConfig(), name) for name in COMPARED_TRAINING},
    }
    filled = {name: {**defaults.get(name, {}), **values} for name, values in saved.items() if isinstance(values, dict)}
    if "model" in filled:
        filled["model"] = comparable(LoopedConfig.from_dict(filled["model"]).to_dict())
    return {**saved, **filled}


def refuse_other_config(path: Path, saved: dict, config: dict, may_change: Callable[[str], bool]):
    refused = [difference for difference in differing(saved, config) if not may_change(difference[0])]
    if not refused:
        return
    names = {name for name, _, _ in refused}
    advice = "Go back to that config, or choose another training.output_dir"
    if all(map(may_change_on_purpose, names)):
        advice = "Go back to that config, choose another training.output_dir, or set training.resume=changed"
    elif names == {"precision"}:
        advice = f"Launch with the same: accelerate launch --mixed_precision {saved['precision']}"
    elif names <= OF_TEXT:
        advice = "The documents of data.source, or the settings by which data reads them, are not those that this run "
        advice += "began with: put them back, or choose another training.output_dir"
    of_dropout = "training.micro_batch_size, by whose rows dropout is drawn,"
    refused = [(of_dropout if name == "rows_of_dropout" else name, *values) for name, *values in refused]
    raise CheckpointError(f"{path} is a checkpoint of another config: {shown(refused)}. {advice}")


def refuse_lost_run(output: Path):
    """Refuse a run without a checkpoint that is past its first save: starting again would lose its metrics."""
    reached = max((record["step"] for record in read_metrics(output / "metrics.jsonl")), default=-1)
    try:
        recipe = yaml.safe_load((output / "recipe.yaml").read_text())
        first = int(recipe["training"]["save_every"])
        # with background saving, the first checkpoint is certainly complete only when the second is due
        first *= 2 if recipe["training"].get("save_in_background") else 1
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        first = 0  # any logged step may have been saved
    if (output / "final").exists() or reached >= first:
        came = "a finished model in final/" if (output / "final").exists() else f"metrics until step {reached}"
        raise CheckpointError(
            f"{output} holds {came}, but no checkpoint to go on from: copy checkpoints/ back, choose another "
            "training.output_dir, or remove that folder to begin anew"
        )


def other_versions(made_by: dict) -> str:
    """List the versions of code and libraries that differ between a checkpoint and this machine, in words.
    An installed wheel does not know its commit."""
    here, there = {**versions(), "commit": commit()}, {**made_by.get("versions", {}), "commit": made_by.get("commit")}
    names = ("torch", "transformers", "modeling-looped", "commit")
    return ", ".join(
        f"{name} {there[name]} (here {here.get(name)})"
        for name in names
        if there.get(name) is not None and there[name] != here.get(name)
    )


def shown(differences: list[tuple[str, object, object]], limit: int = 8) -> str:
    listed = "; ".join(f"{name} was {old!r}, is {new!r}" for name, old, new in differences[:limit])
    return listed + (f"; and {len(differences) - limit} more" if len(differences) > limit else "")


def differing(old: dict, new: dict, prefix: str = "") -> list[tuple[str, object, object]]:
    """Return (dotted name, old value, new value) where two nested dicts differ; a missing key counts as None."""
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differing(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append((f"{prefix}{key}", before, after))
    return found
