"""Residual scaling at width 768: the norm of the state over N (figure 2), and its change by a step (figure 4)."""

from collections.abc import Iterator

import torch

from looped_eval.diagnose.growth import LOOPS, NORM_THEORY, UPDATE_THEORY, mean_curves, slopes
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
# measure -> (field that mean_curves reads, theoretical exponents)
CURVES = {"residual_norm": ("norms", NORM_THEORY["looped"]), "update_size": ("updates", UPDATE_THEORY)}
SHORT = {"loops": (1, 2, 4), "seeds": 1, "steps": 2}


def measurements(setting: Setting) -> Iterator[Measurement]:
    """Measure only the looped model: an unshared stack of 64 copies would take 89 GB to train."""
    config = LoopedConfig.from_preset("residual_scaling", **(FIELDS if setting.tiny else {}))
    how = {"loops": LOOPS, "seeds": 3, "steps": 10, "lr": 1e-4, "num_tokens": 128, **(SHORT if setting.tiny else {})}
    for rule in RULES:  # both measures read the same short trainings
        for name, (of_training, theory) in CURVES.items():

            def run(rule=rule, of_training=of_training, theory=theory):
                with torch.device(setting.device):
                    curves = mean_curves(config, "looped", rule, of_training, **how)
                slope = slopes(how["loops"], curves, theory[rule])
                exponents = {name: slope[name]["slope"] for name in ("first_step", "last_step", "last_step_deep")}
                return {"theory": slope["theory"], **exponents, "loops": how["loops"], "curves": curves}

            yield Measurement(f"{name}_{rule}", run)
