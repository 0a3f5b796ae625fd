"""The range of every number in a recipe, and checks of its texts.

Upper limits are far beyond any real training: they stop a typing error from filling the memory, or from hanging as if
a run had begun.
"""

import dataclasses
import math
from typing import NamedTuple

from .sections import RecipeError
from .yaml_files import shortly


MOST_STEPS, MOST_DEPTH, MOST_TOKENS = 10**12, 4096, 1e18


class Range(NamedTuple):
    """The numbers from `low` to `high`. above: `low` itself is outside. words: the error for a number outside; by
    default it is made from the limits."""

    low: float
    high: float
    above: bool = False
    words: str | None = None

    def problem(self, value: float) -> str | None:
        """Return what is wrong with a number outside the range; None for one inside. NaN is outside."""
        is_above_low = self.low < value if self.above else self.low <= value
        if is_above_low and value <= self.high:
            return None
        if self.words is not None:
            return self.words
        if is_above_low and value < math.inf:
            return f"must be at most {self.high:g}"
        return f"must be above {self.low} and finite" if self.above else f"must be at least {self.low}"


STEPS = Range(1, MOST_STEPS)
RATE = Range(0, 1e30, above=True)
PART = Range(0, 1, words="must lie between 0 and 1")
BELOW_ONE = Range(0, math.nextafter(1, 0), words="must lie between 0 and 1, and be below 1")
DECAY = Range(0, 1000)

RANGES: dict[str, dict[str, Range]] = {
    "dense": {"layers": Range(0, 4095)},
    "data": {
        "max_documents": Range(1, 10**12),
        "validation_fraction": Range(0, math.nextafter(1, 0), True, "must lie between 0 and 1"),
        "tokenizer_vocab_size": Range(1, 2**24),
        "tokenizer_max_characters": Range(1, 10**15),
        "sequence_length": Range(2, 2**24),
        "stride": Range(1, 2**24),
        "expected_tokens": Range(0, MOST_TOKENS, above=True),
        "num_proc": Range(1, 1024),
    },
    "depth": {
        "mean": Range(1, MOST_DEPTH),
        "maximum": Range(1, 2**16),
        "rows_per_draw": Range(1, 2**20),
        "backprop_loops": Range(1, MOST_DEPTH),
        "curriculum_steps": STEPS,
    },
    "optimizer": {
        "lr": RATE,
        "betas": BELOW_ONE._replace(words="must be two numbers from 0 to below 1"),
        "eps": Range(0, 1000, above=True),
        "weight_decay": DECAY,
        "decay_product": PART,
        "embedding_lr": RATE,
        "head_lr": RATE,
        "reference_width": Range(1, 2**24),
        "muon_lr": RATE,
        "muon_momentum": BELOW_ONE,
        "muon_momentum_start": BELOW_ONE,
        "muon_momentum_steps": Range(0, MOST_STEPS),
        "muon_weight_decay": DECAY,
        "muon_weight_decay_end": DECAY,
        "clip": RATE,
    },
    "schedule": {
        "warmup_steps": Range(0, MOST_STEPS),
        "decay_steps": STEPS,
        "decay_fraction": Range(0, 1, True, "must lie above 0, and be at most 1"),
        "final_ratio": PART,
    },
    "training": {
        "seed": Range(0, 2**32 - 1),
        "steps": STEPS,
        "tokens": Range(0, MOST_TOKENS, above=True),
        "epochs": Range(0, 1e6, above=True),
        "flops": Range(0, 1e32, above=True),
        "tokens_per_parameter": Range(0, 1e9, above=True),
        "rows_per_step": Range(1, 2**20),
        "micro_batch_size": Range(1, 2**20),
        "taper_start": Range(-100, 100),  # relations.py: 0 <= start < end <= 1
        "taper_end": Range(-100, 100),
        "save_every": STEPS,
        "keep_last": Range(1, 10**6),
        "export_every": STEPS,
        "stop_after": STEPS,
        "skip_nonfinite_steps": Range(0, 1e9),
        "timeout_minutes": Range(0, 1e6, above=True),
        "max_loss": Range(0, 1e6, above=True),
    },
    # relations.py: loops are at least 1
    "evaluation": {"every": STEPS, "rows": Range(1, 2**24), "loops": Range(-MOST_DEPTH, MOST_DEPTH)},
    "logging": {
        "every": STEPS,
        "monitor_every": STEPS,
        "profile_steps": Range(0, 1000),
        "profile_from": Range(0, MOST_STEPS),
    },
}
# texts that may hold line breaks or be white space: patterns and separators, not names or paths
FREE_TEXTS = ("joined_by", "document_start", "start_token")


def check_ranges(section: str, settings, where: str):
    """Check the numbers and texts of one section."""
    for field in dataclasses.fields(settings):
        name, value = field.name, getattr(settings, field.name)
        for item in value if isinstance(value, list) else [value]:
            problem = None
            if isinstance(item, str):
                problem = text_problem(item, name in FREE_TEXTS)
            elif isinstance(item, (int, float)) and not isinstance(item, bool):
                problem = RANGES[section][name].problem(item)
            if problem:
                raise RecipeError(f"{where}: {section}.{name} {problem}, got {shortly(value)}")


def text_problem(text: str, free: bool = False) -> str | None:
    if not text or (not free and not text.strip()):
        return "must not be empty: leave it out, or write null for none"
    if not free and (not text.isprintable() or len(text) > 4096):
        return "must be one line of printable characters"
    return None
