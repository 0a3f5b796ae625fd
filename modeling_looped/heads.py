"""Classification and question answering: the heads of transformers on a looped trunk."""

import functools
from inspect import Parameter, signature
from typing import Any

from torch import nn

from .compatibility import class_or_missing
from .configuration_looped import LoopedConfig
from .modeling_looped import LoopedModel, LoopedPreTrainedModel
from .outputs import AskedOutputs


GenericForQuestionAnswering, GenericForSequenceClassification, GenericForTokenClassification = (
    class_or_missing("transformers.modeling_layers", f"GenericFor{task}")
    for task in ("QuestionAnswering", "SequenceClassification", "TokenClassification")
)


class _LoopedClassifier:
    """Base class: a head of transformers on a looped trunk, built here as AutoModel does not know remote code."""

    def _build(self: Any, config: LoopedConfig, **heads: nn.Module):
        LoopedPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LoopedModel(config)
        for name, head in heads.items():
            setattr(self, name, head)
        self.post_init()


REFUSED = ("exit_rule", *AskedOutputs._fields)


def without_outputs_of_loops(head: type):
    """Return the `forward` of a head that refuses exits, and outputs of loops, for which its outputs have no field."""

    @functools.wraps(head.forward)
    def forward(self, *args, **kwargs):
        asked = [name for name in REFUSED if kwargs.get(name)]
        if asked:
            raise ValueError(
                f"{type(self).__name__} does not take {', '.join(asked)}: its `model` returns the states of loops, "
                "and LoopedForCausalLM takes exits and returns all outputs of loops"
            )
        return head.forward(self, *args, **kwargs)

    taken = signature(head.forward)
    if "past_key_values" not in taken.parameters:  # the name of the cache by which PEFT finds who takes a prefix
        *named, rest = taken.parameters.values()
        prefix = Parameter("past_key_values", Parameter.KEYWORD_ONLY, default=None)
        vars(forward)["__signature__"] = taken.replace(parameters=[*named, prefix, rest])
    return forward


def label_scores(config: LoopedConfig, bias: bool) -> nn.Linear:
    assert config.num_labels is not None  # transformers fills it in
    return nn.Linear(config.hidden_size, config.num_labels, bias=bias)


class LoopedForSequenceClassification(_LoopedClassifier, GenericForSequenceClassification, LoopedPreTrainedModel):
    forward = without_outputs_of_loops(GenericForSequenceClassification)

    def __init__(self, config: LoopedConfig):
        self._build(config, score=label_scores(config, bias=False))


class LoopedForTokenClassification(_LoopedClassifier, GenericForTokenClassification, LoopedPreTrainedModel):
    forward = without_outputs_of_loops(GenericForTokenClassification)

    def __init__(self, config: LoopedConfig):
        dropout = 0.1 if config.classifier_dropout is None else config.classifier_dropout
        self._build(config, dropout=nn.Dropout(dropout), score=label_scores(config, bias=True))


class LoopedForQuestionAnswering(_LoopedClassifier, GenericForQuestionAnswering, LoopedPreTrainedModel):
    forward = without_outputs_of_loops(GenericForQuestionAnswering)

    def __init__(self, config: LoopedConfig):
        self._build(config, qa_outputs=nn.Linear(config.hidden_size, 2))


__all__ = ["LoopedForQuestionAnswering", "LoopedForSequenceClassification", "LoopedForTokenClassification"]
