"""CORE on a bundle made here, against prompts, tokens and scores written out once more."""

import json
import math
import random
import string

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval import core
from eval.core import EXTENDED, core_scores, prompts, scored
from eval.core_bundle import read_tasks
from modeling_looped import LoopedForCausalLM
from tests.helpers import shake, tiny_config


def letters(generator: random.Random, count: int) -> str:
    return " ".join(generator.choices("abcdefgh", k=count))


def make_bundle(folder, entries=None):
    """One task of each kind; choices of different length; one question is longer than the window of 64."""
    generator = random.Random(0)
    items = {
        "pick": [
            {
                "query": letters(generator, 60 if i == 3 else 1 + i % 4),
                "choices": [letters(generator, 1 + (i + j) % 3) for j in range(4)],
                "gold": i % 4,
            }
            for i in range(12)
        ],
        "which": [
            {
                "context_options": [letters(generator, 2), letters(generator, 3)],
                "continuation": letters(generator, 1 + i % 2),
                "gold": i % 2,
            }
            for i in range(11)
        ],
        "say": [{"context": letters(generator, 3) + " ", "continuation": letters(generator, 1)} for i in range(40)],
    }
    entries = entries or [
        {"label": "pick", "icl_task_type": "multiple_choice", "num_fewshot": [2], "continuation_delimiter": " = "},
        {"label": "which", "icl_task_type": "schema", "num_fewshot": [0]},
        {"label": "say", "icl_task_type": "language_modeling", "num_fewshot": [1], "continuation_delimiter": ": "},
    ]
    (folder / "eval_data/some").mkdir(parents=True)
    for entry in entries:
        label = entry["label"]
        entry.setdefault("dataset_uri", f"some/{label}.jsonl")
        rows = items.get(label, items["pick"])
        (folder / f"eval_data/some/{label}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": entries}))
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline,Other\npick,25,x\nwhich,50,\nsay,0,\n")
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("bundle"))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every character, so that a space is one of its own."""
    characters = ["<s>", *"abcdefgh =:\n?", *string.digits]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<s>", unk_token="?")


@pytest.fixture(scope="module")
def model() -> LoopedForCausalLM:
    torch.manual_seed(0)
    return shake(LoopedForCausalLM(tiny_config(vocab_size=24, max_position_embeddings=64))).eval()


# prompts


def test_prompts_and_their_shots(bundle):
    pick, which, say = read_tasks(bundle)
    lines = (bundle / "eval_data/some/pick.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    random.Random(1337).shuffle(rows)
    assert pick.items == rows
    for index in (0, 7, 11):
        others = rows[:index] + rows[index + 1 :]
        # sampled by place, so the same shots come whatever the items hold
        one, two = random.Random(1234 + index).sample(others, 2)
        start = "".join(f"{shot['query']} = {shot['choices'][shot['gold']]}\n\n" for shot in (one, two))
        expected = [f"{start}{rows[index]['query']} = {choice}" for choice in rows[index]["choices"]]
        assert prompts(pick, index) == expected
    item = which.items[4]
    assert prompts(which, 4) == [f"{context} {item['continuation']}" for context in item["context_options"]]
    item, (shot,) = say.items[5], random.Random(1234 + 5).sample(say.items[:5] + say.items[6:], 1)
    start = f"{shot['context'].strip()}: {shot['continuation']}\n\n{item['context'].strip()}:"
    assert prompts(say, 5) == [start, f"{start} {item['continuation']}"]


def test_what_is_scored():
    choices = scored("multiple_choice", [[1, 2, 3, 4], [1, 2, 5]])
    assert choices == [([1, 2], [3, 4]), ([1, 2], [5])]
    assert scored("schema", [[1, 2, 7, 8], [1, 3, 4, 7, 8]]) == [([1, 2], [7, 8]), ([1, 3, 4], [7, 8])]
    assert scored("language_modeling", [[1, 2], [1, 2, 3, 4]]) == [([1, 2], [3, 4])]
    # a choice that is another's beginning, and one that is all of the other's end
    assert scored("multiple_choice", [[1, 2], [1, 2, 3]]) == [([1], [2]), ([1, 2], [3])]
    assert scored("schema", [[2, 3], [1, 2, 3]]) == [([2], [3]), ([1], [2, 3])]


# scores


def by_hand(model, tokenizer, bundle, depth: int, examples: int | None = None) -> dict[str, float]:
    """Accuracies, a prompt at a time, without padding and without the harness."""

    def losses(text: str, asked: int) -> tuple[list[float], bool]:
        """Of the last `asked` characters, a token each; and whether all of them are the likeliest."""
        ids = torch.tensor([0, *tokenizer(text, add_special_tokens=False)["input_ids"]][-65:])
        with torch.no_grad():
            log_p = model(ids[None, :-1], num_loops=depth).logits[0].double().log_softmax(-1)[-asked:]
        targets = ids[-asked:]
        return (-log_p.gather(-1, targets[:, None])[:, 0]).tolist(), bool((log_p.argmax(-1) == targets).all())

    accuracies = {}
    for task in read_tasks(bundle, examples=examples):
        right = 0
        for index, item in enumerate(task.items):
            texts = prompts(task, index)
            if task.kind == "language_modeling":
                right += losses(texts[1], len(f" {item['continuation']}"))[1]
                continue
            if task.kind == "schema":
                ends = [len(f" {item['continuation']}")] * 2
                while texts[0][-ends[0] - 1 :] == texts[1][-ends[0] - 1 :]:  # contexts may end alike
                    ends = [ends[0] + 1] * 2
            else:
                same = next(i for i in range(len(texts[0])) if len({text[i : i + 1] for text in texts}) > 1)
                ends = [len(text) - same for text in texts]
                ends = [max(end, 1) for end in ends]
            means = [sum(losses(text, end)[0]) / end for text, end in zip(texts, ends)]
            right += means.index(min(means)) == item["gold"]
        accuracies[task.label] = right / len(task.items)
    return accuracies


GUESSING = {"pick": 0.25, "which": 0.5, "say": 0.0}


@pytest.mark.parametrize("examples", [None, 6])
def test_core_by_hand(bundle, model, examples):
    tokenizer = byte_tokenizer()
    results = core_scores(model, tokenizer, bundle, [1, 3], examples, batch_size=5)
    assert list(results) == [1, 3]
    for depth, found in results.items():
        expected = by_hand(model, tokenizer, bundle, depth, examples)
        assert {label: scores["accuracy"] for label, scores in found["tasks"].items()} == pytest.approx(expected)
        centred = [(a - GUESSING[label]) / (1 - GUESSING[label]) for label, a in expected.items()]
        assert found["core"] == pytest.approx(sum(centred) / 3)
    if examples is None:
        assert results[1] != results[3]


def test_language_modelling_is_what_greedy_decoding_says(tmp_path, model):
    """Half of the answers are what `generate` says, in the others its last token is another."""
    tokenizer, generator, items = byte_tokenizer(), random.Random(3), []
    contexts = iter([letters(generator, 4) for _ in range(300)])
    while len(items) < 12:
        context = next(contexts)
        ids = torch.tensor([[0, *tokenizer(context, add_special_tokens=False)["input_ids"]]])
        said = model.generate(ids, num_loops=3, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :].tolist()
        if len(said) == 3 and 1 <= min(said) and said[-1] <= 8:  # ends in a letter
            said[-1] = said[-1] % 8 + 1 if len(items) % 2 else said[-1]
            items.append({"context": context, "continuation": "".join(tokenizer.convert_ids_to_tokens(said))})
    entry = {"icl_task_type": "language_modeling", "num_fewshot": [0], "continuation_delimiter": ""}
    make_bundle(tmp_path, [{"label": "say", **entry}])
    (tmp_path / "eval_data/some/say.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (found,) = core_scores(model, tokenizer, tmp_path, [3], batch_size=5).values()
    assert found["core"] == found["tasks"]["say"]["accuracy"] == 0.5


def test_guessing_is_zero_and_perfect_is_one(bundle):
    pick, which, say = read_tasks(bundle)
    assert [pick.centered(0.25), which.centered(0.5), say.centered(0.0)] == [0, 0, 0]
    assert [task.centered(1.0) for task in (pick, which, say)] == [1, 1, 1]
    assert pick.centered(0.0) == pytest.approx(-1 / 3)


def test_extended(tmp_path, model):
    """The longer list's tasks alone, whatever else it lists; CORE beside it."""
    make_bundle(tmp_path)
    entry = {"icl_task_type": "multiple_choice", "num_fewshot": [0], "dataset_uri": "some/pick.jsonl"}
    listed = [{**entry, "label": label} for label in [*EXTENDED, "not_of_appendix_m"]]
    (tmp_path / "more.yaml").write_text(json.dumps({"icl_tasks": listed}))
    with open(tmp_path / "eval_meta_data.csv", "a") as file:
        file.writelines(f"{label},25,\n" for label in EXTENDED)
    (found,) = core_scores(model, byte_tokenizer(), tmp_path, [2], 3, "more.yaml", 64).values()
    assert set(found["tasks"]) == {*EXTENDED, *GUESSING} and len(EXTENDED) == len(set(EXTENDED))
    values = [found["tasks"][label]["centered"] for label in EXTENDED]
    assert found["core_extended"] == pytest.approx(sum(values) / len(values)) and math.isfinite(found["core"])
    (tmp_path / "more.yaml").write_text(json.dumps({"icl_tasks": listed[1:]}))
    with pytest.raises(ValueError, match=f"more.yaml .*lists no {EXTENDED[0]}"):
        core_scores(model, byte_tokenizer(), tmp_path, [2], 3, "more.yaml")


def test_command(bundle, model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "model"), "--bundle", str(bundle), "--loops", "1,3", "--device", "cpu"]
    core.main([*arguments, "--output", str(tmp_path / "out/core.json")])
    expected = core_scores(model, byte_tokenizer(), bundle, [1, 3])
    written = json.loads((tmp_path / "out/core.json").read_text())
    assert {int(depth): found for depth, found in written.items()} == expected
    assert f"| CORE | {expected[1]['core']:.4f} | {expected[3]['core']:.4f} |" in capsys.readouterr().out


# bad input


def test_folders_that_are_no_bundle(tmp_path, model):
    with pytest.raises(ValueError, match="is no evaluation bundle: it has no core.yaml; unpack"):
        core_scores(model, byte_tokenizer(), tmp_path)


@pytest.mark.parametrize("change,message", [
    ({"icl_task_type": "essay"}, "'pick' is of type 'essay'; CORE knows multiple_choice"),
    ({"label": "unheard"}, "no random baseline for task 'unheard'"),
    ({"dataset_uri": "other/pick.jsonl"}, "'pick' wants .*other/pick.jsonl, which is not there"),
    ({"num_fewshot": [12]}, "12 items, too few for 12 shots"),
    ({"icl_task_type": "schema"}, "have no context_options, continuation, which schema needs"),
])  # fmt: skip
def test_tasks_that_cannot_be_asked(tmp_path, change, message):
    make_bundle(tmp_path, [{"label": "pick", "icl_task_type": "multiple_choice", "num_fewshot": [0], **change}])
    with pytest.raises(ValueError, match=message):
        read_tasks(tmp_path)


def test_no_examples(bundle):
    with pytest.raises(ValueError, match="examples=0: evaluate at least 1"):
        read_tasks(bundle, examples=0)
