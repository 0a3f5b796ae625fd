"""The demo: what it says follows from its numbers; and the whole of it at a size that takes a minute."""

import json
import re
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from copy import deepcopy
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from looped_recipes.common.metrics import last_validation, read_metrics
from looped_recipes.demo import __main__ as main_file
from looped_recipes.demo import command, hops, options, text
from looped_recipes.demo.page import finding, page, path_of, text_finding
from looped_recipes.demo.picture import picture


ROOT = Path(__file__).parent.parent
FOUND = {
    "command": "looped demo",
    "commit": "abc",
    "hardware": "a CPU",
    "hops": {
        "parameters": 1000,
        "loops": 3,
        "steps": 10,
        "training_flops": 1e9,
        "control_flops": 3e8,
        "questions": 20,
        "certainty": 0.9,
        "accuracy": {"1": {"1": 1.0, "2": 1.0, "3": 1.0}, "4": {"1": 0.25, "2": 0.996, "3": 1.0}},
        "control": {"1": 1.0, "4": 0.4},
        "exit_loops": {"1": 1.04, "4": 2.31},
        "exit_accuracy": {"1": 1.0, "4": 0.95},
        "example": {
            "question": "ab ba ; a1",
            "right": "b",
            "answers": [["a", 0.5], ["b", 0.97], ["b", 1.0]],
            "exit": 2,
        },
    },
    "text": {
        "parameters": 2000,
        "loops": 2,
        "steps": 5,
        "bits_per_byte": {"1": 2.5, "2": 2.25, "3": 2.3},
        "samples": {"1": "def <f>", "2": "def g"},
    },
}


def test_the_finding_is_that_of_the_numbers():
    said = finding(FOUND["hops"])
    assert "25 % after 1 loop, 99.6 % after 2 loops and 100 % after 3 loops" in said
    assert "are those of 4 hops: a model with one loop answers 40 % of them" in said
    assert "1.0 for 1 hop and 2.3 for 4 hops" in said and "95 % of those of 4 hops are then right" in said
    changed = deepcopy(FOUND["hops"])
    changed["accuracy"]["4"]["1"], changed["control"]["4"] = 0.5, 0.75
    assert "50 % after 1 loop" in finding(changed) and "one loop answers 75 %" in finding(changed)
    changed["accuracy"]["4"]["2"] = 1.0
    assert "answers 50 % after 1 loop and 100 % after 2 loops or more." in finding(changed)


def test_the_finding_on_text_ranks_no_depths_that_are_the_same():
    assert text_finding(FOUND["text"]) == (
        "On text the model needs 2.500 bits per byte after the first loop and 2.250 after the 2 loops that it was "
        "trained with."
    )
    better = {"loops": 2, "bits_per_byte": {"1": 2.5, "2": 2.3, "3": 2.25, "4": 2.4}}
    assert text_finding(better).endswith("trained with; the least is 2.250, after 3 loops.")
    flat = {"loops": 2, "bits_per_byte": {"1": 2.5, "2": 2.252, "3": 2.25}}
    assert text_finding(flat).endswith("trained with; after 2 loops or more it is the same within 0.005.")


def test_the_steps_of_a_question():
    assert path_of("bg eb ad fe df ca gh hc ; b4") == "b → g → h → c → a"


def test_the_page_opens_with_the_picture_and_needs_nothing_else():
    shown = page(FOUND)
    assert shown.index("<h1>") < shown.index("a model with one loop answers") < shown.index("<svg")
    assert shown.index("<svg") < shown.index("<nav") < shown.index("<h2") and shown.count("<svg") == 3
    assert "prefers-color-scheme: dark" in shown and "&lt;f&gt;" in shown
    assert not re.search(r"<script|<link|src=|href=.[^#]|@import", shown)


def test_points_lie_where_their_values_are():
    root = ElementTree.fromstring(picture(FOUND["hops"]))
    space = "{http://www.w3.org/2000/svg}"
    lines = [each.get("points").split() for each in root.iter(f"{space}polyline")]
    heights = [[float(point.split(",")[1]) for point in line] for line in lines]
    assert len(set(heights[0])) == 1  # 1 hop: always right
    low, high = heights[1][0], heights[1][2]
    zero = high + (low - high) / 0.75  # 25 and 100 % span three quarters of the scale
    across = [each.get("d") for each in root.iter(f"{space}path") if each.get("class") == "rule"]
    level = [float(y) for d in across for y in re.findall(r" (\S+)H", d)]
    assert level == pytest.approx([zero - 0.4 * (zero - heights[0][0])], abs=0.2)
    widths = [float(bar.get("width")) for bar in root.iter(f"{space}rect") if bar.get("class") == "bar"]
    assert len(widths) == 2 and widths[1] / widths[0] == pytest.approx(2.31 / 1.04, rel=0.01)


def test_help_comes_without_the_libraries(capsys, monkeypatch):
    source = Path(options.__file__).read_text() + Path(main_file.__file__).read_text()
    assert not re.search(r"torch|transformers|command import", source)
    with pytest.raises(SystemExit) as stop:
        options.parse(["--help"])
    assert stop.value.code == 0 and "--ask" in capsys.readouterr().out


def test_settings_may_stand_before_and_after_options(tmp_path, capsys):
    asked = options.parse(["training.steps=1", "--output", str(tmp_path), "data.source=a"])
    assert asked.settings == ["training.steps=1", "data.source=a"] and asked.output == tmp_path and asked.ask is None
    assert options.parse(["--ask"]).ask == "" and options.parse(["--ask", "ab ; a1"]).ask == "ab ; a1"
    with pytest.raises(SystemExit):
        options.parse(["--outpt", "x"])
    assert capsys.readouterr().err == "looped demo: unrecognized arguments: --outpt; --help lists the options\n"


def test_what_is_not_installed_is_one_line(monkeypatch):
    """A module that is None cannot be imported."""
    monkeypatch.delitem(sys.modules, "looped_recipes.demo.command")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(sys, "argv", ["looped demo"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(main_file.__file__, run_name="__main__")
    assert stop.value.code == "error: datasets is not installed: pip install 'modeling-looped[train,eval]'"


def test_asking_a_model_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["looped demo", "--output", str(tmp_path), "--ask"])
    with pytest.raises(SystemExit, match="no trained model in .*run `looped demo` first"):
        runpy.run_path(main_file.__file__, run_name="__main__")


def test_a_mistake_in_the_settings_is_told_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(hops, "train_models", lambda *arguments: pytest.fail("training began"))
    with pytest.raises(ValueError, match="in training: .stepz."):
        command.run_demo(tmp_path / "run", ["training.stepz=3"])
    said = {"training.output_dir=x": "say --output", "evaluation.loops=[2,4]": r"\[2, 4\] lacks 1, and"}
    said |= {"model.num_loops=12": "lacks 12, .* with the 12 that it trains", "training.stop_after=3": "it goes on"}
    for setting, answer in said.items():
        with pytest.raises(ValueError, match=answer):
            command.run_demo(tmp_path / "run", [setting])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["2024", "[a] #2", "a: b"])
def test_the_folder_of_the_demo_has_any_name(name, tmp_path, monkeypatch):
    """It is no YAML."""
    monkeypatch.chdir(tmp_path)
    trained = []
    monkeypatch.setattr(hops, "train", lambda recipe: trained.append(recipe) or mock.Mock())
    hops.train_models(Path(name), [], 3)
    trained.append(text.recipe_of(Path(name), []))
    places = [f"{name}", f"{name}/one_loop", name]
    assert [recipe.training.output_dir for recipe in trained] == places
    assert trained[1].data.source == f"{name}/questions.jsonl" and trained[1].model["num_loops"] == 1


def test_a_question_is_of_the_letters_that_were_trained(tmp_path, monkeypatch):
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(hops, "Answerer", lambda folder: None)
    for question in ("xy yz ; x1", "ab ba ; a5"):
        with pytest.raises(ValueError, match=f"'{question}' is not a question of this model: .* from a to h"):
            hops.ask(tmp_path, question)


def test_exits_are_at_the_first_certain_loop():
    answerer = hops.Answerer.__new__(hops.Answerer)
    answerer.rule = hops.ExitRule("max_prob", 0.9)
    sure, unsure = torch.tensor([9.0, 0, 0]), torch.tensor([1.0, 0, 0])
    logits = [torch.stack(rows) for rows in ((sure, unsure, unsure), (unsure, sure, unsure), (sure, sure, unsure))]
    assert answerer.exits(logits).tolist() == [1, 2, 3]
    assert answerer.exits(logits[:1]).tolist() == [1, 1, 1]


@pytest.mark.skipif(not (ROOT / "results/demo.json").exists(), reason="not measured")
def test_the_picture_of_the_readme_is_that_of_the_measured_numbers():
    found = json.loads((ROOT / "results/demo.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs/demo.svg").read_text(encoding="utf-8") == picture(found["hops"])


@pytest.mark.slow
def test_demo_learns_at_every_depth_and_leaves_models(tmp_path, capsys):
    texts = [f"def add_{i}(a, b):\n    return a + b + {i}\n" * 8 for i in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in texts))
    output = tmp_path / "run"
    found = command.run_demo(
        output,
        settings=[
            f"data.source={tmp_path / 'text.jsonl'}",
            f"data.cache_dir={tmp_path / 'shards'}",
            "data.tokenizer_vocab_size=300",
            "data.sequence_length=32",
            "data.validation_fraction=0.1",
            "model.hidden_size=64",
            "model.num_attention_heads=2",
            "training.steps=30",
            "evaluation.every=3",
            "evaluation.rows=8",
        ],
        hops_settings=[
            "training.steps=3",
            "schedule.warmup_steps=1",
            "training.rows_per_step=8",
            "training.micro_batch_size=8",
        ],
        num_documents=300,
    )
    final = output / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    loops = model.config.num_loops
    assert len(tokenizer) <= model.config.vocab_size and found["text"]["loops"] == loops
    validations = [record for record in read_metrics(output / "metrics.jsonl") if "validation/loss" in record]
    after = last_validation(read_metrics(output / "metrics.jsonl"), "bits_per_byte")
    for depth in range(1, loops + 1):
        assert after[depth] < 0.7 * validations[0][f"validation/bits_per_byte_at_{depth}"]
    assert found["text"]["bits_per_byte"] == {
        str(depth): pytest.approx(bits, rel=1e-5) for depth, bits in after.items()
    }
    assert found["hops"]["control_flops"] < 0.5 * found["hops"]["training_flops"]
    saved = json.loads((output / "demo.json").read_text())
    assert (output / "demo.html").read_text(encoding="utf-8") == page(saved, output)
    capsys.readouterr()
    hops.ask(output / "hops/final", "")
    assert capsys.readouterr().out.count("after 1 loop:") == len(hops.HOPS)
