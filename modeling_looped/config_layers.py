"""Values derived from a config's fields: types and inputs of layers, and the slots of their keys and values."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers.configuration_utils import PreTrainedConfig

from .config_errors import LoopedConfigError


LAYER_TYPES = {"L": "full_attention", "S": "sliding_attention"}  # by the letters of window_pattern
SHARED_ROPE = "all_layers"  # the name of rotary tables that do not depend on the type of a layer


def with_rope_kept(changes: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return changes of the fields `before`. Rotary parameters among them that do not name a base or a trained length
    keep those of `before`, which the weights know; None keeps all."""
    present = before.get("rope_parameters")
    if not present:
        return changes
    if "rope_theta" in changes:
        raise LoopedConfigError(
            f"rope_theta={changes['rope_theta']!r} cannot be set beside rope_parameters={present}: change it there "
            "and pass the whole as rope_parameters"
        )
    others = {name: value for name, value in changes.items() if name not in ("rope_parameters", "rope_scaling")}
    given = changes.get("rope_scaling") or changes.get("rope_parameters")
    if isinstance(given, dict):
        given = rope_over(present, given, before["max_position_embeddings"])
    return others if given is None else {**others, "rope_parameters": given}


def rope_over(before: dict[str, Any], given: dict[str, Any], length: int) -> dict[str, Any]:
    if any(isinstance(one, dict) for one in given.values()):
        return {
            kind: rope_over(before.get(kind, before), one, length) if isinstance(one, dict) else one
            for kind, one in given.items()
        }
    if "rope_theta" not in {**before, **given}:  # there is one for each layer type
        return {kind: rope_over(one, given, length) for kind, one in before.items()}
    kept = {"rope_theta": before.get("rope_theta")}
    if given.get("rope_type", given.get("type")) in ("llama3", "yarn", "longrope"):
        kept["original_max_position_embeddings"] = before.get("original_max_position_embeddings", length)
    return {**kept, **given}


class BlockSizes(NamedTuple):
    """Sizes of the blocks of one section: prelude, core or coda."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_sets: int = 0  # number of per-loop parameter sets
    delta_rank: int | None = None  # rank of the matrix that each loop adds to a linear layer
    num_norm_sets: int | None = None  # num_sets if norms have a weight for each loop
    is_modulated: bool = False


class DerivedFields(PreTrainedConfig):
    """Values derived from the fields of a config; `LoopedConfig` inherits this class and defines the fields."""

    @property
    def num_layers(self) -> int:
        """Unique layers: L = P + C + Q."""
        return self.num_prelude_layers + self.num_core_layers + self.num_coda_layers

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether a unique layer has value embeddings: every other layer does, and the last one among them."""
        return self.value_embeddings and layer % 2 == (self.num_layers - 1) % 2

    @property
    def trained_depth(self) -> int:
        """Loops in training. Before a model has been saved: the loops that a new model would be trained with."""
        return self.num_loops if self.trained_num_loops is None else self.trained_num_loops

    @property
    def reads_run_depth(self) -> str | None:
        """The setting that makes a loop depend on the number of loops run, or None. With such a setting the first k
        loops of a deeper run are not a run of k loops."""
        if self.residual_depth == "run":
            return "residual_depth='run'"
        return f"loop_embedding={self.loop_embedding!r}" if self.loop_embedding in ("time", "modulation") else None

    def residual_factor(self, num_loops: int) -> float:
        """eps of the residual scaling rule for layers that are applied `num_loops` times."""
        if self.residual_scaling == "none":
            return 1.0
        divisor = {
            "sqrt": num_loops**0.5,
            "linear": num_loops,
            "factored": num_loops * (self.num_layers / self.residual_reference_layers) ** 0.5,
        }[self.residual_scaling]
        return self.residual_scale / divisor

    @property
    def state_size(self) -> int:
        """Width of the state that is carried from loop to loop."""
        return self.hidden_size if self.core_hidden_size is None else self.core_hidden_size

    def block_sizes(self, section: str) -> BlockSizes:
        heads, key_value_heads = self.num_attention_heads, self.num_key_value_heads
        assert key_value_heads is not None  # since __post_init__
        if section != "core":
            return BlockSizes(self.hidden_size, self.intermediate_size, heads, key_value_heads)
        core_heads = heads if self.core_num_attention_heads is None else self.core_num_attention_heads
        core_mlp = self.intermediate_size if self.core_intermediate_size is None else self.core_intermediate_size
        return BlockSizes(
            self.state_size,
            core_mlp,
            core_heads,
            core_heads * key_value_heads // heads,
            num_sets=self.num_loop_sets,
            delta_rank=self.loop_lora_rank,
            num_norm_sets=self.num_loop_sets if self.loop_norms else None,
            is_modulated=self.loop_embedding == "modulation",
        )

    @property
    def num_loop_sets(self) -> int:
        """Number of per-loop parameter sets, if the model has per-loop parameters."""
        return self.trained_depth if self.num_loop_parameters is None else self.num_loop_parameters

    @property
    def has_sets_in_core(self) -> bool:
        return self.loop_lora_rank is not None or self.loop_norms

    @property
    def num_hidden_layers(self) -> int:
        """Key/value slots of a pass at the configured depth: P + Q + C * (loops that compute keys and values)."""
        # `num_slots(num_loops)` in the fewest reads of fields: transformers asks for this twice per slot of a cache,
        # and its configs take long to read a field
        fields = vars(self)
        loops, most = -(-fields["num_loops"] // fields["key_value_interval"]), fields["num_key_value_loops"]
        loops = loops if most is None or loops < most else most
        return fields["num_prelude_layers"] + fields["num_coda_layers"] + loops * fields["num_core_layers"]

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int):
        if value != self.num_hidden_layers:
            raise LoopedConfigError(
                f"num_hidden_layers={value} does not fit: it is derived from num_prelude_layers + num_coda_layers + "
                f"num_core_layers * {'(loops with keys and values)' if self.shares_keys else 'num_loops'} = "
                f"{self.num_prelude_layers} + {self.num_coda_layers} + {self.num_core_layers} * "
                f"{self.num_stored_loops(self.num_loops)} = {self.num_hidden_layers}. Set those fields, and leave "
                "num_hidden_layers out."
            )

    @property
    def layer_types(self) -> list[str]:
        """Attention type of every slot. Without windows the attribute is absent, so that nothing assumes windows."""
        if not self.has_windows:
            raise AttributeError("layer_types exists only with a window_pattern or a sliding_window")
        return self.types_of_slots(self.num_stored_loops(self.num_loops))

    @layer_types.setter
    def layer_types(self, value: list[str]):
        if list(value) != self.types_of_slots(self.num_stored_loops(self.num_loops)):
            raise LoopedConfigError(
                f"layer_types={value} does not fit: it is derived from window_pattern={self.window_pattern!r} and "
                f"sliding_window={self.sliding_window}. Set those fields instead."
            )

    def types_of_slots(self, stored_loops: int) -> list[str]:
        prelude, core, coda = self.section_layer_types()
        return prelude + coda + core * stored_loops

    @property
    def has_windows(self) -> bool:
        return self.window_pattern is not None or self.sliding_window is not None

    def section_layer_types(self) -> tuple[list[str], list[str], list[str]]:
        """Return the attention types of the layers of prelude, core and coda. A pattern with one letter per layer is
        used as written; another is tiled over all layers, and the last layer gets full attention."""
        pattern = self.window_pattern or ("S" if self.has_windows else "L")
        letters = self._tiled(pattern)
        if self.window_pattern is not None and len(pattern) != self.num_layers:
            letters[-1:] = "L"
        # check_attention refuses other letters once all fields are set
        return self.by_section([LAYER_TYPES.get(letter, letter) for letter in letters])

    def _tiled(self, pattern: str) -> list[str]:
        """Repeat a pattern until each layer has a letter."""
        return [pattern[i % len(pattern)] for i in range(self.num_layers)]

    def by_section(self, of_layers: list) -> tuple[list, list, list]:
        core, coda = self.num_prelude_layers, self.num_prelude_layers + self.num_core_layers
        return of_layers[:core], of_layers[core:coda], of_layers[coda:]

    # Rotary tables of layers: `rope_parameters` is one dict for all layers, or has one dict for each layer type. In
    # that case the checks of transformers run on each dict.

    def section_ropes(self) -> tuple[list[str | None], list[str | None], list[str | None]]:
        """Return the names of the rotary tables that the layers of each section read (see `rope_kinds`), or None."""
        if self.position_embedding != "rope":
            return self.by_section([None] * self.num_layers)
        types = sum(self.section_layer_types(), [])
        names = types if self.rope_kinds() else [SHARED_ROPE] * self.num_layers
        letters = self._tiled(self.rope_pattern or "R")
        return self.by_section([name if letter == "R" else None for name, letter in zip(names, letters)])

    def rope_kinds(self) -> list[str]:
        """Return the layer types for which `rope_parameters` has a dict; empty if one dict serves all layers."""
        parameters = self.rope_parameters or {}
        return [kind for kind in LAYER_TYPES.values() if isinstance(parameters.get(kind), dict)]

    def with_rope_of(self, kind: str):
        """Return this config with the rotary parameters of one name in `section_ropes` set for all layers."""
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
        """Apply a method of transformers that handles one dict of rotary parameters to the dict of each layer type."""
        given, kinds = self.rope_parameters, self.rope_kinds()
        if not kinds:
            action()
            return
        assert given is not None  # because there are kinds
        done = dict(given)
        try:
            for kind in kinds:
                self.rope_parameters = dict(given[kind])
                action()
                done[kind] = self.rope_parameters
        finally:
            self.rope_parameters = done

    # The place of a layer's keys and values: a slot is an index into a transformers cache. More loops only append.
    #     prelude 0..P-1 | coda P..P+Q-1 | loop 0: P+Q.. | loop 1: P+Q+C.. | ...
    # These are stored loops: loops that share keys and values count as one.

    @property
    def shares_keys(self) -> bool:
        """True if some loops compute no keys and values and read those of an earlier loop."""
        return self.key_value_interval > 1 or self.num_key_value_loops is not None

    def stored_loop(self, loop: int) -> int:
        """Return the index, among stored loops, of the keys and values that a loop reads."""
        stored = loop // self.key_value_interval
        return stored if self.num_key_value_loops is None else min(stored, self.num_key_value_loops - 1)

    def makes_keys(self, loop: int) -> bool:
        """Return whether a loop computes keys and values, which that loop and later ones read."""
        return loop == 0 or self.stored_loop(loop) > self.stored_loop(loop - 1)

    def num_stored_loops(self, num_loops: int) -> int:
        return self.stored_loop(num_loops - 1) + 1

    def num_slots(self, num_loops: int) -> int:
        return self.core_slot(self.num_stored_loops(num_loops))

    def core_slot(self, loop: int) -> int:
        """The slot of the first core layer in a loop."""
        return self.num_prelude_layers + self.num_coda_layers + loop * self.num_core_layers

    def split_slot(self, slot: int) -> tuple[int, int]:
        """Split a slot into its layer's slot in the first loop, and the loop; prelude and coda count as loop 0."""
        first = self.core_slot(0)
        if slot < first:
            return slot, 0
        loop, layer = divmod(slot - first, self.num_core_layers)
        return first + layer, loop

    def slot_at(self, first_slot: int, loop: int) -> int:
        """The inverse of `split_slot`."""
        return first_slot + loop * self.num_core_layers
