"""The papers' measurements on any model: `looped diagnose MEASURE MODEL... [field=value ...] [options]`.

    looped diagnose all runs/demo/final
    looped diagnose depth_curve runs/demo/final --num-loops 12 --text my.jsonl
    looped diagnose token_norms runs/sweep                      # every run of it, side by side
    looped diagnose residual_norm residual_scaling hidden_size=96 num_core_layers=1 vocab_size=256 --seeds 1
    looped diagnose theorem_1 --width 512

MODEL is a saved model, the folder of a training run or of a sweep, a config (JSON or YAML), or a preset; field=value
changes a config, which is then initialised at random. The theorems have models of their own. A trained model reads
what its run held out, or --text. Each measure writes a JSON and an SVG; `all` runs every measure of a model with
little training and writes a page, index.html, that holds its figures; what this model does not have is left out, with
the reason. They go to eval/diagnose/ of the training run, where looped report finds them, or, without one, to
runs/eval/<model>/diagnose. `looped diagnose MEASURE --help` lists the options of one.

From Python, a measure is a function of a model and a batch, or of a config: `depth_curve(model, {"input_ids": ids})`.
"""

import argparse
import ast
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from looped_recipes.common.command_line import Depths, Parser, as_typed, folder


RENAMED = {"--loops": "--num-loops"}
FILES = {
    "growth": ("residual_norm", "loop_cosine", "update_size"),
    "premises": ("premises",),
    "theorems": ("theorem_1", "theorem_2", "theorem_3"),
    "dynamics": ("norm_trajectory", "depth_curve", "spectral", "state_dynamics", "sensitivity", "gradient_norms"),
    "transfer": ("lr_transfer",),
    "readout_probes": (
        "radial_gradient",
        "scale_sweep",
        "radial_clamp",
        "update_decomposition",
        "token_norms",
        "future_signal",
        "exit_weighted",
    ),
}
KINDS = {"int": int, "float": float, "str": str}


class Option(NamedTuple):
    name: str
    annotation: str  # e.g. bool, int | None, list[float]
    default: Any


class Described(NamedTuple):
    """Description of a measure, read from its source because importing it takes seconds."""

    about: str  # the first paragraph of its docstring
    reads_a_model: bool
    options: list[Option]  # its keyword-only arguments


@cache
def described() -> dict[str, Described]:
    found = {}
    for file, names in FILES.items():
        body = ast.parse((Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8")).body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        constants = {node.targets[0].id: node.value for node in body if is_constant(node)}
        found |= {name: describe(functions[name], constants) for name in names}
    return found


def is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)


def describe(function: ast.FunctionDef, constants: dict[str, ast.expr]) -> Described:
    options = []
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults):
        value = constants[default.id] if isinstance(default, ast.Name) else default
        options.append(Option(argument.arg, ast.unparse(argument.annotation), ast.literal_eval(value)))
    about = ast.get_docstring(function).split("\n\n")[0].replace("\n", " ")
    given = {argument.arg for argument in function.args.args}
    return Described(about, not given.isdisjoint({"model", "config"}), options)


def add_option(parser: argparse.ArgumentParser, option: Option):
    """Add a flag with the type of the annotation."""
    flag, kind = "--" + option.name.replace("_", "-"), option.annotation.removesuffix(" | None")
    if kind == "bool":
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
        return
    default = option.default
    about = f"default: {'that of the model, or of the measure' if default is None else as_typed(default)}"
    several = {"nargs": "+", "default": argparse.SUPPRESS}
    if option.name == "loops":
        about = f"several depths, 1 2 4 or 1..4; {about}"
        parser.add_argument("--num-loops", dest=option.name, action=Depths, help=about, **several)
    elif kind.startswith("list["):
        parser.add_argument(flag, type=KINDS[kind[5:-1]], help=about, **several)
    else:
        parser.add_argument(flag, type=KINDS[kind], help=about, default=argparse.SUPPRESS)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("looped diagnose", __doc__, RENAMED)
    commands = parser.add_subparsers(dest="measure", required=True, metavar="MEASURE")
    for name, measure in {"all": None, **described()}.items():
        about = "every measure, with little training" if measure is None else measure.about
        command = commands.add_parser(name, help=about.replace("%", "%%"), description=about.replace("%", "%%"))
        command.set_defaults(model=[])
        command.add_argument(
            "--output",
            type=folder,
            help="folder for JSON and SVG; default: eval/diagnose/ of the training run",
        )
        if measure is not None:
            for option in measure.options:
                add_option(command, option)
        if measure is not None and not measure.reads_a_model:
            continue
        command.add_argument("model", nargs="+", metavar="MODEL... [field=value ...]")
        command.add_argument("--text", help="txt, jsonl, parquet or a dataset; default: what the run held out")
        command.add_argument("--tokenizer", help="folder or name, for a model that comes without one")
        command.add_argument("--rows", type=int, default=16)
        command.add_argument(
            "--length", type=int, help="tokens in a row; default: 128, or those of the run's rows if fewer"
        )
        command.add_argument("--seed", type=int, default=0, help="of random weights and tokens")
        command.add_argument("--state-seed", type=int, help="draw the initial state, where the model has a random one")
        command.add_trust()
        command.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
        if name == "depth_curve":
            command.add_argument(
                "--beside", nargs="+", default=[], help="depth_curve.json of others, for the quadrant"
            )
    return parser.parse_args(arguments)
