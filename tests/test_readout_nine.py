"""The readout paper's nine tasks on made-up rows of the same columns: what is asked, and how it is scored."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from looped_eval import statistics
from looped_eval.harness.command import results_by_depth
from looped_eval.harness.looped_lm import LoopedLM
from modeling_looped import LoopedForCausalLM
from tests.helpers import tiny_tokenizer
from tests.helpers_harness import AnsweringModel, save_model_and_tokenizer


def letters(*texts: str) -> dict:
    return {"label": list("ABCDE"[: len(texts)]), "text": list(texts)}


FOLDER = Path(__file__).parent.parent / "eval" / "tasks"
ROWS = {
    "boolq": [
        {"question": "is a b", "passage": "a c b .", "idx": 0, "label": 1},
        {"question": "is c d", "passage": "d e", "idx": 1, "label": 0},
    ],
    "winogrande": [
        {"sentence": "a saw b because _ was c .", "option1": "a", "option2": "b", "answer": "2"},
        {"sentence": "the _ is d", "option1": "e f", "option2": "g", "answer": "1"},
    ],
    "commonsense_qa": [
        {"id": "0", "question": "a b ?", "question_concept": "x", "choices": letters(*"cdefg"), "answerKey": "E"},
        {
            "id": "1",
            "question": "c d ?",
            "question_concept": "y",
            "choices": letters("a a", *"bcde"),
            "answerKey": "A",
        },
    ],
    "sciq": [
        {
            "question": f"{row} ?",
            "distractor1": "b",
            "distractor2": "c c",
            "distractor3": "d",
            "correct_answer": "a",
            "support": "a is the answer .",
        }
        for row in "efghi"
    ],
    "piqa": [
        {"goal": "a b", "sol1": "c d e", "sol2": "f", "label": 1},
        {"goal": "g", "sol1": "h", "sol2": "i", "label": 0},
    ],
    "arc_easy": [
        {
            "id": "0",
            "question": "a ?",
            "choices": {"label": list("1234"), "text": ["4", "3", "2", "1"]},
            "answerKey": "3",
        },
        {"id": "1", "question": "b ?", "choices": letters("c", "d d", "e"), "answerKey": "C"},
        {"id": "2", "question": "no key", "choices": letters("c", "d"), "answerKey": "E"},
    ],
    "arc_challenge": [{"id": "0", "question": "k l ?", "choices": letters(*"mnop"), "answerKey": "B"}],
    "hellaswag": [
        {"ctx_a": "a b [step] c", "ctx_b": "d E", "ctx": "x", "endings": ["f g", "h", "i", "j k l"], "label": "3"},
        {"ctx_a": "a b", "ctx_b": "", "ctx": "x", "endings": list("cdef"), "label": "0"},
        {"ctx_a": "unlabelled", "ctx_b": "", "ctx": "x", "endings": list("cdef"), "label": ""},
    ],
    "openbookqa": [{"id": "0", "question_stem": "a b c", "choices": letters("d", "e e", "f", "g"), "answerKey": "D"}],
}

# prompt, candidates after one space, which is right
ASKED = {
    "boolq": [
        ("Passage: a c b .\nQuestion: is a b?\nAnswer:", ["no", "yes"], 1),
        ("Passage: d e\nQuestion: is c d?\nAnswer:", ["no", "yes"], 0),
    ],
    "winogrande": [
        ("Complete the sentence:", ["a saw b because a was c .", "a saw b because b was c ."], 1),
        ("Complete the sentence:", ["the e f is d", "the g is d"], 0),
    ],
    "commonsense_qa": [
        ("Question: a b ?\nAnswer:", list("cdefg"), 4),
        ("Question: c d ?\nAnswer:", ["a a", *"bcde"], 0),
    ],
    "sciq": [
        ("Question: e ?\nAnswer:", ["a", "b", "c c", "d"], 0),
        ("Question: f ?\nAnswer:", ["b", "c c", "d", "a"], 3),
        ("Question: g ?\nAnswer:", ["c c", "d", "a", "b"], 2),
        ("Question: h ?\nAnswer:", ["d", "a", "b", "c c"], 1),
        ("Question: i ?\nAnswer:", ["a", "b", "c c", "d"], 0),
    ],
    "piqa": [("Question: a b\nAnswer:", ["c d e", "f"], 1), ("Question: g\nAnswer:", ["h", "i"], 0)],
    "arc_easy": [
        ("Question: a ?\nAnswer:", ["4", "3", "2", "1"], 2),
        ("Question: b ?\nAnswer:", ["c", "d d", "e"], 2),
    ],
    "arc_challenge": [("Question: k l ?\nAnswer:", list("mnop"), 1)],
    "hellaswag": [("a b [step] c D E", ["f g", "h", "i", "j k l"], 3), ("a b", list("cdef"), 0)],
    "openbookqa": [("Question: a b c\nAnswer:", ["d", "e e", "f", "g"], 3)],
}


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """The tasks as they are, but for where their rows come from."""
    folder = tmp_path_factory.mktemp("nine")
    for name, rows in ROWS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows_of_our_own = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(path)}}}
        task = {"include": str(FOLDER / f"readout_{name}.yaml"), "task": f"made_up_{name}", "dataset_name": None}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**task, **rows_of_our_own}))
    return TaskManager(include_path=str(folder), include_defaults=False)


TASKS = [f"made_up_{name}" for name in ROWS]


def samples(manager, model) -> dict[str, list[dict]]:
    found = simple_evaluate(model, tasks=TASKS, task_manager=manager, bootstrap_iters=0)
    return {name: found["samples"][f"made_up_{name}"] for name in ROWS}


def test_what_is_asked(manager):
    for name, of_task in samples(manager, AnsweringModel()).items():
        asked = [tuple(pair for pair in sample["arguments"]) for sample in of_task]
        expected = [tuple((prompt, f" {choice}") for choice in choices) for prompt, choices, _ in ASKED[name]]
        assert asked == expected, name
        assert [sample["doc"]["gold"] for sample in of_task] == [gold for _, _, gold in ASKED[name]], name


@torch.no_grad()
def test_how_it_is_scored(manager, tmp_path, capsys):
    """Sums of log-likelihoods in lm-eval, and per token in eval.statistics; candidate after candidate in float64."""
    folder = save_model_and_tokenizer(tmp_path / "model")
    lm = LoopedLM(folder, num_loops=[2], batch_size=3, device="cpu")
    results = results_by_depth(lm, {}, {"output_path": str(tmp_path)}, tasks=TASKS, task_manager=manager)[2]["results"]
    found = statistics.main([str(tmp_path), "--tokenizer", folder])

    model, tokenizer = LoopedForCausalLM.from_pretrained(folder).double(), tiny_tokenizer()
    accuracies, normalised, gold_nlls, margins = {}, {}, [], []
    for name, asked in ASKED.items():
        right, right_per_token = [], []
        for prompt, choices, gold in asked:
            sums, means = [], []
            for choice in choices:
                context, tokens = tokenizer(prompt)["input_ids"], tokenizer(f" {choice}")["input_ids"]
                log_p = model(torch.tensor([context + tokens]), num_loops=2).logits[0].log_softmax(-1)
                steps = [log_p[len(context) + i - 1, token].item() for i, token in enumerate(tokens)]
                sums.append(sum(steps))
                means.append(sum(steps) / len(steps))
            right.append(max(range(len(choices)), key=sums.__getitem__) == gold)
            right_per_token.append(max(range(len(choices)), key=means.__getitem__) == gold)
            gold_nlls.append(-torch.tensor(means).log_softmax(0)[gold].item())
            margins.append(means[gold] - max(mean for i, mean in enumerate(means) if i != gold))
        accuracies[name] = sum(right) / len(right)
        normalised[name] = sum(right_per_token) / len(right_per_token)
        assert results[f"made_up_{name}"]["acc,none"] == pytest.approx(accuracies[name]), name
    assert 0 < sum(accuracies.values()) < 9 and normalised != accuracies
    assert found["items"] == sum(map(len, ASKED.values()))
    assert found["accuracy"] == pytest.approx(sum(accuracies.values()) / 9)
    assert found["normalised_accuracy"] == pytest.approx(sum(normalised.values()) / 9)
    assert found["gold_nll"] == pytest.approx(sum(gold_nlls) / len(gold_nlls), rel=1e-4)
    assert found["gold_margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
    assert "| normalised accuracy |" in capsys.readouterr().out
