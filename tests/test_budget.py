"""The table over compute budgets, against sums by hand."""

import json
import math
import random
import re
import shutil
import statistics
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from looped_eval.budget import command as budget
from looped_eval.budget.row_scores import RowScores, variance_of_mean
from looped_eval.budget.streams import score_windows, windows
from looped_eval.common.curves import draw, table
from looped_eval.common.findings import best_depths
from looped_eval.core.command import core_scores
from looped_recipes.common.token_losses import token_losses
from looped_recipes.data.tokenizers import train_bpe
from modeling_looped import LoopedForCausalLM
from tests.helpers import save_other_tokenizer, shake, tiny_config, tiny_model, tiny_tokenizer


# lm-eval's own tasks are many to read
small_manager = partial(TaskManager, include_defaults=False)
TEXTS = ["a b c d e f g", "h i", "j k l m n o p q r s t u v w x y z " * 3]  # the last is longer than the window


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Three seeds."""
    paths = []
    for seed in range(3):
        path = tmp_path_factory.mktemp(f"seed{seed}")
        config = tiny_config(pad_token_id=0, bos_token_id=1, eos_token_id=2)
        torch.manual_seed(seed)
        shake(LoopedForCausalLM(config), seed=seed).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        paths.append(str(path))
    return paths


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text, "number": 1}) + "\n" for text in TEXTS))
    return str(path)


def nats_and_tokens(folder: str, depth: int) -> tuple[float, int]:
    """Each token once; a second window reaches back as far as the model's 64 positions allow."""
    model, tokenizer = LoopedForCausalLM.from_pretrained(folder), tiny_tokenizer()
    nats, tokens = 0.0, 0
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        stream = [tokenizer.bos_token_id, *ids]
        for start in range(0, len(ids), 64):
            end = min(start + 64, len(ids))
            window = torch.tensor([stream[max(0, end - 64) : end]])
            with torch.no_grad():
                log_p = model(window, num_loops=depth).logits[0].double().log_softmax(-1)
            for i in range(start, end):
                nats -= log_p[i - end, ids[i]].item()
                tokens += 1
    return nats, tokens


def test_bits_and_perplexity_of_models_and_seeds(folders, text, tmp_path, capsys):
    arguments = [f"seeds={folders[0]},{folders[1]}", f"one={folders[2]}", "--loops", "1,3", "--text", text]
    budget.main([*arguments, "--device", "cpu", "--batch_size", "2", "--output", str(tmp_path / "out")])
    record = json.loads((tmp_path / "out/budget.json").read_text())
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    for depth in (1, 3):
        bits, perplexity = [], []
        for folder in folders:
            nats, tokens = nats_and_tokens(folder, depth)
            bits.append(nats / math.log(2) / num_bytes)
            perplexity.append(math.exp(nats / tokens))
        for measure, values in (("bits per byte", bits), ("perplexity", perplexity)):
            curves = record["curves"][measure]
            expected = [statistics.mean(values[:2]), abs(values[0] - values[1]) / math.sqrt(2)]
            assert curves["seeds"][str(depth)] == pytest.approx(expected, rel=1e-4)
            assert curves["one"][str(depth)] == [pytest.approx(values[2], rel=1e-5), None]
    shown = (tmp_path / "out/budget.md").read_text()
    assert shown in capsys.readouterr().out
    assert "| measure | model | 1 loop | 3 loops |" in shown and " ± " in shown
    assert (
        "± of a model of several folders is their standard deviation; ± of one less seeds, 1 against 2 folders, is "
        "the standard error over rows only, which does not tell how folders differ"
    ) in shown
    of_seeds = {"seeds": "standard deviation over folders"}  # a folder's bits per byte and perplexity have no error
    assert record["errors"] == {
        "bits per byte": of_seeds,
        "perplexity": of_seeds,
        "bits per byte, less that of seeds": {"one": "standard error over rows"},
    }
    drawn = (tmp_path / "out/budget.svg").read_text()
    assert drawn.startswith("<svg") and ">seeds: ± standard deviation over folders</text>" in drawn
    assert ">one</text>" in drawn


def test_bars_of_one_chart_say_of_what_they_are(tmp_path):
    """Of two models in one chart, one with a deviation over folders and one with lm-eval's error."""
    curves = {"acc": {"a": {1: (0.5, 0.125)}, "b": {1: (0.25, 0.25)}, "c": {1: (0.25, None)}}}
    less = {"bits per byte, less that of a": {"b": {1: (0.1, 0.2)}, "c": {1: (0.1, 0.2)}}}
    kinds = budget.kinds_of_errors(curves, less, {"a": ["0", "1"], "b": ["2", "3"], "c": ["4"]})
    of_folders, over = "standard deviation over folders", "standard error over rows"
    assert kinds["acc"] == {"a": of_folders, "b": of_folders}
    assert kinds["bits per byte, less that of a"] == {"b": f"{over} and folders", "c": over}
    kinds = budget.kinds_of_errors(curves, {}, {"a": ["0", "1"], "b": ["2"], "c": ["4"]})
    draw(budget.with_kinds(curves, kinds), tmp_path / "acc.svg")
    drawn = (tmp_path / "acc.svg").read_text()
    for said in (f"a: ± {of_folders}", "b: ± lm-eval&#x27;s standard error", "c"):
        assert f">{said}</text>" in drawn


def test_perplexities_of_different_tokens_are_not_compared(folders, text, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(folders[1], other)
    arguments = ["--loops", "2", "--text", text, "--device", "cpu", "--output", str(tmp_path / "out")]
    budget.main([f"a={folders[0]}", f"b={other}", *arguments])
    assert "; perplexity is lowest for " in capsys.readouterr().out
    save_other_tokenizer(other)
    budget.main([f"a={folders[0]}", f"b={other}", *arguments])
    said = capsys.readouterr().out
    assert "bits per byte is lowest for " in said and "perplexity is lowest" not in said
    note = "perplexity: per token, and the models have different tokenizers, so not compared"
    assert note in said and note in (tmp_path / "out/budget.md").read_text()
    with pytest.raises(ValueError, match="^a=.*/other have different tokenizers, so they are no seeds of one model"):
        budget.main([f"a={folders[0]},{other}", *arguments])


def test_a_tokenizer_that_does_not_know_the_text_is_not_the_best(folders, tmp_path, capsys):
    """Its one unknown token for each word costs few bits, and all bytes of the word would be divided by them."""
    texts, other = ["日本語 " * 20, "한국어 " * 20 + "a b"], tmp_path / "other"
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shutil.copytree(folders[1], other)
    train_bpe(texts, 259).save_pretrained(other)
    LoopedForCausalLM(tiny_config(vocab_size=259)).save_pretrained(other)
    arguments = ["--loops", "2", "--text", str(tmp_path / "text.jsonl"), "--device", "cpu"]
    models = [f"unknown={folders[0]}", f"known={other}", f"too={other}"]
    budget.main([*models, *arguments, "--output", str(tmp_path / "out")])
    said = capsys.readouterr().out
    known, _, unknown = json.loads((tmp_path / "out/budget.json").read_text())["values"].values()
    assert unknown[0]["bits per byte"]["2"] < known[0]["bits per byte"]["2"]
    assert "unknown: its tokens give back 1.6% of the text, so its bits per byte are not compared" in said
    assert "lowest for unknown" not in said
    compared = [line for line in said.splitlines() if "less that of known |" in line]
    assert len(compared) == 1 and "| too | 0.0000" in compared[0]


@pytest.mark.parametrize("limit,kept", [("2", 2), ("2.5", 2), ("0.5", 2), ("9", 3)])
def test_limit_takes_the_first_texts(folders, text, tmp_path, limit, kept):
    """As lm-eval counts documents of a task: half of three is two."""
    (tmp_path / "fewer.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS[:kept]))
    found = []
    for place, arguments in (("all", [text, "--limit", limit]), ("fewer", [str(tmp_path / "fewer.jsonl")])):
        output = ["--loops", "2", "--device", "cpu", "--output", str(tmp_path / place)]
        budget.main([folders[0], "--text", *arguments, *output])
        record = json.loads((tmp_path / place / "budget.json").read_text())
        found.append([record[name] for name in ("values", "precision", "sizes")])
    assert found[0] == found[1] and f"in {kept} rows" in found[0][-1][0]


def test_a_difference_of_models_counts_their_seeds():
    """Of two groups of three seeds of one recipe, few differ by two errors, though more than 5 %, since three seeds
    tell little of their spread; by errors over rows alone, 74 % did."""
    draw, outside = np.random.default_rng(0), 0

    def seed_of(bits: np.ndarray, num_bytes: np.ndarray) -> dict[str, RowScores]:
        nats = (bits + draw.normal(0, 0.01) + draw.normal(0, 0.02, len(bits))) * math.log(2) * num_bytes
        return {"": RowScores(*map(torch.from_numpy, (nats[None], nats[None], num_bytes, num_bytes)))}

    for _ in range(200):
        num_bytes, bits = draw.integers(200, 400, 200).astype(float), draw.normal(1.5, 0.2, 200)
        found = {model: [seed_of(bits, num_bytes) for _ in range(3)] for model in "ab"}
        value, error = budget.precision_curves(found, [4])["bits per byte, less that of a"]["b"][4]
        outside += abs(value) > 1.96 * error
    assert outside < 0.2 * 200
    alone = budget.precision_curves({model: seeds[:1] for model, seeds in found.items()}, [4])
    (difference,) = found["b"][0][""].byte_nats - found["a"][0][""].byte_nats
    rows = (difference / math.log(2)).numpy()
    of_rows = rows - rows.sum() / num_bytes.sum() * num_bytes
    error = math.sqrt(200 / 199 * np.square(of_rows).sum()) / num_bytes.sum()
    assert alone["bits per byte, less that of a"]["b"][4][1] == pytest.approx(error)


@pytest.mark.parametrize("ours, theirs, holds", [(3, 3, 0.95), (2, 2, 0.95), (1, 3, None)])
def test_a_difference_has_the_interval_that_is_said(ours, theirs, holds):
    """Folders scatter by more than rows do. One folder against several has the error over rows, as one against one."""
    draw, held, num_bytes = np.random.default_rng(0), 0, torch.full((30,), 100.0, dtype=torch.float64)

    def folder() -> dict[str, RowScores]:
        nats = torch.from_numpy(100 + draw.normal(0, 3) + draw.normal(0, 1, (1, 30)))
        return {"": RowScores(nats, nats, num_bytes, num_bytes)}

    for _ in range(150 if holds else 1):
        found = {"a": [folder() for _ in range(theirs)], "b": [folder() for _ in range(ours)]}
        precision = budget.precision_curves(found, [4])
        folders = {model: [""] * len(of) for model, of in found.items()}
        (said,) = budget.what_spreads_are({}, precision, folders)
        value, error = precision["bits per byte, less that of a"]["b"][4]
        held += holds is not None and abs(value) <= error * float(re.search(r"([\d.]+) times it", said)[1])
    assert f"± of b less a, {ours} against {theirs} folders, is the standard error over rows" in said
    if holds:
        assert held / 150 == pytest.approx(holds, abs=0.054)  # three standard errors
    else:
        (difference,) = found["b"][0][""].byte_nats - sum(of[""].byte_nats for of in found["a"]) / theirs
        assert error == pytest.approx(difference.std().item() / 30**0.5 / 100 / math.log(2)) and "rows only" in said


def test_the_variance_of_a_mean_over_seeds():
    """Of 1 and 3 bits per byte, which have a variance of 2."""
    one = torch.ones(1, dtype=torch.float64)
    seeds = [RowScores(nats[None], nats[None], one, one) for nats in (math.log(2) * one, 3 * math.log(2) * one)]
    assert variance_of_mean(seeds).tolist() == pytest.approx([2 / 2])


@pytest.mark.parametrize("folders", [2, 3])
def test_a_best_depth_of_few_folders_is_rarely_named_where_all_are_equally_good(folders):
    """Depths of a folder differ by noise alone, which few folders tell badly."""
    draw, named = random.Random(0), 0
    for _ in range(400):
        found = []
        for _ in range(folders):
            seed = draw.gauss(0.5, 0.002)
            found.append({"hop acc": {depth: (seed + draw.gauss(0, 0.01), 0.1) for depth in (1, 2, 4)}})
        named += "is best" in best_depths(budget.mean_and_spread({"m": found}, of_means=True), folders={"m": found})
    assert named < 33  # of 20, and three standard deviations of that


def test_depths_of_folders_are_compared_in_pairs():
    """Folders differ by far more than their depths, always in the same direction. Models are not in pairs."""
    values = [(0.2, 0.301), (0.5, 0.598), (0.8, 0.902)]
    found = {"m": [{"hop acc": {1: (one, 0.1), 2: (two, 0.1)}} for one, two in values]}
    said = best_depths(budget.mean_and_spread(found, of_means=True), folders=found)
    assert said == "hop acc is best at 2 loops (0.6003)."
    apart = {f"at {i}": [{"hop acc": {1: (pair[i], 0.1)}} for pair in values] for i in (0, 1)}
    said = best_depths(budget.mean_and_spread(apart, of_means=True), folders=apart)
    assert said.endswith("at best for at 1, at 1 loop, and nowhere clearly worse.")
    apart["at 0"] = apart["at 0"][:1]  # tells no difference of folders
    assert "is highest for at 1" in best_depths(budget.mean_and_spread(apart, of_means=True), folders=apart)


def test_one_text_has_no_standard_error(folders, tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n")
    arguments = [*folders[:2], "--loops", "1", "--text", f"{tmp_path}/text.jsonl", "--device", "cpu"]
    budget.main([*arguments, "--output", str(tmp_path / "out")])
    assert "in one row; a standard error needs at least two" in capsys.readouterr().out
    record = json.loads((tmp_path / "out/budget.json").read_text())
    assert len(record["curves"]["bits per byte"]) == 2 and record["precision"] == {}


def test_a_model_that_gives_no_numbers_leaves_those_of_others(folders, text, tmp_path, capsys):
    model = LoopedForCausalLM.from_pretrained(folders[0])
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(math.nan)
    model.save_pretrained(tmp_path / "broken")
    tiny_tokenizer().save_pretrained(tmp_path / "broken")
    arguments = [f"broken={tmp_path}/broken", f"whole={folders[0]}", "--loops", "1", "--text", text, "--device", "cpu"]
    budget.main([*arguments, "--output", str(tmp_path / "out")])
    record, said = json.loads((tmp_path / "out/budget.json").read_text()), capsys.readouterr().out
    nats, _ = nats_and_tokens(folders[0], 1)
    bits = nats / math.log(2) / sum(len(text.encode()) for text in TEXTS)
    assert record["curves"]["bits per byte"] == {
        "broken": {"1": [None, None]}, "whole": {"1": [pytest.approx(bits, rel=1e-5), None]}
    }  # fmt: skip
    assert f"bits per byte is {bits:.4f} for whole at 1 loop, but nan for broken at 1 loop; perplexity" in said
    assert "bytes in 3 rows\n" in said and "would take" not in said


def test_a_training_run_stands_for_its_model(folders, text, tmp_path):
    shutil.copytree(folders[0], tmp_path / "run/final")
    arguments = [f"run={tmp_path}/run", f"final={tmp_path}/run/final", "--loops", "1", "--text", text]
    budget.main([*arguments, "--device", "cpu", "--output", str(tmp_path / "out")])
    record = json.loads((tmp_path / "out/budget.json").read_text())
    assert record["models"] == {name: [f"{tmp_path}/run/final"] for name in ("run", "final")}
    curves = record["curves"]["bits per byte"]
    assert curves["run"] == curves["final"]


def test_a_space_before_each_text_is_no_byte_of_it():
    """As Llama 2's tokenizer has it. An own token of that space is one of the text's tokens all the same."""
    vocabulary = {"<s>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    texts = ["a b", "b", "", "ab a"]  # 3, 1, 0 and 4 bytes, of 3, 2, 0 and 3 tokens
    rows = windows(tokenizer, texts, length=11)
    assert rows.tolist() == [[0, 5, 2, 4, 0, 2, 4, 0, 0, 5, 4, 5]]
    setup = {"batch_size": 1, "depths": [2], "rank": 0, "device": torch.device("cpu"), "autocast": nullcontext}
    scores = score_windows(SimpleNamespace(tokenizer=tokenizer, model=tiny_model(), **setup), rows)
    assert scores.bytes.tolist() == [3 + 1 + 4]
    with torch.no_grad():
        losses = token_losses(tiny_model()(rows[:, :-1], num_loops=2).logits, rows[:, 1:])
    of_texts = losses[rows[:, 1:] != 0].double()
    assert len(of_texts) == 8 and scores.byte_nats.item() == pytest.approx(of_texts.sum().item())


def test_tasks(folders, tmp_path, monkeypatch, capsys):
    """Accuracies stand beside the texts' measures, with the standard error of so few questions: the first 4 of 7."""
    task = {
        "task": "pick", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "pick.jsonl")}},
        "output_type": "multiple_choice", "doc_to_text": "a b", "doc_to_target": "answer",
        "doc_to_choice": ["c", "d", "e f"], "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "pick.yaml").write_text(json.dumps(task))
    (tmp_path / "pick.jsonl").write_text("".join(json.dumps({"answer": i}) + "\n" for i in (0, 1, 1, 2, 0, 0, 0)))
    monkeypatch.setattr("lm_eval.tasks.TaskManager", small_manager)
    budget.main(
        [folders[0], "--loops", "1..3", "--tasks", "pick", "--include_path", str(tmp_path), "--device", "cpu",
         "--limit", "4", "--output", str(tmp_path / "out")]
    )  # fmt: skip
    record = json.loads((tmp_path / "out/budget.json").read_text())
    assert list(record["errors"]["pick acc"].values()) == ["lm-eval's standard error"]
    model, tokenizer = LoopedForCausalLM.from_pretrained(folders[0]), tiny_tokenizer()
    for depth in (1, 2, 3):
        sums = []
        for choice in ("c", "d", "e f"):
            ids = torch.tensor(tokenizer(f"a b {choice}")["input_ids"])
            log_p = model(ids[None], num_loops=depth).logits[0].log_softmax(-1)
            sums.append(sum(log_p[i - 1, ids[i]].item() for i in range(2, len(ids))))
        accuracy = [1, 2, 1][sums.index(max(sums))] / 4
        ((value, deviation),) = [points[str(depth)] for points in record["curves"]["pick acc"].values()]
        assert (value, deviation) == (accuracy, pytest.approx(math.sqrt(accuracy * (1 - accuracy) / 3)))
        assert record["values"][next(iter(record["models"]))][0]["pick acc"][str(depth)] == accuracy
    assert "pick acc is best" not in capsys.readouterr().out  # four questions tell no depth from another


def test_core(folders, tmp_path):
    """On the first three of a bundle of one small task."""
    bundle = tmp_path / "bundle"
    (bundle / "eval_data").mkdir(parents=True)
    task = "{label: pick, dataset_uri: pick.jsonl, num_fewshot: [1], icl_task_type: multiple_choice}"
    (bundle / "core.yaml").write_text(f"icl_tasks: [{task}]\n")
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\npick,25\n")
    items = [{"query": f"{word} b", "choices": ["c", "d e", "f", "g"], "gold": i} for i, word in enumerate("hijk")]
    (bundle / "eval_data/pick.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    options = ["--core-examples", "3", "--loops", "1,3", "--device", "cpu", "--output", str(tmp_path)]
    budget.main([folders[0], "--core", str(bundle), *options])
    (points,) = json.loads((tmp_path / "budget.json").read_text())["curves"]["CORE"].values()
    expected = core_scores(folders[0], None, bundle, [1, 3], examples=3)
    assert {int(depth): value for depth, (value, _) in points.items()} == {
        depth: pytest.approx(found["core"]) for depth, found in expected.items()
    }


@pytest.mark.parametrize("arguments,message", [
    (["{model}", "--text", "{text}", "--loops", "0,3"], "num_loops=0,3 is no depth"),
    (["{model}"], "nothing to measure"),
    (["x={model}", "x={model}", "--text", "{text}"], "a name of its own"),
    (["x={model},", "--text", "{text}"], "an empty name between commas"),
    (["x={model},{model}", "--text", "{text}"], "names one folder twice"),
    (["{model}", "--text", "{config}"], "line 1: expected a JSON object with a field 'text'"),
    (["{model}", "{missing}", "--text", "{text}"], "no config.json was found"),
    (["{model}", "--core", "{missing}"], "is no evaluation bundle"),
    (["{model}", "--tasks", "nothing", "--limit", "-2"], "--limit -2 must be above 0"),
    (["{model}", "--stream", "a={text}", "--limit", "3"], "--limit 3 is of --text and --tasks"),
    (["{model}", "--text", "{text}", "--limit", "-2"], "--limit -2 must be above 0"),
    (["{model}", "--tasks", "nothing"], "no task is called 'nothing'"),
])  # fmt: skip
@pytest.mark.some(5)
def test_bad_input_before_a_model_is_loaded(folders, text, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", small_manager)
    monkeypatch.setattr(budget.LoopedLM, "__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    places = {"model": folders[0], "text": text, "config": f"{folders[0]}/config.json", "missing": tmp_path / "none"}
    with pytest.raises(ValueError, match=message):
        budget.main([argument.format(**places) for argument in arguments])


def test_names_of_models(tmp_path, monkeypatch):
    assert budget.parse_models(["runs/a/num_loops=4/final", "b=runs/b=1/final,x/b=2", "runs/c"]) == {
        "num_loops=4": ["runs/a/num_loops=4/final"],
        "b": ["runs/b=1/final", "x/b=2"],
        "c": ["runs/c"],
    }
    (tmp_path / "own").mkdir()
    (tmp_path / "latest").symlink_to("own", target_is_directory=True)
    assert budget.parse_models([str(tmp_path / "latest")]) == {"latest": [str(tmp_path / "latest")]}
    of_a_sweep = tmp_path / "betas=[0.9, 0.95]"  # as `looped sweep` names the folder of a run
    of_a_sweep.mkdir()
    assert budget.parse_models([str(of_a_sweep)]) == {of_a_sweep.name: [str(of_a_sweep)]}
    assert budget.parse_models([f"b={of_a_sweep}"]) == {"b": [str(of_a_sweep)]}
    monkeypatch.chdir(tmp_path)
    assert budget.parse_models([of_a_sweep.name]) == {of_a_sweep.name: [of_a_sweep.name]}
    monkeypatch.chdir(tmp_path / "own")
    assert budget.parse_models(["final"]) == {"own": ["final"]} and budget.parse_models(["."]) == {"own": ["."]}


def test_table():
    curves = {"acc": {"a": {1: (0.25, None), 2: (0.5, 0.125)}, "b": {2: (1.0, None)}}}
    assert table(curves).splitlines() == [
        "| measure | model | 1 loop | 2 loops |",
        "| --- | --- | ---: | ---: |",
        "| acc | a | 0.2500 | 0.5000 ± 0.1250 |",
        "| acc | b |  | 1.0000 |",
    ]
