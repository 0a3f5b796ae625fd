"""Base of layouts: how a foreign config.json and its tensors correspond to those of this package.

A layout is written down once, as rules from stored names to names here, and used in both directions: `reading.py`
passes the rules to transformers, which loads with them, and `writing.py` applies them backwards.
"""

import re
from collections.abc import Collection
from functools import cached_property
from typing import Any, NamedTuple

from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig

from ..configuration_looped import LoopedConfig, LoopedConfigError
from ..foreign_names import GENERATION_FIELDS, KEYS_OF_TOOLS
from .changes import Change


REQUIRED: Any = object()
# how all releases compute, though no config.json says so. It affects only rounding, so other values are written too
OF_RELEASES = {"norm_rounding": "before_weight"}
# fields of a config that matter in training only: a layout need not express them, and reading gives the defaults
OF_TRAINING = frozenset(
    """
    format_version trained_num_loops loop_loss exit_entropy_weight norm_penalty scale_anchor scale_anchor_target
    latent_loss latent_anchor init_scheme initializer_range residual_dropout residual_dropout_on embedding_dropout
    attention_dropout classifier_dropout state_init_std use_cache
    """.split()
)
# keys of any config.json that have the same meaning here
SHARED = ("dtype", "torch_dtype", "quantization_config", "id2label", "label2id", "num_labels", "problem_type")


class Rule(NamedTuple):
    """A stored tensor and the parameters it holds. A name may contain `{i}`, the number of a layer; in a rule without
    a change it may be the beginning of a name, up to a dot."""

    stored: str
    ours: tuple[str, ...]
    change: Change | None = None

    def pattern(self, template: str) -> str:
        number = re.escape(template).replace(re.escape("{i}"), r"(\d+)")
        return f"^{number}$" if self.change else rf"^{number}(?=\.|$)"


def rules(table: dict[str, str]) -> list[Rule]:
    return [Rule(stored, (ours,)) for stored, ours in table.items()]


class Layout:
    """A published layout; each has a subclass."""

    name: str  # value of `--to`
    title: str  # in messages
    architecture: str = ""
    model_type: str | None = None
    reads = True
    ignored: tuple[str, ...] = ()  # patterns of stored tensors that follow from others
    keeps_tied_head = False  # whether a tied head is stored beside the embedding
    is_pickled = False
    said_elsewhere: frozenset[str] = frozenset()  # fields that its config.json lacks, but other files have

    def recognises(self, config: dict, stored_names: Collection[str]) -> bool:
        """Return whether a folder has this layout. stored_names: of tensors; read if the config does not decide."""
        return self.model_type is not None and config.get("model_type") == self.model_type

    def read_config(self, config: dict) -> dict:
        """Return the fields of LoopedConfig for a config.json; raise an error that names what cannot be run here."""
        raise NotImplementedError

    def write_config(self, config: LoopedConfig) -> dict:
        """Return the config.json of a model in this layout; `said_differently` finds the fields it cannot express."""
        raise NotImplementedError

    def make_rules(self) -> list[Rule]:
        raise NotImplementedError

    def further_tensors(self, config: LoopedConfig, tensors: dict) -> dict:
        """Return tensors to store that are not parameters here."""
        return {}

    def adjust_generation(self, generation: GenerationConfig, config: LoopedConfig, stored: dict):
        """Set what generate() of the release does, or should do, beyond its files. stored: its config.json."""

    def write_generation(self, words: dict, generation: GenerationConfig):
        """Write the values of a generation config that belong in config.json into `words`."""

    @cached_property
    def all_rules(self) -> list[Rule]:
        return self.make_rules()

    def describe(self, config: LoopedConfig) -> str:
        outside = [(config.num_prelude_layers, "before"), (config.num_coda_layers, "after")]
        extra = "".join(f" and {count} {where} the loop" for count, where in outside if count)
        return f"{self.title}: {config.num_core_layers} layers{extra}, {config.num_loops} loops"


class Fields:
    """The fields of a foreign config.json, taken one by one; unknown fields that are left at the end are refused."""

    def __init__(self, layout: Layout, stored: dict):
        self.layout, self.stored, self.left = layout, stored, dict(stored)

    def take(self, *names: str, default: Any = REQUIRED) -> Any:
        """Take a field that has several names, and return its value; if several are present, they must agree."""
        given = {name: self.left.pop(name) for name in names if name in self.left}
        given = {name: value for name, value in given.items() if value is not None}
        if len({repr(value) for value in given.values()}) > 1:
            raise LoopedConfigError(f"config.json of {self.layout.title}: {given} must be equal")
        if given:
            return next(iter(given.values()))
        if default is REQUIRED:
            raise LoopedConfigError(f"config.json of {self.layout.title} has no {' or '.join(names)}, which is needed")
        return default

    def expect(self, name: str, *allowed: Any):
        """Take a field that must have one of these values if it is present. None stands for the layout's default."""
        value = self.left.pop(name, None)
        if value is not None and value not in allowed:
            wanted = " or ".join(repr(option) for option in allowed) or "absent or null"
            raise LoopedConfigError(
                f"config.json of {self.layout.title} has {name}={value!r}, but only {wanted} is known here: a model "
                "that means something else would give wrong results"
            )

    def drop(self, *names: str):
        """Drop fields that matter in training only, or follow from other fields."""
        for name in names:
            self.left.pop(name, None)

    def rope(self, theta: float | int) -> dict:
        """Return rope_parameters from the fields of any version of transformers. theta: where these do not say it."""
        given = self.take("rope_parameters", default=None)
        scaling = dict(self.take("rope_scaling", default=None) or {})
        if given is not None:
            return {"rope_theta": theta, "rope_type": "default", **given}
        scaling["rope_type"] = scaling.pop("type", None) or scaling.get("rope_type", "default")
        return {**scaling, "rope_theta": theta}

    def shared(self) -> dict:
        """Return the fields that mean the same in every config.json. Called last, it refuses unknown fields."""
        fields = {name: self.left.pop(name) for name in SHARED if name in self.left}
        if (dtype := fields.pop("torch_dtype", None)) is not None:
            fields.setdefault("dtype", dtype)
        self.drop("architectures", "auto_map", "transformers_version", "model_type", "custom_pipelines")
        unknown = []
        for name, value in self.left.items():
            if name in GENERATION_FIELDS and not name.startswith("_"):
                fields[name] = value
            elif value is not None and not (
                name.startswith("_") or name in KEYS_OF_TOOLS or hasattr(PreTrainedConfig, name)
            ):
                unknown.append(f"{name}={value!r}")
        if unknown:
            raise LoopedConfigError(
                f"config.json of {self.layout.title} has fields that are not known here, so what they change would be "
                f"lost: {', '.join(unknown)}. Remove them from config.json if they change nothing"
            )
        return {name: value for name, value in fields.items() if value is not None}


def token_ids(fields: Fields, vocab_size: int, bos=None, eos=None, pad=None) -> dict:
    """Return the ids of special tokens; an id missing in the config or outside the vocabulary becomes the argument."""

    def inside(value, otherwise):
        ids = value if isinstance(value, list) else [value]
        return value if all(isinstance(i, int) and 0 <= i < vocab_size for i in ids) and ids else otherwise

    names = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    return {name: inside(fields.take(name, default=None), default) for name, default in names.items()}


def rope_words(config: LoopedConfig) -> dict[str, Any]:
    """Return rotary positions in fields that both transformers 4 and 5 read."""
    parameters = dict(config.rope_parameters or {})
    theta = parameters.pop("rope_theta", 10000.0)
    scaling = None if parameters.get("rope_type", "default") == "default" else parameters
    return {"rope_theta": theta, "rope_scaling": scaling}


def said_differently(layout: Layout, config: LoopedConfig, stored: dict) -> list[str]:
    """List the fields of a config that its config.json in this layout does not reproduce."""
    try:
        back = LoopedConfig(**layout.read_config(stored))
    except LoopedConfigError as error:  # values that the layout always has do not fit those of this model
        raise LoopedConfigError(f"the layout of {layout.title} cannot say this model: as it reads, {error}") from error
    unsaid = {*OF_TRAINING, *OF_RELEASES, *layout.said_elsewhere}
    ours = {name: getattr(config, name) for name in LoopedConfig.__annotations__ if name not in unsaid}
    return [f"{name}={value!r}" for name, value in ours.items() if value != getattr(back, name)]
