"""Residual scaling at width 768: figure 2, the norm of the state over N, and figure 4, its change by a step."""

from collections.abc import Iterator

import torch

from looped_eval.diagnose.growth import LOOPS, residual_norm, update_size
from modeling_looped import LoopedConfig

from .pieces import Measurement, Setting


FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_core_layers": 1,
    "vocab_size": 256,
}
RULES = ("none", "sqrt", "linear")


def measurements(setting: Setting) -> Iterator[Measurement]:
    config = LoopedConfig.from_preset("residual_scaling", **(FIELDS if setting.tiny else {}))
    how = {"loops": (1, 2, 4), "seeds": 1, "steps": 2} if setting.tiny else {"loops": LOOPS, "seeds": 3}
    for rule in RULES:  # both measures read the same short trainings
        for measure, curves in ((residual_norm, "R"), (update_size, "update")):

            def run(measure=measure, curves=curves, rule=rule):
                with torch.device(setting.device):
                    found = measure(config, rules=[rule], **how)["looped"][rule]
                slope = found["slope"]
                exponents = {name: slope[name]["slope"] for name in ("first_step", "last_step", "last_step_deep")}
                return {"theory": slope["theory"], **exponents, "loops": how["loops"], "curves": found[curves]}

            yield Measurement(f"{measure.__name__}_{rule}", run)
