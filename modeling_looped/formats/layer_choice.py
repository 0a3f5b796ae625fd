"""The choice of dense layers for the layers of prelude, core and coda."""

from typing import NamedTuple


SECTIONS = ("prelude", "core", "coda")
CORE_INITS = ("copy", "lower", "stepwise", "average")


class LayerChoice(NamedTuple):
    """sources: for each looped layer of a section, the dense layers that it is made of (their mean, if several).
    tied: the dense layers that all loops of the core stand for, in order; None if the layers were copied."""

    sources: dict[str, list[tuple[int, ...]]]
    num_loops: int
    tied: list[int] | None = None

    def letters(self, of_dense: str, what: str) -> str:
        """Return a letter for each looped layer, from a letter for each dense layer."""
        letters = ""
        for sources in (sources for section in SECTIONS for sources in self.sources[section]):
            found = {of_dense[layer] for layer in sources}
            if len(found) > 1:
                raise ValueError(
                    f"the dense layers {', '.join(map(str, sources))} would become one, but differ in {what} "
                    f"({', '.join(of_dense[layer] for layer in sources)}): use another number of core layers, or "
                    "core_init='lower' or 'stepwise' without loop_lora_rank and loop_norms"
                )
            letters += found.pop()
        return letters

    def check_loops(self, of_dense: str, what: str):
        """Refuse loops with weights of their own if the dense layers that they stand for at one place differ."""
        assert self.tied is not None
        size = len(self.sources["core"])
        for place in range(size):
            layers = self.tied[place::size]
            found = [of_dense[layer] for layer in layers]
            if len(set(found)) > 1:
                raise ValueError(
                    f"with loop_lora_rank or loop_norms the loops of one layer stand for the dense layers "
                    f"{', '.join(map(str, layers))}, but these differ in {what} ({', '.join(found)}), which all loops "
                    f"share: use a number of core layers after which these letters repeat, not {size}, or leave out "
                    "loop_lora_rank and loop_norms"
                )


def choose_layers(
    num_dense: int,
    prelude: int | None,
    core: int | None,
    coda: int | None,
    num_loops: int | None,
    layers: list[int] | dict[str, list[int]] | None,
    core_init: str,
) -> LayerChoice:
    """Choose the dense layers that the looped layers come from; the arguments are those of `from_dense`."""
    counts = {"prelude": prelude, "core": core, "coda": coda}
    given = {f"num_{name}_layers": count for name, count in counts.items()} | {"num_loops": num_loops}
    for name, value in given.items():
        least = 1 if name in ("num_core_layers", "num_loops") else 0
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if core_init not in CORE_INITS:
        raise ValueError(f"core_init must be one of {', '.join(CORE_INITS)}, got {core_init!r}")
    if isinstance(layers, dict):
        kept = layers_by_section(num_dense, layers)
        for name in ("prelude", "coda"):
            if counts[name] not in (None, len(kept[name])):
                raise ValueError(
                    f"num_{name}_layers={counts[name]}, but layers names {len(kept[name])} for {name}: {kept[name]}"
                )
    else:
        kept = divided(list(range(num_dense)) if layers is None else checked(num_dense, layers), prelude, coda)
    sources: dict[str, list[tuple[int, ...]]] = {name: [(layer,) for layer in kept[name]] for name in SECTIONS}
    if core_init == "copy":
        check_core(kept, core)
        return LayerChoice(sources, 1 if num_loops is None else num_loops)
    sources["core"], loops = tied(kept["core"], core, num_loops, core_init)
    return LayerChoice(sources, loops, kept["core"])


def checked(num_dense: int, layers) -> list[int]:
    """Return numbers of dense layers as a list; refuse them if they are wrong or not in order."""
    if not isinstance(layers, (list, tuple, range)) or any(
        isinstance(layer, bool) or not isinstance(layer, int) for layer in layers
    ):
        raise ValueError(
            "layers must be a list of numbers of layers, or a dict of one such list for each section, as "
            f"{{'prelude': [0], 'core': [2, 3], 'coda': [5]}}, got {layers!r}"
        )
    layers = list(layers)
    beyond = [layer for layer in layers if not 0 <= layer < num_dense]
    if beyond:
        raise ValueError(f"layers {beyond} are none of the dense model's, which has 0 to {num_dense - 1}")
    if any(after <= before for before, after in zip(layers, layers[1:])):
        raise ValueError(f"layers must be in the order in which the dense model runs them, each once, got {layers}")
    return layers


def layers_by_section(num_dense: int, layers: dict) -> dict[str, list[int]]:
    unknown = [name for name in layers if name not in SECTIONS]
    if unknown or not layers.get("core"):
        raise ValueError(f"layers must have the keys prelude, core and coda, with layers for core, got {layers}")
    kept = {name: list(layers.get(name) or []) for name in SECTIONS}
    checked(num_dense, [layer for section in SECTIONS for layer in kept[section]])
    return kept


def divided(layers: list[int], prelude: int | None, coda: int | None) -> dict[str, list[int]]:
    first, last = prelude or 0, coda or 0
    if first + last >= len(layers):
        raise ValueError(
            f"num_prelude_layers={first} and num_coda_layers={last} leave no layer for the core: {len(layers)} dense "
            "layers are kept"
        )
    end = len(layers) - last
    return {"prelude": layers[:first], "core": layers[first:end], "coda": layers[end:]}


def check_core(kept: dict[str, list[int]], core: int | None):
    layers = kept["core"]
    if core is not None and core != len(layers):
        first, last = len(kept["prelude"]), len(kept["coda"])
        advice = "lower the numbers"
        if core < len(layers):
            advice = (
                "name those to keep with layers=[...], or make fewer core layers of more with core_init='average', "
                "'lower' or 'stepwise'"
            )
        raise ValueError(
            f"prelude + core + coda = {first} + {core} + {last} = {first + core + last}, but "
            f"{first + len(layers) + last} dense layers are kept: {advice}"
        )


def tied(
    layers: list[int], core: int | None, num_loops: int | None, core_init: str
) -> tuple[list[tuple[int, ...]], int]:
    """Return the sources of `core` looped layers made from `core * num_loops` dense ones, and the number of loops."""
    if core is None and num_loops is None:
        raise ValueError(
            f"core_init={core_init!r} makes core layers of more dense ones: say num_core_layers, or num_loops"
        )
    size = core if core is not None else len(layers) // (num_loops or 1)
    loops = num_loops if num_loops is not None else len(layers) // size
    if size * loops != len(layers) or size == 0:
        raise ValueError(
            f"core_init={core_init!r} makes core layers of num_core_layers * num_loops dense ones, but "
            f"num_core_layers={core} and num_loops={num_loops} do not divide the {len(layers)} layers {layers}"
        )
    if core_init == "average":
        return [tuple(layers[i::size]) for i in range(size)], loops
    if core_init == "lower":
        return [(layer,) for layer in layers[:size]], loops
    places = [round(i * (len(layers) - 1) / (size - 1)) for i in range(size)] if size > 1 else [0]
    return [(layers[place],) for place in places], loops
