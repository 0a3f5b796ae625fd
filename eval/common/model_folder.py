"""Opens a saved model's config and tokenizer before its weights, so that mistakes are found without loading."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import PreTrainedConfig

from looped_recipes.common.checksums import check_folder
from looped_recipes.common.command_line import typed
from looped_recipes.common.hub import can_only_be_path, model_inside
from looped_recipes.data.tokenizers import num_ids, read_tokenizer, start_id
from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.formats.registry import is_published
from modeling_looped.loading import class_beside_weights


LONG_TEXTS = "sequence-length-is-longer-than-the-specified-maximum"  # key of a warning of transformers


def open_config(target: str, trust_remote_code: bool = False) -> tuple[Path, LoopedConfig]:
    """Return the folder and the config of a model. target: a saved model, or the folder of its training run.
    trust_remote_code: also import its own class, see `import_own_class`."""
    folder = model_folder(target)
    if folder is None:
        raise ValueError(
            f"there is no folder {target!r}: name a saved model, its training run, or a published model that was "
            "fetched (`hf download NAME --local-dir FOLDER`)"
        )
    if trust_remote_code:
        import_own_class(folder)
    return folder, LoopedConfig.from_pretrained(folder)


def import_own_class(source: str | Path, revision: str = "main", subfolder: str = ""):
    """Import the class of the user's own that saved a model, if one did: its file may register exit criteria, which
    are checked before the weights are read."""
    where = {"revision": revision, "subfolder": subfolder}
    fields, _ = PreTrainedConfig.get_config_dict(source, **where)
    if not is_published(fields):
        class_beside_weights(LoopedForCausalLM, source, {"trust_remote_code": True, **where})


def open_model(folder: Path, args, **asked) -> LoopedForCausalLM:
    """Open a model to run it. args: options with `device` and `trust_remote_code`."""
    model = LoopedForCausalLM.from_pretrained(folder, trust_remote_code=args.trust_remote_code, **asked)
    return model.to(args.device).eval()


def loops_by_default(model) -> int:
    """Return how many loops `generate` runs where a call names none: what was saved for it, else the config's."""
    return getattr(model.generation_config, "num_loops", None) or model.config.num_loops


def open_tokenizer(folder: Path, name: str | None, config: LoopedConfig):
    """Open the tokenizer of a model. name: another tokenizer, for a model that has none, as in `named_tokenizer`."""
    if name is None and not (folder / "tokenizer_config.json").is_file():
        raise ValueError(f"{folder} holds no tokenizer to read text with: save one there, or pass --tokenizer")
    tokenizer = named_tokenizer(name or str(folder))
    tokenizer.deprecation_warnings[LONG_TEXTS] = True  # no warning: texts are cut into windows
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # without BERT's token_type_ids
    check_vocabulary(tokenizer, config)
    return tokenizer


def check_vocabulary(tokenizer, config: LoopedConfig):
    if (size := num_ids(tokenizer)) > config.vocab_size:  # of the largest id: there may be fewer tokens
        raise ValueError(f"the tokenizer has ids up to {size - 1}, but the model vocab_size={config.vocab_size}")


def named_tokenizer(name: str):
    """Open a tokenizer by its folder, by the training run that holds it, or by its name on the Hub."""
    path = Path(name)
    is_path = can_only_be_path(name) or ("/" in name and path.parent.is_dir())
    if is_path and not path.exists():
        raise ValueError(f"there is no tokenizer folder {name!r} (looked from {Path.cwd()})")
    try:
        return read_tokenizer(model_inside(name))
    except Exception as error:  # the Hub, the folder and the file raise different kinds
        said = " ".join(str(error).split())
        raise ValueError(
            f"can not load tokenizer {name!r}: {said}; name a folder that holds a tokenizer.json, a finished run, or "
            "a tokenizer on the Hub"
        ) from error


def start_token(tokenizer) -> int:
    """Return the token that begins documents, as in training; refuse a tokenizer without one."""
    start = start_id(tokenizer)
    if start is None:
        raise ValueError("the tokenizer has neither a bos nor an eos token, so nothing begins a document: set one")
    return start


def unlearned_start(tokenizer) -> int | None:
    """Return the token that prompts begin with, if documents end with another, so that it needs not be predicted."""
    start = tokenizer.bos_token_id
    begins = start is not None and tokenizer("", verbose=False)["input_ids"][:1] == [start]
    return start if begins and start != tokenizer.eos_token_id else None


def joined_tokens(documents: Iterable[dict], tokenizer, start: int | None = None) -> Iterator[int]:
    """Yield the tokens of one text after another, with the end token, if there is one, after each, and `start` before
    each."""
    begin, end = ([] if token is None else [token] for token in (start, tokenizer.eos_token_id))
    for document in documents:
        yield from begin + tokenizer(document["text"], add_special_tokens=False, verbose=False)["input_ids"] + end


def training_run(target: str) -> Path | None:
    """Return the training run that `target` is or belongs to, as its final model or the model of a checkpoint."""
    path = Path(target).resolve()
    runs = (path, path.parent) if (path / "config.json").is_file() else (path,)
    return next((run for run in runs if (run / "metrics.jsonl").is_file()), None)


def results_folder(target: str) -> Path:
    """Return the folder for results about a model: eval/ in its training run, where the report finds them; eval/ in
    the model's folder for the model of a checkpoint; without a run, a folder in runs/eval."""
    path, run = Path(target).resolve(), training_run(target)
    if run is None:
        return Path("runs/eval") / path.name
    return (run if path in (run, run / "final") else path) / "eval"


def model_folder(target: str) -> Path | None:
    """Return the folder of a saved model, which may be inside that of its training run; None if `target` is no folder.

    Raise if the weights are not those that training saved.
    """
    path = Path(target)
    if not path.is_dir():
        return None
    folder = Path(model_inside(target))
    if (folder / "config.json").is_file():
        check_folder(folder)
        return folder
    run = next((folder for folder in (path, *path.parents[:2]) if (folder / "checkpoints").is_dir()), None)
    advice = "" if run is None else f": `{typed('looped export', run)}` makes a model of its newest checkpoint"
    raise ValueError(
        f"folder {target!r} holds neither a saved model (config.json) nor a finished run (final/){advice}"
    )
