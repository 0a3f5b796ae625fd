"""Checks of a run before its data are prepared; `looped plan` and a launch make the same checks."""

import math
import tempfile
from pathlib import Path

from looped_recipes.common.files import is_foreign, nearest_existing
from looped_recipes.common.flops import sizes
from modeling_looped import LoopedConfig, depths_of_step

from .model_fields import check_added_fields, check_model
from .operations import Operations, UnknownEpoch
from .recipe import Recipe, RecipeError
from .relations import TRAINED_TOKENIZERS, check_sampler, check_schedule
from .sections import SECTIONS


def check_run(recipe: Recipe) -> LoopedConfig:
    """Return the model's config; refuse a recipe of which it is known without data that it can not be run."""
    config = recipe.model_config()
    given = dict(recipe.model)
    if recipe.training.model_file is not None:
        given.pop("num_loop_parameters", None)  # a class of the user's own may have a set for each loop
    check_model(given, config)
    check_added_fields(recipe.model, recipe.model_class)
    check_sampler(recipe.depth)
    try:
        sizes(config)
    except Exception as error:  # torch and transformers raise different kinds
        raise RecipeError(f"section 'model' can not be built: {' '.join(str(error).split())}") from error
    if recipe.training.initialize_from is None or recipe.start_is_here:  # else the saved model may differ
        check_against_model(recipe, config)
        check_input(recipe, config)
    if recipe.start_is_here:
        check_positions(recipe, config)
    check_depths(recipe, config)
    check_keys(recipe, config)
    check_recomputed(recipe.training.gradient_checkpointing, config)
    steps = steps_of(recipe, config)
    if steps is not None:
        check_schedule(recipe.schedule, recipe.depth, steps)
        check_within(recipe, steps)
    check_output(Path(recipe.training.output_dir))
    start = recipe.training.initialize_from
    if start is not None and Path(start).resolve().is_relative_to(Path(recipe.training.output_dir, "final").resolve()):
        raise RecipeError(
            f"training.initialize_from={start!r} is what this run itself would write: choose another "
            "training.output_dir"
        )
    return config


def check_positions(recipe: Recipe, config: LoopedConfig):
    """Refuse rows longer than the positions of an existing model; a new model has as many as its rows are long."""
    length, positions = recipe.data.sequence_length, config.max_position_embeddings
    if length > positions:
        raise RecipeError(
            f"data.sequence_length={length} is more than the max_position_embeddings={positions} of {recipe.start}: "
            f"make rows shorter, or set model.max_position_embeddings={length}"
        )


def steps_of(recipe: Recipe, config: LoopedConfig) -> int | None:
    """Return the steps of the run; None if only the prepared data can tell."""
    try:
        return Operations(recipe, config).num_steps(recipe.data.expected_rows())
    except UnknownEpoch:
        return None


def note_on_windows(recipe: Recipe, config: LoopedConfig) -> str | None:
    """Return a note if no row of this run is longer than the window: the run then trains full attention."""
    length = recipe.data.sequence_length
    if not config.has_windows or config.sliding_window < length:
        return None
    return (
        f"model.sliding_window={config.sliding_window} has no effect on rows of data.sequence_length={length} tokens: "
        "lower it, unless the model is to be used on longer text"
    )


def check_within(recipe: Recipe, steps: int):
    """Refuse settings that name a step which the run does not reach."""
    logging = recipe.logging
    for name in ("stop_after", "export_every"):
        value = getattr(recipe.training, name)
        if value is not None and value > steps:
            raise RecipeError(
                f"training.{name}={value} would have no effect in a run of {steps} steps: lower it, or leave it out"
            )
    if logging.profile_steps and logging.profile_from >= steps:
        raise RecipeError(
            f"logging.profile_from={logging.profile_from} lies beyond a run of {steps} steps: nothing would be "
            "traced; lower it, or leave out logging.profile_steps"
        )


def check_against_model(recipe: Recipe, config: LoopedConfig):
    """Refuse settings outside of `model` that have no effect with this model, or do not fit it."""
    trains_all, all_weights = not recipe.training.freeze_all_but_gate, "all weights, not training.freeze_all_but_gate"
    tapers, taper = config.readout_norm == "taper", "model.readout_norm 'taper'"
    needs = [
        ("training.freeze_all_but_gate", config.exit_gate != "none", "a model with an exit gate (model.exit_gate)"),
        ("optimizer.head_lr", trains_all, all_weights),
        ("optimizer.embedding_lr", trains_all, all_weights),
        ("optimizer.name", trains_all, all_weights),  # it differs for matrices of blocks, which are frozen then
        ("optimizer.head_lr", not config.tie_word_embeddings, "a head that is not tied"),
        ("optimizer.correct_for_depth", config.residual_scaling == "factored", "model.residual_scaling 'factored'"),
        ("optimizer.muon_value_gates", config.value_embeddings, "model.value_embeddings"),
        ("training.taper_start", tapers, taper),
        ("training.taper_end", tapers, taper),
    ]
    for key, applies, needed in needs:
        section, name = key.split(".")
        if not applies and getattr(getattr(recipe, section), name) != getattr(SECTIONS[section](), name):
            raise RecipeError(f"{key} would have no effect: it needs {needed}; set that, or leave it out")
    data = recipe.data
    own_size = "vocab_size" in recipe.model or "preset" in recipe.model
    if own_size and data.tokenizer in TRAINED_TOKENIZERS and data.tokenizer_vocab_size > config.vocab_size:
        raise RecipeError(
            f"the tokenizer has up to data.tokenizer_vocab_size={data.tokenizer_vocab_size} entries, but the model's "
            f"vocab_size is {config.vocab_size}: raise model.vocab_size, or use a smaller data.tokenizer_vocab_size"
        )


def check_depths(recipe: Recipe, config: LoopedConfig):
    """Refuse depths that can not be drawn, and a maximum below their mean: most depths would be the maximum."""
    depth, mean = recipe.depth, recipe.mean_depth(config)
    if depth.maximum is not None and depth.maximum < mean:
        raise RecipeError(f"depth.maximum={depth.maximum} is below the mean depth {mean:g}: raise it, or leave it out")
    try:
        depths_of_step(
            depth.sampler,
            mean,
            seed=0,
            step=0,
            rows=[0],
            per=depth.per,
            backprop_loops=recipe.backprop_loops(config),
            split=depth.split,
            maximum=depth.maximum,
            rows_per_draw=depth.rows_per_draw,
        )
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"section 'depth': {error}") from error


def check_keys(recipe: Recipe, config: LoopedConfig):
    """Refuse a model that shares keys between loops if at some depth no loop with gradients computes keys and values:
    the backward pass of such a step would fail."""
    window, mean, depth = recipe.backprop_loops(config), recipe.mean_depth(config), recipe.depth
    deepest = (depth.maximum or math.inf) if recipe.depths_vary else mean
    if window is None or window >= deepest or not config.shares_keys:
        return
    most = math.inf if config.num_key_value_loops is None else config.num_key_value_loops
    last = config.key_value_interval * (most - 1)  # the last loop that computes keys and values
    if window < config.key_value_interval or deepest - window > last:
        raise RecipeError(
            f"with depth.backprop_loops={depth.backprop_loops!r} no loop with gradients computes keys and values in "
            f"some steps (model.key_value_interval={config.key_value_interval}, "
            f"model.num_key_value_loops={config.num_key_value_loops}): leave out backprop_loops, or share fewer"
        )


def check_input(recipe: Recipe, config: LoopedConfig):
    """Refuse a depth at which the embedding and the prelude would never get a gradient. A class of the user's own may
    pass the input on in another way, and a head that is the embedding trains it."""
    window, mean, training = recipe.backprop_loops(config), recipe.mean_depth(config), recipe.training
    if recipe.depths_vary or window is None or window >= mean or config.injection != "none":
        return
    trains_all = not training.freeze_all_but_gate and config.loop_loss != "gate" and training.model_file is None
    if trains_all and (config.num_prelude_layers or not config.tie_word_embeddings):
        raise RecipeError(
            f"with depth.backprop_loops={recipe.depth.backprop_loops!r} of {mean:g} loops and model.injection='none' "
            "the embedding and the prelude would get no gradient in any step, as their output enters before the first "
            "loop alone: choose a model.injection, or leave out backprop_loops"
        )


def check_recomputed(checkpointing: bool | str, config: LoopedConfig):
    if checkpointing == "loops" and config.shares_keys:
        raise RecipeError(
            "training.gradient_checkpointing='loops' computes a loop again by itself, but here loops read keys of "
            f"others (model.key_value_interval={config.key_value_interval}, model.num_key_value_loops="
            f"{config.num_key_value_loops}): set it to true"
        )


def check_output(folder: Path):
    """Refuse a folder of the run that can not be written, or where a recipe or a final/ is not that of a run."""
    own = folder / "recipe.yaml"
    try:
        existing = nearest_existing(folder.absolute())
        with tempfile.TemporaryDirectory(prefix=".looped-", dir=existing) as trial:
            Path(trial, *folder.absolute().relative_to(existing).parts).mkdir(parents=True, exist_ok=True)
        final = folder / "final"
        if is_foreign(final):
            raise RecipeError(
                f"{final} exists and is not a saved model: it would not be overwritten; choose another "
                "training.output_dir"
            )
        if own.exists() and not any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "final")):
            raise RecipeError(
                f"{own} exists, but no run beside it: the resolved recipe would be written over it; choose another "
                "training.output_dir, or move that file elsewhere"
            )
    except OSError as error:
        raise RecipeError(
            f"training.output_dir={str(folder)!r} can not be written ({error.strerror or error}): choose another"
        ) from error
