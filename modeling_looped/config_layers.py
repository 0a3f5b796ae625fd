"""What follows from a config's depth and sizes: what each layer is, and where it keeps its keys and values."""

from typing import NamedTuple

from transformers.configuration_utils import PreTrainedConfig

from .config_errors import LoopedConfigError
from .config_relations import LAYER_TYPES


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


class LayersAndSlots(PreTrainedConfig):
    """What `LoopedConfig`, which has the fields, derives from depth and sizes."""

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
                f"{self.num_stored_loops(self.num_loops)} = {self.num_hidden_layers}. Set those fields instead."
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
