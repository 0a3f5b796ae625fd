"""Writing a model in the layout of a release: its config.json, its tensors, its generation config."""

import glob
import json
import os
import re
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.generation import GenerationConfig
from transformers.utils import logging

from ..configuration_looped import LoopedConfig, LoopedConfigError
from ..depth_options import DEPTH_FIELDS, differ, listed, set_fields
from ..pretrained import share_weights
from .folder import SHARDS, TOKENIZER_FILES, WEIGHTS, find_file
from .layout import Layout, Rule, said_differently
from .llama import LLAMA, as_one_stack, unrolled_tensors
from .registry import LAYOUTS


logger = logging.get_logger(__name__)
SHARD_SIZE = "5GB"


def save_public(model, folder, to: str, unroll: bool = False, tokenizer_of=None):
    """Write a LoopedForCausalLM in the layout `to` (see LAYOUTS). The folder is new, and appears whole or not at all.

    The folder has no code: it is for programs that know the layout, and for `from_pretrained` of this package.
    unroll: for llama only, write the core's layers once for each loop. tokenizer_of: a folder or repository whose
    tokenizer is copied.
    """
    if to not in LAYOUTS:
        raise ValueError(f"there is no layout {to!r} to write: choose one of {', '.join(LAYOUTS)}")
    if unroll and to != LLAMA.name:
        raise ValueError(f"unroll is of llama, which has no loops; {to!r} has")
    refuse_quantized(model)
    refuse_adapter(model)
    refuse_offloaded(model)
    layout, config, tensors = LAYOUTS[to], model.config, model.state_dict()
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        check_generation_config(layout, config, generation)
    if layout is LLAMA:
        config, tensors = as_one_stack(config, unroll), unrolled_tensors(config, tensors)
    words = public_config(layout, config)
    stored = public_tensors(layout, config, tensors)

    def fill(place: Path):
        write(place, layout, words, stored, generation)
        if tokenizer_of is not None:
            copy_tokenizer(tokenizer_of, place)

    whole_folder(folder, fill)


def refuse_quantized(model):
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"the weights of {model.config.name_or_path or 'the model'} are quantized: convert the model as it was "
            "before, and quantize the result"
        )


def refuse_adapter(model):
    if model._hf_peft_config_loaded:
        raise ValueError(
            f"{model.config.name_or_path or 'the model'} has an adapter beside its weights: merge it, and take what "
            "that gives"
        )


def refuse_offloaded(model):
    if offloaded := [name for name, tensor in model.state_dict().items() if tensor.is_meta]:
        raise ValueError(
            f"{len(offloaded)} tensors are offloaded or on the meta device, e.g. {offloaded[0]}: save the model by "
            "save_pretrained, and convert that folder by `looped convert`"
        )


def check_generation_config(layout: Layout, config: LoopedConfig, generation: GenerationConfig):
    """Refuse a saved depth of `generate` beside the config's, and warn of other saved options that are left out."""
    words, kept = {}, GenerationConfig()
    layout.write_generation(words, generation)
    layout.adjust_generation(kept, config, words)  # as it will be read
    plain = {**DEPTH_FIELDS, "num_loops": config.num_loops, **set_fields(kept)}
    lost = {name: value for name, value in set_fields(generation).items() if differ(value, plain[name])}
    if "num_loops" in lost:
        raise ValueError(
            f"the generation config says num_loops={lost['num_loops']} and the config num_loops={config.num_loops}, "
            f"but {layout.title} has one depth: pass --num-loops to `looped convert`, or num_loops to from_pretrained"
        )
    if lost:
        logger.warning(f"the layout of {layout.title} cannot say {listed(lost)} of the generation config: left out")


def public_config(layout: Layout, config: LoopedConfig) -> dict:
    """Return config.json in this layout, or raise an error that lists what it cannot express."""
    words = layout.write_config(config)
    if foreign := said_differently(layout, config, words):
        raise LoopedConfigError(
            f"the layout of {layout.title} cannot say {', '.join(foreign)}: a model with this cannot be written in it"
        )
    if layout.architecture:
        words["architectures"] = [layout.architecture]
    if config.dtype is not None:
        words["torch_dtype"] = str(config.dtype).removeprefix("torch.")
    return words


def public_tensors(layout: Layout, config: LoopedConfig, tensors: dict) -> dict:
    """Return the tensors as this layout stores them."""
    left, stored = dict(tensors), {}
    head = left.pop("lm_head.weight") if config.tie_word_embeddings else None
    if head is not None and not torch.equal(head, left["model.embed_tokens.weight"]):
        raise LoopedConfigError(
            "the model's config says tie_word_embeddings=True, but its embedding and its head differ: set it to False "
            "to write both"
        )
    for rule in layout.all_rules:
        for name, parts in matches(rule, left):
            stored[name] = parts[0] if rule.change is None else rule.change.write(parts, config)
    if left:
        raise LoopedConfigError(f"the layout of {layout.title} has no place for {', '.join(sorted(left)[:5])}")
    if head is not None and layout.keeps_tied_head:
        stored["lm_head.weight"] = head
    return {**stored, **layout.further_tensors(config, stored)}


def matches(rule: Rule, left: dict):
    """Yield the stored names that a rule gives, with the tensors for it, which are removed from `left`."""
    for name in list(left):
        found = re.match(rule.pattern(rule.ours[0]), name)
        if found is None:
            continue
        number, rest = "".join(found.groups()), name[found.end() :]
        names = [template.replace("{i}", number) + rest for template in rule.ours]
        yield rule.stored.replace("{i}", number) + rest, [left.pop(ours) for ours in names]


def write(place: Path, layout: Layout, words: dict, stored: dict, generation: GenerationConfig | None):
    if generation is not None:
        layout.write_generation(words, generation)
        plain = GenerationConfig(**{
            name: value for name, value in generation.to_diff_dict().items() if name not in DEPTH_FIELDS
        })  # fmt: skip
        plain.save_pretrained(place)
    (place / "config.json").write_text(json.dumps(words, indent=2, sort_keys=True) + "\n")
    if layout.is_pickled:  # one file, as the release's code reads it
        save_torch_state_dict(with_own_memory(stored), place, safe_serialization=False, max_shard_size="1TB")
    else:
        save_shards(stored, place)
        share_weights(place)


def save_shards(stored: dict, place: Path):
    """Save tensors with memory for the copies of one shard: those of all loops may be many times the model."""
    shapes = {name: tensor.to("meta") for name, tensor in stored.items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=SHARD_SIZE)
    for file, names in split.filename_to_tensors.items():
        save_file(with_own_memory({name: stored[name] for name in names}), place / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (place / SHARDS.format(WEIGHTS[0])).write_text(json.dumps(index, indent=2) + "\n")


def with_own_memory(tensors: dict) -> dict:
    """Give every tensor separate memory on the CPU: of tensors that share memory, only one would be saved."""
    seen, own = set(), {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        place = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return own


def copy_tokenizer(source, place: Path):
    """Copy the files of a tokenizer unchanged."""
    for name in TOKENIZER_FILES:
        if (file := find_file(source, name, {})) is not None:
            shutil.copyfile(file, place / name)


def whole_folder(folder, fill):
    """Make a new folder that `fill` fills; it gets its name when it is complete."""
    folder = Path(folder)
    check_new(folder)
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    place = folder.absolute().parent / f".saving-{folder.name}.{os.getpid()}"
    remove_leftovers(folder.absolute())
    place.mkdir()
    try:
        fill(place)
        check_new(folder)  # another process may have written it meanwhile
        os.replace(place, folder)
    except SafetensorError as error:  # such as a full disk
        shutil.rmtree(place, ignore_errors=True)
        raise OSError(f"{folder} could not be written: {error}") from error
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def remove_leftovers(folder: Path):
    """Remove what killed writers of this folder left; such a name ends with the number of their process."""
    for leftover in folder.parent.glob(f".saving-{glob.escape(folder.name)}.*"):
        number = leftover.suffix.removeprefix(".")
        if number.isdecimal() and (int(number) == os.getpid() or not is_running(int(number))):
            shutil.rmtree(leftover, ignore_errors=True)


def is_running(process: int) -> bool:
    if os.name == "nt":  # where signal 0 is Ctrl+C, and would be sent
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user, or not a number of a process
        pass
    return True


def check_new(folder: Path):
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already: nothing is overwritten, choose another name")
    if folder.is_dir() and (folder.is_symlink() or os.path.ismount(folder) or folder.samefile(os.curdir)):
        raise FileExistsError(
            f"{folder} is a link, a disk or the current folder, and no folder can take its place: name a new one in it"
        )
