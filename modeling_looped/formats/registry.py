"""The list of layouts, and the search for the layout of a folder."""

from typing import NamedTuple

from ..config_relations import MOST_LAYERS
from ..configuration_looped import LoopedConfigError
from .folder import stored_names
from .huginn import HUGINN, RETROFITTED, RETROFITTED_OLMO
from .layout import OF_RELEASES, Layout
from .llama import LLAMA
from .nanbeige import NANBEIGE
from .ouro import OURO
from .parcae import GATED_PARCAE, PARCAE


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (OURO, HUGINN, RETROFITTED, RETROFITTED_OLMO, PARCAE, GATED_PARCAE, NANBEIGE, LLAMA)
}
READABLE = [layout for layout in LAYOUTS.values() if layout.reads]
# a key that only a config.json of this package has
OURS = "num_core_layers"


class ForeignFolder(NamedTuple):
    """A folder in a foreign layout."""

    layout: Layout
    config: dict  # its config.json

    def read_config(self) -> dict:
        for name, value in self.config.items():
            if "layer" in name and isinstance(value, int) and value > MOST_LAYERS:
                raise LoopedConfigError(f"{name} must be at most {MOST_LAYERS}, got {value}")
        try:
            fields = self.layout.read_config(self.config)
        except (TypeError, AttributeError, ArithmeticError) as error:  # it computes with stored values
            raise LoopedConfigError(
                f"config.json has a value that no config of {self.layout.title} has ({error}): fetch it again"
            ) from error
        return {**OF_RELEASES, **fields, "architectures": ["LoopedForCausalLM"]}


def candidates(config: dict) -> list[Layout]:
    """Return the layouts in which a config.json may be written."""
    kinds = ((), (".norm_3.",), (".q_norm.",))  # names that distinguish layouts of one model_type
    return [layout for layout in READABLE if any(layout.recognises(config, names) for names in kinds)]


def is_published(config: dict) -> bool:
    """Return whether a config.json is that of a published model in a foreign layout."""
    return OURS not in config and bool(candidates(config))


def find_layout(config: dict, path, hub: dict) -> ForeignFolder | None:
    """Return the layout of a folder with this config.json; None if it is that of this package."""
    model_type = config.get("model_type")
    if OURS in config or model_type == "looped" or (model_type is None and "_class_name" not in config):
        return None
    may_be = candidates(config)
    if not may_be:
        raise LoopedConfigError(f"{path} {unknown(config)}")
    names = frozenset() if len(may_be) == 1 else stored_names(path, hub)
    for layout in may_be:
        if layout.recognises(config, names):
            return ForeignFolder(layout, config)
    raise LoopedConfigError(
        f"{path} says model_type={model_type!r}, but its tensors are those of none of the models of this kind that "
        f"can be opened: {', '.join(layout.title for layout in may_be)}"
    )


def unknown(config: dict) -> str:
    kind = config.get("model_type") or config.get("_class_name")
    what = "model_type" if config.get("model_type") else "_class_name"
    opened = ", ".join(f"{layout.title} ({layout.model_type or '_class_name'})" for layout in READABLE)
    return (
        f"has {what}={kind!r} in its config.json, which is no looped model that opens here. What opens: folders that "
        f"were saved by this package (looped), {opened}. A dense model is made to loop by "
        "LoopedForCausalLM.from_dense, or by a recipe with dense.path"
    )
