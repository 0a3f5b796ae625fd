"""Answers that are kept in a file, and what they depend on: one is recalled only where all of that is as it was."""

import json
from pathlib import Path

import torch
from lm_eval.models.huggingface import HFLM

from looped_eval.common.curves import PLACE_AND_SPEED
from looped_recipes.common.checksums import LIST, checksum, read_sealed


WEIGHTS = (".safetensors", ".bin", ".gguf")
READ_FILES = (*WEIGHTS, ".json", ".model", ".txt")  # files of a model, tokenizer or adapter that decide answers
# the effect of the others is read from the loaded model
CHANGE_NO_ANSWER = {*PLACE_AND_SPEED, "pretrained", "dtype", "mixed_precision_dtype", "max_length"}

# attributes of modules that change answers where no weight changes; all but the first are of PEFT's layers
OF_MODULES = ("training", "_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def source_of(lm: HFLM, arguments: dict) -> list[str]:
    """Return what an answer depends on beside the request and `state_of`: files, commits and arguments of `HFLM`."""
    effective = [str(x) for x in (lm.model.dtype, lm.mixed_precision_dtype, lm.max_length)]
    given = [f"{name}={value}" for name, value in sorted(arguments.items()) if name not in CHANGE_NO_ANSWER]
    folders = [lm.config._name_or_path, lm.tokenizer.name_or_path, lm.peft, lm.delta]
    folders = [Path(folder, arguments.get("subfolder") or "") for folder in folders if folder]
    commit_hash = str(getattr(lm.config, "_commit_hash", None))  # of a model on the Hub
    return [*effective, *given, lm.revision, commit_hash, *map(files_of_model, folders)]


def state_of(lm: HFLM) -> list:
    """Return what an answer depends on in the loaded model, which may change between two requests.

    Weights are read, since a write through `.data` leaves no other trace. That takes less than a pass."""
    settings = [
        [type(module).__qualname__, *(f"{n}={vars(module)[n]}" for n in OF_MODULES if n in vars(module))]
        for module in lm.model.modules()
    ]
    configs = [str(lm.config), str(getattr(lm.model, "generation_config", None)), lm.max_length]
    return [checksum_of_weights(lm.model), settings, configs, vocabulary_of(lm.tokenizer)]


def files_of_model(folder: Path) -> str:
    """Return checksums of the weights, settings and vocabulary in a folder. Those of weights come from the list
    written at saving, if there is one: weights are large and not edited by hand."""
    if not folder.is_dir():
        return ""
    listed = read_sealed(folder / LIST)["checksums"] if (folder / LIST).is_file() else {}
    known = {name: value for name, value in listed.items() if name.endswith(WEIGHTS)}
    files = sorted(path for path in folder.iterdir() if path.name.endswith(READ_FILES) and path.name != LIST)
    return " ".join(f"{path.name}:{known.get(path.name) or checksum(path)}" for path in files)


@torch.no_grad()
def checksum_of_weights(model: torch.nn.Module) -> list[int]:
    """Return for each tensor of the model's state the sum of its bits, as integers, times random odd factors. It is
    taken on the tensor's device, and exact: one element that differs always changes it."""
    tensors = [x for value in model.state_dict().values() for x in plain_tensors(value)]
    count = min(2**20, max((tensor.nbytes for tensor in tensors), default=0))  # of a small model no million is drawn
    factors = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0)) | 1
    sums = []
    for tensor in tensors:
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, torch.int64)
        factors, total = factors.to(tensor.device), torch.zeros((), dtype=torch.int64, device=tensor.device)
        for piece in tensor.detach().contiguous().flatten().view(integers).split(len(factors)):
            total = 31 * total + (piece * factors[: len(piece)]).sum()
        sums.append(total)
    return [int(total) for total in sums]


def plain_tensors(value) -> list[torch.Tensor]:
    """Return the tensors that hold the content: those inside a sharded or quantized one; none if it was offloaded."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return []
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return [inner for name in names for inner in plain_tensors(getattr(value, name))]
    return [value]


def vocabulary_of(tokenizer) -> list:
    """Return what decides the tokens of a text; a fast tokenizer also holds how the last batch was padded and cut."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return [str(tokenizer), tokenizer.get_vocab()]
    parts = json.loads(fast.to_str())
    return [str(tokenizer), {name: part for name, part in parts.items() if name not in ("padding", "truncation")}]


def open_answers(path: str):
    from sqlitedict import SqliteDict

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # by itself it stores pickles, which run code when they are read
    return SqliteDict(path, tablename="answers", encode=json.dumps, decode=decoded)


def decoded(text: str) -> tuple:
    value, *counts = json.loads(text)
    return tuple(value) if isinstance(value, list) else value, *counts
