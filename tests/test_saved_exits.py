"""A depth that is asked for runs to the end, also where exits were saved with the model; saved exits are announced."""

import copy
import json

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, GenerationConfig, pipeline

from looped_eval.harness.command import main as harness
from looped_eval.harness.looped_lm import LoopedLM
from modeling_looped import generation

from .helpers import random_ids, tiny_model, tiny_tokenizer


IDS = random_ids(2, 5, vocab_size=30)
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
EXITS = {"exit_criterion": "max_prob", "exit_threshold": 0.0, "min_loops": 1}  # always reached


@pytest.fixture
def said(monkeypatch):
    said = []
    monkeypatch.setattr(generation.logger, "warning_once", said.append)
    return said


@pytest.fixture
def folder(tmp_path, said):
    model = tiny_model(vocab_size=30, pad_token_id=0)
    for name, value in EXITS.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(tmp_path)
    assert "Exits are saved" in said[-1] and "looped halting" in said[-1]
    said.clear()
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def loops_of(model, **arguments):
    outputs = model.generate(IDS, return_dict_in_generate=True, **GREEDY, **arguments)
    return set(outputs.token_loops[:, 1:].flatten().tolist())  # the prompt's pass runs to the end


@pytest.mark.parametrize("way", ["by hand", "of a loaded model", "of a new model"])
def test_exits_are_read_however_they_came_into_the_file(way, tmp_path):
    """Of a file that says it was made of the model's config, transformers leaves out what it does not know."""
    model = tiny_model(vocab_size=30, pad_token_id=0)
    model.save_pretrained(tmp_path)
    if way == "by hand":
        path = tmp_path / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **EXITS}))
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path) if way == "of a loaded model" else model
        for name, value in EXITS.items():
            setattr(loaded.generation_config, name, value)
        loaded.generation_config.save_pretrained(tmp_path)
    assert loops_of(AutoModelForCausalLM.from_pretrained(tmp_path)) == {1}


def test_a_depth_in_a_call_undoes_saved_exits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert loops_of(model) == {1}
    copied = copy.deepcopy(model.generation_config)
    for depth in (2, 3, 4):
        passed = GenerationConfig()
        passed.num_loops = depth
        for arguments in ({"num_loops": depth}, {"generation_config": passed},
                          {"generation_config": copied, "num_loops": depth}):  # fmt: skip
            assert loops_of(model, **arguments) == {depth}, arguments
    assert loops_of(model, num_loops=[2, 4]) == {2, 4}
    # exits that are asked for in the same call
    assert loops_of(model, num_loops=4, exit_threshold=0.0) == loops_of(model, num_loops=4, min_loops=1) == {1}
    assert loops_of(model, num_loops=4, exit_criterion="max_prob", min_loops=2, exit_threshold=0.0) == {2}
    assert loops_of(model, num_loops=4, exit_threshold=1.0) == {4}
    passed.exit_criterion, passed.exit_threshold, passed.min_loops = "max_prob", 0.0, 2
    assert loops_of(model, generation_config=passed, num_loops=3) == {2}


def test_a_depth_at_loading_undoes_saved_exits_and_says_so(folder, said, tmp_path):
    assert loops_of(AutoModelForCausalLM.from_pretrained(folder)) == {1}
    assert said.pop().startswith("This model has loop_loss='terminal': unless it was trained at depths")
    assert len(said) == 1 and "exit_criterion='max_prob'" in said[0] and "exit_criterion=None" in said[0]
    model = AutoModelForCausalLM.from_pretrained(folder, num_loops=4)
    assert loops_of(model) == {4} and len(said) == 2 and loops_of(model, **EXITS) == {1}
    assert len(said) == 3 and "num_loops=4 was asked for" in said[1]
    # a copy is told of them when it is saved and when it is opened
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "tuned")
    AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert "Exits are saved" in said[-2] and str(tmp_path / "tuned") in said[-1]
    model.save_pretrained(tmp_path / "without")
    assert loops_of(AutoModelForCausalLM.from_pretrained(tmp_path / "without")) == {4}


@pytest.mark.parametrize("depth", [2, 4])
def test_evaluation_generates_at_the_depth_that_it_names(depth, folder, monkeypatch):
    """What lm-eval's model generates, and ours, and a pipeline: as a model without exits at that depth."""
    plain = tiny_model(vocab_size=30, pad_token_id=0)
    five = {**GREEDY, "eos_token_id": 2, "min_new_tokens": 5}  # as the tokenizer ends, and not before
    expected = plain.generate(IDS, num_loops=depth, **five)
    assert not torch.equal(expected, plain.generate(IDS, **five, **EXITS))
    setup = {"device": "cpu", "dtype": "float32", "num_loops": depth}
    for lm in (HFLM(str(folder), **setup), LoopedLM(str(folder), **setup)):
        found = lm._model_generate(IDS, 10, [], attention_mask=torch.ones_like(IDS), do_sample=False, min_new_tokens=5)
        assert torch.equal(found, expected), type(lm)
    tokens = pipeline("text-generation", model=str(folder), device="cpu")(
        "a b c", num_loops=depth, max_new_tokens=5, min_new_tokens=5, do_sample=False, return_tensors=True
    )[0]["generated_token_ids"]
    prompt = torch.tensor([tokens[:-5]])
    assert tokens == plain.generate(prompt, num_loops=depth, **five)[0].tolist()


def test_exits_of_the_harness_are_said_once(folder):
    for name, value in (("exit_criterion", "kl"), ("min_loops", "2"), ("draft_loops", "1")):
        arguments = ["--model", "looped", "--model_args", f"pretrained={folder}", "--tasks", "arc_easy"]
        with pytest.raises(ValueError, match=f"{name}.*--model_args.*leave it out of gen_kwargs"):
            harness(["run", *arguments, "--gen_kwargs", f"{name}={value}"])


def test_a_saved_field_that_nothing_reads_is_no_wish(folder):
    """as the pipelines of older transformers pass it: a pipeline's generation config is a copy of the model's."""
    model = AutoModelForCausalLM.from_pretrained(folder, num_loops=3)
    model.generation_config.draft_tokens = 4
    copied = copy.deepcopy(model.generation_config)
    assert loops_of(model) == loops_of(model, generation_config=copied) == {3}
    with pytest.raises(ValueError, match="draft_tokens=4 without draft_loops"):
        loops_of(model, draft_tokens=4)
