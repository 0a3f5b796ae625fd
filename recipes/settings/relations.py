"""Refuse settings of a recipe that exclude each other, need each other, or have no effect with the others."""

import dataclasses
import re
from collections.abc import Iterator

from modeling_looped import SAMPLERS

from .sections import (
    LENGTHS,
    SECTIONS,
    DataConfig,
    DenseConfig,
    DepthConfig,
    OptimizerConfig,
    RecipeError,
    ScheduleConfig,
    TrainingConfig,
)


# tokenizers trained on the documents, with their least vocabulary: special tokens, and for bpe all single bytes
TRAINED_TOKENIZERS = {"bpe": 259, "word": 5, "symbols": 5}
MUON = [field.name for field in dataclasses.fields(OptimizerConfig) if field.name.startswith("muon_")]


# Settings without effect


def refuse_idle(recipe):
    """Refuse a setting that differs from its default although other settings leave it without effect."""
    for section, names, reason in idle(recipe):
        defaults = SECTIONS[section]()
        given = getattr(recipe, section)
        names = [name for name in names if getattr(given, name) != getattr(defaults, name)]
        if names:
            said = ", ".join(f"{section}.{name}={as_yaml(getattr(given, name))}" for name in names)
            back = " ".join(f"{section}.{name}={as_yaml(getattr(defaults, name))}" for name in names)
            raise RecipeError(
                f"{said} would have no effect with {reason}: leave it out where the recipe says it, or set the "
                f"default ({back})"
            )


def as_yaml(value) -> str:
    """Return a value as YAML, in one line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())


def idle(recipe) -> Iterator[tuple[str, list[str], str]]:
    """Yield (section, settings that have no effect, reason)."""
    if recipe.dense.path is None:
        yield "dense", ["layers", "core_init"], "no dense.path"
    yield from idle_data(recipe.data)
    yield from idle_depth(recipe.depth)
    yield from idle_optimizer(recipe.optimizer)
    decay = ["decay_steps", "decay_fraction"]
    if recipe.schedule.name == "constant":
        yield "schedule", [*decay, "final_ratio"], "schedule.name='constant'"
    elif recipe.schedule.name == "cosine":
        yield "schedule", decay, "schedule.name='cosine', which falls until the last step"
    lengths = [name for name in LENGTHS if getattr(recipe.training, name) is not None]
    if len(lengths) > 1:
        yield "training", lengths[1:], f"training.{lengths[0]}, which says how long the run is"
    if recipe.training.compile:
        yield "training", ["kernels"], "training.compile, which fuses the same"
    if recipe.training.tokens_per_parameter is None:
        yield "training", ["count_embedding"], "no training.tokens_per_parameter"
    if not recipe.logging.profile_steps:
        yield "logging", ["profile_from"], "no logging.profile_steps"
    if not recipe.logging.trackers:
        yield "logging", ["project"], "no logging.trackers"


def idle_data(data: DataConfig) -> Iterator[tuple[str, list[str], str]]:
    if data.source == "embedded":
        yield "data", ["source_config", "split"], "data.source='embedded'"
        if data.validation_source in (None, "embedded"):
            yield "data", ["text_field", "streaming"], "data.source='embedded'"
    if (data.validation_source or data.source) == "embedded":
        yield "data", ["validation_split"], "validation on embedded documents, which have one split"
    own = "validation_source" if data.validation_source is not None else "validation_split"
    if getattr(data, own) is not None:
        yield "data", ["validation_fraction"], f"data.{own}={getattr(data, own)!r}"
    if data.tokenizer in TRAINED_TOKENIZERS:
        reason = f"data.tokenizer={data.tokenizer!r}, which is trained here and has its own"
        yield "data", ["start_token"], reason
    else:
        names = ["tokenizer_vocab_size", "tokenizer_max_characters"]
        yield "data", names, f"data.tokenizer={data.tokenizer!r}, which is not trained here"
    if data.packing == "concatenate":
        yield "data", ["cropped"], "data.packing='concatenate'"
    if data.joined_by is not None:
        yield "data", ["document_tokens", "start_token"], "data.joined_by, which makes one text without documents"
    if data.token_field is not None:
        yield "data", ["text_field"], "data.token_field, which takes tokens as they are"
        if not data.document_masking:  # which needs to know where documents begin
            yield "data", ["document_tokens"], "data.token_field, which takes tokens as they are"
    if data.streaming:
        yield "data", ["num_proc"], "data.streaming=true, which one process reads"


def idle_depth(depth: DepthConfig) -> Iterator[tuple[str, list[str], str]]:
    if depth.sampler == "fixed":
        yield "depth", ["maximum", "per", "rows_per_draw", "split"], "depth.sampler='fixed', which draws nothing"
    if depth.curriculum is None:
        yield "depth", ["curriculum_target"], "no depth.curriculum"


def idle_optimizer(optimizer: OptimizerConfig) -> Iterator[tuple[str, list[str], str]]:
    muon = optimizer.name != "adamw"
    if not muon:
        yield "optimizer", MUON, "optimizer.name='adamw'"
    elif optimizer.muon_momentum_steps == 0:
        yield "optimizer", ["muon_momentum_start"], "optimizer.muon_momentum_steps=0"
    if optimizer.atan2 and not optimizer.update_clipping:
        yield "optimizer", ["eps"], "optimizer.atan2=true and no update_clipping"
    if not optimizer.update_clipping:
        yield "optimizer", ["clip_as_one"], "no optimizer.update_clipping"
    if optimizer.weight_decay == 0:
        yield "optimizer", ["decay_all"], "optimizer.weight_decay=0"
        if not muon or not (optimizer.muon_weight_decay or optimizer.muon_weight_decay_end):
            yield "optimizer", ["keep_decay_product"], "no weight decay"


# Settings that do not go together


def check_sampler(depth: DepthConfig):
    if depth.sampler not in SAMPLERS:
        raise RecipeError(f"depth.sampler must be one of {', '.join(SAMPLERS)}, got {depth.sampler!r}")


def check_relations(recipe):
    if recipe.dense.path is not None:
        check_dense(recipe, recipe.dense)
    check_data(recipe.data)
    check_joined(recipe.data)
    if recipe.training.model_file is None:  # else it is checked when that file, which may add one, is imported
        check_sampler(recipe.depth)
    check_depth(recipe.depth)
    check_curriculum(recipe.depth)
    check_optimizer(recipe.optimizer)
    check_training(recipe.training)
    check_kernels(recipe)
    loops = recipe.evaluation.loops
    if loops is not None and (not loops or min(loops) < 1 or len(set(loops)) < len(loops)):
        raise RecipeError(f"evaluation.loops must be different depths of at least 1, got {loops}")
    trackers = recipe.logging.trackers
    if len(set(trackers)) < len(trackers):
        raise RecipeError(f"logging.trackers must name each once, got {trackers}")
    schedule = recipe.schedule
    if schedule.name == "wsd" and (schedule.decay_steps is None) == (schedule.decay_fraction is None):
        raise RecipeError("schedule 'wsd' needs one of schedule.decay_steps and schedule.decay_fraction")


def check_dense(recipe, dense: DenseConfig):
    """Refuse settings that conflict with a dense model: it sets sizes and tokens, the recipe sets the loops."""
    if recipe.training.initialize_from is not None:
        raise RecipeError(
            f"dense.path={dense.path!r} and training.initialize_from="
            f"{recipe.training.initialize_from!r} both say where the weights come from: leave one out"
        )
    if recipe.data.tokenizer in TRAINED_TOKENIZERS:
        raise RecipeError(
            "the dense model knows the tokens of its own tokenizer, but data.tokenizer="
            f"{recipe.data.tokenizer!r} is trained here: set data.tokenizer to its folder or name, e.g. {dense.path}"
        )
    if recipe.model.get("preset") is not None:
        raise RecipeError(
            f"model.preset={recipe.model['preset']!r} has sizes and blocks of its own, and so has "
            f"dense.path={dense.path!r}: name the fields of the loop instead"
        )
    if recipe.model.get("num_loops") is None:
        raise RecipeError(f"dense.path={dense.path!r} needs model.num_loops, the depth to train for")


def check_optimizer(optimizer: OptimizerConfig):
    if len(optimizer.betas) != 2:
        raise RecipeError(f"optimizer.betas must be two numbers from 0 to below 1, got {optimizer.betas}")
    if optimizer.decay_product is not None and optimizer.weight_decay not in (0, decay_of_product(optimizer)):
        raise RecipeError("set optimizer.weight_decay or optimizer.decay_product, not both")


def decay_of_product(optimizer: OptimizerConfig) -> float:
    """Return the weight decay that `decay_product` stands for."""
    return optimizer.decay_product / optimizer.lr


def check_data(data: DataConfig):
    if data.document_masking and data.document_tokens == "none":
        raise RecipeError("data.document_masking needs a token between documents, but data.document_tokens is 'none'")
    if data.start_token is not None and data.document_tokens in ("end", "none"):
        raise RecipeError(
            f"data.start_token={data.start_token!r} would begin documents, but data.document_tokens is "
            f"{data.document_tokens!r}: leave it out, or write 'start'"
        )
    if data.packing == "best_fit" and data.stride is not None:
        raise RecipeError(f"data.stride={data.stride} is for packing 'concatenate'; best_fit has no stride")
    if data.stride is not None and data.stride > data.sequence_length:
        raise RecipeError(
            f"data.stride={data.stride} is longer than data.sequence_length={data.sequence_length}, so what "
            "lies between rows would never be read: make it shorter"
        )
    if data.expected_tokens is not None and data.expected_tokens < data.sequence_length:
        raise RecipeError(
            f"data.expected_tokens={data.expected_tokens:g} do not fill one row of data.sequence_length="
            f"{data.sequence_length}: correct one of them"
        )
    if data.token_field is not None:
        check_tokens(data)
    least = TRAINED_TOKENIZERS.get(data.tokenizer, 0)
    if data.tokenizer_vocab_size < least:
        raise RecipeError(
            f"data.tokenizer_vocab_size={data.tokenizer_vocab_size} is too small: special tokens and single "
            f"bytes alone are {least} with data.tokenizer={data.tokenizer!r}"
        )
    try:
        re.compile(data.document_start or "")
    except re.error as error:
        raise RecipeError(f"data.document_start={data.document_start!r} is no regular expression: {error}") from None


def check_tokens(data: DataConfig):
    """Refuse settings that do not go with a column of token ids (data that is tokenised already)."""
    if data.tokenizer in TRAINED_TOKENIZERS:
        raise RecipeError(
            f"data.token_field={data.token_field!r} holds tokens already, but data.tokenizer="
            f"{data.tokenizer!r} would be trained here: name the tokenizer that they were made with"
        )
    for name in ("joined_by", "document_start"):
        if (value := getattr(data, name)) is not None:
            raise RecipeError(
                f"data.{name}={value!r} joins texts, but data.token_field={data.token_field!r} holds tokens: "
                "leave one of them out"
            )


def check_joined(data: DataConfig):
    """Refuse settings that do not go with `joined_by`: one joined text has no documents to hold out, mask or pack."""
    if data.joined_by is None:
        return
    if not data.joined_by.isspace():
        raise RecipeError(f"data.joined_by must be white space, e.g. a blank line, got {data.joined_by!r}")
    if data.validation_source is None and data.validation_split is None:
        raise RecipeError(
            f"data.joined_by={data.joined_by!r} makes one text, of which no documents can be held out: name "
            "a data.validation_split or a data.validation_source"
        )
    others = {"packing": "concatenate", "document_masking": False, "document_start": None}
    for name, needed in others.items():
        if getattr(data, name) != needed:
            raise RecipeError(
                f"data.joined_by={data.joined_by!r} makes one text without documents, but "
                f"data.{name}={getattr(data, name)!r}: leave one of them out"
            )


def check_depth(depth: DepthConfig):
    if depth.sampler == "fixed" and depth.mean is not None:
        raise RecipeError(f"depth.mean={depth.mean} needs a sampler that draws depths; set model.num_loops instead")
    if depth.split == "prefix" and depth.backprop_loops is None:
        raise RecipeError("depth.split='prefix' draws the loops before the last backprop_loops: set backprop_loops")
    if (depth.per == "micro_batch") != (depth.rows_per_draw is not None):
        raise RecipeError(
            "depth.rows_per_draw says how many rows share a depth, for depth.per='micro_batch' and nothing "
            f"else; got per={depth.per!r} and rows_per_draw={depth.rows_per_draw}"
        )


def check_curriculum(depth: DepthConfig):
    if (depth.curriculum is None) != (depth.curriculum_steps is None):
        raise RecipeError(
            "depth.curriculum needs depth.curriculum_steps, and the other way round; got "
            f"curriculum={depth.curriculum!r} and curriculum_steps={depth.curriculum_steps}"
        )
    if depth.curriculum and depth.curriculum_target == "forward" and depth.backprop_loops is None:
        raise RecipeError(
            "depth.curriculum_target='forward' grows the loops without gradients, and there are none: set "
            "depth.backprop_loops, or the target backward"
        )


def check_training(training: TrainingConfig):
    if not 0 <= training.taper_start < training.taper_end <= 1:
        raise RecipeError(
            "training.taper_start and training.taper_end are parts of the run, 0 <= start < end <= 1, got "
            f"{training.taper_start} and {training.taper_end}"
        )
    name = training.push_to_hub
    if name is not None and not re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", name, re.ASCII):
        raise RecipeError(f"training.push_to_hub must be owner/name, got {name!r}")


def check_kernels(recipe):
    """Check shapes: a CUDA graph has one shape, and GPUs multiply in float8 only if sizes are multiples of 16."""
    length = recipe.data.sequence_length
    if recipe.training.float8 is not None and length % 16:
        raise RecipeError(
            f"training.float8={recipe.training.float8!r} needs rows of a multiple of 16 tokens, but "
            f"data.sequence_length={length}: change it, or leave float8 out"
        )
    if recipe.training.compile == "cuda_graphs" and recipe.depth.per != "batch":
        raise RecipeError(
            "training.compile='cuda_graphs' needs passes of one shape, but with depth.per="
            f"{recipe.depth.per!r} rows leave them one by one: set depth.per='batch' or training.compile=true"
        )


def check_schedule(schedule: ScheduleConfig, depth: DepthConfig, total_steps: int):
    """Refuse warm-up, decay and depths that grow, if they do not fit into a run of `total_steps` steps."""
    decay_steps = decay_steps_of(schedule, total_steps)
    if schedule.warmup_steps + decay_steps > total_steps:
        raise RecipeError(
            f"schedule.warmup_steps={schedule.warmup_steps} and {decay_steps} steps of decay do not fit into a run of "
            f"{total_steps} steps"
        )
    if depth.curriculum_steps is not None and depth.curriculum_steps > total_steps:
        raise RecipeError(
            f"depth.curriculum_steps={depth.curriculum_steps} is more than the {total_steps} steps of the run, which "
            "would never train at its full depth: lower it"
        )


def decay_steps_of(schedule: ScheduleConfig, total_steps: int) -> int:
    if schedule.name != "wsd":
        return 0
    return schedule.decay_steps if schedule.decay_steps is not None else round(schedule.decay_fraction * total_steps)
