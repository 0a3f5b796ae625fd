"""Looped language models for transformers: one model family in which every published variant is a setting."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .cache import LoopedCache
from .configuration_looped import LoopedConfig, LoopedConfigError
from .modeling_looped import (
    LoopedForCausalLM,
    LoopedForQuestionAnswering,
    LoopedForSequenceClassification,
    LoopedForTokenClassification,
    LoopedModel,
    LoopedPreTrainedModel,
)


__version__ = "0.1.0"

AutoConfig.register("looped", LoopedConfig, exist_ok=True)
AutoModel.register(LoopedConfig, LoopedModel, exist_ok=True)
AutoModelForCausalLM.register(LoopedConfig, LoopedForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(LoopedConfig, LoopedForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(LoopedConfig, LoopedForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(LoopedConfig, LoopedForQuestionAnswering, exist_ok=True)

__all__ = [
    "LoopedCache",
    "LoopedConfig",
    "LoopedConfigError",
    "LoopedForCausalLM",
    "LoopedForQuestionAnswering",
    "LoopedForSequenceClassification",
    "LoopedForTokenClassification",
    "LoopedModel",
    "LoopedPreTrainedModel",
]
