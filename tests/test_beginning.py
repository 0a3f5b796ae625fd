"""What a run begins with: a saved model, of which nothing is made up."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from looped_recipes.common.checksums import Damaged, write_checksums
from looped_recipes.engine.beginning import build_model, check_start, note_on_vocabulary
from looped_recipes.settings.costs import plan
from looped_recipes.settings.recipe import RecipeError, load_recipe
from looped_recipes.settings.run_checks import check_run
from modeling_looped.loading import LoopedCheckpointError
from tests.helpers import tiny_model, tiny_tokenizer


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "run" / "final"
    tiny_model(num_loops=3, num_coda_layers=1, max_position_embeddings=64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def recipe_of(tmp_path, saved, *more: str):
    (tmp_path / "recipe.yaml").write_text("data: {sequence_length: 64}\ntraining: {steps: 5}\n")
    start = [f"training.initialize_from={saved}", f"training.output_dir={tmp_path / 'next'}"]
    return load_recipe(tmp_path / "recipe.yaml", [*start, *more])


def test_the_recipe_of_a_saved_model_has_its_sizes(tmp_path, saved):
    """So what is checked and planned is the model that trains."""
    recipe = recipe_of(tmp_path, saved, "model.num_loops=5")
    model, config = build_model(recipe, tiny_tokenizer()), check_run(recipe)
    own = {name: getattr(config, name) for name in ("architectures", "_name_or_path")}
    assert config.to_dict() == {**model.config.to_dict(), **own}
    assert (config.hidden_size, config.num_loops, config.trained_depth) == (32, 5, 5)
    assert plan(recipe)["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert "assumed" not in plan(recipe)
    missing = recipe_of(tmp_path, "some/model")
    assert plan(missing)["assumed"].startswith("some/model is not here")


def test_a_vocabulary_that_is_far_too_large_is_told(tmp_path, saved):
    (tmp_path / "recipe.yaml").write_text("training: {steps: 5}\n")
    tokenizer = tiny_tokenizer()
    for vocab_size, is_told in ((64, False), (127, False), (128, True)):
        recipe = load_recipe(tmp_path / "recipe.yaml", [f"model.vocab_size={vocab_size}"])
        note = note_on_vocabulary(recipe, recipe.model_config(), tokenizer)
        assert (note is not None) == is_told and (note is None or note.endswith("model.vocab_size=64 would do"))
    of_saved = recipe_of(tmp_path, saved)
    assert note_on_vocabulary(of_saved, tiny_model(vocab_size=999).config, tokenizer) is None


@pytest.mark.parametrize("more", [[], ["model.exit_gate=normed"]])
def test_weights_that_are_stored_in_bf16_are_trained_in_fp32(more, tmp_path, saved):
    """Whose last bits are smaller than what a step changes."""
    tiny_model(num_loops=3, num_coda_layers=1, max_position_embeddings=64).bfloat16().save_pretrained(saved)
    model = build_model(recipe_of(tmp_path, saved, *more), tiny_tokenizer())
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_a_saved_model_learns_the_end_of_documents_where_it_is_its_padding_too(tmp_path, saved):
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    tiny_model(num_loops=3, max_position_embeddings=64, pad_token_id=end).save_pretrained(saved)
    model = build_model(recipe_of(tmp_path, saved), tokenizer)
    ids = torch.tensor([[end, 5, 6]])
    model(ids, labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[end].any() and model.config.pad_token_id == end


@pytest.mark.parametrize(("stops", "expected"), [(2, 2), ([2, 9], [2, 9]), (9, [9, 2]), ([8, 9], [8, 9, 2])])
def test_a_saved_model_stops_at_the_end_of_the_documents_too(stops, expected, tmp_path, saved):
    model = tiny_model(num_loops=3, max_position_embeddings=64)
    model.generation_config.eos_token_id = stops
    model.save_pretrained(saved)
    model = build_model(recipe_of(tmp_path, saved), tiny_tokenizer())
    assert model.generation_config.eos_token_id == expected and tiny_tokenizer().eos_token_id == 2


def test_other_tokens_are_refused(tmp_path, saved):
    recipe, words = recipe_of(tmp_path, saved), Tokenizer(models.WordLevel({"x": 0, "y": 1}, "x"))
    other = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="y", pad_token="y")
    with pytest.raises(RecipeError, match="knows the tokens of its own tokenizer, .* set data.tokenizer=.*final"):
        build_model(recipe, other)
    (saved / "tokenizer.json").write_text("{}")
    with pytest.raises(RecipeError, match="can not compare the tokens .* does not open: .*; mend it, or move its"):
        build_model(recipe, other)
    (saved / "tokenizer_config.json").unlink()
    assert build_model(recipe, other).config.hidden_size == 32  # nothing says which it knew


def test_a_damaged_model_is_not_begun_with(tmp_path, saved):
    write_checksums(saved)
    content = bytearray((saved / "model.safetensors").read_bytes())
    content[-1] ^= 4
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(Damaged, match="model.safetensors has the checksum"):
        build_model(recipe_of(tmp_path, saved), tiny_tokenizer())


def test_the_vocabulary_has_room_for_the_largest_id(tmp_path):
    words = Tokenizer(models.WordLevel({"x": 0, "y": 1, "far": 200}, "x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="x", eos_token="y", pad_token="y")
    (tmp_path / "recipe.yaml").write_text(
        "model: {hidden_size: 32, intermediate_size: 64, num_attention_heads: 2}\ntraining: {steps: 5}\n"
    )
    assert build_model(load_recipe(tmp_path / "recipe.yaml"), tokenizer).config.vocab_size == 256
    recipe = load_recipe(tmp_path / "recipe.yaml", ["model.vocab_size=200"])
    with pytest.raises(RecipeError, match="tokenizer has ids of 201 entries, but the model's vocab_size is 200"):
        build_model(recipe, tokenizer)
    named = load_recipe(tmp_path / "recipe.yaml", ["model.vocab_size=200", "data.tokenizer=folder"])
    with pytest.raises(RecipeError, match="raise model.vocab_size, or use a smaller data.tokenizer$"):
        build_model(named, tokenizer)


@pytest.mark.parametrize("pad", [None, "y"])
def test_a_model_begins_by_the_end_where_its_tokenizer_has_nothing_else(pad, tmp_path):
    """And learns that token: as the one for padding it would have an embedding of zeros for ever."""
    words = Tokenizer(models.WordLevel({"x": 0, "y": 1}, "x"))
    (tmp_path / "recipe.yaml").write_text(
        "model: {hidden_size: 32, intermediate_size: 64, num_attention_heads: 2}\ntraining: {steps: 5}\n"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="y", pad_token=pad)
    model = build_model(load_recipe(tmp_path / "recipe.yaml"), tokenizer)
    config = model.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 1, None)
    assert model.generation_config.pad_token_id == 1
    ids = torch.tensor([[1, 0, 0]])
    model(ids, labels=ids).loss.backward()
    table = model.get_input_embeddings().weight
    assert table[1].any() and table.grad[1].any()


@pytest.mark.parametrize("more", ["model.num_core_layers=3", "model.num_coda_layers=0"])
def test_a_new_gate_is_all_that_may_be_new(tmp_path, saved, more):
    assert build_model(recipe_of(tmp_path, saved, "model.exit_gate=normed"), tiny_tokenizer()).exit_gate is not None
    for gate in ([], ["model.exit_gate=normed"]):
        with pytest.raises(LoopedCheckpointError, match="does not fit"):
            build_model(recipe_of(tmp_path, saved, more, *gate), tiny_tokenizer())


def test_rows_as_long_as_the_model_reads(tmp_path, saved):
    recipe = recipe_of(tmp_path, saved, "data.sequence_length=65")
    with pytest.raises(RecipeError, match="sequence_length=65 is more than the max_position_embeddings=64 of .*final"):
        check_run(recipe)
    with pytest.raises(RecipeError, match="set model.max_position_embeddings=65"):
        build_model(recipe, tiny_tokenizer())
    wider = recipe_of(tmp_path, saved, "data.sequence_length=65", "model.max_position_embeddings=65")
    assert build_model(wider, tiny_tokenizer()).config.max_position_embeddings == 65


def test_what_to_name_is_said(tmp_path, saved):
    with pytest.raises(RecipeError, match="holds no saved model .*: name .*run/final"):
        check_start(recipe_of(tmp_path, saved.parent))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(RecipeError, match="it holds an adapter: merge that"):
        check_start(recipe_of(tmp_path, tmp_path / "adapter"))
