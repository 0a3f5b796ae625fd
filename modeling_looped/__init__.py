"""Looped language models for transformers: one model family in which every published variant is a setting."""

import transformers

from .auto_classes import AUTO_CLASSES
from .cache import LoopedCache
from .causal_lm import LoopedForCausalLM
from .configuration_looped import LoopedConfig, LoopedConfigError
from .exit_criteria import ExitRule
from .formats import register_public_formats, save_public
from .heads import LoopedForQuestionAnswering, LoopedForSequenceClassification, LoopedForTokenClassification
from .modeling_looped import LoopedModel, LoopedPreTrainedModel
from .samplers import SAMPLERS, depths_of_step, generator_of, initial_state_of_step
from .shared_passes import SharedPasses


__version__ = "0.2.0"

transformers.AutoConfig.register("looped", LoopedConfig, exist_ok=True)
for auto_name, model_class in AUTO_CLASSES.items():
    getattr(transformers, auto_name).register(LoopedConfig, model_class, exist_ok=True)
del auto_name, model_class

__all__ = [
    "ExitRule",
    "LoopedCache",
    "LoopedConfig",
    "LoopedConfigError",
    "LoopedForCausalLM",
    "LoopedForQuestionAnswering",
    "LoopedForSequenceClassification",
    "LoopedForTokenClassification",
    "LoopedModel",
    "LoopedPreTrainedModel",
    "SAMPLERS",
    "SharedPasses",
    "depths_of_step",
    "generator_of",
    "initial_state_of_step",
    "register_public_formats",
    "save_public",
]
