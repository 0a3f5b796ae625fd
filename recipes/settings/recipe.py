"""Recipes: YAML and `section.key=value` arguments, read into one dataclass per section (sections.py) and checked.

The YAML holds only values that differ from the defaults of sections.py, and may start from another recipe with
`extends: other.yaml`. There, and in an argument, null gives a setting that cannot be null its default back, as if it
had not been named. An unknown key is an error that names the nearest known one. `model` holds a preset name and fields
of `LoopedConfig`.
"""

import dataclasses
import functools
import math
import os
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from transformers import AutoConfig

from looped_recipes.common.command_line import typed
from looped_recipes.common.files import write_whole
from looped_recipes.common.metrics import read_metrics
from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.formats.dense import start_from_dense

from .curriculum import curriculum
from .foreign_keys import MIXTURES, place_of
from .model_fields import FIELDS, WHOLE_NUMBERS, check_model_fields, refuse_unknown_fields
from .model_file import class_in_file
from .paths import expanded, matching, named_in, recipe_file
from .ranges import check_ranges
from .relations import check_relations, decay_of_product, refuse_idle
from .sections import (
    LENGTHS,
    SECTIONS,
    DataConfig,
    DenseConfig,
    DepthConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    RecipeError,
    ScheduleConfig,
    TrainingConfig,
)
from .yaml_files import parse_yaml, read_yaml, refuse_unknown, shortly


PATHS = {
    "dense": ("path",),
    "data": ("source", "validation_source", "tokenizer", "cache_dir"),
    "training": ("output_dir", "initialize_from", "model_file"),
}
LAUNCHES, FOLDER = "provenance.jsonl", "launched_in"  # file of a run, and what a line of it says of the folder
LONGEST_CHAIN = 20  # of recipes that extend each other


@dataclass
class Recipe:
    model: dict = field(default_factory=dict)  # preset, LoopedConfig fields, and those that training.model_file adds
    dense: DenseConfig = field(default_factory=DenseConfig)
    data: DataConfig = field(default_factory=DataConfig)
    depth: DepthConfig = field(default_factory=DepthConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def model_config(self, **overrides) -> LoopedConfig:
        """Return the model's config; `overrides` hold what only the tokenizer knows (vocab_size and special tokens).

        If the model to start from is not on this machine, the sizes in the recipe are used.
        """
        try:
            return self.with_added_fields(self._config_of_ours(overrides))
        # transformers' checks, such as those of kinds of rotary positions, raise other errors than ValueError
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise RecipeError(f"section 'model': {' '.join(str(error).split())}") from error

    def _config_of_ours(self, overrides: dict) -> LoopedConfig:
        if self.start_is_here and self.dense.path is not None:
            return start_from_dense(AutoConfig.from_pretrained(self.dense.path), **self.dense_options()).config
        if self.start_is_here:
            return LoopedConfig.from_pretrained(self.start, **self.changes_to_start())
        fields = {**self.fields_of_ours, **overrides}
        preset = self.model.get("preset")
        return LoopedConfig(**fields) if preset is None else LoopedConfig.from_preset(preset, **fields)

    @property
    def fields_of_ours(self) -> dict:
        """The fields of LoopedConfig that the recipe sets."""
        return {name: value for name, value in self.model.items() if name in FIELDS}

    @property
    def added_fields(self) -> dict:
        """The fields that it sets of those that the class in training.model_file adds to the config."""
        return {name: value for name, value in self.model.items() if name not in (*FIELDS, "preset")}

    def with_added_fields(self, config: LoopedConfig) -> LoopedConfig:
        for name, value in self.added_fields.items():
            setattr(config, name, value)
        return config

    @property
    def model_class(self) -> type[LoopedForCausalLM]:
        return class_in_file(self.training.model_file)

    @property
    def start(self) -> str | None:
        """Return the folder or name of the model that the run begins with; None for a new model."""
        return self.training.initialize_from if self.dense.path is None else self.dense.path

    @property
    def start_is_here(self) -> bool:
        return self.start is not None and (Path(self.start) / "config.json").is_file()

    def changes_to_start(self) -> dict:
        """Return the fields that change a saved model, e.g. its loss."""
        changes = self.fields_of_ours
        if "num_loops" in changes:  # the depth of this training, even if an earlier one had another
            changes["trained_num_loops"] = changes["num_loops"]
        return changes

    def dense_options(self) -> dict:
        """Return the arguments of `from_dense`, except the path."""
        return {**self.fields_of_ours, "layers": self.dense.layers, "core_init": self.dense.core_init}

    def mean_depth(self, config: LoopedConfig) -> float:
        return config.trained_depth if self.depth.mean is None else self.depth.mean

    @property
    def depths_vary(self) -> bool:
        return self.depth.sampler != "fixed" or self.depth.curriculum is not None

    def backprop_loops(self, config: LoopedConfig) -> int | None:
        if self.depth.backprop_loops == "half":
            return math.ceil(self.mean_depth(config) / 2)
        return self.depth.backprop_loops

    def depths_at(self, config: LoopedConfig, step: int) -> tuple[float, int | None]:
        """Return the mean depth at a step, and the number of loops with gradients."""
        settings, mean, window = self.depth, self.mean_depth(config), self.backprop_loops(config)
        if settings.curriculum is None:
            return mean, window
        assert settings.curriculum_steps is not None  # see check_curriculum
        return curriculum(
            settings.curriculum, settings.curriculum_target, settings.curriculum_steps, step, mean, window
        )

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def save(self, path: str | Path):
        content = self.to_dict()
        if self.optimizer.decay_product is not None:  # it determines weight_decay, also at another rate
            del content["optimizer"]["weight_decay"]
        write_whole(path, yaml.safe_dump(content, sort_keys=False))


def load_recipe(
    path: str | Path,
    overrides: typing.Sequence[str] = (),
    changes: dict[str, typing.Any] | None = None,
) -> Recipe:
    """Read a recipe from YAML, changed by `changes` and then by overrides: section.key=value, with values in YAML."""
    raw = _read(path)
    if raw.keys() & {"grid", "runs"}:
        raise RecipeError(f"{path} is a sweep, of many runs: `{typed('looped sweep', path)}` trains them")
    for layer in ((changes or {}).items(), map(split_override, overrides)):
        said: dict[str, dict] = {}
        for key, value in layer:
            section, _, name = key.partition(".")
            _section(raw, section, f"{path} with {key}")
            said.setdefault(section, {})[name] = value
        raw |= {section: _over(section, raw.get(section) or {}, values) for section, values in said.items()}
    return recipe_from_dict(raw, str(path))


def recipe_of_run(run: str | Path) -> Recipe:
    """Read the recipe of a finished run. Its relative paths are those of the folder from which it was launched."""
    recipe, run = load_recipe(Path(run) / "recipe.yaml"), Path(run).resolve()
    launched_in = folder_of_launch(run, recipe.training.output_dir)
    if launched_in in (None, Path.cwd()):
        return recipe
    for section, names in PATHS.items():
        for name in names:
            value = getattr(getattr(recipe, section), name)
            if value is not None and matching(launched_in / value):
                setattr(getattr(recipe, section), name, str(launched_in / value))
    return recipe


def refuse_another_place(path: str | Path, recipe: Recipe):
    """Refuse to begin anew with the recipe of a run that is named to go on with it, from another folder than that in
    which its output_dir leads to it."""
    run, output = recipe_file(path).resolve().parent, recipe.training.output_dir
    if not (run / LAUNCHES).is_file() or Path(output).resolve() == run:
        return
    if (launched_in := folder_of_launch(run, output)) is not None:
        raise RecipeError(
            f"{path} is of a run that was launched in {launched_in}, and from here its training.output_dir={output!r} "
            "is another folder: go on with it from there, or name another training.output_dir for a new run"
        )


def folder_of_launch(run: Path, output: str) -> Path | None:
    """Return the folder in which `output` leads to the run: as the last launch has noted, or else by the name of the
    run. None if the run was moved."""
    noted = [Path(launch[FOLDER]) for launch in read_metrics(run / LAUNCHES)[-1:] if FOLDER in launch]
    length = len(run.parts) - len(Path(os.path.normpath(output)).parts)  # none of "."
    return next((each for each in (*noted, Path(*run.parts[:length])) if (each / output).resolve() == run), None)


def split_override(override: str) -> tuple[str, typing.Any]:
    key, equals, value = override.partition("=")
    if not equals or not all(key.partition(".")):
        example = f"{place_of(key) or 'training.steps'}={value or 100}"
        raise RecipeError(f"{override!r} is not an override: write section.key=value, e.g. {example}")
    parsed, text = parse_yaml(value, f"{override!r} is not an override: {value!r}"), value.strip()
    is_quoted = text[:1] in ("'", '"') and text[:1] == text[-1:]  # else a comment may follow the quotes
    as_written = text.lower() in ("", "~", "null") if parsed is None else is_quoted or parsed == text
    if not as_written and (parsed is None or isinstance(parsed, str)):
        raise RecipeError(f"{override!r} stands for {parsed!r} in YAML: put the value in quotes, or correct it")
    section, _, name = key.partition(".")
    if not text and not takes_null(section, name):
        raise RecipeError(f"{override!r} holds no value: write one, or {key}=null for the default")
    return key, parsed


def recipe_from_dict(raw: dict, where: str = "the recipe") -> Recipe:
    refuse_unknown(raw, ["model", *SECTIONS], where, "section")
    has_own_class = _section(raw, "training", where).get("model_file") is not None
    recipe = Recipe(model=_model_fields(_section(raw, "model", where), where, has_own_class))
    for name, section in SECTIONS.items():
        values = _section(raw, name, where)
        hints = _types_of_fields(section)
        refuse_unknown(values, list(hints), where, f"key in {name}")
        checked = {key: _checked(value, hints[key], f"{name}.{key}", where) for key, value in values.items()}
        setattr(recipe, name, section(**checked))
        check_ranges(name, getattr(recipe, name), where)
    try:
        _expand_paths(recipe)
        check_relations(recipe)
        if recipe.optimizer.decay_product is not None:
            recipe.optimizer.weight_decay = decay_of_product(recipe.optimizer)
        refuse_idle(recipe)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    return recipe


_types_of_fields = functools.cache(typing.get_type_hints)


def _section(raw: dict, name: str, where: str) -> dict:
    values = {} if raw.get(name) is None else raw[name]
    if not isinstance(values, dict):
        raise RecipeError(f"{where}: section {name!r} must hold key: value pairs, got {shortly(values)}")
    return values


def _expand_paths(recipe: Recipe):
    for section, names in PATHS.items():
        for name in names:
            value = getattr(getattr(recipe, section), name)
            if value is not None and value.startswith("~"):
                try:
                    setattr(getattr(recipe, section), name, str(expanded(value)))
                except ValueError as error:
                    raise RecipeError(f"{section}.{name}={error}") from None


def _read(path: str | Path, seen: tuple[Path, ...] = ()) -> dict:
    """Return the sections of a recipe over those of the recipe that it extends; an empty section changes nothing."""
    raw = read_yaml(path)
    path = recipe_file(path)
    if path.resolve() in seen:
        raise RecipeError(f"{path} extends itself: name another recipe, or leave extends out")
    if len(seen) == LONGEST_CHAIN:
        raise RecipeError(f"{path} is extended over more than {LONGEST_CHAIN} recipes: name the first one yourself")
    base = raw.pop("extends", None)
    if base is None:
        return raw
    if not isinstance(base, str) or not base.strip():
        raise RecipeError(f"{path}: extends must name a recipe, got {shortly(base)}")
    merged = _read(named_in(path, base), (*seen, path.resolve()))
    for name, section in raw.items():
        of_base = {} if merged.get(name) is None else merged[name]
        if isinstance(section, dict) and isinstance(of_base, dict):
            merged[name] = _over(name, of_base, section)
        elif section is not None or name not in merged:
            merged[name] = section
    return merged


def _over(section: str, values: dict, by: dict) -> dict:
    """Return a section changed by later settings: a length of the run replaces any length that was set before, and
    null takes away a setting that cannot be null, which then has its default."""
    if section == "training" and any(by.get(name) is not None for name in LENGTHS):
        values = {name: value for name, value in values.items() if name not in LENGTHS}
    taken_away = {name for name, value in by.items() if value is None and not takes_null(section, name)}
    return {name: value for name, value in {**values, **by}.items() if name not in taken_away}


def takes_null(section: str, name) -> bool:
    """Return whether null is a value of a setting. An unknown setting keeps it, and is refused later."""
    of = LoopedConfig if section == "model" else SECTIONS.get(section)
    types_of = {field.name: field.type for field in dataclasses.fields(of)} if of else {}
    return name not in types_of or type(None) in typing.get_args(types_of[name])


def _model_fields(fields: dict, where: str, has_own_class: bool) -> dict:
    """Return the values of the section. What a class of the user's own adds is checked when its file is imported."""
    if not has_own_class:
        refuse_unknown_fields(fields, where)
    fields = with_numbers(fields)
    check_model_fields({key: value for key, value in fields.items() if key in (*FIELDS, "preset")}, where)
    return {name: as_whole(value) if name in WHOLE_NUMBERS else value for name, value in fields.items()}


DECIMAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def as_number(value):
    """Return a number for a text such as 3e-4, which YAML does not read as one; return other values unchanged."""
    if isinstance(value, str) and len(value) < 100 and DECIMAL.fullmatch(value):
        return float(value)
    return value


def as_whole(value):
    """Return an int for a float without a part behind the point; return other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def with_numbers(value):
    """Return `as_number` of all that lists and mappings hold."""
    if isinstance(value, dict):
        return {key: with_numbers(item) for key, item in value.items()}
    return list(map(with_numbers, value)) if isinstance(value, list) else as_number(value)


def _checked(value, hint, key: str, where: str):
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in options:
        origin = typing.get_origin(option)
        if option is type(None) and value is None:
            return None
        if origin is Literal and value in typing.get_args(option):
            return value
        if option is float and not isinstance(value, bool) and isinstance(as_number(value), (int, float)):
            return _as_float(as_number(value))
        if option is int and not isinstance(value, bool) and isinstance(as_whole(as_number(value)), int):
            return as_whole(as_number(value))
        if origin is list and isinstance(value, list):
            (item,) = typing.get_args(option)
            return [_checked(element, item, key, where) for element in value]
        if option in (str, bool) and isinstance(value, option):
            return value
    wanted = " or ".join(
        f"one of {', '.join(map(str, typing.get_args(o)))}"
        if typing.get_origin(o) is Literal
        else getattr(o, "__name__", str(o))
        for o in options
        if o is not type(None)
    )
    in_list = f"; write {[value]}" if wanted == "list" and isinstance(value, (str, int, float)) else ""
    if key == "data.source" and isinstance(value, list):
        in_list = f"; name {MIXTURES}"
    raise RecipeError(f"{where}: {key} must be {wanted}, got {shortly(value)}{in_list}")


def _as_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
