"""Rotary positions of a config: one dict of parameters for all layers, or one for each type of layers."""

import copy
from collections.abc import Callable
from typing import Any

from .config_layers import LayersAndSlots
from .config_relations import LAYER_TYPES, SHARED_ROPE


class RopeOfLayers(LayersAndSlots):
    """Which layers read which rotary tables; transformers' checks are made for the parameters of each."""

    def section_ropes(self) -> tuple[list[str | None], list[str | None], list[str | None]]:
        """The rotary tables that the layers of each section read, see `rope_kinds`; None where they read none."""
        if self.position_embedding != "rope":
            return self.by_section([None] * self.num_layers)
        types = sum(self.section_layer_types(), [])
        names = types if self.rope_kinds() else [SHARED_ROPE] * self.num_layers
        letters = self._tiled(self.rope_pattern or "R")
        return self.by_section([name if letter == "R" else None for name, letter in zip(names, letters)])

    def rope_kinds(self) -> list[str]:
        """The layer types that `rope_parameters` has a dict for; none where one dict is that of all layers."""
        parameters = self.rope_parameters or {}
        return [kind for kind in LAYER_TYPES.values() if isinstance(parameters.get(kind), dict)]

    def with_rope_of(self, kind: str):
        """This config with the rotary parameters of one kind of `section_ropes` for all layers."""
        if kind == SHARED_ROPE:
            return self
        config = copy.copy(self)
        config.rope_parameters = (self.rope_parameters or {})[kind]
        return config

    def validate_rope(self):
        if self.position_embedding != "rope":  # transformers fills in rope_parameters, and checks them, regardless
            return
        try:
            self._for_each_rope(super().validate_rope)
        except KeyError as error:
            raise ValueError(f"rope_parameters={self.rope_parameters} lack a key. {error.args[0]}") from error

    def standardize_rope_params(self):
        self._for_each_rope(super().standardize_rope_params)

    def convert_rope_params_to_dict(self, *args, **kwargs):
        convert, left = super().convert_rope_params_to_dict, kwargs

        def convert_one():
            nonlocal left
            left = convert(*args, **kwargs)

        self._for_each_rope(convert_one)
        return left

    def _for_each_rope(self, action: Callable[[], Any]):
        """What transformers does with one dict of rotary parameters, with that of each layer type."""
        given, kinds = self.rope_parameters, self.rope_kinds()
        if not kinds:
            action()
            return
        assert given is not None  # it has kinds
        done = dict(given)
        try:
            for kind in kinds:
                self.rope_parameters = dict(given[kind])
                action()
                done[kind] = self.rope_parameters
        finally:
            self.rope_parameters = done
