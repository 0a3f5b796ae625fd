"""What makes a run the run it is: a checkpoint goes on only under settings that agree with those it was saved under.

Refused if different: the model, the tokens, their order and depths, the kind of optimizer. Rates, other settings of
optimizers and the schedule may be changed on purpose (`training.resume=changed`), and the length of the run at any
time; what was changed is printed. Everything else (logging, evaluation, saving, compiling, processes, micro batches)
changes no step beyond rounding, and is not compared.
"""

import dataclasses
import hashlib

import numpy as np

from .config import Recipe


NUM_SAMPLED_ROWS = 64
LENGTH = ("steps", "tokens", "epochs", "flops", "tokens_per_parameter", "count_embedding")
TRAINING = ("seed", "rows_per_step", "initialize_from", "freeze_all_but_gate", "taper_start", "taper_end", *LENGTH)


def identity(recipe: Recipe, model_config: dict, data) -> dict:
    """Everything that is compared, in sections; `data` is what `shards.prepare` returns."""
    return {
        "model": model_config,
        "data": {
            "sequence_length": recipe.data.sequence_length,
            "stride": recipe.data.stride or recipe.data.sequence_length,
            "document_masking": recipe.data.document_masking,
            "rows": len(data.train),
            "sampled_rows": sample_of_rows(data.train),
        },
        "tokenizer": data.manifest["tokenizer"]["sha256"],
        "depth": dataclasses.asdict(recipe.depth),
        "optimizer": dataclasses.asdict(recipe.optimizer),
        "schedule": dataclasses.asdict(recipe.schedule),
        "training": {name: getattr(recipe.training, name) for name in TRAINING},
    }


def sample_of_rows(rows) -> str:
    """A hash of rows spread over all: the same text gives it wherever the files lie."""
    digest = hashlib.sha256()
    for index in sorted(set(np.linspace(0, len(rows) - 1, NUM_SAMPLED_ROWS).astype(int).tolist())):
        digest.update(rows.tokens(index).tobytes())
    return digest.hexdigest()[:16]


def may_change(name: str, resume: bool | str) -> bool:
    """Whether a run may go on although this setting, of a dotted name, is another."""
    if name in {f"training.{key}" for key in LENGTH}:
        return True
    on_purpose = name.startswith(("optimizer.", "schedule.")) and name != "optimizer.name"
    return on_purpose and resume == "changed"
