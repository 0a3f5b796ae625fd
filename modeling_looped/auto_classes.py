"""The class that each Auto class of transformers opens, from the installed package or a folder of remote code."""

from .causal_lm import LoopedForCausalLM
from .heads import LoopedForQuestionAnswering, LoopedForSequenceClassification, LoopedForTokenClassification
from .modeling_looped import LoopedModel


AUTO_CLASSES = {
    "AutoModel": LoopedModel,
    "AutoModelForCausalLM": LoopedForCausalLM,
    "AutoModelForQuestionAnswering": LoopedForQuestionAnswering,
    "AutoModelForSequenceClassification": LoopedForSequenceClassification,
    "AutoModelForTokenClassification": LoopedForTokenClassification,
}


def auto_map() -> dict[str, str]:
    """Return the same table in the form of config.json, "file.Class" by name; transformers adds AutoConfig itself."""
    return {auto: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for auto, cls in AUTO_CLASSES.items()}
