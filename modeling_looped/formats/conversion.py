"""The rules of a layout as conversions of transformers, with which transformers loads a foreign folder.

transformers looks conversions up by the name of the model's class, both to load and to save. So a model is loaded as
a class of another name and then gets its own class back, and is saved in the layout of this package like any other.
"""

import re

from transformers import conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

from .changes import ShapeError
from .layout import Layout, Rule


class ReadChange(ConversionOps):
    """The change of a rule as an operation that transformers runs while it loads."""

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
        except ShapeError:  # reported like any other tensor of wrong shape
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
    """Return a subclass of `model_class`, under whose name the conversions of a layout are registered."""
    name = f"{re.sub('[^a-zA-Z]', '', layout.name.title())}As{model_class.__name__}"
    conversion_mapping.register_checkpoint_conversion_mapping(name, conversions(layout), overwrite=True)
    return type(name, (model_class,), {"_keys_to_ignore_on_load_unexpected": list(layout.ignored)})


def leave_loading_class(model, model_class: type):
    """Give a loaded model its own class back, and remove what the class for loading left on it."""
    model.__class__ = model_class
    vars(model).pop("_weight_conversions", None)
