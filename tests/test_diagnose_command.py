"""`looped diagnose`: models and texts from anywhere, files and a page, errors that say what to do."""

import json
import re
import shutil
from xml.etree import ElementTree

import pytest
import torch
from accelerate import Accelerator

from looped_eval.common.held_out import HeldOutError
from looped_eval.common.model_folder import results_folder
from looped_eval.common.page import Charts, Heading
from looped_eval.common.run_folder import RunFolder
from looped_eval.diagnose import command as diagnose
from looped_eval.diagnose.dynamics import depth_curve
from looped_eval.diagnose.model_and_text import DiagnoseError, config_fields, make_config, open_model_and_text
from looped_eval.diagnose.readings import READINGS
from looped_eval.report import command as report
from looped_recipes.data.shards import prepare
from looped_recipes.data.tokenizers import mark_documents
from looped_recipes.engine.validation import validate
from looped_recipes.settings.recipe import DataConfig, load_recipe, recipe_of_run
from modeling_looped import LoopedForCausalLM
from tests.helpers import random_ids, run_of, run_of_documents, tiny_config, tiny_model, tiny_tokenizer
from tests.helpers_pretrain import monitored


OVERRIDES = ["hidden_size=32", "intermediate_size=48", "num_attention_heads=4", "num_core_layers=1", "vocab_size=30"]


@pytest.fixture
def run_folder(tmp_path):
    """A training run: final/ with a tokenizer, and metrics."""
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(vocab_size=30, injection="diagonal", num_loops=2, exit_gate="raw"))
    model.save_pretrained(tmp_path / "run/final")
    tiny_tokenizer().save_pretrained(tmp_path / "run/final")
    run_of(tmp_path / "run", tmp_path / "run/final", "h g f e d c b a " * 60)
    records = [{"step": step, "residual_norm/loop_1": 1.5 + step, "spectral_radius": 0.4} for step in (0, 10)]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a b c d e f g h " * 60}) + "\n")
    return tmp_path / "run"


def test_there_are_eighteen_measures_of_models_and_three_of_theorems():
    of_models = [name for name, measure in diagnose.MEASURES.items() if measure.reads_a_model]
    assert len(of_models) == 18
    assert set(diagnose.MEASURES) - set(of_models) == {"theorem_1", "theorem_2", "theorem_3"}


def test_all_writes_a_page_that_needs_no_other_file(run_folder, tmp_path, monkeypatch):
    quick = {"loops": [1, 2, 3], "seeds": 1, "steps": 1, "num_tokens": 8}
    for name in ("residual_norm", "update_size"):
        monkeypatch.setitem(diagnose.MEASURES, name, diagnose.MEASURES[name]._replace(quick=quick))
    arguments = ["all", str(run_folder), "--text", str(tmp_path / "text.jsonl"), "--rows", "2", "--length", "16"]
    diagnose.main([*arguments, "--output", str(tmp_path / "out")])
    page = (tmp_path / "out/index.html").read_text()
    of_models = [name for name, measure in diagnose.MEASURES.items() if measure.reads_a_model]
    assert 'id="theorem_1"' not in page
    for name in of_models:
        assert f">{READINGS[name].title}</h" in page
        saved = json.loads((tmp_path / f"out/{name}.json").read_text())
        assert {"command", "commit", "hardware", "model", "text", "options", "result"} <= set(saved)
        charts = ElementTree.parse(tmp_path / f"out/{name}.svg").getroot().findall("{*}svg")
        assert charts and all(chart.findall(".//{*}title") for chart in charts)
    assert page.count(">While the model trained<") == 2  # two curves of the run
    assert (
        page.index(">Gradients</h2>")
        < page.index(">Fresh models of this config</h2>")
        < page.index(">Learning rates</h3>")
    )
    assert not re.search(r'(src|href)="(?!#)', page)
    losses = json.loads((tmp_path / "out/depth_curve.json").read_text())["result"]["ce"]
    best = min(range(len(losses)), key=losses.__getitem__) + 1
    loops = "1 loop is" if best == 1 else f"{best} loops are"
    assert f'<p class="finding">{loops} best here: {losses[best - 1]:.3f} cross-entropy' in page
    radius = json.loads((tmp_path / "out/spectral.json").read_text())["result"]
    assert radius["training"]["spectral_radius"] == {"step": [0, 10], "value": [0.4, 0.4]}


def test_a_training_run_keeps_its_measures_for_the_report(run_folder, tmp_path):
    options = ["--text", str(tmp_path / "text.jsonl"), "--rows", "2", "--length", "16"]
    diagnose.main(["token_norms", str(run_folder / "final"), *options])
    diagnose.main(["spectral", str(run_folder), *options])
    assert "While the model trained" in (run_folder / "eval/diagnose/spectral.svg").read_text()
    beside, own, fresh = report.diagnostics([RunFolder(run_folder, "run")])
    drawn = [chart.title for block in own.blocks if isinstance(block, Charts) for chart in block.charts]
    assert drawn[:3] == [
        "The linear maps of a loop",
        "What A does to the states that occur",
        "While the model trained",
    ]
    assert drawn[3].startswith("Norms of all tokens") and fresh.blocks == beside.blocks == []
    assert results_folder("lt").as_posix() == "runs/eval/lt"
    assert results_folder(str(tmp_path)).as_posix() == f"runs/eval/{tmp_path.name}"


def test_several_models_side_by_side(run_folder, tmp_path, capsys):
    """The runs of a sweep, of which one has no model, and a fresh model."""
    sweep, kept = tmp_path / "sweep", [tmp_path / "sweep" / name for name in ("lr=1", "lr=2")]
    for path in kept:
        shutil.copytree(run_folder, path)
    (sweep / "lr=3").mkdir()
    (sweep / "lr=3/metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    options = ["--text", str(tmp_path / "text.jsonl"), "--rows", "2", "--length", "16"]
    diagnose.main(["token_norms", str(sweep), *options])
    said = capsys.readouterr().out
    saved = [json.loads((path / "eval/diagnose/token_norms.json").read_text())["result"] for path in kept]
    assert f"{sweep / 'lr=3'}\nleft out: " in said and "token_norms of 2 of 3 models." in said
    assert f"|  | {kept[0]} | {kept[1]} |" in said and f"next: looped report {kept[0]} {kept[1]}" in said
    cells = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| mean |")]
    assert [float(cell) for cell in cells[0][1:]] == pytest.approx([found["mean"] for found in saved], rel=0.01)
    beside = report.diagnostics(report.open_runs([sweep]))[0]
    assert [block.words for block in beside.blocks if isinstance(block, Heading)] == [READINGS["token_norms"].title]
    assert beside.blocks[1].head == ["", "lr=1", "lr=2"]

    with pytest.raises(DiagnoseError, match="is the folder of one model, but 3 are measured"):
        diagnose.main(["token_norms", str(sweep), "--output", str(tmp_path / "out")])
    with pytest.raises(DiagnoseError, match="none of the 2 models"):
        diagnose.main(["token_norms", str(sweep / "lr=3"), "nothing", *options])


def test_all_leaves_out_what_the_model_does_not_have(tmp_path, monkeypatch):
    few = {name: diagnose.MEASURES[name] for name in ("spectral", "radial_clamp", "token_norms")}
    monkeypatch.setattr(diagnose, "MEASURES", few)
    diagnose.main(["all", "lt", *OVERRIDES, "num_loops=1", "--rows", "1", "--length", "8", "--output", str(tmp_path)])
    page = (tmp_path / "index.html").read_text()
    assert "Norms of tokens</h2>" in page and "Injection</h2>" not in page and ">A fresh model, before any" in page
    assert page.index("What does not apply</h2>") < page.index("Injection: no linear map meets")
    assert "no linear map meets the state of a model with injection=" in page and "at least 2, got 1" in page
    assert not (tmp_path / "spectral.json").exists()


def test_options_are_those_of_the_function(tmp_path, capsys):
    common = ["--rows", "1", "--length", "8", "--output", str(tmp_path)]
    diagnose.main(["scale_sweep", "lt", *OVERRIDES, *common, "--alphas", "0.5", "2", "--num-loops", "3"])
    saved = json.loads((tmp_path / "scale_sweep.json").read_text())
    assert saved["result"]["alpha"] == [0.5, 2.0] and saved["options"]["num_loops"] == 3
    assert saved["text"] == "random tokens with seed 0"
    for name, measure in diagnose.MEASURES.items():  # every option of every function is a flag
        with pytest.raises(SystemExit) as stop:
            diagnose.parse([name, "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        flags = ["num-loops" if option == "loops" else option.replace("_", "-") for option in measure.defaults()]
        assert all("--" + flag in shown for flag in flags)


def test_quadrant_beside_other_models(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    arguments = ["depth_curve", "lt", *OVERRIDES, "num_loops=2", "--rows", "1", "--length", "8", "--output"]
    diagnose.main([*arguments, str(first)])
    diagnose.main([*arguments, str(second), "--beside", str(first / "depth_curve.json")])
    drawn = [(folder / "depth_curve.svg").read_text() for folder in (first, second)]
    assert ["Cost of exiting at once" in svg for svg in drawn] == [False, True]
    third = tmp_path / "third" / "eval" / "diagnose" / "depth_curve.json"  # folders of the same name
    third.parent.mkdir(parents=True)
    third.write_text(json.dumps({**json.loads((first / "depth_curve.json").read_text()), "model": "runs/other"}))
    others = ["--beside", str(first / "depth_curve.json"), str(third)]
    diagnose.main([*arguments, str(second), *others])
    drawn = (second / "depth_curve.svg").read_text()
    assert "runs/other" in drawn and "lt hidden_size" in drawn
    with pytest.raises(DiagnoseError, match="another of these files is of 'runs/other' too"):
        diagnose.main([*arguments, str(second), *others, str(third)])
    (tmp_path / "other.json").write_text('{"measure": "spectral", "result": {}}')
    for path, message in (("none.json", "cannot be read"), ("other.json", "holds no depth curve")):
        with pytest.raises(DiagnoseError, match=message):
            diagnose.main([*arguments, str(second), "--beside", str(tmp_path / path)])


def test_models_from_every_place(run_folder, tmp_path):
    trained = open_model_and_text(str(run_folder), text=str(tmp_path / "text.jsonl"), rows=2, length=16)
    letters = trained.batch["input_ids"][0, :9]
    assert letters[:8].tolist() == list(range(4, 12)) and trained.config.injection == "diagonal"
    assert torch.equal(
        trained.model.lm_head.weight,
        open_model_and_text(str(run_folder / "final"), rows=1, length=4).model.lm_head.weight,
    )
    fresh = open_model_and_text(
        str(run_folder / "final/config.json"), ["num_loops=5", "residual_scaling=linear"], rows=2, length=8
    )
    assert fresh.config.num_loops == 5 and fresh.where["text"] == "random tokens with seed 0"
    text, tokenizer = str(tmp_path / "text.jsonl"), str(run_folder / "final")
    borrowed = open_model_and_text("lt", OVERRIDES, text=text, tokenizer=tokenizer, rows=2, length=16)
    assert torch.equal(borrowed.batch["input_ids"], trained.batch["input_ids"])
    (tmp_path / "recipe.yaml").write_text("model: {preset: parcae, num_loops: 2, hidden_size: 32, vocab_size: 50, "
                                          "num_attention_heads: 4, intermediate_size: 48}\n")  # fmt: skip
    recipe = open_model_and_text(str(tmp_path / "recipe.yaml"), rows=2, length=8, state_seed=3)
    assert recipe.config.injection == "diagonal" and recipe.batch["initial_state"].shape == (2, 8, 32)
    again = open_model_and_text(str(tmp_path / "recipe.yaml"), rows=2, length=8, state_seed=3)
    assert torch.equal(again.batch["initial_state"], recipe.batch["initial_state"])
    assert torch.equal(again.model.lm_head.weight, recipe.model.lm_head.weight)


def test_a_trained_model_reads_what_its_run_held_out(run_folder, tmp_path, capsys):
    """The document begins with its start token, which is no target, and the output says what was read."""
    of = open_model_and_text(str(run_folder), rows=3, length=16)
    read = [1, *list(range(11, 3, -1)) * 6][:48]  # h to a; training text is z to w
    assert of.batch["input_ids"].flatten().tolist() == read
    assert of.batch["labels"].flatten().tolist() == [-100, *read[1:]]
    assert of.where["text"] == f"validation split of {run_folder} ({run_folder / 'held_out.jsonl'})"
    options = ["--rows", "3", "--length", "16", "--output", str(tmp_path)]
    diagnose.main(["token_norms", str(run_folder / "final"), *options])
    said = capsys.readouterr().out
    assert f"text: {of.where['text']}\n" in said and f"next: looped diagnose all {run_folder}" in said
    assert json.loads((tmp_path / "token_norms.json").read_text())["text"] == of.where["text"]

    with pytest.raises(ValueError, match=r"holds 482 tokens, fewer than 31 rows of 16: ask for fewer"):
        open_model_and_text(str(run_folder), rows=31, length=16)
    with pytest.raises(HeldOutError, match="leave out --tokenizer, or pass --text"):
        open_model_and_text(str(run_folder), tokenizer=str(run_folder / "final"))
    (run_folder / "recipe.yaml").unlink()
    with pytest.raises(ValueError, match=r"holds no recipe.yaml.*name a text"):
        open_model_and_text(str(run_folder))
    (run_folder / "metrics.jsonl").unlink()
    with pytest.raises(HeldOutError, match="in no training run.*pass --text.*--text embedded"):
        open_model_and_text(str(run_folder / "final"))


@pytest.mark.parametrize("data", [{}, {"document_masking": True}], ids=["joined", "masked"])
def test_losses_are_those_of_the_runs_validation(run_folder, data):
    stream = run_of_documents(run_folder / "final", **data)
    recipe = recipe_of_run(run_folder)
    validation = prepare(recipe.data).validation
    count = recipe.evaluation.rows = len(validation)
    of = open_model_and_text(str(run_folder), rows=count)  # by default as long as the rows of the run
    assert torch.equal(of.batch["input_ids"], stream[: count * 8].view(count, 8))
    logged = validate(Accelerator(cpu=True), of.model, of.config, recipe, validation)
    found = depth_curve(of.model, of.batch)["ce"]
    assert found[:2] == pytest.approx([logged[f"validation/loss_at_{k}"] for k in (1, 2)], rel=1e-5)
    with_one_more = open_model_and_text(str(run_folder), rows=4, length=9)
    assert torch.equal(with_one_more.batch["input_ids"], stream[:36].view(4, 9))


def test_a_text_is_read_with_its_start_tokens(run_folder, tmp_path):
    tokenizer = mark_documents(tiny_tokenizer(), DataConfig(source="", start_token="<s>"))
    tokenizer.save_pretrained(run_folder / "final")
    (tmp_path / "text.jsonl").write_text('{"text": "a b c"}\n{"text": "d"}\n')
    batch = open_model_and_text(str(run_folder), text=str(tmp_path / "text.jsonl"), rows=1, length=8).batch
    assert batch["input_ids"].tolist() == [[1, 4, 5, 6, 2, 1, 7, 2]]
    assert batch["labels"].tolist() == [[-100, 4, 5, 6, 2, -100, 7, 2]]


@pytest.mark.parametrize(
    "target,overrides,options,message",
    [
        ("flx", [], {}, "no preset; did you mean 'flt'"),
        ("nowhere.json", [], {}, "there is no config 'nowhere.json'"),
        ("lt", ["num_lops=3"], {}, "did you mean 'num_loops'"),
        ("lt", ["num_loops"], {}, "write field=value"),
        ("lt", ["num_loops=0"], {}, "num_loops must be at least 1, got 0"),
        ("lt", OVERRIDES, {"text": "a.txt"}, "cannot be read without a tokenizer"),
        ("lt", OVERRIDES, {"rows": 0}, "at least 1 row"),
        ("lt", OVERRIDES, {"state_seed": 1}, "state_init='normal'"),
    ],
)
def test_bad_models_are_refused(target, overrides, options, message):
    with pytest.raises(ValueError, match=message):
        open_model_and_text(target, overrides, **options)


def test_bad_folders_and_texts_are_refused(run_folder, tmp_path):
    with pytest.raises(ValueError, match="neither a saved model"):
        open_model_and_text(str(tmp_path))
    with pytest.raises(DiagnoseError, match="would change the trained model.*config.json"):
        open_model_and_text(str(run_folder), ["num_loops=3"])
    with pytest.raises(DiagnoseError, match=r"holds \d+ tokens, fewer than 99 rows of 128"):
        open_model_and_text(str(run_folder), text=str(tmp_path / "text.jsonl"), rows=99)
    with pytest.raises(ValueError, match="tokenizer has ids up to 29, but the model vocab_size=20"):
        open_model_and_text("lt", [*OVERRIDES, "vocab_size=20"], tokenizer=str(run_folder / "final"))
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="broken.yaml is not YAML: line 1"):
        open_model_and_text(str(tmp_path / "broken.yaml"))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DiagnoseError, match="cannot be read"):
        open_model_and_text(str(tmp_path / "broken.json"))
    (tmp_path / "dense.yaml").write_text("dense: {path: a/llama}\ndata: {tokenizer: a/llama}\nmodel: {num_loops: 2}\n")
    with pytest.raises(ValueError, match="begins with the dense model 'a/llama': name its trained run"):
        open_model_and_text(str(tmp_path / "dense.yaml"))


@pytest.mark.parametrize("recipe", ["smoke/flt.yaml", "fully_looped/small_lt.yaml", "smoke/ouro_gate.yaml"])
def test_a_recipe_is_read_as_training_reads_it(recipe):
    """By its short name, with what it extends."""
    assert make_config(config_fields(recipe), []).to_dict() == load_recipe(recipe).model_config().to_dict()


def test_monitoring_metrics_are_these_measures():
    """Training's metrics equal the diagnostics of the same model and batch."""
    model = tiny_model(injection="concat", state_init="zeros")
    batch = {"input_ids": random_ids(2, 7)}
    outputs = model(**batch, labels=batch["input_ids"], output_loop_hidden_states=True)
    outputs.loss.backward()
    metrics = monitored(model, outputs, [3, 3])
    model.zero_grad()
    trajectory = diagnose.MEASURES["norm_trajectory"].function(model, batch)
    dynamics = diagnose.MEASURES["state_dynamics"].function(model, batch, num_loops=3)
    for loop, norm in enumerate(trajectory["R"][1:], start=1):
        assert metrics[f"residual_norm/loop_{loop}"] == pytest.approx(norm, rel=1e-5)
    assert metrics["state_change"] == pytest.approx(dynamics["change"][-1] / 32**0.5, rel=1e-5)
    spectrum = diagnose.MEASURES["spectral"].function(model, batch)
    assert metrics["spectral_radius"] == pytest.approx(spectrum["A"]["spectral_radius"])


def test_infinities_are_null_in_json():
    assert diagnose.finite({"a": [1.0, float("inf")], "b": float("nan")}) == {"a": [1.0, None], "b": None}
