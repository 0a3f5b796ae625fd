"""Checks of a launch against the recipe, and the initial model of a run."""

from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import GenerationConfig

from looped_recipes.common.checksums import check_folder
from looped_recipes.data.sources import looks_like_path
from looped_recipes.data.tokenizers import TRAINERS, num_ids, read_tokenizer, start_id
from looped_recipes.engine.distributed import check_split, check_units
from looped_recipes.engine.kernels import check_device
from looped_recipes.engine.tensor_parallel import data_rank
from looped_recipes.settings.recipe import Recipe, RecipeError
from looped_recipes.settings.run_checks import check_positions
from modeling_looped import LoopedConfig, LoopedForCausalLM


def check_launch(recipe: Recipe, accelerator: Accelerator):
    """Run the checks that do not need prepared data."""
    training, world = recipe.training, data_rank(accelerator).world
    if training.rows_per_step % world:
        raise RecipeError(
            f"training.rows_per_step={training.rows_per_step} is not a multiple of the {world} processes that read "
            "rows; change one"
        )
    check_precision(accelerator)
    check_device(training, accelerator.device.type)
    check_units(accelerator, recipe)
    check_split(accelerator, recipe)
    check_trackers(recipe, accelerator)
    check_start(recipe)


def precision_of(accelerator: Accelerator) -> str | None:
    """Return a sentence on the precision of a GPU's matrix products; None on a CPU."""
    if accelerator.device.type == "cpu":
        return None
    if accelerator.mixed_precision != "no":
        return f"products are computed in {accelerator.mixed_precision}"
    return (
        "products are computed in fp32, as no launch asked for another precision; in bf16 a GPU is several times as "
        "fast: accelerate launch --mixed_precision bf16, or ACCELERATE_MIXED_PRECISION=bf16 before the command"
    )


def check_precision(accelerator: Accelerator):
    """Refuse fp16 on a CPU, which accelerate silently ignores, and fp8, which would reach no layer under FSDP2."""
    if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
        raise RecipeError(
            f"mixed_precision {accelerator.mixed_precision!r} is not supported: choose bf16; with training.float8 the "
            "blocks compute their products in float8"
        )
    if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
        raise RecipeError(
            f"mixed_precision 'fp16' would have no effect on {accelerator.device.type!r}: choose bf16, or no for fp32"
        )


def check_trackers(recipe: Recipe, accelerator: Accelerator):
    """Refuse trackers that are not installed: accelerate silently skips them."""
    found = {str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with}
    missing = [name for name in recipe.logging.trackers if name not in found]
    if missing:
        raise RecipeError(
            f"logging.trackers={recipe.logging.trackers}: {', '.join(missing)} is not installed; install it "
            f"(pip install {' '.join(missing)}), or leave it out"
        )


def check_start(recipe: Recipe):
    dense, start = recipe.dense.path, recipe.training.initialize_from
    if dense is not None and not is_model(dense):
        raise RecipeError(
            f"dense.path={dense!r} holds no model of transformers (looked from {Path.cwd()}): make that one "
            "first, or name another"
        )
    if start is not None and not is_model(start):
        raise RecipeError(
            f"training.initialize_from={start!r} holds no saved model (looked from {Path.cwd()}): "
            f"{what_to_name(start)}"
        )


def what_to_name(start: str) -> str:
    if is_model(f"{start}/final"):
        return f"name {start}/final"
    if (Path(start) / "adapter_config.json").is_file():
        return "it holds an adapter: merge that into its model, save the model, and name its folder"
    return "train that one first, or name another"


def is_model(name: str) -> bool:
    """Return whether a folder holds a saved model. Names on the Hub are accepted without a look-up."""
    return not looks_like_path(name) or (Path(name) / "config.json").is_file()


def build_model(recipe: Recipe, tokenizer) -> LoopedForCausalLM:
    start, eos, pad = start_id(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id
    if pad in (start, eos):  # the embedding of a token for padding is zero and is not trained
        pad = None
    special = {"bos_token_id": start, "eos_token_id": eos, "pad_token_id": pad}
    fields = {**special, "max_position_embeddings": max(recipe.data.sequence_length, trained_positions(recipe))}
    if recipe.dense.path is not None:
        model = looped_dense_model(recipe, tokenizer)
    elif recipe.training.initialize_from is not None:
        model = saved_model(recipe, tokenizer)
    else:
        if "vocab_size" not in recipe.model and "preset" not in recipe.model:
            fields["vocab_size"] = vocab_size_for(tokenizer)
        model = recipe.model_class(recipe.model_config(**fields))
        if pad is None:
            model.generation_config.pad_token_id = eos
    if recipe.start is not None:
        check_positions(recipe, model.config)
        table = model.get_input_embeddings()
        if getattr(table, "padding_idx", None) in (start, eos):  # as it lies in documents, it is to learn here too
            table.padding_idx = None
        stop_at(eos, model.generation_config)
    size = num_ids(tokenizer)
    if size > model.config.vocab_size:
        smaller = "data.tokenizer_vocab_size" if recipe.data.tokenizer in TRAINERS else "data.tokenizer"
        raise RecipeError(
            f"the tokenizer has ids of {size} entries, but the model's vocab_size is {model.config.vocab_size}: raise "
            f"model.vocab_size, or use a smaller {smaller}"
        )
    if recipe.training.freeze_all_but_gate:
        if model.exit_gate is None:
            raise RecipeError("training.freeze_all_but_gate needs a model with an exit gate: set model.exit_gate")
        model.requires_grad_(False)
        model.exit_gate.requires_grad_(True)
    return model


def vocab_size_for(tokenizer) -> int:
    """Return the least multiple of 64 that has room for all ids."""
    return -(-num_ids(tokenizer) // 64) * 64


def note_on_vocabulary(recipe: Recipe, config: LoopedConfig, tokenizer) -> str | None:
    """Return a note if a new model has far more tokens than the tokenizer: a preset says its number itself."""
    fits = vocab_size_for(tokenizer)
    if recipe.start is not None or config.vocab_size < 2 * fits:
        return None
    return (
        f"model.vocab_size={config.vocab_size} is far above the {num_ids(tokenizer)} entries of the tokenizer, and "
        f"every step computes all of them: model.vocab_size={fits} would do"
    )


def stop_at(token: int, config: GenerationConfig):
    """Let generation stop at the token that ends documents, beside those at which a model that is there stops."""
    stops = [] if config.eos_token_id is None else config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    if token not in stops:
        config.eos_token_id = [*stops, token]


def saved_model(recipe: Recipe, tokenizer) -> LoopedForCausalLM:
    """Load the model of training.initialize_from, with weights in fp32 like every model that is trained here. No
    weight may be missing, except those of a new exit gate."""
    start = recipe.training.initialize_from
    check_folder(start)
    check_tokens_of(start, tokenizer)
    changes, model_class = recipe.changes_to_start(), recipe.model_class
    has_new_gate = "exit_gate" in changes
    if recipe.added_fields:
        changes = {"config": recipe.with_added_fields(LoopedConfig.from_pretrained(start, **changes))}
    changes["dtype"] = torch.float32  # by default it is that of the file
    if not has_new_gate:
        return model_class.from_pretrained(start, **changes)
    model, info = model_class.from_pretrained(start, output_loading_info=True, **changes)
    missing = {name for name in info["missing_keys"] if not name.startswith("exit_gate.")}
    model_class.refuse_misfits(start, model, {**info, "missing_keys": missing})
    return model


def check_tokens_of(start: str, tokenizer):
    """Refuse data whose tokenizer differs from that of the saved model; without a saved tokenizer any is accepted."""
    own = vocabulary_beside(start)
    if own is not None and tokenizer.get_vocab() != own:
        raise RecipeError(
            f"the model of training.initialize_from={start!r} knows the tokens of its own tokenizer, and the data "
            f"have others: set data.tokenizer={start}"
        )


def vocabulary_beside(model: str) -> dict[str, int] | None:
    """Return the vocabulary of the tokenizer that lies beside a model; None if there is none."""
    if not (Path(model) / "tokenizer_config.json").is_file():
        return None
    try:
        return read_tokenizer(model).get_vocab()
    except Exception as error:  # of several kinds
        said = " ".join(str(error).split())
        raise RecipeError(
            f"can not compare the tokens of the data with those of {model}, as the tokenizer there does not open: "
            f"{said}; mend it, or move its files out of that folder"
        ) from error


def looped_dense_model(recipe: Recipe, tokenizer) -> LoopedForCausalLM:
    """Convert the dense model, with weights in fp32 too. Data may leave tokens of its tokenizer out, or add some, also
    in the places of tokens that it keeps in reserve."""
    path = recipe.dense.path
    check_folder(path)
    if (vocabulary := vocabulary_beside(path)) is not None:
        own, added = {id: token for token, id in vocabulary.items()}, tokenizer.get_added_vocab()
        words = {token: id for token, id in tokenizer.get_vocab().items() if token not in added}
        if other := [token for token, id in words.items() if own.get(id, token) != token]:
            raise RecipeError(
                f"the dense model of dense.path={path!r} knows the tokens of its own tokenizer, and {len(other)} of "
                f"data.tokenizer, such as {other[0]!r}, have the ids of others: set data.tokenizer={path}"
            )
    try:
        return recipe.model_class.from_dense(
            path, dtype=torch.float32, **recipe.dense_options(), **recipe.added_fields
        )
    except ValueError as error:
        raise RecipeError(f"dense.path={path!r}: {error}") from error


def trained_positions(recipe: Recipe) -> int:
    """Return max_position_embeddings of the recipe or its preset, else 0. Learned positions get exactly this many."""
    if "max_position_embeddings" in recipe.model or "preset" in recipe.model:
        return recipe.model_config().max_position_embeddings
    return 0
