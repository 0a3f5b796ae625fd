"""The class of model that a run trains: ours, or one of the user's own in a Python file."""

import importlib.util
import sys
from pathlib import Path

from modeling_looped import LoopedConfig, LoopedForCausalLM

from .sections import RecipeError


def class_in_file(name: str | None) -> type[LoopedForCausalLM]:
    """Return the subclass of LoopedForCausalLM that the file defines. Its models are saved together with the file."""
    if name is None:
        return LoopedForCausalLM
    path = Path(name).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise RecipeError(f"training.model_file={name!r} is no Python file (looked from {Path.cwd()})")
    module = sys.modules.get(path.stem) or imported(path)
    if (module.__file__ or "") != str(path):
        raise RecipeError(f"training.model_file={name!r} has the name of a module, {module.__file__}: rename it")
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == path.stem]
    found = [each.__name__ for each in own if issubclass(each, LoopedForCausalLM)]
    if len(found) != 1:
        raise RecipeError(
            f"training.model_file={name!r} must define one subclass of LoopedForCausalLM, but it defines "
            f"{', '.join(found) or 'none'}"
        )
    model_class = getattr(module, found[0])
    if model_class.config_class is not LoopedConfig:
        raise RecipeError(
            f"training.model_file={name!r}: {found[0]} has a config_class of its own, and recipes set the fields of "
            "LoopedConfig alone: keep what is new in attributes of the class"
        )
    model_class.register_for_auto_class("AutoModelForCausalLM")
    return model_class


def imported(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
