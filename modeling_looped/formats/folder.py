"""Reading of a folder, local or on the Hub: its config.json, the names of its tensors, its small files."""

import json
import os
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import cached_file


# arguments of from_pretrained that say where to look
HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "proxies",
    "token",
    "local_files_only",
    "revision",
    "subfolder",
)
WEIGHTS, SHARDS = ("model.safetensors", "pytorch_model.bin"), "{}.index.json"
RENAMED_WEIGHTS = ("model.pt", "model.bin")  # names that Parcae's release writes and its evaluation reads
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TOKENIZER_FILES = """
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.model vocab.json
    merges.txt vocab.txt chat_template.jinja chat_template.json
""".split()


def hub_arguments(kwargs: dict) -> dict:
    return {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}


def find_file(path, name: str, hub: dict) -> str | None:
    """Return the local path of a file of the folder, or None if the folder lacks it."""
    missing_is_none = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    try:
        return cached_file(path, name, **hub, **missing_is_none)
    except OSError:
        return None


def model_place(path, hub: dict) -> tuple:
    """Return the model's folder, which for an adapter is that of its base model, and the arguments to look there."""
    failure = None
    try:
        if cached_file(path, "config.json", **hub) is not None:
            return path, hub
    except OSError as error:  # the folder lacks it, or the Hub is out of reach
        failure = error
    adapter = find_file(path, "adapter_config.json", hub)
    base = None if adapter is None else read_object(adapter).get("base_model_name_or_path")
    if base is not None:
        return base, {name: value for name, value in hub.items() if name not in ("revision", "subfolder")}
    if adapter is None and failure is not None and not os.path.isdir(path):
        raise failure  # here: each file that is asked for takes long to fail
    return path, hub


def read_json_config(path, hub: dict) -> dict | None:
    """Return config.json, or None if it cannot be read: loading will then say what is wrong."""
    file = find_file(path, "config.json", hub)
    if file is None:
        return None
    try:
        with open(file, encoding="utf-8") as opened:
            stored = json.load(opened)
    except ValueError:
        return None
    if not isinstance(stored, dict):
        raise ValueError(f"{file} must be a JSON object, {{...}}, but is a {type(stored).__name__}")
    try:
        return PreTrainedConfig.get_config_dict(path, **hub)[0]
    except (OSError, ValueError):
        return None


def stored_tensors(path, hub: dict) -> dict[str, torch.dtype | None]:
    """Return the names of all stored tensors with their types where these are known, else None."""
    return {name: dtype for file in weight_files(path, hub) for name, dtype in tensors_in(file).items()}


def stored_names(path, hub: dict) -> frozenset[str]:
    """Return the names of all stored tensors. An index holds them, so that no shard is fetched from the Hub."""
    file = weights_or_index(path, hub)
    if not file.endswith(".json"):
        return frozenset(tensors_in(file))
    shards_of(file)  # refuses what is no index
    return frozenset(read_object(file)["weight_map"])


def tensors_in(file: str) -> dict[str, torch.dtype | None]:
    try:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                return {name: FLOATS.get(opened.get_slice(name).get_dtype()) for name in opened.keys()}
        stored = torch.load(file, map_location="meta", weights_only=True)
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"the weight file {file} is damaged, or no file of tensors alone ({reason})") from error
    if not isinstance(stored, dict):
        raise ValueError(f"the weight file {file} holds a {type(stored).__name__}, and no tensors by name")
    return {name: getattr(tensor, "dtype", None) for name, tensor in stored.items()}


def check_indices(path, hub: dict, variant: str | None):
    """Refuse indices of shards that transformers could not read."""
    for whole in WEIGHTS:
        name = f".{variant}.".join(whole.rsplit(".", 1)) if variant else whole
        if (index := find_file(path, SHARDS.format(name), hub)) is not None:
            shards_of(index)


def weights_or_index(path, hub: dict) -> str:
    for name in WEIGHTS:
        for each in (name, SHARDS.format(name)):
            if (file := find_file(path, each, hub)) is not None:
                return file
    other = next((name for name in RENAMED_WEIGHTS if find_file(path, name, hub) is not None), None)
    advice = "" if other is None else f"; if {other} holds tensors by name, rename it to {WEIGHTS[-1]}"
    raise OSError(f"{path} has no weights: neither {' nor '.join(WEIGHTS)}, whole or in shards{advice}")


def weight_files(path, hub: dict) -> list[str]:
    file = weights_or_index(path, hub)
    if not file.endswith(".json"):
        return [file]
    found = {shard: find_file(path, shard, hub) for shard in shards_of(file)}
    if missing := [shard for shard, place in found.items() if place is None]:
        raise OSError(f"{path} lacks {', '.join(missing)}, which {os.path.basename(file)} names")
    return [place for place in found.values() if place is not None]


def shards_of(index: str) -> list[str]:
    """Return the files that an index names; refuse files outside its folder."""
    places = read_object(index).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{index} is no index: it needs a weight_map, from names of tensors to names of files")
    outside = [name for name in names if os.path.isabs(name) or ".." in name.replace("\\", "/").split("/")]
    if outside:
        raise ValueError(f"{index} names a file outside its folder: {outside[0]!r}")
    return sorted(set(names))


def read_object(file: str) -> dict:
    try:
        with open(file, encoding="utf-8") as opened:
            value = json.load(opened)
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must be a JSON object, {{...}}, but is a {type(value).__name__}")
    return value
