"""Loops that read the keys and values of an earlier loop: slots, depths, operations, memory and what is refused.

That the numbers are right is tested where they are for all models: formulas, caches, exits, drafts, random configs.
"""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from looped_eval.common.hooks import last_state, trace
from looped_recipes.cache import compare, memory
from looped_recipes.common.flops import cache_numbers_per_token, forward_flops_per_token
from looped_recipes.settings.recipe import RecipeError, load_recipe
from looped_recipes.settings.run_checks import check_run
from modeling_looped.formats.writing import save_public
from tests.helpers import random_ids, tiny_config, tiny_model
from tests.naive import has_keys


RECIPES = Path(__file__).parent.parent / "recipes"
POLICIES = [(interval, most) for interval in (1, 2, 3) for most in (None, 1, 2, 3)]


@pytest.mark.parametrize(("interval", "most"), POLICIES)
def test_slots_are_those_of_loops_with_keys(interval, most):
    fields = {"num_prelude_layers": 1, "key_value_interval": interval, "num_key_value_loops": most}
    for depth in (1, 2, 5, 8):
        config = tiny_config(num_loops=depth, **fields)
        with_keys = [t for t in range(depth) if has_keys(config, t)]
        assert [t for t in range(depth) if config.makes_keys(t)] == with_keys
        assert config.num_hidden_layers == 1 + 2 * len(with_keys)
        for t in range(depth):
            assert with_keys[config.stored_loop(t)] == max(s for s in with_keys if s <= t)


@pytest.mark.parametrize("fields", [{}, {"key_value_interval": 2}, {"num_key_value_loops": 1}], ids=str)
@pytest.mark.parametrize("system", [{"num_key_value_heads": 2, "num_coda_layers": 1}, {"kv_latent_size": 5}], ids=str)
@pytest.mark.some(3)
def test_memory_and_operations_are_those_that_are_counted(system, fields):
    model, ids = tiny_model(num_loops=5, **system, **fields), random_ids(1, 7)
    cache = model(ids).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert numbers == 7 * cache_numbers_per_token(model.config)
    plain = tiny_model(num_loops=5, **system)
    counted = []
    for each in (plain, model):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            each(ids, use_cache=False)
        counted.append(counter.get_total_flops() / 7)
    saved = forward_flops_per_token(plain.config, 7, 5) - forward_flops_per_token(model.config, 7, 5)
    assert counted[0] - counted[1] == saved


def test_the_first_loops_keys_serve_any_depth():
    """A token's keys do not depend on how deep it ran, so a sequence can be deepened halfway."""
    model, ids = tiny_model(num_key_value_loops=1, injection="add").double(), random_ids(2, 9)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache, num_loops=[1, 2])
        deeper = model(ids[:, 6:], past_key_values=cache, num_loops=7).logits
        torch.testing.assert_close(deeper, model(ids, num_loops=7).logits[:, 6:], rtol=1e-10, atol=1e-10)


def test_rows_at_different_loops_write_their_own_keys():
    """In some passes the first row's loop makes no keys and the second's does. The hole keeps rows in one call."""
    model, ids = tiny_model(key_value_interval=2, injection="add", eos_token_id=None).double(), random_ids(2, 5)
    mask = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    exits = {"exit_criterion": "max_prob", "exit_threshold": float("inf")}  # which none reaches
    how = {"max_new_tokens": 5, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, num_loops=[2, 3], **exits, **how)
    for row, depth in enumerate([2, 3]):
        rows = slice(row, row + 1)
        alone = model.generate(ids[rows], attention_mask=mask[rows], num_loops=depth, use_cache=False, **how)
        assert torch.equal(together[rows], alone)


@pytest.mark.parametrize("fields", [{"loop_change_gate": True}, {"state_init": "zeros"}], ids=str)
def test_hooks_see_states_alone(fields):
    model, ids = tiny_model(key_value_interval=2, injection="add", **fields), random_ids(1, 5)
    with last_state(model) as kept, torch.no_grad():
        states = model(ids, output_loop_hidden_states=True).loop_hidden_states
    assert torch.equal(kept[0], states[-1])
    assert all(map(torch.equal, trace(model, {"input_ids": ids}).states, states))
    if "state_init" in fields:
        assert model.generate(ids, max_new_tokens=3, warm_start=True, eos_token_id=None).shape == (1, 8)


@pytest.mark.parametrize("fields", [{"key_value_interval": 0}, {"num_key_value_loops": 0}], ids=str)
def test_counts_are_positive(fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must be at least 1, got 0"):
        tiny_config(**fields)


@pytest.mark.parametrize(("layout", "unroll"), [("llama", True), ("nanbeige", False)])
def test_published_layouts_cannot_say_it(layout, unroll, tmp_path):
    model = tiny_model(num_key_value_loops=1)
    with pytest.raises(ValueError, match="num_key_value_loops=1"):
        save_public(model, tmp_path / "public", layout, unroll)


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        (["model.num_key_value_loops=1"], True),
        (["model.num_key_value_loops=1", "depth.backprop_loops=null"], False),
        (["model.num_key_value_loops=1", "depth.maximum=8", "depth.backprop_loops=8"], False),
        (["model.key_value_interval=4"], False),
        (["model.key_value_interval=5"], True),
    ],
    ids=str,
)
def test_recipes_whose_keys_would_get_no_gradient(settings, is_refused):
    recipe = load_recipe(RECIPES / "parcae/small.yaml", settings)  # mean depth 8, gradients through 4
    if is_refused:
        with pytest.raises(RecipeError, match="no loop with gradients computes keys"):
            check_run(recipe)
    else:
        check_run(recipe)


def test_loops_that_read_keys_of_others_are_not_computed_again_by_themselves():
    model, ids = tiny_model(num_loops=4, key_value_interval=2).train(), random_ids(2, 5)
    model.model.checkpoints_loops = True
    with pytest.raises(ValueError, match="checkpoints_loops .* loops read keys of others .key_value_interval=2"):
        model(ids, labels=ids)
    model.eval()(ids, labels=ids)


def test_how_deep_a_cache_is_of_loops_that_share():
    model, ids = tiny_model(num_loops=2, key_value_interval=2), random_ids(1, 5)
    cache = model(ids[:, :4]).cache
    with pytest.raises(ValueError, match="num_loops=3 is deeper than the 2 loops that the cache holds"):
        model(ids[:, 4:], cache=cache, num_loops=3)


def test_a_comparison_of_no_runs_leaves_results_as_they_are(tmp_path):
    (tmp_path / "results.json").write_text("of before")
    with pytest.raises(ValueError, match="holds no finished runs: name the folder of the sweep"):
        compare.main([str(tmp_path), str(tmp_path / "results.json")])
    assert (tmp_path / "results.json").read_text() == "of before"


def test_the_table_of_presets(capsys):
    memory.main(["ouro", "parcae"])
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[2] == "| `ouro` | 4 | 768 KiB | 384 KiB | 192 KiB | 396 KiB |"
    )  # 2 x 24 layers x 4 loops x 2,048 numbers
