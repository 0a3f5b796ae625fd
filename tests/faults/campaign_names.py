"""Misspelt and foreign names of depth and of other fields, at every place where a name can be given.

Silent is a name that was accepted while the result is that of the default, and nobody was told.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from looped_eval.harness.looped_lm import LoopedLM
from modeling_looped import LoopedConfig, configuration_looped, foreign_names
from modeling_looped.depth_options import DEPTH_FIELDS
from tests.faults.campaign import Trial
from tests.helpers import random_ids, tiny_config, tiny_model, tiny_tokenizer


IDS = random_ids(1, 4)
LETTERS = "abcdefghijklmnopqrstuvwxyz_"
GREEDY = {"max_new_tokens": 2, "do_sample": False}


class Heard:
    """What the loggers of names say during one trial."""

    def __enter__(self):
        self.said, self.before = [], [module.logger for module in (foreign_names, configuration_looped)]
        for module in (foreign_names, configuration_looped):
            module.logger = self
        return self

    def __exit__(self, *_):
        foreign_names.logger, configuration_looped.logger = self.before

    def warning_once(self, message: str):
        self.said.append(message)


def misspelt(name: str, draw: random.Random) -> str:
    """With a letter lost, doubled, exchanged for another or swapped with the next one."""
    i = draw.randrange(1, len(name) - 1)
    return draw.choice(
        [
            name[:i] + name[i + 1 :],
            name[:i] + name[i] + name[i:],
            name[:i] + draw.choice(LETTERS) + name[i + 1 :],
            name[:i] + name[i + 1] + name[i] + name[i + 2 :],
            name.replace("_", "", 1),
            name.removeprefix("num_"),
        ]
    )


def a_name(draw: random.Random, of_config: bool, known_there: Iterable[str]) -> str:
    foreign = foreign_names.FIELD_OF if of_config else foreign_names.ARGUMENT_OF
    ours = [
        "num_loops",
        "num_core_layers",
        "injection",
        "readout_norm",
        "hidden_size",
        "residual_scaling",
        "sliding_window",
    ]
    of_calls = ["num_loops", "exit_criterion", "exit_threshold", "min_loops", "draft_loops", "prompt_loops"]
    known = {*(field.name for field in fields(LoopedConfig)), *vars(GenerationConfig()), *vars(tiny_config())}
    known |= {"input_ids", *of_calls, *known_there, *foreign_names.ARGUMENTS_OF_TOOLS, *foreign_names.KEYS_OF_TOOLS}
    while True:
        name = (
            draw.choice(sorted(foreign))
            if draw.random() < 0.5
            else misspelt(draw.choice(ours if of_config else of_calls), draw)
        )
        if name.isidentifier() and not name.startswith("_") and name not in known:
            return name


def places(folder: Path) -> dict:
    """By the place where a name is given: whether it is a field of a config, names known there, and what gives it."""
    model = tiny_model()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)

    def in_generation_config(name, value):
        config = GenerationConfig(**GREEDY)
        setattr(config, name, value)
        return model.generate(IDS, generation_config=config)

    return {
        "LoopedConfig": (True, (), lambda name, value: LoopedConfig(**{name: value})),
        "from_preset": (True, (), lambda name, value: LoopedConfig.from_preset("flt", **{name: value})),
        "an engine's override": (True, (), lambda name, value: tiny_config().update({name: value})),
        "AutoConfig.from_pretrained": (
            True,
            (),
            lambda name, value: AutoConfig.from_pretrained(folder, **{name: value}),
        ),
        "from_pretrained": (
            True,
            (),
            lambda name, value: AutoModelForCausalLM.from_pretrained(folder, **{name: value}),
        ),
        "lm_eval's model_args": (
            True,
            (),
            lambda name, value: LoopedLM.create_from_arg_string(f"pretrained={folder},{name}={value}"),
        ),
        "forward": (False, (), lambda name, value: model(IDS, **{name: value})),
        "the trunk's forward": (False, (), lambda name, value: model.model(IDS, **{name: value})),
        "generate": (False, DEPTH_FIELDS, lambda name, value: model.generate(IDS, **GREEDY, **{name: value})),
        "a generation config": (False, DEPTH_FIELDS, in_generation_config),
    }


def trials(seed: int, folder: Path) -> Iterator[Trial]:
    draw, of_all = random.Random(seed), places(folder)
    for place in itertools.cycle(of_all):
        of_config, known_there, give = of_all[place]
        name, value = a_name(draw, of_config, known_there), draw.randint(1, 9)
        yield met(f"{place}: {name}={value}", give, name, value)


def met(fault: str, give, name: str, value: int) -> Trial:
    with Heard() as heard, torch.no_grad():
        try:
            give(name, value)
        except (ValueError, TypeError, OSError) as error:
            if name in str(error):
                return Trial(fault, "refused")
            return Trial(fault, "traceback", f"{type(error).__name__}: {error}")
    told = any(name in message for message in heard.said)
    return Trial(fault, "refused" if told else "silent", "" if told else "accepted, at the default")
