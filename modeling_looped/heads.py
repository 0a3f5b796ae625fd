"""Classification and question answering: the heads of transformers on a looped trunk."""

from typing import Any

from torch import nn

from .borrowed import class_or_missing
from .configuration_looped import LoopedConfig
from .modeling_looped import LoopedModel, LoopedPreTrainedModel


GenericForQuestionAnswering, GenericForSequenceClassification, GenericForTokenClassification = (
    class_or_missing("transformers.modeling_layers", f"GenericFor{task}")
    for task in ("QuestionAnswering", "SequenceClassification", "TokenClassification")
)


class _LoopedClassifier:
    """The heads of transformers on our trunk; the trunk is built here because AutoModel does not know remote code."""

    def _build(self: Any, config: LoopedConfig, **heads: nn.Module):
        LoopedPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LoopedModel(config)
        for name, head in heads.items():
            setattr(self, name, head)
        self.post_init()


def label_scores(config: LoopedConfig, bias: bool) -> nn.Linear:
    assert config.num_labels is not None  # transformers fills it in
    return nn.Linear(config.hidden_size, config.num_labels, bias=bias)


class LoopedForSequenceClassification(_LoopedClassifier, GenericForSequenceClassification, LoopedPreTrainedModel):
    def __init__(self, config: LoopedConfig):
        self._build(config, score=label_scores(config, bias=False))


class LoopedForTokenClassification(_LoopedClassifier, GenericForTokenClassification, LoopedPreTrainedModel):
    def __init__(self, config: LoopedConfig):
        dropout = 0.1 if config.classifier_dropout is None else config.classifier_dropout
        self._build(config, dropout=nn.Dropout(dropout), score=label_scores(config, bias=True))


class LoopedForQuestionAnswering(_LoopedClassifier, GenericForQuestionAnswering, LoopedPreTrainedModel):
    def __init__(self, config: LoopedConfig):
        self._build(config, qa_outputs=nn.Linear(config.hidden_size, 2))


__all__ = ["LoopedForQuestionAnswering", "LoopedForSequenceClassification", "LoopedForTokenClassification"]
