"""What follows from a config's fields: what each layer is and reads, and where it keeps its keys and values."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers.configuration_utils import PreTrainedConfig

from .config_errors import LoopedConfigError


LAYER_TYPES = {"L": "full_attention", "S": "sliding_attention"}  # by the letters of window_pattern
SHARED_ROPE = "all_layers"  # the name of rotary tables that do not depend on the type of a layer


class BlockSizes(NamedTuple):
    """Sizes of the blocks of one section: prelude, core or coda."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_sets: int = 0  # sets of parameters that loops have for themselves
    delta_rank: int | None = None  # of what each loop adds to the linear layers
    num_norm_sets: int | None = None  # num_sets where norms have a weight for each loop
    is_modulated: bool = False


class DerivedFields(PreTrainedConfig):
    """What `LoopedConfig`, which has the fields, derives from them."""

    @property
    def num_layers(self) -> int:
        """Unique layers: L = P + C + Q."""
        return self.num_prelude_layers + self.num_core_layers + self.num_coda_layers

    def has_value_embedding(self, layer: int) -> bool:
        """Every other layer, so that the last one has one; layers counted once, whatever the depth."""
        return self.value_embeddings and layer % 2 == (self.num_layers - 1) % 2

    @property
    def trained_depth(self) -> int:
        """Loops in training. Before a model has been saved: the loops that a new model would be trained with."""
        return self.num_loops if self.trained_num_loops is None else self.trained_num_loops

    @property
    def reads_run_depth(self) -> str | None:
        """The setting, if any, by which a loop depends on how many are run; with it, the first k loops of a deeper
        run are not a run of k loops."""
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
        """How many sets of parameters loops have for themselves, where they have any."""
        return self.trained_depth if self.num_loop_parameters is None else self.num_loop_parameters

    @property
    def has_sets_in_core(self) -> bool:
        return self.loop_lora_rank is not None or self.loop_norms

    @property
    def num_hidden_layers(self) -> int:
        """Key/value slots of a pass at the configured depth: P + Q + C * num_loops, of loops that have some."""
        return self.num_slots(self.num_loops)

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
        """Attention type of every slot. Absent without windows, so that no consumer sees any."""
        if not self.has_windows:
            raise AttributeError("layer_types exists only with a window_pattern or a sliding_window")
        return self._type_of_slots()

    @layer_types.setter
    def layer_types(self, value: list[str]):
        if list(value) != self._type_of_slots():
            raise LoopedConfigError(
                f"layer_types={value} does not fit: it is derived from window_pattern={self.window_pattern!r} and "
                f"sliding_window={self.sliding_window}. Set those fields instead."
            )

    def _type_of_slots(self) -> list[str]:
        prelude, core, coda = self.section_layer_types()
        return prelude + coda + core * self.num_stored_loops(self.num_loops)

    @property
    def has_windows(self) -> bool:
        return self.window_pattern is not None or self.sliding_window is not None

    def section_layer_types(self) -> tuple[list[str], list[str], list[str]]:
        """Attention types of the layers of prelude, core and coda: the pattern as it is if it has a letter for each of
        them, else tiled over all, the last one full."""
        pattern = self.window_pattern or ("S" if self.has_windows else "L")
        letters = self._tiled(pattern)
        if self.window_pattern is not None and len(pattern) != self.num_layers:
            letters[-1:] = "L"
        # other letters are refused when all fields are there
        return self.by_section([LAYER_TYPES.get(letter, letter) for letter in letters])

    def _tiled(self, pattern: str) -> list[str]:
        """A letter for each layer."""
        return [pattern[i % len(pattern)] for i in range(self.num_layers)]

    def by_section(self, of_layers: list) -> tuple[list, list, list]:
        core, coda = self.num_prelude_layers, self.num_prelude_layers + self.num_core_layers
        return of_layers[:core], of_layers[core:coda], of_layers[coda:]

    # Which layers read which rotary tables: `rope_parameters` is one dict for all, or one for each type of layers, and
    # transformers' checks are made for each.

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

    # Where a layer keeps its keys and values: a slot is an index into a transformers cache. More loops only append.
    #     prelude 0..P-1 | coda P..P+Q-1 | loop 0: P+Q.. | loop 1: P+Q+C.. | ...
    # Here loops are counted as they are stored: of those that share keys and values, the first one.

    @property
    def shares_keys(self) -> bool:
        """Whether there are loops without keys and values of their own."""
        return self.key_value_interval > 1 or self.num_key_value_loops is not None

    def stored_loop(self, loop: int) -> int:
        """Whose keys and values a loop reads, as it is stored."""
        stored = loop // self.key_value_interval
        return stored if self.num_key_value_loops is None else min(stored, self.num_key_value_loops - 1)

    def makes_keys(self, loop: int) -> bool:
        """Whether a loop computes keys and values, which it and those after it read."""
        return loop == 0 or self.stored_loop(loop) > self.stored_loop(loop - 1)

    def num_stored_loops(self, num_loops: int) -> int:
        return self.stored_loop(num_loops - 1) + 1

    def num_slots(self, num_loops: int) -> int:
        return self.core_slot(self.num_stored_loops(num_loops))

    def core_slot(self, loop: int) -> int:
        """The slot of the first core layer in a loop."""
        return self.num_prelude_layers + self.num_coda_layers + loop * self.num_core_layers

    def split_slot(self, slot: int) -> tuple[int, int]:
        """A slot as that of its layer in the first loop, and the loop; prelude and coda are at loop 0."""
        first = self.core_slot(0)
        if slot < first:
            return slot, 0
        loop, layer = divmod(slot - first, self.num_core_layers)
        return first + layer, loop

    def slot_at(self, first_slot: int, loop: int) -> int:
        """The inverse of `split_slot`."""
        return first_slot + loop * self.num_core_layers
