"""The class of model that a run trains: ours, or one of the user's own in a Python file."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from transformers.dynamic_module_utils import get_relative_imports

from modeling_looped import LoopedConfig, LoopedForCausalLM

from .sections import RecipeError


MODULES: dict[Path, ModuleType] = {}  # the files that were imported, each once

ALONE = (
    "it is copied beside the weights by itself, and may import packages that are installed, but no file beside it and "
    "none of the current folder"
)


def class_in_file(name: str | None) -> type[LoopedForCausalLM]:
    """Return the subclass of LoopedForCausalLM that the file defines. Its models are saved together with the file."""
    if name is None:
        return LoopedForCausalLM
    path = Path(name).resolve()
    if not path.is_file() or path.suffix != ".py" or not path.stem.isidentifier():
        raise RecipeError(
            f"training.model_file={name!r} is no Python file that can be imported (looked from {Path.cwd()})"
        )
    if (module := MODULES.get(path)) is None:
        module = MODULES[path] = imported(path)
    own = {each for each in vars(module).values() if isinstance(each, type) and each.__module__ == path.stem}
    found = sorted((each for each in own if issubclass(each, LoopedForCausalLM)), key=lambda cls: cls.__name__)
    if len(found) != 1:
        raise RecipeError(
            f"training.model_file={name!r} must define one subclass of LoopedForCausalLM, but it defines "
            f"{', '.join(cls.__name__ for cls in found) or 'none'}"
        )
    (model_class,) = found
    if model_class.config_class is not LoopedConfig:
        raise RecipeError(
            f"training.model_file={name!r}: {model_class.__name__} has a config_class of its own, and recipes set the "
            "fields of LoopedConfig alone: keep what is new in attributes of the class"
        )
    model_class.register_for_auto_class("AutoModelForCausalLM")
    return model_class


def code_of(name: str) -> bytes | None:
    """Return the code of a file as this process has imported it, else as it is now; None where it is no longer."""
    path = Path(name).resolve()
    if path in MODULES:
        return MODULES[path].CODE
    return path.read_bytes() if path.is_file() else None


def imported(path: Path) -> ModuleType:
    known = importlib.util.find_spec(path.stem)
    if known is not None and known.origin != str(path):
        raise RecipeError(f"training.model_file={str(path)!r} has the name of a module, {known.origin}: rename it")
    if beside := imports_of_neighbours(path):
        raise RecipeError(f"training.model_file={str(path)!r} imports {', '.join(beside)}: {ALONE}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(spec)
    module.CODE = path.read_bytes()  # pyrefly: ignore[missing-attribute]  the file may be edited while the run goes on
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        del sys.modules[path.stem]
        raise RecipeError(f"training.model_file={str(path)!r} imports what is not found ({error}): {ALONE}") from error
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def imports_of_neighbours(path: Path) -> list[str]:
    """Return what a file imports, or would if it were there, that its copy beside the weights will not find."""
    nodes = list(ast.walk(ast.parse(path.read_bytes(), str(path))))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    names = sorted({module.partition(".")[0] for module in modules})
    # the first place is the folder of the script or, as the empty one is, the current folder: of this process alone
    elsewhere = [place for place in sys.path[1:] if place]
    here = [name for name in names if is_found(name, sys.path) and not is_found(name, elsewhere)]
    return here + sorted(f".{name}" for name in get_relative_imports(path))


def is_found(name: str, places: list[str]) -> bool:
    return any(finder.find_spec(name, places) is not None for finder in sys.meta_path)


def write_code(model: LoopedForCausalLM, folder: Path):
    """Write the code of a class from a file as it was imported, in the place of the copy of the file as it is now."""
    for path, module in MODULES.items():
        if module.__name__ == type(model).__module__:
            (folder / path.name).write_bytes(module.CODE)
