"""CORE on a bundle made here, against prompts, tokens and scores written out once more."""

import copy
import csv
import json
import math
import random
import statistics
import string
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from looped_eval.core import command as core
from looped_eval.core.bundle import read_tasks
from looped_eval.core.command import EXTENDED, core_scores
from looped_eval.core.scoring import prompts, requests_of
from looped_eval.harness.looped_lm import LoopedLM
from modeling_looped import LoopedForCausalLM
from modeling_looped.samplers import generator_of
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
    choices = requests_of("multiple_choice", [[1, 2, 3, 4], [1, 2, 5]])
    assert choices == [([1, 2], [3, 4]), ([1, 2], [5])]
    assert requests_of("schema", [[1, 2, 7, 8], [1, 3, 4, 7, 8]]) == [([1, 2], [7, 8]), ([1, 3, 4], [7, 8])]
    assert requests_of("language_modeling", [[1, 2], [1, 2, 3, 4]]) == [([1, 2], [3, 4])]
    # a choice that is another's beginning, and one that is all of the other's end
    assert requests_of("multiple_choice", [[1, 2], [1, 2, 3]]) == [([1], [2]), ([1, 2], [3])]
    assert requests_of("schema", [[2, 3], [1, 2, 3]]) == [([2], [3]), ([1], [2, 3])]


# scores


def by_hand(model, tokenizer, bundle, depth: int, examples=None, seed: int | None = None) -> dict[str, float]:
    """Accuracies, a prompt at a time, without padding and without the harness."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        state = None
        if seed is not None and model.config.state_init == "normal":
            drawn = generator_of("initial_state", seed, tuple(ids.tolist()))
            state = model.sample_initial_state(1, len(ids), drawn)
        return model(ids[None], num_loops=depth, initial_state=state).logits[0].double()

    def losses(text: str, asked: int) -> tuple[list[float], bool]:
        """Of the last `asked` characters, a token each; and whether all of them are the likeliest."""
        ids = torch.tensor([0, *tokenizer(text, add_special_tokens=False)["input_ids"]][-65:])
        with torch.no_grad():
            log_p = forward(ids[:-1]).log_softmax(-1)[-asked:]
        targets = ids[-asked:]
        return (-log_p.gather(-1, targets[:, None])[:, 0]).tolist(), bool((log_p.argmax(-1) == targets).all())

    accuracies = {}
    for task in read_tasks(bundle, examples=examples):
        task, right = replace(task, shots_seed=1234 if seed is None else seed), 0
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
@pytest.mark.some(1)
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


def test_a_diverged_model_has_no_accuracy(bundle, model):
    diverged = copy.deepcopy(model)
    diverged.lm_head.weight.data.fill_(torch.nan)
    (found,) = core_scores(diverged, byte_tokenizer(), bundle, [1], 6, seeds=[0, 1]).values()
    values = [found["core"], found["core_deviation"], *(scores["accuracy"] for scores in found["tasks"].values())]
    assert all(map(math.isnan, values))


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


@pytest.fixture(scope="module")
def noisy_model() -> LoopedForCausalLM:
    """Starts from noise that is as large as anything else."""
    torch.manual_seed(0)
    fields = {"vocab_size": 24, "max_position_embeddings": 64, "num_loops": 2, "state_init_std": 1.0}
    return shake(LoopedForCausalLM(tiny_config("parcae", **fields))).eval()


def test_first_states_are_drawn_for_each_row_by_itself(noisy_model):
    """Whatever rows share a batch, and whether logits are kept; another seed scores otherwise."""
    requests = [("", [0, 3, 4, 5], [6, 7]), ("", [0, 8], [1, 2, 3]), ("", [0, 3, 4, 5], [6, 1])]
    scores = {}
    for seed in (None, 5, 6):
        lm = LoopedLM(noisy_model, tokenizer=byte_tokenizer(), num_loops=[1, 2], device="cpu", state_seed=seed)
        scores[seed] = lm.score_tokens(requests)
        for batch_size in (1, 3):
            lm.batch_size_per_gpu = batch_size
            assert torch.allclose(lm.score_tokens(requests)[:, 0], scores[seed][:, 0], atol=1e-5)
            assert torch.allclose(lm.score_tokens(requests, is_text=True)[:, 0], scores[seed][:, 0], atol=1e-5)
        for column, (_, given, asked) in enumerate(requests):
            ids = torch.tensor([*given, *asked])
            state = None
            if seed is not None:
                state = noisy_model.sample_initial_state(1, len(ids) - 1, generator_of(
                    "initial_state", seed, tuple(ids[:-1].tolist())
                ))  # fmt: skip
            with torch.no_grad():
                logits = noisy_model(ids[None, :-1], num_loops=2, initial_state=state).logits[0]
            expected = logits.log_softmax(-1)[len(given) - 1 :].gather(-1, ids[len(given) :, None]).sum()
            assert scores[seed][1, 0, column].item() == pytest.approx(expected.item(), abs=1e-4)
    assert (scores[5] - scores[6])[:, 0].abs().min() > 1e-3 < (scores[5] - scores[None])[:, 0].abs().min()


@pytest.mark.slow
def test_seeds_by_hand(bundle, noisy_model):
    """Shots and noise of each seed; mean and deviation of each value; without seeds nothing is drawn."""
    tokenizer, seeds = byte_tokenizer(), [1234, 7]
    results = core_scores(noisy_model, tokenizer, bundle, [1, 2], 5, batch_size=7, seeds=seeds)
    assert results == core_scores(noisy_model, tokenizer, bundle, [1, 2], 5, batch_size=3, seeds=seeds)
    for depth, found in results.items():
        each = [by_hand(noisy_model, tokenizer, bundle, depth, 5, seed) for seed in seeds]
        assert list(found["seeds"]) == seeds
        for label in GUESSING:
            accuracies = [values[label] for values in each]
            assert [of_seed["tasks"][label]["accuracy"] for of_seed in found["seeds"].values()] == accuracies
            scores = found["tasks"][label]
            assert scores["accuracy"] == pytest.approx(sum(accuracies) / 2)
            variance = sum((a - scores["accuracy"]) ** 2 for a in accuracies) / 2
            assert scores["accuracy_deviation"] == pytest.approx(math.sqrt(variance))
            assert scores["centered_deviation"] == pytest.approx(math.sqrt(variance) / (1 - GUESSING[label]))
        cores = [of_seed["core"] for of_seed in found["seeds"].values()]
        assert found["core"] == pytest.approx(statistics.mean(cores))
        assert found["core_deviation"] == pytest.approx(statistics.pstdev(cores))
    assert max(found["core_deviation"] for found in results.values()) > 0
    plain = core_scores(noisy_model, tokenizer, bundle, [2], 5)[2]
    assert {label: scores["accuracy"] for label, scores in plain["tasks"].items()} == pytest.approx(
        by_hand(noisy_model, tokenizer, bundle, 2, 5)
    )


def test_seeds_of_a_model_without_noise_choose_the_shots(bundle, model):
    (found,) = core_scores(model, byte_tokenizer(), bundle, [2], seeds=[1234, 9]).values()
    (plain,) = core_scores(model, byte_tokenizer(), bundle, [2]).values()
    assert found["seeds"][1234] == plain
    expected = by_hand(model, byte_tokenizer(), bundle, 2, seed=9)
    assert {label: scores["accuracy"] for label, scores in found["seeds"][9]["tasks"].items()} == expected
    with pytest.raises(ValueError, match="state_init='normal'"):
        LoopedLM(model, tokenizer=byte_tokenizer(), device="cpu", state_seed=1)


def test_single_tasks(bundle, model):
    (alone,) = core_scores(model, byte_tokenizer(), bundle, [2], tasks=["say", "pick"]).values()
    (all_three,) = core_scores(model, byte_tokenizer(), bundle, [2]).values()
    assert alone == {"tasks": {label: all_three["tasks"][label] for label in ("say", "pick")}}
    with pytest.raises(ValueError, match="no task sing; known are pick, which, say; --extended brings more"):
        core_scores(model, byte_tokenizer(), bundle, [2], tasks=["say", "sing"])


def describe(folder, change=None):
    """A bundle of which eval_meta_data.csv describes all but the tasks of core.yaml."""
    make_bundle(folder)
    rows = [{"Eval Task": label, "Random baseline": 100 * r} for label, r in GUESSING.items()]
    for number, label in enumerate([*EXTENDED, "of_no_list"]):
        kind = (
            "question answering"
            if label == "of_no_list"
            else ("multiple choice", "schema", "language modeling")[number % 3]
        )
        rows.append({"Eval Task": label, "Task Category": f"kind {number % 4}", "Task Type": kind,
                     "#shots": number % 3, "Random baseline": number})  # fmt: skip
        source = {"multiple choice": "pick", "schema": "which"}.get(kind, "say")
        name = "mmlu" if label.startswith("mmlu") else label
        (folder / f"eval_data/kind_{number % 4}").mkdir(exist_ok=True)
        items = (folder / f"eval_data/some/{source}.jsonl").read_text()
        (folder / f"eval_data/kind_{number % 4}/{name}.jsonl").write_text(items)
    if change:
        change(rows)
    with open(folder / "eval_meta_data.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[-1]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_extended_as_the_bundle_describes_it(tmp_path, model):
    describe(tmp_path)
    tasks = {task.label: task for task in read_tasks(tmp_path, "eval_meta_data.csv", only=EXTENDED)}
    assert set(tasks) == set(EXTENDED)
    for number, label in enumerate(EXTENDED):
        task = tasks[label]
        assert task.kind == ("multiple_choice", "schema", "language_modeling")[number % 3]
        assert (task.num_shots, task.guessing) == (number % 3, number / 100)
        assert task.delimiter == {
            "mmlu_zeroshot": "Answer: ",
            "mmlu_fewshot": "\nAnswer: ",
            "logi_qa": "\nAnswer: ",
        }.get(label, " ")
    (found,) = core_scores(model, byte_tokenizer(), tmp_path, [2], 3, "eval_meta_data.csv", 64).values()
    values = [found["tasks"][label]["centered"] for label in EXTENDED]
    assert found["core_extended"] == pytest.approx(sum(values) / len(values))
    assert set(found["tasks"]) == {*EXTENDED, *GUESSING}


def test_core_yaml_goes_before_the_description(tmp_path):
    """Where both have a task."""
    describe(tmp_path, lambda rows: rows[0].update({"Task Category": "x", "Task Type": "schema", "#shots": 9}))
    (pick,) = read_tasks(tmp_path, "eval_meta_data.csv", only=["pick"])
    assert (pick.kind, pick.num_shots, pick.delimiter) == ("multiple_choice", 2, " = ")


def test_bundles_that_do_not_describe_their_tasks(tmp_path, bundle):
    with pytest.raises(ValueError, match="has no column Task Category, Task Type, #shots: name a list"):
        read_tasks(bundle, "eval_meta_data.csv")
    describe(tmp_path, lambda rows: rows.pop(5))
    with pytest.raises(ValueError, match=f"lists no {EXTENDED[2]}, which CORE-extended is a mean over"):
        core.read_extended(tmp_path, "eval_meta_data.csv", 3)


def test_command_with_seeds(bundle, noisy_model, tmp_path, capsys):
    noisy_model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    arguments = [
        str(tmp_path / "model"),
        "--bundle",
        str(bundle),
        "--loops",
        "2",
        "--device",
        "cpu",
        "--examples",
        "6",
    ]
    core.main([*arguments, "--seeds", "3,4", "--tasks", "say,which", "--output", str(tmp_path / "core.json")])
    (found,) = core_scores(
        noisy_model, byte_tokenizer(), bundle, [2], 6, seeds=[3, 4], tasks=["say", "which"]
    ).values()
    written = json.loads((tmp_path / "core.json").read_text())["depths"]["2"]
    assert written["tasks"] == found["tasks"] and set(written["seeds"]) == {"3", "4"} and "core" not in written
    which = found["tasks"]["which"]
    assert f"| which | {which['accuracy']:.4f} ± {which['accuracy_deviation']:.4f} |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        core.main([*arguments, "--seeds", "3,four"])
    assert "whole numbers with commas between them, got '3,four'" in capsys.readouterr().err


def test_command(bundle, model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "model"), "--bundle", str(bundle), "--loops", "1,3", "--device", "cpu"]
    core.main([*arguments, "--output", str(tmp_path / "out/core.json")])
    expected = core_scores(model, byte_tokenizer(), bundle, [1, 3])
    written = json.loads((tmp_path / "out/core.json").read_text())
    assert {int(depth): found for depth, found in written["depths"].items()} == expected
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
