"""What a recipe may say: one dataclass per section, filled from YAML and `key=value` arguments.

A recipe holds only what differs from the defaults below, may start from another with `extends: other.yaml`, and an
unknown key is an error that names the nearest known one. `model` holds a preset name and `LoopedConfig` fields.
"""

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from modeling_looped import LoopedConfig

from .flops import Sizes


class RecipeError(ValueError):
    """A recipe that can not be run as it is written."""


@dataclass
class DataConfig:
    source: str = "embedded"  # embedded | a `datasets` name | a file, folder or glob of txt, jsonl or parquet
    source_config: str | None = None  # configuration of a `datasets` name, e.g. sample-10BT
    split: str = "train"
    text_field: str = "text"
    document_start: str | None = None  # rows are lines, joined to documents that begin where this pattern matches
    joined_by: str | None = None  # rows that are not empty are one text, joined by this white space, no bos or eos
    streaming: bool = False
    max_documents: int | None = None
    validation_source: str | None = None  # its own source; otherwise documents are held out of `source`
    validation_split: str | None = None
    validation_fraction: float = 0.01
    tokenizer: str = "bpe"  # bpe | word: trained on the training documents; otherwise a name or folder
    tokenizer_vocab_size: int = 32768
    tokenizer_max_characters: int | None = None  # how much text a tokenizer is trained on; None is 2 billion
    # special tokens that a document has; one where the tokenizer has no bos of its own. start: it ends the one before
    document_tokens: Literal["both", "start", "end", "none"] = "both"
    start_token: str | None = None  # of a tokenizer that is brought along: what begins documents instead of its bos
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    cropped: Literal["keep", "drop"] = (
        "keep"  # best_fit: what is cut off comes back as a document, or is lost (Parcae)
    )
    sequence_length: int = 1024
    stride: int | None = None  # concatenate: distance between starts of rows; None is sequence_length
    document_masking: bool = False  # position_ids restart at every document, so attention stays inside it
    expected_tokens: float | None = None  # for training: what a plan in epochs reckons with, nothing else
    num_proc: int | None = None
    cache_dir: str = ".shards"


@dataclass
class DepthConfig:
    sampler: Literal["fixed", "poisson", "poisson_lognormal", "uniform"] = "fixed"
    mean: float | None = None  # None is the model's num_loops
    maximum: int | None = None
    per: Literal["batch", "micro_batch", "sequence"] = "batch"  # batch: one draw for all rows of the step
    # micro_batch: so many neighbouring rows of the step share a draw; training.micro_batch_size does not change it
    rows_per_draw: int | None = None
    # gradients through the last so many loops; "half" is half the mean depth, rounded up; None is all
    backprop_loops: int | Literal["half"] | None = None
    split: Literal["total", "prefix"] = (
        "total"  # total: T is drawn, then split (Parcae); prefix: n drawn, T = n + k (Huginn)
    )
    # the mean grows over the first so many steps: loops before those with gradients (forward), these, or both
    curriculum: Literal["linear", "sqrt"] | None = None
    curriculum_steps: int | None = None
    curriculum_target: Literal["forward", "backward", "both"] = "forward"


@dataclass
class OptimizerConfig:
    # muon, normuon (Parcae): for matrices of the blocks; the rest stays with AdamW
    name: Literal["adamw", "muon", "normuon"] = "adamw"
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    update_clipping: bool = False  # of AdamW, see stable_adamw.py
    atan2: bool = False  # AdamW without epsilon
    decay_all: bool = True  # false: no decay of AdamW for norms, biases and other vectors, nor for Parcae's B and C
    keep_decay_product: bool = False  # lr * weight_decay stays what it is at the base rate
    decay_product: float | None = None  # sets weight_decay to this over lr
    correct_for_depth: bool = True  # residual_scaling "factored": rate and eps of the blocks times (L / L_ref)^(-1/2)
    embedding_lr: float | None = None
    head_lr: float | None = None
    reference_width: int | None = None  # embedding and head rates times sqrt(reference_width / hidden_size)
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_momentum_start: float = 0.85
    muon_momentum_steps: int = 300
    muon_weight_decay: float = 0.0
    muon_weight_decay_end: float | None = None  # where it would be, linearly, after the last step; None stays constant
    muon_value_gates: bool = False  # gates of value embeddings too
    clip: float | None = 1.0


@dataclass
class ScheduleConfig:
    name: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None  # wsd
    decay_fraction: float | None = None  # wsd, of all steps
    final_ratio: float = 0.0  # last rate over the base rate: cosine, wsd


@dataclass
class TrainingConfig:
    output_dir: str = "runs/default"
    seed: int = 0
    # length of the run: the first that is set
    steps: int | None = None
    tokens: float | None = None
    epochs: float | None = None
    flops: float | None = None  # training operations, see flops.py
    tokens_per_parameter: float | None = None
    count_embedding: bool = True  # among the parameters of tokens_per_parameter
    rows_per_step: int = 64  # sequences per optimizer step, over all processes
    micro_batch_size: int = 8  # sequences per process and forward pass
    compile: bool = False  # compile the blocks, once for all loops
    gradient_checkpointing: bool = False
    initialize_from: str | None = None  # a saved model to start from
    freeze_all_but_gate: bool = False  # Ouro's stage II
    taper_start: float = 0.05  # model.readout_norm taper: where the norm begins to go, as a part of all steps,
    taper_end: float = 1.0  # and where it is gone
    save_every: int = 500
    keep_last: int = 2
    keep_best: bool = True
    # continue from the newest whole checkpoint in output_dir; changed: also with other rates and another schedule
    resume: bool | Literal["changed"] = True
    stop_after: int | None = None  # leave off after this step, as if interrupted: the schedule stays that of the run
    max_loss: float | None = None  # a run that ends above this validation loss counts as diverged: sweeps leave it out
    push_to_hub: str | None = None  # owner/name: what is in final/ goes there at the end


@dataclass
class EvaluationConfig:
    every: int = 250
    rows: int = 128
    loops: list[int] | None = None  # None: 1..num_loops, one pass for all


@dataclass
class LoggingConfig:
    every: int = 10
    monitor_every: int = 50  # norms of states and of blocks' gradients, state change, spectral radius
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    project: str = "looped"


SECTIONS = {
    "data": DataConfig,
    "depth": DepthConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "training": TrainingConfig,
    "evaluation": EvaluationConfig,
    "logging": LoggingConfig,
}


@dataclass
class Recipe:
    model: dict = field(default_factory=dict)  # preset, and LoopedConfig fields
    data: DataConfig = field(default_factory=DataConfig)
    depth: DepthConfig = field(default_factory=DepthConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def model_config(self, **overrides) -> LoopedConfig:
        """The model's config; `overrides` hold what only the tokenizer knows (vocab_size and special tokens)."""
        fields = {**self.model, **overrides}
        preset = fields.pop("preset", None)
        try:
            config = LoopedConfig(**fields) if preset is None else LoopedConfig.from_preset(preset, **fields)
        except ValueError as error:
            raise RecipeError(f"section 'model': {error}") from error
        if config.state_init_std is not None and config.state_init != "normal":
            raise RecipeError(
                f"section 'model': state_init_std={config.state_init_std} is used by state_init='normal' only, got "
                f"{config.state_init!r}"
            )
        return config

    def mean_depth(self, config: LoopedConfig) -> float:
        return config.trained_depth if self.depth.mean is None else self.depth.mean

    @property
    def depths_vary(self) -> bool:
        return self.depth.sampler != "fixed" or self.depth.curriculum is not None

    def backprop_loops(self, config: LoopedConfig) -> int | None:
        if self.depth.backprop_loops == "half":
            return math.ceil(self.mean_depth(config) / 2)
        return self.depth.backprop_loops

    def num_steps(self, sizes: Sizes, flops_per_token: float, num_rows: int | None = None) -> int:
        training = self.training
        tokens_per_step = training.rows_per_step * self.data.sequence_length
        if training.steps is not None:
            return training.steps
        if training.tokens is not None:
            return max(1, math.ceil(training.tokens / tokens_per_step))
        if training.flops is not None:
            return max(1, round(training.flops / flops_per_token / tokens_per_step))
        if training.tokens_per_parameter is not None:
            parameters = sizes.total if training.count_embedding else sizes.without_embedding
            # whole steps within the budget, as the public code of the Fully Looped Transformer counts
            return max(1, int(training.tokens_per_parameter * parameters // tokens_per_step))
        if training.epochs is not None:
            if num_rows is None:
                raise RecipeError("how long an epoch is, prepared data or data.expected_tokens must tell")
            return max(1, math.ceil(training.epochs * num_rows / training.rows_per_step))
        raise RecipeError("say how long to train: training.steps, tokens, flops, tokens_per_parameter or epochs")

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def save(self, path: str | Path):
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))


def load_recipe(path: str | Path, overrides: typing.Sequence[str] = ()) -> Recipe:
    """A recipe from YAML, with `section.key=value` overrides (values are YAML too)."""
    raw = _read(Path(path))
    for override in overrides:
        key, equals, value = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot:
            raise RecipeError(f"{override!r} is not an override: write section.key=value, e.g. training.steps=100")
        raw.setdefault(section, {})
        if not isinstance(raw[section], dict):
            raise RecipeError(f"section {section!r} must hold key: value pairs, got {raw[section]!r}")
        try:
            raw[section][name] = as_number(yaml.safe_load(value))
        except yaml.YAMLError:
            raise RecipeError(f"{override!r} is not an override: {value!r} is not YAML") from None
    return recipe_from_dict(raw, str(path))


def recipe_from_dict(raw: dict, where: str = "the recipe") -> Recipe:
    _refuse_unknown(raw, ["model", *SECTIONS], where, "section")
    recipe = Recipe(model=_model_fields(raw.get("model") or {}, where))
    for name, section in SECTIONS.items():
        values = raw.get(name) or {}
        if not isinstance(values, dict):
            raise RecipeError(f"{where}: section {name!r} must hold key: value pairs, got {values!r}")
        hints = typing.get_type_hints(section)
        _refuse_unknown(values, list(hints), where, f"key in {name}")
        checked = {key: _checked(value, hints[key], f"{name}.{key}", where) for key, value in values.items()}
        setattr(recipe, name, section(**checked))
    _check_ranges(recipe, where)
    _check_relations(recipe, where)
    return recipe


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict:
    if not path.is_file():
        raise RecipeError(f"there is no recipe {path}")
    if path.resolve() in seen:
        raise RecipeError(f"{path} extends itself")
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} must hold sections (model, data, ...), got {raw!r}")
    base = raw.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise RecipeError(f"{path}: extends must name a recipe, got {base!r}")
    merged = _read(path.parent / base, (*seen, path.resolve())) if base else {}
    for name, section in raw.items():
        if isinstance(section, dict) and isinstance(merged.get(name), dict):
            merged[name] = {**merged[name], **section}
        else:
            merged[name] = section
    return merged


def _model_fields(fields: dict, where: str) -> dict:
    if not isinstance(fields, dict):
        raise RecipeError(f"{where}: section 'model' must hold key: value pairs, got {fields!r}")
    known = [f.name for f in dataclasses.fields(LoopedConfig) if f.name != "trained_num_loops"] + ["preset"]
    _refuse_unknown(fields, known, where, "key in model")
    return {key: as_number(value) for key, value in fields.items()}


def _refuse_unknown(given: dict, known: list[str], where: str, what: str):
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            advice = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise RecipeError(f"{where}: unknown {what}: {key!r}; {advice}")


def as_number(value):
    """YAML reads 3e-4 as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _checked(value, hint, key: str, where: str):
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in options:
        origin = typing.get_origin(option)
        if option is type(None) and value is None:
            return None
        if origin is Literal and value in typing.get_args(option):
            return value
        if option is float and not isinstance(value, bool) and isinstance(as_number(value), (int, float)):
            return float(as_number(value))
        if option is int and not isinstance(value, bool):
            number = as_number(value)
            if isinstance(number, int) or (isinstance(number, float) and number.is_integer()):
                return int(number)
        if origin is list and isinstance(value, list):
            (item,) = typing.get_args(option)
            return [_checked(element, item, key, where) for element in value]
        if option in (str, bool) and isinstance(value, option):
            return value
    wanted = " or ".join(
        f"one of {', '.join(map(str, typing.get_args(o)))}"
        if typing.get_origin(o) is Literal
        else getattr(o, "__name__", str(o))
        for o in options
        if o is not type(None)
    )
    raise RecipeError(f"{where}: {key} must be {wanted}, got {value!r}")


AT_LEAST = {
    "data": {"sequence_length": 2, "stride": 1, "max_documents": 1, "tokenizer_vocab_size": 1, "num_proc": 1},
    "depth": {"maximum": 1, "backprop_loops": 1, "rows_per_draw": 1, "curriculum_steps": 1},
    "optimizer": {"eps": 0, "weight_decay": 0, "reference_width": 1, "muon_momentum_steps": 0},
    "schedule": {"warmup_steps": 0, "decay_steps": 0, "decay_fraction": 0, "final_ratio": 0},
    "training": {
        "steps": 1,
        "rows_per_step": 1,
        "micro_batch_size": 1,
        "save_every": 1,
        "keep_last": 1,
        "stop_after": 1,
    },
    "evaluation": {"every": 1, "rows": 1},
    "logging": {"every": 1, "monitor_every": 1},
}
POSITIVE = {
    "depth": ("mean",),
    "optimizer": ("lr", "muon_lr", "embedding_lr", "head_lr", "clip"),
    "training": ("tokens", "epochs", "flops", "tokens_per_parameter", "max_loss"),
}


def _check_ranges(recipe: Recipe, where: str):
    for section, limits in AT_LEAST.items():
        for name, limit in limits.items():
            value = getattr(getattr(recipe, section), name)
            if isinstance(value, (int, float)) and not limit <= value < math.inf:
                raise RecipeError(f"{where}: {section}.{name} must be at least {limit}, got {value}")
    for section, names in POSITIVE.items():
        for name in names:
            value = getattr(getattr(recipe, section), name)
            if value is not None and not 0 < value < math.inf:
                raise RecipeError(f"{where}: {section}.{name} must be above 0 and finite, got {value}")
    betas, loops = recipe.optimizer.betas, recipe.evaluation.loops
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise RecipeError(f"{where}: optimizer.betas must be two numbers from 0 to below 1, got {betas}")
    if loops is not None and (not loops or min(loops) < 1):
        raise RecipeError(f"{where}: evaluation.loops must be depths of at least 1, got {loops}")


def _check_relations(recipe: Recipe, where: str):
    data, depth, optimizer = recipe.data, recipe.depth, recipe.optimizer
    if optimizer.decay_product is not None:
        decay = optimizer.decay_product / optimizer.lr
        if optimizer.weight_decay not in (0, decay):
            raise RecipeError(f"{where}: set optimizer.weight_decay or optimizer.decay_product, not both")
        optimizer.weight_decay = decay
    if not 0 < data.validation_fraction < 1:
        raise RecipeError(
            f"{where}: data.validation_fraction must lie between 0 and 1, got {data.validation_fraction}"
        )
    if data.document_masking and data.document_tokens == "none":
        raise RecipeError(
            f"{where}: data.document_masking needs a token between documents, but data.document_tokens is 'none'"
        )
    if data.start_token is not None and data.document_tokens in ("end", "none"):
        raise RecipeError(
            f"{where}: data.start_token={data.start_token!r} would begin documents, but data.document_tokens is "
            f"{data.document_tokens!r}: leave it out, or write 'start'"
        )
    if data.packing == "best_fit" and data.stride is not None:
        raise RecipeError(f"{where}: data.stride={data.stride} is for packing 'concatenate'; best_fit has no stride")
    _check_joined(data, where)
    if depth.sampler == "fixed" and depth.mean is not None:
        raise RecipeError(
            f"{where}: depth.mean={depth.mean} needs a sampler that draws depths; set model.num_loops instead"
        )
    if depth.split == "prefix" and depth.backprop_loops is None:
        raise RecipeError(
            f"{where}: depth.split='prefix' draws the loops before the last backprop_loops: set backprop_loops"
        )
    _check_draws(depth, where)
    if not 0 <= recipe.training.taper_start < recipe.training.taper_end <= 1:
        raise RecipeError(
            f"{where}: training.taper_start and training.taper_end are parts of the run, 0 <= start < end <= 1, got "
            f"{recipe.training.taper_start} and {recipe.training.taper_end}"
        )
    if recipe.schedule.name == "wsd" and (recipe.schedule.decay_steps is None) == (
        recipe.schedule.decay_fraction is None
    ):
        raise RecipeError(f"{where}: schedule 'wsd' needs one of schedule.decay_steps and schedule.decay_fraction")


def _check_draws(depth: DepthConfig, where: str):
    if (depth.per == "micro_batch") != (depth.rows_per_draw is not None):
        raise RecipeError(
            f"{where}: depth.rows_per_draw says how many rows share a depth, for depth.per='micro_batch' and nothing "
            f"else; got per={depth.per!r} and rows_per_draw={depth.rows_per_draw}"
        )
    if (depth.curriculum is None) != (depth.curriculum_steps is None):
        raise RecipeError(
            f"{where}: depth.curriculum needs depth.curriculum_steps, and the other way round; got "
            f"curriculum={depth.curriculum!r} and curriculum_steps={depth.curriculum_steps}"
        )
    if depth.curriculum and depth.curriculum_target == "forward" and depth.backprop_loops is None:
        raise RecipeError(
            f"{where}: depth.curriculum_target='forward' grows the loops without gradients, and there are none: set "
            "depth.backprop_loops, or the target backward"
        )


def _check_joined(data: DataConfig, where: str):
    """One text has no documents to hold out, to mask, to pack, or to begin anew."""
    if data.joined_by is None:
        return
    if not data.joined_by.isspace():
        raise RecipeError(f"{where}: data.joined_by must be white space, e.g. a blank line, got {data.joined_by!r}")
    if data.validation_source is None and data.validation_split is None:
        raise RecipeError(
            f"{where}: data.joined_by={data.joined_by!r} makes one text, of which no documents can be held out: name "
            "a data.validation_split or a data.validation_source"
        )
    others = {"packing": "concatenate", "document_masking": False, "document_start": None}
    for name, needed in others.items():
        if getattr(data, name) != needed:
            raise RecipeError(
                f"{where}: data.joined_by={data.joined_by!r} makes one text without documents, but "
                f"data.{name}={getattr(data, name)!r}: leave one of them out"
            )
