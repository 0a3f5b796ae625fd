"""Where a layer keeps its keys and values: the arithmetic of cache slots, in one place.

A slot is an index into a transformers cache. Slots come in the order prelude, coda, then loop by loop of the core:

    prelude 0..P-1 | coda P..P+Q-1 | loop 0: P+Q.. | loop 1: P+Q+C.. | ...

so that running more loops only appends.
"""


def num_slots(config, num_loops: int) -> int:
    return core_slot(config, num_loops, 0)


def prelude_slot(config, layer: int) -> int:
    return layer


def coda_slot(config, layer: int) -> int:
    return config.num_prelude_layers + layer


def core_slot(config, loop: int, layer: int) -> int:
    return config.num_prelude_layers + config.num_coda_layers + loop * config.num_core_layers + layer


def split_slot(config, slot: int) -> tuple[int, int]:
    """A slot as that of its layer in the first loop, and the loop; prelude and coda are at loop 0."""
    first = core_slot(config, 0, 0)
    if slot < first:
        return slot, 0
    loop, layer = divmod(slot - first, config.num_core_layers)
    return first + layer, loop


def slot_at(config, first_slot: int, loop: int) -> int:
    """The inverse of `split_slot`."""
    return first_slot + loop * config.num_core_layers


def structural_layer_types(config) -> tuple[list[str], list[str], list[str]]:
    """Attention type of the unique layers of prelude, core and coda: the pattern tiled over all, the last one full."""
    num_layers = config.num_prelude_layers + config.num_core_layers + config.num_coda_layers
    pattern = config.window_pattern or "L"
    letters = [pattern[i % len(pattern)] for i in range(num_layers - 1)] + ["L"]
    types = [{"L": "full_attention", "S": "sliding_attention"}[letter] for letter in letters]
    first, last = config.num_prelude_layers, config.num_prelude_layers + config.num_core_layers
    return types[:first], types[first:last], types[last:]
