"""Commands: how they are found, read options, report errors, and say where a result comes from."""

import dataclasses
import importlib.util
import inspect
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertTokenizer

from looped_eval.benchmark import command as benchmark
from looped_eval.benchmark import options as options_of_benchmark
from looped_eval.budget import options as options_of_budget
from looped_eval.chat import command as chat
from looped_eval.chat import options as options_of_chat
from looped_eval.common.findings import best_depths
from looped_eval.diagnose import command as diagnose
from looped_eval.diagnose import options as options_of_diagnose
from looped_eval.diagnose.options import described
from looped_eval.halting import options as halting_options
from looped_eval.halting.command import next_command
from looped_eval.halting.conclusion import conclusion, conclusion_at_loops
from looped_eval.harness.command import as_lm_eval_spells
from looped_eval.readout_table import options as options_of_readout_table
from looped_eval.show_loops import command as show_loops
from looped_recipes import convert
from looped_recipes.common import command_line, console, provenance
from looped_recipes.common.command_line import TRACEBACK, Depths, Parser, device_of, run_command
from looped_recipes.common.files import write_whole
from looped_recipes.engine.ending import ending
from looped_recipes.engine.finite import Divergence
from looped_recipes.own_text import command as own_text
from looped_recipes.settings.cluster import muon_shapes
from looped_recipes.settings.costs import plan
from looped_recipes.settings.estimates import estimates, kept_by_layers, memory
from looped_recipes.settings.help import help_of_recipes, meanings
from looped_recipes.settings.paths import recipe_file, similar_recipe
from looped_recipes.settings.recipe import RecipeError, load_recipe
from looped_recipes.settings.sections import SECTIONS
from modeling_looped import LoopedForCausalLM
from modeling_looped.depth_options import DEPTH_FIELDS
from modeling_looped.formats.registry import LAYOUTS

from .helpers import tiny_model, tiny_tokenizer
from .public_folders import PUBLIC_REPOSITORIES


ROOT = Path(__file__).parent.parent


def own_parser(*positionals: str) -> Parser:
    parser = Parser("python -m looped_eval.own", "About it.", {"--loops": "--num-loops"})
    for name in positionals:
        parser.add_argument("first")
        parser.add_argument(name, nargs="*")
    parser.add_argument("--num-loops", nargs="+", action=Depths)
    parser.add_argument("--batch-size", type=int)
    return parser


def test_only_what_is_missing_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        own_parser("rest").parse_args([])
    assert "required: first;" in capsys.readouterr().err
    assert own_parser("rest").parse_args(["a"]).rest == [] and own_parser("rest").parse_args(["a", "b"]).rest == ["b"]


# The console script


def test_every_command_is_listed_and_there(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["looped"])
    with pytest.raises(SystemExit) as stop:
        console.main()
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for name, (module, about) in console.COMMANDS.items():
        assert importlib.util.find_spec(module) is not None
        assert re.search(rf"^  {name} +{re.escape(about)}$", shown, re.M)
    folders = [ROOT / "recipes", ROOT / "eval"]
    entries = {path for folder in folders for path in folder.glob("*.py") if path.name != "__init__.py"}
    entries |= {path.parent for folder in folders for path in folder.glob("*/__main__.py")}
    modules = {f"looped_{path.parent.name}.{path.stem}" for path in entries}
    assert modules == {module for module, _ in console.COMMANDS.values()}


def test_a_misspelt_command_is_told_its_nearest(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["looped", "pretrian"])
    with pytest.raises(SystemExit, match="no command 'pretrian'; did you mean 'pretrain'"):
        console.main()


def test_a_command_runs_in_its_place(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "PROGRAM", None)
    monkeypatch.setattr(sys, "argv", ["looped", "plan", str(ROOT / "recipes/smoke/lt.yaml"), "model.num_loops=2"])
    with pytest.raises(SystemExit) as stop:
        console.main()
    assert stop.value.code == 0 and "training FLOPs per token" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["plan", "--help"], ["plan", str(ROOT / "recipes/smoke/lt.yaml")]])
def test_a_reader_that_has_seen_enough_makes_no_error_of_a_command(arguments, monkeypatch):
    monkeypatch.setattr(command_line, "PROGRAM", None)
    monkeypatch.setattr(sys, "argv", ["looped", *arguments])
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as stop:
            console.main()
        assert stop.value.code == 0


HELP_OF_ALL = """
import contextlib, io, sys
from looped_recipes.common import console

for name in sys.argv[1:]:
    sys.argv = ["looped", name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            console.main()
        except SystemExit as stop:
            assert stop.code == 0, (name, stop.code)
    assert len(shown.getvalue()) > 200, (name, shown.getvalue())
    begins = shown.getvalue().startswith(f"usage: looped {name} ")
    assert begins or name in ("pretrain", "eval"), (name, shown.getvalue())  # those have no options of argparse
    heavy = {"torch", "transformers", "datasets", "lm_eval", "scipy", "matplotlib"} & sys.modules.keys()
    assert not heavy, f"looped {name} --help imports {heavy}"
"""


def test_help_begins_with_the_command_and_imports_nothing_that_takes_seconds():
    names = list(console.COMMANDS)
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_difference_within_two_standard_errors_is_no_clear_one():
    flops = {("looped", 2): 1.0, ("plain", 1): 1.0}
    for looped, is_clear in ((2.041, True), (2.039, False)):
        result = {
            "looped": {"parameters": 50, "bits_per_byte": {2: looped}, "error": 0.02},
            "plain": {"parameters": 100, "bits_per_byte": {1: 2.0}, "error": 0.01},
        }
        assert own_text.in_words(result, flops).endswith("no clear difference.") != is_clear


def test_halting_takes_its_text_as_other_commands_do():
    for arguments in (["M", "a", "b"], ["M", "--text", "a", "b"], ["M", "a", "--text", "b"]):
        assert halting_options.parse(arguments).text == ["a", "b"]
    assert halting_options.parse(["M"]).text == []


def test_help_of_generate_says_what_a_call_that_leaves_an_argument_out_gets():
    assert str(inspect.signature(LoopedForCausalLM.generate)).count(" = as saved") == len(DEPTH_FIELDS)


def test_help_of_recipes_knows_every_key(capsys):
    for section, keys in meanings().items():
        fields = {field.name for field in dataclasses.fields(SECTIONS[section])}
        assert fields == keys.keys() and all(meaning for _, meaning in keys.values()), section
    assert meanings()["training"]["micro_batch_size"] == ("8", "sequences per process and forward pass")
    assert meanings()["depth"]["per"][1].startswith("batch | micro_batch | sequence; batch: one draw")
    assert "num_prelude_layers, num_core_layers" in help_of_recipes("", ["model"])
    assert help_of_recipes("about", ["--help", "depth"]).splitlines()[:2] == [
        "depth",
        "    sampler=fixed                       how depths are drawn: fixed (always `mean`), poisson,",
    ]


def test_options_that_stand_in_two_places_are_the_same():
    """Those that --help must know without an import of what they are of."""
    assert convert.LAYOUTS == tuple(LAYOUTS)
    for names in PUBLIC_REPOSITORIES.values():
        assert all(name.split("/")[1] in convert.__doc__ for name in names)
    assert set(options_of_benchmark.BENCHMARKS) == {*benchmark.BENCHMARKS, "decode"}
    assert described().keys() == diagnose.MEASURES.keys()
    for name, measure in diagnose.MEASURES.items():
        assert {option.name: option.default for option in described()[name].options} == measure.defaults()
        about = inspect.getdoc(measure.function).split("\n\n")[0].replace("\n", " ")
        assert described()[name].reads_a_model == measure.reads_a_model and described()[name].about == about


def test_a_recipe_is_found_by_its_short_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipe_file("smoke/flt.yaml") == recipe_file("recipes/smoke/flt.yaml") == ROOT / "recipes/smoke/flt.yaml"
    assert load_recipe("smoke/flt.yaml").model["preset"] == "flt"
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke/flt.yaml").write_text("")
    assert recipe_file("smoke/flt.yaml") == Path("smoke/flt.yaml")
    listed = help_of_recipes("", ["--help", "recipes"])
    assert "readout/44m/per_loop_raw.yaml" in listed and "parcae/ablations/table_4.sweep.yaml" in listed
    assert "accelerate/" not in listed
    assert similar_recipe(Path("ddp"), "recipe") is None
    with pytest.raises(RecipeError, match="there is no recipe smoke/none.yaml: neither here nor among those"):
        load_recipe("smoke/none.yaml")
    for name in ("parcae", "recipes/parcae/"):
        with pytest.raises(RecipeError, match="parcae is a folder of them: name one, such as parcae/large.yaml, parc"):
            load_recipe(name)


# Options and errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-loops", "1", "2", "4", "--batch-size", "3"],
        ["--num_loops", "4,1,2", "--batch_size=3"],
        ["--loops", "1..2", "4", "--batch-size=3"],
        ["--loops=1,2,4", "--batch_size", "3"],
    ],
)
def test_one_spelling_and_the_former_ones(arguments):
    args = own_parser().parse_args(arguments)
    assert (args.num_loops, args.batch_size) == ([1, 2, 4], 3)
    assert args.command == "python -m looped_eval.own " + " ".join(arguments)


def test_positional_arguments_may_stand_after_options():
    args = own_parser("more").parse_args(["a", "--batch-size", "3", "b", "c"])
    assert (args.first, args.more, args.batch_size) == ("a", ["b", "c"], 3)


def test_depths_that_are_none_are_refused(capsys):
    with pytest.raises(SystemExit):
        own_parser().parse_args(["--num-loops", "1", "0..2"])
    assert "num_loops=1,0..2 is no depth: write 4 or 1,2,4,8 or 1..8" in (shown := capsys.readouterr().err)
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("parse, arguments", [
    (options_of_budget.parse, ["model"]),
    (halting_options.parse, ["model"]),
    (options_of_diagnose.parse, ["depth_curve", "model"]),
    (options_of_readout_table.parse, ["run"]),
])  # fmt: skip
def test_a_file_in_the_place_of_a_folder_is_refused_before_anything_is_measured(parse, arguments, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for output in ("file", "file/below"):
        with pytest.raises(SystemExit):
            parse([*arguments, "--output", str(tmp_path / output)])
        assert f"{tmp_path / 'file'} is a file: name a folder" in capsys.readouterr().err
    assert str(parse([*arguments, "--output", str(tmp_path / "new/below")]).output) == str(tmp_path / "new/below")


def test_a_device_that_is_not_there_is_refused_at_once():
    parser = Parser("python -m looped_eval.own", "About it.")
    parser.add_argument("--device", default="cpu")
    assert parser.parse_args([]).device == "cpu"
    with pytest.raises(ValueError, match="--device warp is not there.*pass cpu"):
        parser.parse_args(["--device", "warp"])


def test_a_gpu_that_is_named_is_the_current_one(monkeypatch):
    current = []
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [device_of(name) for name in ("cuda:1", "cuda", "cpu")] == ["cuda:1", "cuda", "cpu"]
    assert current == ["cuda:1"]


@pytest.mark.parametrize("error", [ValueError("two\nlines"), FileNotFoundError(2, "not there", "x.txt")])
def test_an_error_is_one_line(error, monkeypatch):
    def main(arguments):
        raise error

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code.startswith("error: ") and "\n" not in stop.value.code
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(type(error)):
        run_command(main)


@pytest.mark.parametrize(
    "error,said",
    [
        (Divergence("the loss is nan"), "error: the loss is nan"),
        (ModuleNotFoundError("No module", name="lm_eval"), "error: lm_eval is not installed: pip install"),
        (ModuleNotFoundError("No module", name="resource"), "error: Python has no module 'resource' on this system"),
        (ModuleNotFoundError("Could not import module 'GPT2Model'"), "error: Could not import module 'GPT2Model'"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "error: CUDA out of memory: use a smaller batch"),
        (ImportError("looped serve needs more"), "error: looped serve needs more"),
    ],
)
def test_what_the_user_can_mend_is_one_line(error, said, monkeypatch):
    def main(arguments):
        raise error

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code.startswith(said) and "\n" not in stop.value.code
    monkeypatch.setattr(command_line, "UNTIL_ENDED", 0)
    monkeypatch.setenv("RANK", "1")  # of several processes that all meet it, the first tells it
    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), ModuleNotFoundError("No module", name="looped_eval.nothing"), AttributeError("x")]
)
def test_mistakes_of_our_own_are_shown_whole(error):
    def main(arguments):
        raise error

    with pytest.raises(type(error)):
        run_command(main)


def test_a_mistake_of_our_own_is_shown_whole():
    with pytest.raises(KeyError):
        run_command(lambda arguments: {}["nothing"])


def test_a_command_to_type_takes_paths_for_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("-run", "--of two"):
        Path(name).mkdir()
        words = shlex.split(command_line.typed("looped chat", Path(name), "--num-loops", 2))
        assert words == ["looped", "chat", f"./{name}", "--num-loops", "2"]
        assert options_of_chat.parse(words[2:]).model == f"./{name}"


def test_the_status_of_a_command():
    for returned, status in ((None, 0), (1, 1), (Path("x"), 0)):
        with pytest.raises(SystemExit) as stop:
            run_command(lambda arguments, returned=returned: returned)
        assert stop.value.code == status


@pytest.mark.parametrize("encoding,shown", [("ascii", "2 ? 10?, kl ? 0.1\n"), ("latin-1", "2 × 10?, kl ? 0.1\n")])
def test_what_a_terminal_cannot_show_does_not_end_a_command(encoding, shown, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    with pytest.raises(SystemExit) as stop:
        run_command(lambda arguments: print("2 × 10⁹, kl ≤ 0.1"))
    assert stop.value.code == 0 and written.getvalue().decode(encoding) == shown


def test_options_of_lm_eval_in_our_spelling():
    ours = ["--batch-size", "8", "--output=out", "--num-loops", "1,2", "--model_args", "pretrained=a,num_loops=1,4"]
    assert as_lm_eval_spells(ours) == [
        *("--batch_size", "8", "--output_path=out", "--model_args", "num_loops=1+2"),
        *("--model_args", "pretrained=a,num_loops=1+4"),
    ]
    assert as_lm_eval_spells(["--num-loops=1..4", "--limit", "-1"]) == [
        "--model_args",
        "num_loops=1..4",
        "--limit",
        "-1",
    ]


# Results


def test_a_result_says_where_it_comes_from(tmp_path):
    path = tmp_path / "new" / "result.json"
    result = {"result": {"a": [1.23456789, float("inf")], "b": [[1.23456789]]}, "depths": {2: 0.5}}
    provenance.write_json(path, result, "python -m eval.own", digits=3)
    content = json.loads(path.read_text())
    assert torch.__version__.startswith(content.pop("versions")["torch"])
    assert content.pop("commit") and content.pop("hardware")
    assert content == {
        "command": "python -m eval.own",
        "result": {"a": [1.23, None], "b": [[1.235]]},
        "depths": {"2": 0.5},
    }


def test_a_result_says_of_how_many_processes(monkeypatch):
    alone = provenance.hardware()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert provenance.hardware() == f"3 processes, each with {alone}"


def test_numbers_are_whole_without_digits(tmp_path):
    provenance.write_json(tmp_path / "result.json", {"x": 1 / 3})
    assert json.loads((tmp_path / "result.json").read_text())["x"] == 1 / 3


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    with pytest.raises(IsADirectoryError, match=f"^{tmp_path} is a folder: name a file"):
        write_whole(tmp_path, "text")
    assert not list(tmp_path.parent.glob(f".saving-{tmp_path.name}*"))


def test_a_write_that_fails_leaves_the_old_result(tmp_path, monkeypatch):
    provenance.write_json(tmp_path / "result.json", {"x": 1})

    def full(*arguments):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        provenance.write_json(tmp_path / "result.json", {"x": 2})
    assert json.loads((tmp_path / "result.json").read_text())["x"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


# What commands end with


def at_depths(*values: float, measured: tuple = ()) -> list[dict]:
    """Fixed depths with these ratios where thresholds are calibrated, and on the other text, unless others are
    measured there. A pass costs as much as its loops."""
    return [
        {"loops": k, "calibrated_ratio": before, "ratio": ratio, "predicted_speedup": len(values) / k}
        for k, (before, ratio) in enumerate(zip(values, measured or values), start=1)
    ]


def exits_at(loops: float, speedup: float, ratio: float = 1.0) -> list[dict]:
    """Two criteria, of which the second was the cheaper one where they were calibrated."""
    lucky = {"criterion": "entropy", "mean_loops": 1.0, "calibrated_speedup": 0.9, "predicted_speedup": 3.0}
    chosen = {"criterion": "kl", "mean_loops": loops, "calibrated_speedup": 1.2, "predicted_speedup": speedup}
    return [{**lucky, "ratio": 1.0}, {**chosen, "ratio": ratio, "ratio_error": 0.004}]


@pytest.mark.parametrize(
    "fixed,tokens,said",
    [
        (at_depths(1.5, 1.2, 1.1, 1), exits_at(2.4, 1.5), "kl takes 2.40 of 4 loops, 40 % of them saved"),
        (at_depths(1.5, 1.2, 1.1, 1), exits_at(2.3, 1.5), "no smaller fixed depth is"),
        (at_depths(1.5, 1.005, 1, 1), exits_at(2.3, 1.5), "so is a fixed depth of 2 (there 0.50 % worse)"),
        (at_depths(1.5, 1.005, 1, 1), exits_at(2.3, 1.5), "1.50 times as fast, and that depth 2.00 times: they gain "),
        (at_depths(1.5, 1.2, 1, 1), exits_at(2.3, 1.5), "1.50 times as fast, and that depth 1.33 times: they gain o"),
        (at_depths(1.5, 1.2, 1, 1), exits_at(2.3, 1.3), "1.30 times as fast, and that depth 1.33 times: they gain "),
        (at_depths(1.5, 1.2, 1.1, 1), exits_at(2.3, 1.5, 0.995), "it is 0.50 % better, ± 0.40 by its sequences)"),
        (at_depths(1.5, 1.2, 1.1, 1), exits_at(2.3, 1.5, 1.02), "it is 2.00 % worse, ± 0.40 by its sequences"),
        (at_depths(1.5, 1, 1, 1), exits_at(3.9, 0.95), "does (on the other text 0.00 % worse): num_loops=2 is enough"),
        (at_depths(1.5, 1.2, 1.1, 1), exits_at(3.9, 0.95), "needs its 4 loops"),
    ],
)
def test_what_early_exit_is_worth(fixed, tokens, said):
    assert said in conclusion(fixed, tokens, 0.01, 4)


def test_exits_that_do_what_a_fixed_depth_does_gain_nothing():
    """Both are within the budget where they were calibrated, and both miss it on the other text."""
    fixed, tokens = at_depths(1.5, 1.0005, 1, 1, measured=(1.5, 1.02, 1, 1)), exits_at(2.0, 2.0, 1.02)
    assert conclusion(fixed, tokens, 0.01, 4).endswith(
        "(on the other text it is 2.00 % worse, ± 0.40 by its sequences); so is a fixed depth of 2 (there 2.00 % "
        "worse). By FLOPs, checks included, exits are 2.00 times as fast, and that depth 2.00 times: they gain "
        "nothing over it."
    )
    assert next_command(halting_options.parse(["m"]), fixed, tokens) == "looped chat m --num-loops 2"


def test_halting_goes_on_with_what_is_worth_it():
    args = halting_options.parse(["m"])
    assert next_command(args, at_depths(1.5, 1.2, 1, 1), exits_at(2.3, 1.5)) == "looped halting m --write"
    assert next_command(args, at_depths(1.5, 1.005, 1, 1), exits_at(2.3, 1.5)) == "looped chat m --num-loops 2"
    args = halting_options.parse(["m", "--write"])
    assert next_command(args, at_depths(1.5, 1.2, 1, 1), exits_at(2.3, 1.5)) == "looped chat m"
    given = ["m", "a text.txt", "--sequences", "8", "--length", "9", "--criteria", "entropy", "kl", "--seed", "3"]
    args = halting_options.parse(given)
    assert next_command(args, at_depths(1.5, 1.2, 1, 1), exits_at(2.3, 1.5)) == (
        "looped halting m 'a text.txt' --sequences 8 --length 9 --criteria entropy kl --seed 3 --write"
    )


def at_loops(criterion: str, wanted: float, loops: float, perplexity: float) -> dict:
    """A criterion that is as good on the other text as on that of its calibration."""
    found = {"mean_loops": loops, "perplexity": perplexity, "calibrated_ratio": perplexity / 5}
    return {"criterion": criterion, "wanted_loops": wanted, **found}


@pytest.mark.parametrize("first,said", [("3", ""), ("1.5", ""), ("1.2", " --mean-loops 3")])
def test_halting_writes_what_it_has_just_measured(first, said):
    """At the first of --mean-loops, as --write does, or at the first that some criterion reaches."""
    given = ["m", "t.txt", "--length", "9", "--mean-loops", first, "3", "1.5"]
    rows = [at_loops("entropy", 1.5, 1.5, 8.0), at_loops("entropy", 3, 3.0, 7.0), at_loops("kl", 3, 3.0, 6.0)]
    args, best = halting_options.parse(given), "entropy" if first == "1.5" else "kl"
    command = next_command(args, [], rows)
    assert command == f"looped halting {' '.join(given)}{said} --write {best}"
    again = halting_options.parse(command.split()[2:])
    assert again.write == best and again.mean_loops[0] == float("3" if said else first)
    assert {**vars(args), **{key: vars(again)[key] for key in ("write", "mean_loops", "command")}} == vars(again)


def test_more_loops_than_asked_for_are_no_better_criterion():
    near, far = at_loops("kl", 1.5, 1.57, 9.0), at_loops("entropy", 1.5, 1.6, 8.0)
    few = at_loops("max_prob", 1.5, 1.0, 9.5)
    said = conclusion_at_loops([], [far, near, few])
    assert "kl has the lowest perplexity there, and on the other text 9.00 in 1.57 loops; left out for more" in said
    assert "other text: entropy (1.60)." in said and "max_prob" not in said
    said = conclusion_at_loops([], [far, at_loops("kl", 1.5, 2.0, 9.0)])
    assert "entropy has the lowest perplexity there, and on the other text 8.00 in 1.60 loops." in said


def test_the_best_on_the_other_text_is_not_the_best_criterion():
    """Of several one is lucky there: the choice is made where they were calibrated."""
    chosen, lucky = at_loops("kl", 2, 2.0, 9.0), at_loops("entropy", 2, 2.0, 10.0)
    assert "kl has the lowest perplexity there, and" in conclusion_at_loops([], [lucky | {"perplexity": 8.0}, chosen])


def test_the_spread_of_one_sequence_is_not_said():
    row = {"criterion": "kl", "mean_loops": 2.3, "calibrated_speedup": 1.2, "predicted_speedup": 1.5, "ratio": 1.02}
    said = conclusion(at_depths(1.5, 1.2, 1.1, 1), [{**row, "ratio_error": math.nan}], 0.01, 4)
    assert "(on the other text it is 2.00 % worse)" in said


def test_mean_loops_of_several_thresholds_in_a_sentence():
    loops = {"threshold 0.5": {2: (1.0, None)}, "threshold 0.9": {2: (2.0, None)}}
    said = best_depths({"mean loops": loops})
    assert "threshold 0.5, 1.00 of 2 loops" in said and "threshold 0.9, 2.00 of 2 loops" in said


def test_the_best_depth_in_a_sentence():
    curves = {
        "a acc": {"": {1: (0.2, None), 2: (0.4, None), 4: (0.4, None)}},
        "a perplexity": {"x": {1: (9.0, None)}, "y": {1: (8.0, None), 2: (7.5, None)}},
        "mean loops": {"": {4: (1.0, None)}},
    }
    assert best_depths(curves) == (
        "a acc is highest at 2 loops (0.4000); a perplexity is lowest for y at 2 loops (7.5000). "
        "With exits: 1.00 of 4 loops, 75 % of them saved."
    )
    assert best_depths(curves, exits_stop=False).endswith(" With exits: 1.00 of 4 loops.")  # which all run
    assert best_depths({"a loss": {"": {4: (1.5, None)}}}) == "a loss is 1.5000 at 4 loops."
    of_errors = {"bbh_zeroshot_salient_translation_error_detection exact_match": {"": {4: (0.5, None)}}}
    assert best_depths(of_errors).endswith("error_detection exact_match is 0.5000 at 4 loops.")


def test_so_few_questions_name_no_best_depth():
    curves = {"a acc": {"": {1: (0.25, 0.1), 2: (0.15, 0.08)}}, "b acc": {"": {1: (0.2, 0.03), 2: (0.9, 0.03)}}}
    assert best_depths(curves) == (
        "a acc is 0.2500 ± 0.1000 at best, at 1 loop, and nowhere clearly worse; b acc is best at 2 loops (0.9000)."
    )
    text = {f"t {name}": {"": {1: (2.0, None), 2: (1.0, None)}} for name in ("word_perplexity", "bits_per_byte")}
    assert best_depths(text) == "t bits_per_byte is lowest at 2 loops (1.0000)."


@pytest.mark.parametrize(
    "typed, said",
    [
        ("diagnose dept_curve x", "there is no 'dept_curve'; did you mean 'depth_curve'?"),
        ("benchmark trian", "there is no 'trian'; did you mean 'train'?"),
        ("benchmark zzz", "there is no 'zzz'; choose one of train, memory"),
        ("laws parametrik x", "there is no 'parametrik'; did you mean 'parametric'?"),
    ],
)
def test_a_mistyped_name_is_answered_with_what_was_meant(typed, said, capsys):
    command, *arguments = typed.split()
    with pytest.raises(SystemExit):
        importlib.import_module(f"looped_eval.{command}.options").parse(arguments)
    error = capsys.readouterr().err
    assert said in error and "_memory" not in error


@pytest.mark.parametrize(
    "typed, kind, meant",
    [
        ("smoke/ftl.yaml", "recipe", "smoke/flt.yaml"),
        ("recipes/smoke/flt", "recipe", "smoke/flt.yaml"),
        ("transfer.yaml", "sweep", "residual_scaling/transfer.sweep.yaml"),
        ("mine/other.yaml", "recipe", None),
    ],
)
def test_a_mistyped_recipe(typed, kind, meant):
    assert similar_recipe(Path(typed), kind) == meant


def test_a_run_ends_with_what_it_has_come_to(tmp_path):
    lines = [{"step": 9, "loss": 2.0}, {"step": 9, "validation/loss": 2.1}]
    lines[1] |= {f"validation/bits_per_byte_at_{k}": bits for k, bits in ((1, 1.5), (2, 1.25), (3, 1.2))}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = "trained 10 steps: loss 2.000, held-out loss 2.100; 1.250 bits per byte at 2 loops, 1.200 at 3 loops"
    assert ending(tmp_path / "metrics.jsonl", trained_loops=2) == said


# Plans


def saved_bytes(config, rows: int, length: int) -> int:
    """Of what autograd keeps for the backward pass of one batch, beside the weights."""
    model, kept = LoopedForCausalLM(config).train(), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    ids = torch.randint(config.vocab_size, (rows, length))

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no other storage takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, labels=ids, output_logits=False, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


@pytest.mark.parametrize("loss", ["terminal", "per_loop"])
def test_memory_of_activations_is_what_autograd_keeps(loss):
    recipe = load_recipe("own_text/looped.yaml", [f"model.loop_loss={loss}"])
    config = recipe.model_config()
    expected = 4 * 2 * 256 * (config.vocab_size + kept_by_layers(recipe, config))
    assert saved_bytes(config, rows=2, length=256) == pytest.approx(expected, rel=0.2)


def test_estimates_say_what_they_assume():
    recipe = load_recipe("own_text/looped.yaml")
    shown = estimates(recipe, 1e15)
    assert "40% of" in shown["time here"] and shown["time on one H100"] == "3 seconds, at 40% of 989 TFLOP/s"
    assert memory(recipe, recipe.model_config())["weights"] == 4 * plan(recipe)["parameters"]
    fewer = load_recipe("own_text/looped.yaml", ["training.rows_per_step=2"])  # than a micro batch has
    assert "activations of 2 rows" in memory(fewer, fewer.model_config())
    for name, tied in (("muon", "true"), ("normuon", "false")):
        recipe = load_recipe("own_text/looped.yaml", [f"optimizer.name={name}", f"model.tie_word_embeddings={tied}"])
        config = recipe.model_config()
        with_one = sum(rows * columns for rows, columns in muon_shapes(config, False))
        moments = 2 * plan(recipe)["parameters"] - with_one
        assert memory(recipe, config)["optimizer"] == pytest.approx(4 * moments, rel=0.01), name


def test_a_plain_model_takes_as_many_operations_as_the_looped_one():
    looped, plain = (plan(load_recipe(f"own_text/{name}.yaml")) for name in ("looped", "plain"))
    assert plain["training FLOPs per token"] == pytest.approx(looped["training FLOPs per token"], rel=0.01)
    readme = (ROOT / "recipes/own_text/README.md").read_text()
    assert all(f"| {costs['parameters']:,} |" in readme for costs in (looped, plain))


@pytest.mark.parametrize(
    "text,said",
    [(None, "there is no file"), ("", "is empty"), ("x.pdf", "known are"), ("a short text", "or give more text")],
)
def test_a_text_that_cannot_be_read_is_refused_before_anything_is_measured(text, said, tmp_path, monkeypatch):
    monkeypatch.setattr(own_text, "seconds_per_step", lambda recipe: pytest.fail("was measured"))
    path = tmp_path / ("x.pdf" if text == "x.pdf" else "my.txt")
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecipeError, match=said):
        own_text.main([str(path), "--output", str(tmp_path / "out"), f"data.cache_dir={tmp_path / 'shards'}"])


def begun(folder: Path, text: Path) -> Path:
    (folder / "looped").mkdir(parents=True)
    load_recipe("own_text/looped.yaml", [f"data.source={text}", "training.steps=33"]).save(
        folder / "looped" / "recipe.yaml"
    )
    return folder


def test_another_text_wants_another_folder(tmp_path):
    one, other = (tmp_path / name for name in ("one.txt", "other.txt"))
    for path in (one, other):
        path.write_text("a b c")
    folder = begun(tmp_path / "out", one)
    with pytest.raises(ValueError, match="has models of .*one.txt: choose another folder for those of .*other.txt"):
        own_text.main([str(other), "--output", str(folder)])


def test_what_both_models_of_own_text_have_is_no_override(tmp_path, monkeypatch):
    monkeypatch.setattr(own_text, "number_of_steps", lambda *given: pytest.fail("was measured"))
    text = tmp_path / "one.txt"
    text.write_text("a b c")
    instead = {"data.source=x": "FILE", "training.output_dir=x": "--output"}
    instead |= {"training.steps=5": "--minutes", "training.tokens=99": "--minutes", "training.epochs=2": "--minutes"}
    for override, option in instead.items():
        with pytest.raises(ValueError, match=f"{override} is of both models here: say {option} instead"):
            own_text.main([str(text), override, "--output", str(tmp_path / "out")])
    for override in ("model.num_loops=4", "depth.sampler=poisson", "evaluation.loops=[2,3]"):
        with pytest.raises(ValueError, match="would make both models alike in what is compared"):
            own_text.main([str(text), override, "--output", str(tmp_path / "out")])


def test_a_file_and_a_folder_of_own_text_have_any_name(tmp_path, monkeypatch):
    """They are no YAML."""

    class Begun(Exception):
        pass

    def begin(args, recipes):
        raise Begun([(recipe.data.source, recipe.training.output_dir) for recipe in recipes])

    monkeypatch.setattr(own_text, "number_of_steps", begin)
    text, output = tmp_path / "my: text #1.txt", tmp_path / "[a] #2"
    text.write_text("a b c")
    with pytest.raises(Begun) as begun:
        own_text.main([str(text), "--output", str(output)])
    assert begun.value.args[0] == [(str(text), str(output / name)) for name in own_text.NAMES]


def test_steps_of_own_text_are_timed_as_they_are_trained(monkeypatch):
    """On the device and in the precision of the launch."""
    entered = []

    def autocast():
        entered.append(True)
        return torch.autocast("cpu", torch.bfloat16)

    launch = SimpleNamespace(device=torch.device("cpu"), autocast=autocast)
    monkeypatch.setattr(own_text, "make_accelerator", lambda: launch)
    small = ["model.hidden_size=32", "model.num_attention_heads=2", "model.num_key_value_heads=2"]
    small += ["model.intermediate_size=32", "model.vocab_size=64", "data.sequence_length=16"]
    rows = ["training.rows_per_step=2", "training.micro_batch_size=1", "training.steps=1"]
    assert own_text.seconds_per_step(load_recipe("own_text/looped.yaml", [*small, *rows]), 0) > 0
    assert len(entered) == 6  # two micro batches in three steps
    for rows, count in ((["training.rows_per_step=4"], 3), (["training.rows_per_step=9"], 6)):  # of 8 and fewer
        entered.clear()
        own_text.seconds_per_step(load_recipe("own_text/looped.yaml", [*small, *rows]), 0)
        assert len(entered) == count


def test_how_many_steps_of_own_text(tmp_path, monkeypatch, capsys):
    """Those that fit, the least, or those of the run that goes on; each is said."""
    text = tmp_path / "my.txt"
    text.write_text("a b c")
    monkeypatch.setattr(own_text, "prepare", lambda data: None)
    monkeypatch.setattr(own_text, "seconds_per_step", lambda recipe, minutes: 1.5)
    recipes = [load_recipe("own_text/looped.yaml", [f"data.source={text}", f"training.output_dir={tmp_path}/none"])]
    args = own_text.parse([str(text), "--minutes", "10", "--output", str(tmp_path / "out")])
    assert own_text.number_of_steps(args, recipes) == 300 and "the least" not in capsys.readouterr().out
    args.minutes = 0.1
    assert own_text.number_of_steps(args, recipes) == 20
    assert "3 steps fit; 20 are the least, for about 0.7 minutes" in capsys.readouterr().out
    folder = begun(tmp_path / "out", text)
    recipes[0].training.output_dir = str(folder / "looped")
    assert own_text.number_of_steps(args, recipes) == 33
    assert "goes on with the 33 steps that it began with, whatever --minutes says" in capsys.readouterr().out


@pytest.mark.slow
def test_a_text_of_ones_own(tmp_path, monkeypatch, capsys):
    """As a user types it, with fewer and smaller steps: both models, their comparison, and what to type next."""
    text = tmp_path / "my text.txt"
    text.write_text("".join(f"{i} loops, {i * i} steps and no end\n\n" for i in range(4000)))
    monkeypatch.setattr(own_text, "LEAST_STEPS", 3)
    monkeypatch.setattr(own_text, "seconds_per_step", lambda recipe, minutes: 1000.0)
    small = ["model.hidden_size=32", "model.num_attention_heads=2", "model.intermediate_size=64", "evaluation.rows=4"]
    small += ["model.vocab_size=400", "data.tokenizer_vocab_size=400", "data.sequence_length=32", "evaluation.every=3"]
    small += ["data.validation_fraction=0.3", "schedule.warmup_steps=1"]
    output = tmp_path / "my models"
    own_text.main([str(text), "--output", str(output), f"data.cache_dir={tmp_path / 'shards'}", *small])
    said = capsys.readouterr().out
    result = json.loads((output / "comparison.json").read_text())["result"]
    assert set(result["looped"]["bits_per_byte"]) == {"1", "2", "3", "4", "5"}
    assert set(result["plain"]["bits_per_byte"]) == {"1"}
    assert f"next: looped chat '{output / 'looped'}'" in said and "looped, 3 loops" in said
    for name in own_text.NAMES:
        model = LoopedForCausalLM.from_pretrained(output / name / "final")
        assert model.num_parameters() == result[name]["parameters"]


# Chat


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_model(eos_token_id=2).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


GREEDY = ("--temperature", "0", "--max-new-tokens", "4", "--device", "cpu")


def test_chat_completes_each_line_by_itself(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a b\n\nc\n"))
    chat.main([str(folder), *GREEDY, "--num-loops", "2"])
    shown = capsys.readouterr().out
    assert shown.count("[2.00 of 2 loops a token]") == 2
    chat.main([str(folder), "a", "b", *GREEDY, "--num-loops", "2"])
    said = capsys.readouterr().out
    assert "[2.00 of 2 loops a token]" in said and shown.startswith(said)


def test_chat_with_exits_or_few_loops_leaves_out_drafts_that_were_saved(tmp_path, capsys):
    model = tiny_model(eos_token_id=None)
    model.generation_config.draft_loops = 1
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    chat.main([str(tmp_path), "a", *GREEDY, "--num-loops", "1"])
    chat.main([str(tmp_path), "a", *GREEDY, "--exit-criterion", "kl", "--exit-threshold", "100"])
    assert "% of them saved]" in capsys.readouterr().out


def test_chat_remembers_the_turns_of_a_conversation(folder, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['role'][0] }} {{ turn['content'] }} {% endfor %}"
    model = tiny_model(eos_token_id=2)
    conversation = chat.Conversation(model, tokenizer, {"max_new_tokens": 3, "do_sample": False}, "be kind")
    said, loops = conversation.answer("a b")
    assert loops == model.config.num_loops and said.strip() in capsys.readouterr().out
    ids = conversation.ids_of("c")["input_ids"]
    expected = tokenizer(f"s be kind u a b a {said} u c ", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert torch.equal(ids, expected)


def test_chat_refuses_what_it_cannot_do(folder):
    with pytest.raises(ValueError, match="--system needs a tokenizer with a chat template"):
        chat.main([str(folder), "a", "--system", "be kind"])
    with pytest.raises(ValueError, match="--max-new-tokens must be at least 1.*got 0"):
        chat.main([str(folder), "a", "--max-new-tokens", "0"])
    with pytest.raises(ValueError, match="there is no folder"):
        chat.main([str(folder / "nothing"), "a"])


def test_chat_and_server_read_no_token_types(tmp_path, capsys):
    """BERT's tokenizer gives them, and `generate` refuses them."""
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])}
    BertTokenizer(vocab=words, eos_token="[SEP]").save_pretrained(tmp_path)
    tiny_model(eos_token_id=None).save_pretrained(tmp_path)
    chat.main([str(tmp_path), "a", "b", *GREEDY])
    assert "of 3 loops a token]" in capsys.readouterr().out


def test_a_prompt_that_is_not_utf_8_is_refused(folder, monkeypatch):
    said = re.escape(r"the prompt b'caf\xe9' is not UTF-8")
    given = b"caf\xe9".decode("utf-8", "surrogateescape")  # as arguments and a terminal's lines come
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{given}\n"))
    for arguments in ([given], []):
        with pytest.raises(ValueError, match=said):
            chat.main([str(folder), *arguments, *GREEDY])
    with pytest.raises(ValueError, match=said):
        show_loops.main([str(folder), given, "--output", str(folder / "loops.html")])


def test_chat_leaves_out_the_beginning_where_there_is_no_more_room(folder, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['role'][0] }} {{ turn['content'] }} {% endfor %}"
    model = tiny_model(position_embedding="learned", max_position_embeddings=16, eos_token_id=None)
    conversation = chat.Conversation(model, tokenizer, {"max_new_tokens": 6, "do_sample": False}, "be kind")
    for _ in range(6):
        conversation.answer("a b")
    assert "of the beginning left out: no more room]" in capsys.readouterr().out
    assert conversation.turns[0]["role"] == "system" and len(conversation.turns) < 13
    with pytest.raises(ValueError, match="tokens are more than the max_position_embeddings=16 .*: write less"):
        conversation.answer("a " * 40)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_chat_in_a_terminal_goes_on_after_what_ends_a_turn(folder, capsys, monkeypatch):
    """A prompt that is too long, and an answer that is ended by Ctrl-C, leave the conversation as it was."""
    config = tiny_model(position_embedding="learned", max_position_embeddings=16, eos_token_id=None)
    config.save_pretrained(folder)
    tokenizer, asked, answer = tiny_tokenizer(), [], chat.Conversation.answer
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['role'][0] }} {{ turn['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    lines = iter(["a", "b " * 40, "c", "d"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    monkeypatch.setattr(sys, "stdin", Terminal())

    def answer_or_be_ended(self, text):
        asked.append((text.split()[0], len(self.turns)))
        told = answer(self, text)
        if text == "c":
            raise KeyboardInterrupt
        return told

    monkeypatch.setattr(chat.Conversation, "answer", answer_or_be_ended)
    chat.main([str(folder), *GREEDY])
    shown = capsys.readouterr().out
    assert asked == [("a", 0), ("b", 2), ("c", 2), ("d", 2)]  # a question and its answer
    assert shown.count("loops a token]") == 2 and "[ended: this turn is left out]" in shown
    assert "tokens are more than the max_position_embeddings=16" in shown and "left out: no more room" not in shown


@pytest.mark.slow
def test_chat_reads_a_long_line_of_a_terminal():
    """By itself a terminal cuts a line at 4,095 bytes."""
    pytest.importorskip("readline")
    pty = pytest.importorskip("pty")
    reads = "import sys; from looped_eval.chat.command import prompts_of; print('ready', flush=True);"
    reads += "print(*(len(line) for line in prompts_of(sys.stdin)), 'characters')"
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", reads])
    with os.fdopen(terminal, "r+b", buffering=0) as lines:
        shown = b""
        while b"> " not in shown:
            shown += lines.read(1024)
        for _ in range(60):
            lines.write(b"a" * 100)
        lines.write(b"\n\x04")
        while b"characters" not in shown:
            shown += lines.read(1024)
    os.waitpid(process, 0)
    assert b"6000 characters" in shown


def test_chat_writes_no_more_than_the_model_reads():
    model = tiny_model(position_embedding="learned", max_position_embeddings=16, eos_token_id=None)
    conversation = chat.Conversation(model, tiny_tokenizer(), {"max_new_tokens": 200, "do_sample": False})
    prompt = conversation.prompt_of("a b c")
    conversation.answer("a b c")  # and no position beyond those that it has learned
    assert conversation.room_after(prompt) == 17 - prompt["input_ids"].shape[1]


def test_code_that_was_changed_has_a_plus_sign(tmp_path, monkeypatch):
    changed = ""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "git", lambda command, *_: {"rev-parse": "abc", "status": changed}[command])
    assert provenance.commit.__wrapped__() == "unknown"  # no clone
    (tmp_path / ".git").mkdir()
    assert provenance.commit.__wrapped__() == "abc"
    changed = " M a.py"
    assert provenance.commit.__wrapped__() == "abc+"


def test_the_result_of_another_command_is_noted(tmp_path, capsys):
    (tmp_path / "result.json").write_text('{"command": "looped this"}')
    provenance.note_what_is_replaced(tmp_path / "result.json", "looped this")
    assert not capsys.readouterr().out
    provenance.note_what_is_replaced(tmp_path / "result.json", "looped that")
    assert "of `looped this`, will be replaced" in capsys.readouterr().out


def test_the_hardware_is_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    assert provenance.hardware() == "NVIDIA H100"
