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
    """Return the same table in the form of config.json, "file.Class" by name, of the files beside a saved model."""
    of_models = {auto: f"modeling_looped.{cls.__name__}" for auto, cls in AUTO_CLASSES.items()}
    return {"AutoConfig": "configuration_looped.LoopedConfig", **of_models}
