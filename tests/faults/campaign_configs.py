"""Saved models whose config.json names sizes that they do not have: refused, in little time and memory."""

import json
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from modeling_looped import LoopedForCausalLM
from tests import public_folders
from tests.faults.campaign import Trial
from tests.faults.campaign_recipes import SECONDS, Hang, limited
from tests.helpers import tiny_model


MEMORY = 3 * 2**30  # bytes that one try may take
VALUES = [10**6, 10**9, 10**12, 10**18, 10**30, 2**31, 2**63, 0, -1, -(2**40), 1.5, "x", "8", [], {}, [8], True, "nan"]
OF_OURS = """hidden_size intermediate_size vocab_size num_core_layers num_prelude_layers num_coda_layers head_dim
    num_key_value_heads loop_lora_rank""".split()
OF_LLAMA = "hidden_size intermediate_size vocab_size num_hidden_layers num_key_value_heads head_dim".split()
PUBLISHED = {
    "ouro": (public_folders.ouro, OF_LLAMA),
    "nanbeige": (public_folders.nanbeige, OF_LLAMA),
    "huginn": (
        public_folders.huginn,
        ["n_embd", "padded_vocab_size", "intermediate_size", "n_layers_in_recurrent_block"],
    ),
    "parcae": (public_folders.parcae, ["n_embd", "padded_vocab_size", "n_layers_in_recurrent_block"]),
}


def trials(seed: int, folder: Path) -> Iterator[Trial]:
    logging.set_verbosity_error()
    draw = random.Random(seed)
    kinds = {"dense": (saved_llama(folder / "dense"), OF_LLAMA, LoopedForCausalLM.from_dense)}
    for preset in ("flt", "ouro", "parcae"):
        place = folder / f"our {preset}"
        tiny_model(preset=preset).save_pretrained(place)
        kinds[place.name] = place, OF_OURS, LoopedForCausalLM.from_pretrained
    for name, (make, fields) in PUBLISHED.items():
        config, tensors = make()
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}  # tied ones are stored twice
        place = public_folders.write_folder(folder / name, config, tensors)
        kinds[name] = place, fields, LoopedForCausalLM.from_pretrained
    configs = {name: (place / "config.json").read_text() for name, (place, _, _) in kinds.items()}
    sound = {name: load(place).state_dict() for name, (place, _, load) in kinds.items()}
    while True:
        for name, (place, fields, load) in kinds.items():
            config = json.loads(configs[name])
            changes = {field: draw.choice(VALUES) for field in draw.sample(fields, draw.choice((1, 1, 2)))}
            if draw.random() < 0.7 and name.startswith("our"):
                del config["num_hidden_layers"]  # which would give away most of them
            (place / "config.json").write_text(json.dumps({**config, **changes}))
            yield opened(f"{name}: {changes}", place, load, sound[name])


def saved_llama(place: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**public_folders.LLAMA_SIZES)).save_pretrained(place)
    return place


def opened(fault: str, place: Path, load, sound: dict) -> Trial:
    try:
        with limited(SECONDS), little_memory():
            state = load(place).state_dict()
    except ValueError as error:
        return Trial(fault, "refused") if str(error) else Trial(fault, "traceback", repr(error))
    except (Exception, Hang) as error:
        return Trial(fault, "traceback", f"{type(error).__name__}: {str(error)[:300]!r}")
    same = state.keys() == sound.keys() and all(torch.equal(state[name], sound[name]) for name in sound)
    return Trial(fault, "right") if same else Trial(fault, "silent", "another model was opened")


@contextmanager
def little_memory():
    """No more memory than the process has, and some."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
