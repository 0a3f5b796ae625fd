"""Texts as one stream in windows, and standard errors, against sums by hand."""

import json
import math
import statistics

import pytest
import torch
from datasets import Dataset

from looped_eval.budget import command as budget
from looped_eval.budget.fully_looped import SIX, lambada_perplexity, six_curves
from looped_eval.budget.row_scores import RowScores
from looped_eval.budget.streams import STREAMS, parse_stream, score_windows, texts_of, windows
from looped_eval.core.command import core_scores
from looped_eval.harness.looped_lm import LoopedLM
from modeling_looped import LoopedForCausalLM
from tests.helpers import shake, tiny_config, tiny_tokenizer


# an empty text is a start token alone
TEXTS = ["a b c d e f g", "", "h i", "j k l m n o p q r s t u v w x y z " * 4, "a c e g i k m"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shake(LoopedForCausalLM(tiny_config(pad_token_id=0, bos_token_id=1, eos_token_id=2))).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def naive_stream(texts: list[str]) -> list[int]:
    return [token for text in texts for token in [1, *(ord(word) - ord("a") + 4 for word in text.split())]]


def naive_windows(stream: list[int], length: int, group: int) -> list[list[int]]:
    """Batches of `group` windows of inputs and targets, as long as a whole batch and one more token are left."""
    rows = []
    for batch in range((len(stream) - 1) // (group * length)):
        chunk = stream[batch * group * length : (batch + 1) * group * length + 1]
        rows += [chunk[i * length : (i + 1) * length + 1] for i in range(group)]
    return rows


@pytest.mark.parametrize("length,group,limit", [(8, 1, None), (8, 4, None), (5, 3, 61), (16, 1, 64), (10**3, 1, None)])
def test_windows_cut_the_stream(length, group, limit):
    stream = naive_stream(TEXTS)[: None if limit is None else limit + 1]
    expected = naive_windows(stream, length, group)
    if not expected:
        with pytest.raises(ValueError, match=f"{len(stream)} tokens, fewer than 1 window"):
            windows(tiny_tokenizer(), TEXTS, length, limit, group)
        return
    found = windows(tiny_tokenizer(), iter(TEXTS), length, limit, group)
    assert found.tolist() == expected
    assert all(before[-1] == after[0] for before, after in zip(found, found[1:]))


def test_a_tokenizer_without_bos_begins_texts_with_its_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    assert windows(tokenizer, ["a b c"], 3).tolist() == [[2, 4, 5, 6]]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a bos nor an eos"):
        windows(tokenizer, ["a b c"], 3)


def by_hand(folder: str, rows: list[list[int]], depth: int) -> tuple[list[float], list[float], list[int]]:
    """Of each window: nats of all targets, nats of the letters among them, and how many these are: a byte each."""
    model = LoopedForCausalLM.from_pretrained(folder).double()
    nats, letter_nats, letters = [], [], []
    for row in rows:
        with torch.no_grad():
            log_p = model(torch.tensor([row[:-1]]), num_loops=depth).logits[0].log_softmax(-1)
        losses = [-log_p[i, token].item() for i, token in enumerate(row[1:])]
        nats.append(sum(losses))
        letter_nats.append(sum(loss for loss, token in zip(losses, row[1:]) if token != 1))
        letters.append(sum(token != 1 for token in row[1:]))
    return nats, letter_nats, letters


@pytest.mark.parametrize("depths", [[1, 3], [2]])
def test_streams_are_scored_window_by_window(folder, depths):
    lm = LoopedLM(folder, num_loops=depths, device="cpu", batch_size=3, dtype="float64")
    rows = windows(lm.tokenizer, TEXTS, 8)
    scores = score_windows(lm, rows)
    for column, depth in enumerate(depths):
        nats, letter_nats, letters = by_hand(folder, rows.tolist(), depth)
        assert scores.perplexity()[column].item() == pytest.approx(math.exp(sum(nats) / rows[:, 1:].numel()))
        bits = sum(letter_nats) / sum(letters) / math.log(2)
        assert scores.bits_per_byte()[column].item() == pytest.approx(bits)
        residuals = [n / math.log(2) - bits * b for n, b in zip(letter_nats, letters)]  # their mean is 0
        error = statistics.stdev(residuals) * math.sqrt(len(residuals)) / sum(letters)
        assert scores.bits_per_byte_error()[column].item() == pytest.approx(error)


def test_standard_errors_are_the_spread_of_repeated_measurements():
    """Of values and of differences of two models, whose rows vary together."""
    draw = torch.Generator().manual_seed(0)
    num_bytes = 50 + 20 * torch.rand(2000, 64, generator=draw, dtype=torch.float64)
    common = torch.randn(2000, 64, generator=draw, dtype=torch.float64)
    values, errors, differences, difference_errors = [], [], [], []
    for sizes, shared in zip(num_bytes, common):
        one, other = (
            RowScores(nats, nats, sizes, sizes)
            for nats in (sizes * (1 + 0.2 * shared + 0.02 * torch.randn(1, 64, generator=draw)) for _ in range(2))
        )
        values.append(one.bits_per_byte().item())
        errors.append(one.bits_per_byte_error().item())
        difference, error = one.less(other)
        differences.append(difference.item())
        difference_errors.append(error.item())
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(values), rel=0.05)
    assert statistics.fmean(difference_errors) == pytest.approx(statistics.stdev(differences), rel=0.05)
    assert statistics.fmean(difference_errors) < statistics.fmean(errors) / 5


def test_tokens_for_a_smaller_error():
    """Four times the rows of the same kind halve the error."""
    draw = torch.Generator().manual_seed(0)
    nats = torch.randn(1, 100, generator=draw, dtype=torch.float64) + 9
    one = RowScores(nats, nats, torch.full((100,), 7.0), torch.full((100,), 3.0))
    error = one.bits_per_byte_error().item()
    assert error == pytest.approx(statistics.stdev(nats[0].tolist()) / 10 / 3 / math.log(2))  # rows of one size
    assert one.tokens_for(error / 2) == pytest.approx(4 * 700, abs=1)


# from files, and on the command line


def test_brackets_in_the_name_of_a_file_are_its_name(tmp_path):
    for name in ("a[1]", "a1"):
        Dataset.from_dict({"text": [name]}).to_parquet(tmp_path / f"{name}.parquet")
    assert list(texts_of(f"{tmp_path}/a[1].parquet")) == ["a[1]"]


@pytest.mark.parametrize("kind", ["text", "stream"])
def test_null_is_an_empty_text(folder, tmp_path, kind):
    """As in a parquet file, and as `looped prepare` takes it."""
    results = []
    for name, empty in (("null", None), ("empty", "")):
        rows = ["a b c d e f g h", empty, "i j"]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        path = str(tmp_path / f"{name}.jsonl")
        assert list(texts_of(path)) == [rows[0], "", rows[2]]
        asked = ["--text", path] if kind == "text" else ["--stream", f"x={path}", "--max_length", "4"]
        budget.main([folder, *asked, "--num-loops", "2", "--device", "cpu", "--output", str(tmp_path / name)])
        results.append(json.loads((tmp_path / name / "budget.json").read_text())["curves"])
    assert results[0] == results[1]
    (tmp_path / "number.jsonl").write_text('{"text": "a"}\n\n{"text": 3}\n')
    with pytest.raises(ValueError, match="line 3: the field 'text' holds 3, which is no text"):
        list(texts_of(str(tmp_path / "number.jsonl")))


def test_texts_of_both_kinds_of_files(tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n \n")  # blank lines are no texts
    Dataset.from_dict({"text": TEXTS, "number": range(5)}).to_parquet(tmp_path / "a.parquet")
    assert list(texts_of(str(tmp_path / "a.jsonl"))) == list(texts_of(str(tmp_path / "a.parquet"))) == TEXTS
    assert parse_stream(f"x={tmp_path / 'a.jsonl'}") == ("x", str(tmp_path / "a.jsonl"))
    assert parse_stream("wikitext_2") == ("wikitext_2", STREAMS["wikitext_2"])


def test_models_side_by_side(folder, tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    torch.manual_seed(1)
    shake(LoopedForCausalLM.from_pretrained(folder), seed=1).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    budget.main(
        [f"one={folder}", f"two={tmp_path / 'other'}", "--loops", "1,3", "--stream", f"some={tmp_path}/text.jsonl",
         "--max_length", "8", "--stream_group", "2", "--device", "cpu", "--output", str(tmp_path / "out")]
    )  # fmt: skip
    record = json.loads((tmp_path / "out/budget.json").read_text())
    rows = naive_windows(naive_stream(TEXTS), 8, 2)
    bits = {}
    for name, path in (("one", folder), ("two", str(tmp_path / "other"))):
        nats, letter_nats, letters = by_hand(path, rows, 3)
        bits[name] = [n / math.log(2) for n in letter_nats]
        found = {measure: points[name]["3"][0] for measure, points in record["curves"].items()}
        assert found["some bits per byte"] == pytest.approx(sum(bits[name]) / sum(letters), rel=1e-5)
        assert found["some perplexity"] == pytest.approx(math.exp(sum(nats) / (8 * len(rows))), rel=1e-5)
    differences = [two - one for one, two in zip(bits["one"], bits["two"])]
    mean = sum(differences) / sum(letters)
    residuals = [difference - mean * size for difference, size in zip(differences, letters)]
    error = statistics.stdev(residuals) * math.sqrt(len(rows)) / sum(letters)
    assert record["precision"]["some bits per byte, less that of one"] == {
        "two": {"1": pytest.approx(record["precision"]["some bits per byte, less that of one"]["two"]["1"]),
                "3": [pytest.approx(mean, rel=1e-4), pytest.approx(error, rel=1e-4)]}
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert f"some bits per byte: {8 * len(rows)} tokens and {sum(letters)} bytes in {len(rows)} rows" in printed


@pytest.mark.parametrize("arguments,message", [
    (["--stream", "wikitext"], "write NAME=FILE, or one of wikitext_2"),
    (["--stream", "a=none.jsonl"], "there is no file 'none.jsonl'"),
    (["--stream", "wikitext_2", "--stream", "wikitext_2"], "two streams have the same name"),
    (["--stream", "wikitext_2", "--six"], "pass --core BUNDLE too"),
])  # fmt: skip
def test_bad_streams(folder, monkeypatch, arguments, message):
    monkeypatch.setattr(budget.LoopedLM, "__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=message):
        budget.main([folder, *arguments])


# the six tasks


def make_bundle(folder):
    """The six labels, small, with their shots; and one more."""
    (folder / "eval_data").mkdir(parents=True)
    entries = []
    for label in (*SIX, "copa"):
        shots = 2 if label in ("piqa", "hellaswag") else 0
        kind = "language_modeling" if label == "lambada_openai" else "multiple_choice"
        entry = {"label": label, "dataset_uri": f"{label}.jsonl", "num_fewshot": [shots], "icl_task_type": kind}
        entries.append(entry | ({} if kind == "language_modeling" else {"continuation_delimiter": " "}))
        rows = [
            {"context": "a b c " * (1 + i), "continuation": "defgh"[i]}
            if kind == "language_modeling"
            else {"query": f"{'abcde'[i]} f " * (1 + 6 * i), "choices": ["g", "h i", "j"], "gold": i % 3}
            for i in range(5)
        ]
        (folder / f"eval_data/{label}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": entries}))
    baselines = "".join(f"{entry['label']},25\n" for entry in entries)
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n" + baselines)
    return folder


@pytest.mark.slow
def test_one_command_gives_the_six_and_all_else_of_table_1(folder, tmp_path, capsys):
    bundle = make_bundle(tmp_path / "bundle")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    stream = f"={tmp_path}/text.jsonl"
    budget.main(
        [folder, "--loops", "1,3", "--core", str(bundle), "--six", "--core_max_length", "200", "--device", "cpu",
         "--max_length", "8", "--stream", "wikitext_2" + stream, "--stream", "validation" + stream,
         "--output", str(tmp_path / "out")]
    )  # fmt: skip
    curves = json.loads((tmp_path / "out/budget.json").read_text())["curves"]
    measures = {f"{name} {kind}" for name in ("wikitext_2", "validation") for kind in ("perplexity", "bits per byte")}
    assert set(curves) == {*measures, "CORE", *SIX, "average of the six", "lambada_openai perplexity"}
    expected = core_scores(folder, None, bundle, [1, 3], device="cpu", max_length=200)
    for depth, found in expected.items():
        accuracies = [found["tasks"][label]["accuracy"] for label in SIX]
        values = {measure: next(iter(points.values()))[str(depth)][0] for measure, points in curves.items()}
        assert [values[label] for label in SIX] == accuracies
        assert values["average of the six"] == pytest.approx(sum(accuracies) / 6)
        assert values["CORE"] == pytest.approx(found["core"])
    assert "| average of the six |" in capsys.readouterr().out
    expected[1]["tasks"].pop("piqa")
    with pytest.raises(ValueError, match="lists no piqa, which table 1 reports"):
        six_curves(expected)


def test_prompts_are_cut_only_where_it_is_asked_for(folder, tmp_path):
    """Prompts of up to 200 tokens against a window of 64 positions."""
    bundle = make_bundle(tmp_path / "bundle")
    model, tokenizer = LoopedForCausalLM.from_pretrained(folder).eval(), tiny_tokenizer()
    rows = [json.loads(line) for line in (bundle / "eval_data/arc_easy.jsonl").read_text().splitlines()]
    right = {64: 0, 10**4: 0}
    for window in right:
        for row in rows:
            means = []
            for choice in row["choices"]:
                given = [1, *tokenizer(row["query"], add_special_tokens=False)["input_ids"]]
                asked = tokenizer(choice, add_special_tokens=False)["input_ids"]
                ids = torch.tensor((given + asked)[-(window + 1) :])
                with torch.no_grad():
                    losses = torch.nn.functional.cross_entropy(
                        model(ids[None], num_loops=3).logits[0, :-1], ids[1:], reduction="none"
                    )
                means.append(losses[-len(asked) :].mean().item())
            right[window] += means.index(min(means)) == row["gold"]
        options = {"max_length": window, "device": "cpu"}
        found = core_scores(folder, None, bundle, [3], **options)[3]["tasks"]["arc_easy"]["accuracy"]
        assert found == right[window] / len(rows)


def test_lambada_perplexity(folder, tmp_path):
    bundle = make_bundle(tmp_path / "bundle")
    lm = LoopedLM(folder, num_loops=[1, 3], device="cpu", batch_size=2)
    model, nats, tokens = LoopedForCausalLM.from_pretrained(folder).eval(), 0.0, 0
    for line in (bundle / "eval_data/lambada_openai.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = naive_stream([f"{row['context']} {row['continuation']}"])
        with torch.no_grad():
            nats -= model(torch.tensor([ids]), num_loops=3).logits[0, -2].log_softmax(-1)[ids[-1]].item()
        tokens += 1
    curves = lambada_perplexity(lm, bundle)["lambada_openai perplexity"][""]
    assert curves[3][0] == pytest.approx(math.exp(nats / tokens), rel=1e-5) and set(curves) == {1, 3}
