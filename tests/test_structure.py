"""Imports run one way: from evaluation to training to the model family, and in these from commands to common files."""

import ast
import builtins
import collections
import functools
import re
import symtable
from pathlib import Path

import pytest

import modeling_looped
from modeling_looped.formats.saved_code import imports_of_ours, in_order, text_of, tree_of


ROOT = Path(__file__).parent.parent
PACKAGES = {"modeling_looped": "modeling_looped", "recipes": "looped_recipes", "eval": "looped_eval"}  # by folder
# a config names the classes that open it, and they take a config: transformers' remote code wants both in one place
DELIBERATE = {"auto_classes", "causal_lm", "configuration_looped", "heads", "modeling_looped", "pretrained"}


def module_of(path: Path) -> str:
    folder, *parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *(parts[:-1] if parts[-1] == "__init__" else parts)])


FILES = {module_of(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def imported(module: str) -> set[str]:
    """Modules of ours that a file imports, also inside functions."""
    path, found = FILES[module], set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else base for name in names}
    return (found & FILES.keys()) - {module}


@functools.cache
def imports() -> dict[str, set[str]]:
    return {module: imported(module) for module in FILES}


def room(module: str) -> str:
    """The package that a file lies in; a command that is one file is a room of its own, and so is what users import
    of the model family, which opens the foreign layouts too."""
    if module == "modeling_looped":
        return "modeling_looped, as users import it"
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    return module if package in ("looped_eval", "looped_recipes") else package


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of nodes that reach each other."""

    def reached(start: str) -> set[str]:
        seen, rest = set(), [start]
        while rest:
            for target in graph[rest.pop()] - seen:
                seen.add(target)
                rest.append(target)
        return seen

    reach = {node: reached(node) for node in graph}
    groups = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    return [set(group) for group in groups if len(group) > 1]


@pytest.mark.parametrize(
    "package,others",
    [
        ("modeling_looped", ("looped_recipes", "looped_eval")),
        ("looped_recipes", ("looped_eval",)),
        ("looped_recipes.common", ("looped_recipes.data", "looped_recipes.engine")),
        ("looped_recipes.data", ("looped_recipes.engine",)),
    ],
)
def test_arrows_run_one_way(package, others):
    above = "looped_recipes.demo"  # trains and evaluates
    inside = [each for each in FILES if f"{each}.".startswith(f"{package}.") and not each.startswith(above)]
    wrong = [(a, b) for a in inside for b in imports()[a] if any(f"{b}.".startswith(f"{other}.") for other in others)]
    assert inside and wrong == []


def test_no_circle_but_the_deliberate_one():
    assert circles(imports()) == [{f"modeling_looped.{name}" for name in DELIBERATE}]


def test_no_circle_of_rooms():
    rooms = {room(module): set() for module in FILES}
    for module, targets in imports().items():
        if module != "modeling_looped":  # the front door, through which all of the package is seen
            rooms[room(module)] |= {room(target) for target in targets} - {room(module)}
    assert circles(rooms) == []


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == [{"b", "c"}]


def test_the_model_family_is_flat_and_imports_by_one_dot():
    """What merges the files for a saved model follows no other imports; foreign layouts are not saved with one."""
    assert {path.parent.name for path in (ROOT / "modeling_looped").rglob("*.py")} == {"modeling_looped", "formats"}
    for path in (ROOT / "modeling_looped").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1 and (node.level == 0 or node.module and "." not in node.module), path.name


def test_files_beside_a_saved_model_share_no_names():
    """They are merged into two files: one name must not be two things there."""
    meanings = collections.defaultdict(set)
    for part in {*in_order("configuration_looped"), *in_order("auto_classes")}:
        assert ast.get_docstring(tree_of(part)), part
        for symbol in symtable.symtable(text_of(part), part, "exec").get_symbols():
            if symbol.is_assigned() and not symbol.is_imported():
                meanings[symbol.get_name()].add(part)
        nodes = list(ast.walk(tree_of(part)))
        ours = [node for node, _ in imports_of_ours(nodes)]
        assert not any(alias.asname for node in ours for alias in node.names), part
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in ours:
                for alias in node.names:
                    meanings[alias.asname or alias.name].add(f"{getattr(node, 'module', '')}.{alias.name}")
    assert meanings.pop("__all__")
    assert all("\nlogger = logging.get_logger(__name__)\n" in text_of(part) for part in meanings.pop("logger"))
    assert len(meanings) > 500
    assert {name: given for name, given in meanings.items() if len(given) > 1} == {}
    assert meanings.keys() & set(dir(builtins)) == set()


def test_model_files_never_import_foreign_layouts():
    """What is saved beside a model is the files that its config reaches."""
    formats = "modeling_looped.formats"
    reached, rest = set(), {"modeling_looped.configuration_looped"}
    while rest:
        module = rest.pop()
        reached.add(module)
        rest |= imports()[module] - reached
    assert len(reached) > 20 and not any(module.startswith(formats) for module in reached)


def test_every_package_is_in_the_wheel():
    listed = (ROOT / "pyproject.toml").read_text().partition("packages = [")[2].partition("]")[0]
    named = set(re.findall(r'"([\w.]+)"', listed))
    # to setuptools a folder of recipes is a package too, unless its name cannot be imported
    folders = [path.parent.relative_to(ROOT / "recipes").parts for path in ROOT.glob("recipes/*/**/*.yaml")]
    of_recipes = {".".join(["looped_recipes", *parts]) for parts in folders if all(map(str.isidentifier, parts))}
    assert named == of_recipes | {module for module, path in FILES.items() if path.name == "__init__.py"}


def test_all_places_name_the_same_version():
    version = modeling_looped.__version__
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    changes = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    wheels = re.findall(r"modeling_looped-([\d.]+)-py3", (ROOT / "docs/install.md").read_text())
    assert (cited, changes[0], wheels) == ([version], version, [version])
