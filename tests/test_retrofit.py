"""Recipes that start from a dense model: trained here, unrolled to a Llama, made to loop and trained on."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from looped_recipes.common.metrics import last_validation, read_metrics
from looped_recipes.convert import convert
from looped_recipes.engine.beginning import build_model
from looped_recipes.engine.saving import CheckpointError
from looped_recipes.pretrain import main
from looped_recipes.retrofit import small
from looped_recipes.settings.recipe import RecipeError, load_recipe
from looped_recipes.settings.run_checks import check_run
from modeling_looped import LoopedForCausalLM
from tests.helpers import random_ids, tiny_tokenizer
from tests.helpers_recipes import RECIPES


TINY = RECIPES / "retrofit" / "tiny"


def settings(text, *more):
    """Overrides for all runs, of a model with other sizes than the recipes'."""
    return [
        *("model.hidden_size=32", "model.intermediate_size=48", "training.rows_per_step=4", "evaluation.rows=8"),
        *("data.sequence_length=32", f"data.source={text / 'train.jsonl'}", f"data.cache_dir={text / 'shards'}"),
        *("evaluation.every=100", "logging.every=1", "training.save_every=100", "schedule.warmup_steps=1"),
        *more,
    ]


OF_DENSE = ["model.vocab_size=320", "data.tokenizer_vocab_size=320"]


def of_looped(llama, output, *more):
    return [
        f"dense.path={llama}",
        f"data.tokenizer={llama}",
        "model.vocab_size=320",
        f"training.output_dir={output}",
        *more,
    ]


@pytest.fixture(scope="module")
def llama(training_text, tmp_path_factory):
    """A Llama of six layers with its tokenizer, trained for a few steps as a looped model of one loop."""
    folder = tmp_path_factory.mktemp("llama")
    more = [*OF_DENSE, "training.steps=12", f"training.output_dir={folder / 'dense'}"]
    final = main([str(TINY / "dense.yaml"), *settings(training_text, *more)])
    convert(str(final), folder / "llama", "llama", unroll=True)
    return folder / "llama"


def losses(output) -> list[float]:
    return [record["loss"] for record in read_metrics(output / "metrics.jsonl") if "loss" in record]


def test_the_llama_is_the_model(llama):
    looped, dense = (
        LoopedForCausalLM.from_pretrained(llama.parent / "dense/final"),
        AutoModelForCausalLM.from_pretrained(llama),
    )
    assert dense.config.model_type == "llama" and dense.config.num_hidden_layers == 6
    ids = random_ids(2, 9)
    assert torch.equal(dense(ids).logits, looped(ids).logits)
    assert AutoTokenizer.from_pretrained(llama)("a b c") == AutoTokenizer.from_pretrained(
        llama.parent / "dense/final"
    )("a b c")


@pytest.mark.slow
def test_a_retrofit_loses_less_than_it_started_with(llama, training_text, tmp_path):
    more = of_looped(llama, tmp_path, "training.steps=12", "depth.curriculum_steps=8", "evaluation.every=1")
    final = main([str(TINY / "looped.yaml"), *settings(training_text, *more)])
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "validation/loss" in record]
    first, last = (last_validation([records[place]], "loss") for place in (0, -1))  # the first step's rate is 0
    assert set(first) == {1, 2, 3, 4, 6, 8} and max(first.values()) - min(first.values()) < 1e-5
    assert all(last[depth] < first[depth] for depth in first)
    model = LoopedForCausalLM.from_pretrained(final)
    assert (model.config.num_prelude_layers, model.config.num_core_layers, model.config.num_coda_layers) == (2, 2, 1)
    assert model.trained_depth == 4 and model.dtype == torch.float32
    loops = [record["loops"] for record in read_metrics(tmp_path / "metrics.jsonl") if "loops" in record]
    assert len(set(loops)) > 1


@pytest.mark.slow
def test_a_run_from_a_dense_model_resumes(llama, training_text, tmp_path):
    recipe, quick = (
        str(TINY / "looped.yaml"),
        ["training.steps=6", "training.save_every=3", "depth.curriculum_steps=4"],
    )
    main([recipe, *settings(training_text, *of_looped(llama, tmp_path / "whole", *quick))])
    cut = settings(training_text, *of_looped(llama, tmp_path / "cut", *quick))
    main([recipe, *cut, "training.stop_after=3"])
    main([recipe, *cut])
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"dense.layers was \[0, 1, 3, 4, 5\], is \[0, 1, 2, 4, 5\]"):
        main([recipe, *cut, "dense.layers=[0, 1, 2, 4, 5]", "training.steps=8"])


def test_healing_at_one_loop_comes_before_more(llama, training_text, tmp_path):
    """What follows trains at its own depth, not at that of the healing."""
    one_loop = ["model.num_loops=1", "depth.sampler=fixed", "depth.curriculum=null", "depth.curriculum_steps=null"]
    one_loop += ["depth.curriculum_target=forward", "training.steps=2", "evaluation.loops=[1]"]
    healed = main(
        [str(TINY / "looped.yaml"), *settings(training_text, *of_looped(llama, tmp_path / "one", *one_loop))]
    )
    more = of_looped(llama, tmp_path / "more", "dense.path=null", "dense.layers=null", "training.steps=2")
    more += [f"training.initialize_from={healed}", "depth.curriculum_steps=1"]
    final = main([str(TINY / "looped.yaml"), *settings(training_text, *more)])
    assert LoopedForCausalLM.from_pretrained(healed).trained_depth == 1
    assert LoopedForCausalLM.from_pretrained(final).trained_depth == 4


@pytest.mark.slow
def test_the_small_command(training_text, tmp_path, monkeypatch):
    """As it is run, but with smaller models and on other text: losses fall, and the control is no looped model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(small, "load_recipe", lambda path, more: load_recipe(path, [*more, *settings(training_text)]))
    dense = load_recipe(TINY / "dense.yaml")
    assert dense.model["num_core_layers"] == 6
    small.main(["results.json", "model.vocab_size=512", "training.steps=40"])
    result = json.loads((tmp_path / "results.json").read_text())
    before, after = result["looped"]["before"], result["looped"]["after"]
    assert all(after[depth] < before[depth] for depth in before)
    assert result["control"]["loss"] < result["dense"]["loss"]
    assert AutoModelForCausalLM.from_pretrained("runs/retrofit/llama").config.model_type == "llama"


# What a recipe says of its dense model


def test_a_llama_of_fewer_steps_is_not_taken_for_that_of_more(tmp_path, monkeypatch):
    """As after a first trial; the dense model alone was trained on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(small, "trained", lambda recipe: pytest.fail("training began"))
    dense = load_recipe(TINY / "dense.yaml", ["training.steps=40"])
    dense.save(f"{dense.training.output_dir}/recipe.yaml")
    llama = tmp_path / load_recipe(TINY / "looped.yaml").dense.path
    llama.mkdir()
    (llama / "config.json").touch()
    with pytest.raises(ValueError, match="llama was made of another number of steps than training.steps=400: remove"):
        small.main([])


def test_sizes_come_from_the_dense_model(llama):
    """Also those that the recipe leaves out; learned before any weight is read."""
    more = [f"dense.path={llama}", f"data.tokenizer={llama}", "data.sequence_length=32"]
    recipe = load_recipe(TINY / "looped.yaml", more)
    for name in ("vocab_size", "hidden_size", "intermediate_size"):
        recipe.model.pop(name)
    config = check_run(recipe)
    assert (config.hidden_size, config.vocab_size, config.num_layers, config.num_loops) == (32, 320, 5, 4)
    assert config.injection == "concat" and config.tie_word_embeddings


def test_tokens_that_a_dense_model_does_not_know_are_refused(llama, tmp_path):
    more = [f"dense.path={llama}", f"data.tokenizer={llama}", "data.sequence_length=32"]
    recipe = load_recipe(TINY / "looped.yaml", more)
    for name in ("vocab_size", "hidden_size", "intermediate_size"):
        recipe.model.pop(name)
    with pytest.raises(
        RecipeError, match="dense model .* knows the tokens of its own tokenizer, and 26 of data.tokenizer"
    ):
        build_model(recipe, tiny_tokenizer())
    own = AutoTokenizer.from_pretrained(llama)
    assert build_model(recipe, own).config.vocab_size == 320
    own.save_pretrained(tmp_path)
    for path in tmp_path.glob("*.json"):  # a special token with a name of one's own
        path.write_text(path.read_text().replace(own.pad_token, "<|mine|>"))
    renamed = AutoTokenizer.from_pretrained(tmp_path)
    assert renamed.get_vocab() != own.get_vocab()
    assert build_model(recipe, renamed).config.vocab_size == 320


@pytest.mark.parametrize(
    "more, message",
    [
        (["dense.path=runs/of/nothing"], "'runs/of/nothing' holds no model of transformers"),
        (["data.sequence_length=33"], "sequence_length=33 is more than the max_position_embeddings=32 of .*llama"),
        (["model.hidden_size=64"], "hidden_size=64 cannot be chosen: .* hidden_size=32"),
        (["model.num_core_layers=3"], r"2 \+ 3 \+ 1 = 6, but 5 dense layers are kept"),
        (["dense.layers=[0, 9]"], r"layers \[9\] are none of the dense model's, which has 0 to 5"),
        (["dense.core_init=mean"], "dense.core_init must be one of copy, lower, stepwise, average, got 'mean'"),
        (["data.tokenizer=bpe"], "dense model knows the tokens of its own tokenizer"),
        (["training.initialize_from=runs/x/final"], "both say where the weights come from"),
        (["model.preset=huginn"], "model.preset='huginn' has sizes and blocks of its own"),
        (["model.num_loops=null"], "needs model.num_loops"),
        (["dense.path=null"], r"dense.layers=\[0, 1, 3, 4, 5\] would have no effect with no dense.path"),
        (["dense.layers=[0, x]"], "dense.layers must be int, got 'x'"),
    ],
)
def test_what_is_refused_before_data_are_prepared(more, message, llama, tmp_path, monkeypatch):
    monkeypatch.setattr("looped_recipes.engine.training.prepare", None)
    arguments = [f"dense.path={llama}", f"data.tokenizer={llama}", "model.vocab_size=320", "model.hidden_size=32"]
    arguments += ["model.intermediate_size=48", f"training.output_dir={tmp_path}"]
    with pytest.raises(RecipeError, match=message):
        main([str(TINY / "looped.yaml"), *arguments, *more])


def test_published_sizes():
    """TinyLlama without 6 of its 22 layers, and with a matrix that reads state and input."""
    layer = 2048 * (2 * 2048 + 2 * 4 * 64) + 3 * 2048 * 5632 + 2 * 2048
    config = load_recipe(RECIPES / "retrofit" / "tinyllama.yaml").model_config()
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    assert model.num_parameters() == 2 * 32000 * 2048 + 16 * layer + 2048 + 2 * 2048**2


def test_the_ramp_of_the_whole_depth():
    """Retrofitted recurrence: the mean is ceil(f N) and at least 1, gradients flow through at most 8 of it."""
    from looped_recipes.settings.curriculum import curriculum

    for shape in ("linear", "sqrt"):
        for step in range(0, 110, 9):
            p = min(step / 100, 1)
            mean = max(1, math.ceil((p if shape == "linear" else 1 - math.sqrt(1 - p)) * 32))
            assert curriculum(shape, "total", 100, step, 32, 8) == (mean, min(8, mean))
            assert curriculum(shape, "total", 100, step, 32, None) == (mean, None)
