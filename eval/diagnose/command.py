"""The papers' measurements on any model: `python -m eval.diagnose MEASURE MODEL [field=value ...] [options]`.

    python -m eval.diagnose all runs/demo/final
    python -m eval.diagnose depth_curve runs/demo/final --num-loops 12 --text my.jsonl
    python -m eval.diagnose residual_norm lt hidden_size=64 num_core_layers=2 vocab_size=256 --seeds 3
    python -m eval.diagnose theorem_1 --width 512

MODEL is a saved model, a training run's folder, a config (JSON or YAML), or a preset; field=value changes a config,
which is then initialised at random. The theorems have models of their own. A trained model reads what its run held
out, or --text. Each measure writes a JSON and an SVG; `all` runs every measure of a model with little training and
writes a page, index.html, that holds its charts; what this model does not have is left out, with the reason. They go
to diagnose/ of the training run, where eval.report finds them, or, without one, to runs/diagnose/<model>. `python -m
eval.diagnose MEASURE --help` lists the options of one.

From Python, a measure is a function of a model and a batch, or of a config: `depth_curve(model, {"input_ids": ids})`.
"""

import argparse
import inspect
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from looped_eval.common.model_folder import training_run
from looped_eval.common.page import Section, to_html
from looped_recipes.common.chart import save_charts
from looped_recipes.common.command_line import Depths, Parser
from looped_recipes.common.files import write_whole
from looped_recipes.common.provenance import finite, provenance, rounded, write_json

from . import dynamics, growth, page, premises, readout_probes, theorems, transfer
from .model_and_text import DiagnoseError, ModelAndText, open_model_and_text


GIVEN = ("model", "batch", "config", "classes")  # of the subject, to measures that take them


RENAMED = {"--loops": "--num-loops"}


class Measure(NamedTuple):
    function: Callable
    quick: dict = {}  # options in `all`
    monitored: str | None = None  # its name in a run's metrics.jsonl

    def defaults(self) -> dict:
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    @property
    def reads_a_model(self) -> bool:
        return not {"model", "config"}.isdisjoint(inspect.signature(self.function).parameters)

    def __call__(self, of: ModelAndText | None, **options) -> dict:
        wanted = [name for name in inspect.signature(self.function).parameters if name in GIVEN] if of else []
        return self.function(*(getattr(of, name) for name in wanted), **options)

    @property
    def about(self) -> str:
        return inspect.getdoc(self.function).split("\n\n")[0].replace("\n", " ")


LITTLE = {"loops": [1, 2, 4, 8], "seeds": 1, "steps": 3, "num_tokens": 64}
MEASURES = {
    "residual_norm": Measure(growth.residual_norm, LITTLE),
    "loop_cosine": Measure(growth.loop_cosine, {"copies": 8, "steps": 3, "num_tokens": 64}),
    "update_size": Measure(growth.update_size, LITTLE),
    "premises": Measure(premises.premises),
    "theorem_1": Measure(theorems.theorem_1),
    "theorem_2": Measure(theorems.theorem_2),
    "theorem_3": Measure(theorems.theorem_3),
    "norm_trajectory": Measure(dynamics.norm_trajectory, monitored="residual_norm/"),
    "lr_transfer": Measure(
        transfer.lr_transfer,
        {"loops": [1, 4], "rates": [2.5e-4, 1e-3, 4e-3], "steps": 10, "rows_per_step": 2},
    ),
    "radial_gradient": Measure(readout_probes.radial_gradient),
    "scale_sweep": Measure(readout_probes.scale_sweep),
    "radial_clamp": Measure(readout_probes.radial_clamp),
    "update_decomposition": Measure(readout_probes.update_decomposition),
    "token_norms": Measure(readout_probes.token_norms),
    "future_signal": Measure(readout_probes.future_signal),
    "exit_weighted": Measure(readout_probes.exit_weighted),
    "depth_curve": Measure(dynamics.depth_curve),
    "spectral": Measure(dynamics.spectral, monitored="spectral_radius"),
    "state_dynamics": Measure(dynamics.state_dynamics, monitored="state_change"),
    "gradient_norms": Measure(dynamics.gradient_norms, monitored="gradient_norm/"),
}


def training_series(records: list[dict], prefix: str) -> dict[str, dict]:
    """{metric: {"step": [...], "value": [...]}} of a run's records."""
    series = {}
    for record in records:
        for key, value in record.items():
            if key.startswith(prefix):
                points = series.setdefault(key, {"step": [], "value": []})
                points["step"].append(record["step"])
                points["value"].append(value)
    return series


def run_measure(
    name: str, of: ModelAndText | None, folder: Path, beside: dict[str, dict], command: str | None = None, **options
) -> tuple[dict, Path]:
    """Measure, write, draw; returns the result and its picture."""
    measure, picture = MEASURES[name], folder / f"{name}.svg"
    result = finite(measure(of, **options))
    used = {**measure.defaults(), **options}
    series = training_series(of.records, measure.monitored) if measure.monitored else {}
    if series:
        result["training"] = series
    asked = {
        "measure": name,
        **(of.where if of else {}),
        "options": used,
    }
    write_json(folder / f"{name}.json", {**asked, "result": result}, command, digits=6)
    save_charts(page.charts_of(name, result, beside), picture)
    return result, picture


def run_all(of: ModelAndText, folder: Path, command: str | None = None) -> Path:
    results, left_out = {}, {}
    for name, measure in MEASURES.items():
        if not measure.reads_a_model:
            continue
        try:
            results[name], _ = run_measure(name, of, folder, {}, command, **measure.quick)
            print(f"{name}: {folder / (name + '.json')}")
        except ValueError as reason:
            left_out[name] = str(reason)
            print(f"{name}: left out, {reason}")
    where = Section("How it was measured", [page.numbers({**of.where, **provenance(command)})])
    path = folder / "index.html"
    title = "A fresh model, before any training" if of.is_fresh else "What this looped model does"
    write_whole(path, to_html(title, [*page.sections(results, left_out), where], page.headlines(results)))
    return path


def add_options(parser: argparse.ArgumentParser, measure: Measure):
    """A flag for every option of the function, typed by its annotation."""
    hints = typing.get_type_hints(measure.function)
    for name, default in measure.defaults().items():
        kinds = [kind for kind in typing.get_args(hints[name]) if kind is not type(None)]
        is_list = "list" in str(hints[name])
        while kinds and typing.get_args(kinds[0]):
            kinds = list(typing.get_args(kinds[0]))
        if hints[name] is bool:
            flag = "--" + name.replace("_", "-")
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
            continue
        about = f"default: {' '.join(map(str, default)) if isinstance(default, tuple) else default}"
        if name == "loops":
            about = f"several depths, 1 2 4 or 1..4; {about}"
            parser.add_argument(
                "--num-loops", dest=name, nargs="+", action=Depths, default=argparse.SUPPRESS, help=about
            )
            continue
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=kinds[0] if kinds else hints[name],
            nargs="+" if is_list else None,
            default=argparse.SUPPRESS,
            help=about,
        )


def read_result(path: str) -> dict:
    """The curves of a depth_curve.json."""
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise DiagnoseError(f"{path!r} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("measure") != "depth_curve":
        raise DiagnoseError(f"{path!r} holds no depth curve; `python -m eval.diagnose depth_curve MODEL` makes one")
    return content["result"]


def default_folder(target: str) -> Path:
    """The folder of what is measured: where eval.report looks for it, if there is a training run."""
    run = training_run(target)
    return Path("runs/diagnose") / Path(target).resolve().name if run is None else run / "diagnose"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("eval.diagnose", __doc__, RENAMED)
    commands = parser.add_subparsers(dest="measure", required=True, metavar="MEASURE")
    for name, measure in {"all": None, **MEASURES}.items():
        about = "every measure, with little training" if measure is None else measure.about
        command = commands.add_parser(name, help=about.replace("%", "%%"), description=about.replace("%", "%%"))
        command.set_defaults(model=[])
        command.add_argument(
            "--output",
            help="folder for JSON and SVG; default: diagnose/ of the training run, or runs/diagnose/<model>",
        )
        if measure is not None:
            add_options(command, measure)
        if measure is not None and not measure.reads_a_model:
            continue
        command.add_argument("model", nargs="+", metavar="MODEL [field=value ...]")
        command.add_argument("--text", help="txt, jsonl, parquet or a dataset; default: what the run held out")
        command.add_argument("--tokenizer", help="folder or name, for a model that comes without one")
        command.add_argument("--rows", type=int, default=16)
        command.add_argument("--length", type=int, default=128, help="tokens in a row")
        command.add_argument("--seed", type=int, default=0, help="of random weights and tokens")
        command.add_argument("--state-seed", type=int, help="draw the initial state, where the model has a random one")
        command.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
        if name == "depth_curve":
            command.add_argument(
                "--beside", nargs="+", default=[], help="depth_curve.json of others, for the quadrant"
            )
    return parser.parse_args(arguments)


def main(arguments: list[str]):
    args = parse(arguments)
    if args.measure != "all" and not MEASURES[args.measure].reads_a_model:
        measure_and_say(args, None, Path(args.output or "runs/diagnose/theorems"), {})
        return
    target, *overrides = args.model
    beside = {Path(path).parent.name: read_result(path) for path in getattr(args, "beside", [])}
    names = ("text", "tokenizer", "rows", "length", "seed", "state_seed", "dtype")
    of = open_model_and_text(target, overrides, **{name: getattr(args, name) for name in names})
    folder = Path(args.output) if args.output else default_folder(target)
    if args.measure == "all":
        print(f"text: {of.where['text']}")
        print(run_all(of, folder, args.command))
        return
    measure_and_say(args, of, folder, beside)


def measure_and_say(args: argparse.Namespace, of: ModelAndText | None, folder: Path, beside: dict[str, dict]):
    options = {name: getattr(args, name) for name in MEASURES[args.measure].defaults() if hasattr(args, name)}
    result, picture = run_measure(args.measure, of, folder, beside, args.command, **options)
    if of is not None:
        print(f"text: {of.where['text']}")
    print(json.dumps(rounded({key: value for key, value in result.items() if not isinstance(value, (dict, list))}, 4)))
    print(folder / f"{args.measure}.json", picture, sep="\n")
