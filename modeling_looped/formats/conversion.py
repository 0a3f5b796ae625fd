"""The rules of a layout in transformers' words, so that its own loading reads a foreign folder.

transformers looks conversions up by the name of the model's class, on loading and again on saving. So a model is
loaded as a class of another name and given its own class back: from then on it is saved in our layout, as any other.
"""

import re

from transformers import conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

from .changes import ShapeError
from .layout import Layout, Rule


class ReadChange(ConversionOps):
    """A change of a rule, as transformers runs it while it loads."""

    def __init__(self, rule: Rule):
        self.rule = rule

    def convert(self, input_dict, full_layer_name: str = "", config=None, **kwargs):
        tensor = next(iter(input_dict.values()))
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        first, *_ = leaves = [template.rpartition("{i}.")[2] for template in self.rule.ours]
        layer = full_layer_name.removesuffix(first)
        assert self.rule.change is not None
        try:
            parts = self.rule.change.read(tensor, config)
        except ShapeError:  # reported as any other tensor of a wrong shape
            return {full_layer_name: tensor}
        return {layer + leaf: part for leaf, part in zip(leaves, parts, strict=True)}

    @property
    def reverse_op(self):
        raise NotImplementedError("what a foreign folder was converted with is not kept: writing.py writes one")


def conversions(layout: Layout) -> list:
    made: list[WeightTransform] = []
    for rule in layout.all_rules:
        source, targets = rule.pattern(rule.stored), [template.replace("{i}", r"\1") for template in rule.ours]
        if rule.change is None:
            made.append(WeightRenaming(source, targets[0]))
        else:
            made.append(WeightConverter(source, targets, operations=[ReadChange(rule)]))
    return made


def loading_class(model_class: type, layout: Layout) -> type:
    """The class under whose name a folder of this layout is loaded as a `model_class`."""
    name = f"{re.sub('[^a-zA-Z]', '', layout.name.title())}As{model_class.__name__}"
    conversion_mapping.register_checkpoint_conversion_mapping(name, conversions(layout), overwrite=True)
    return type(name, (model_class,), {"_keys_to_ignore_on_load_unexpected": list(layout.ignored)})


def leave_loading_class(model, model_class: type):
    """Makes a loaded model one of its own class again; nothing of the class for loading is kept."""
    model.__class__ = model_class
    vars(model).pop("_weight_conversions", None)
