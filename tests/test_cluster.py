"""What `recipes.plan --gpus` reckons, against sums by hand, and the page that shows it."""

import io
from contextlib import redirect_stdout
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from looped_recipes.common.flops import sizes, training_flops_per_token, validation_flops_per_token
from looped_recipes.engine.optimizers import build_optimizers
from looped_recipes.engine.validation import losses_at
from looped_recipes.plan import ASSUMED, main
from looped_recipes.settings.cluster import Cluster, least_between, muon_flops, muon_shapes
from looped_recipes.settings.costs import on_cluster
from looped_recipes.settings.recipe import RecipeError, load_recipe
from modeling_looped import LoopedConfig
from tests.helpers import random_ids, tiny_model
from tests.helpers_recipes import RECIPES


PAGE = RECIPES / "parcae" / "RUN_1.3B.md"


def printed(*arguments: str) -> str:
    with redirect_stdout(io.StringIO()) as said:
        main(list(arguments))
    return said.getvalue()


def test_the_page_shows_what_the_command_prints():
    assert printed(str(RECIPES / "parcae" / "xlarge.yaml"), "--gpus", "64") in PAGE.read_text()


def test_numbers_of_the_large_run():
    said = printed(str(RECIPES / "parcae" / "xlarge.yaml"), "--gpus", "64", "--mfu", "0.5", "--dollars", "2")
    lines = {line[:32].strip(): line[33:57].strip() for line in said.splitlines()}
    parameters, steps = 1_338_591_744, 198_365
    products = 12_573_167_616 * 524_288 / 64 / (989e12 * 0.5)
    assert lines["products of a step"] == f"{products:.3f} s"
    checkpoint = 12 * parameters - 4 * 679_481_856  # bytes; so many lie in matrices of blocks, which have one moment
    assert lines["checkpoint"] == f"{checkpoint / 1e9:.1f} GB, {checkpoint / 5e9:.1f} s"
    sent = 4 * parameters + 4 * parameters + 4 * 679_481_856  # weights, gradients, and momenta of matrices of blocks
    assert lines["communication of a step"].startswith(f"{sent * 63 / 64 / 1e9:.1f} GB")
    hours = float(lines["the run, communication hidden"].split()[0])
    layer = 2 * 12 * 1536**2 + 4 * 1536 * 2048  # a forward pass of a token, whose head has 32768 rows
    validation = 8 * (1 + 16 + 16) * layer + 16 * 2 * 1536 * 32768  # sixteen loops, each read through a coda
    validation *= 1024 * 2048 / 64 / (989e12 * 0.5) / 250
    part = float(lines["time in validation"].removesuffix("%")) / 100
    seconds = products + float(lines["Muon's iterations of a step"].split()[0])
    assert part == pytest.approx(validation / (validation + seconds), abs=0.001)
    seconds += validation
    assert hours == pytest.approx((steps * seconds + steps / 500 * checkpoint / 5e9) / 3600, rel=0.005)
    assert float(lines["GPU hours"].split()[0].replace(",", "")) == pytest.approx(64 * hours, rel=0.01)


@pytest.mark.parametrize("system", [{}, {"residual_scaling": "sqrt", "residual_depth": "run"}], ids=str)
def test_operations_of_validation_are_those_of_its_passes(system):
    """Of one pass that reads all loops, or of a pass for each depth; norms are beside."""
    width = {"hidden_size": 256, "num_prelude_layers": 1, "num_coda_layers": 2}
    model, ids = tiny_model(num_loops=4, **width, **system).eval(), random_ids(1, 16)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        losses_at(model, model.config, [2, 4], {"input_ids": ids, "labels": ids})
    assert validation_flops_per_token(model.config, 16, [2, 4]) == pytest.approx(
        counter.get_total_flops() / 16, rel=0.01
    )


@pytest.mark.parametrize("injection", ["none", "add"])
@pytest.mark.parametrize("backprop_loops", [2, 4])
def test_operations_of_training_are_those_of_its_pass(injection, backprop_loops):
    """Without an injection a prelude has no backward pass where the first loop has no gradients; norms are beside."""
    width = {"hidden_size": 256, "num_prelude_layers": 3}
    model, ids = tiny_model(num_loops=4, injection=injection, **width).train(), random_ids(1, 16)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(ids, shift_labels=ids, backprop_loops=backprop_loops, use_cache=False).loss.backward()
    assert training_flops_per_token(model.config, 16, 4, backprop_loops) == pytest.approx(
        counter.get_total_flops() / 16, rel=0.03
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_is_multiplied_only_where_it_is_the_head(tied):
    model = tiny_model(preset="parcae", tie_word_embeddings=tied)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = {id(table) for table in tables if table is not model.lm_head.weight}
    assert len(tables) > 1 - tied  # value embeddings too
    n = sizes(model.config)
    assert n.multiplied == sum(p.numel() for p in model.parameters() if id(p) not in tables)
    assert n.without_embedding == n.total - model.get_input_embeddings().weight.numel()


@pytest.mark.parametrize("value_gates", [False, True])
@pytest.mark.parametrize("system", [{"preset": "parcae"}, {"loop_embedding": "modulation"}], ids=str)
def test_muon_keeps_one_moment_of_what_is_counted(system, value_gates):
    recipe = load_recipe(RECIPES / "parcae" / "small.yaml", [f"optimizer.muon_value_gates={value_gates}"])
    model = tiny_model(**system)
    muon, _ = build_optimizers(model, recipe.optimizer, 10)
    ids = random_ids(1, 8)
    model(ids, labels=ids, use_cache=False).loss.backward()
    muon.step()
    shapes = muon_shapes(model.config, value_gates)
    kept = [tuple(sorted(state["momentum_buffer"].shape)) for state in muon.state.values()]
    assert sorted(kept) == sorted(shapes)
    others = [part for state in muon.state.values() for name, part in state.items() if name != "momentum_buffer"]
    assert all(1 in part.shape for part in others)  # a number for each row or column


def test_muon_counts_every_matrix():
    config = LoopedConfig(
        vocab_size=64, hidden_size=8, intermediate_size=12, num_attention_heads=2, num_core_layers=3, num_loops=5
    )
    square, wide = 4 * 8**3 + 2 * 8**3, 4 * 8 * 8 * 12 + 2 * 8**3
    assert muon_flops(muon_shapes(config, False)) == 3 * 5 * (4 * square + 3 * wide)


def test_muon_shares_matrices_out():
    """Two GPUs take two of five matrices, two, and one; each turn is as long as its larger matrix."""
    square, wide = 5 * (4 * 8**3 + 2 * 8**3), 5 * (4 * 8 * 8 * 12 + 2 * 8**3)
    shapes = [(8, 8), (8, 12), (8, 8), (8, 8), (8, 12)]
    assert muon_flops(shapes, 2) == wide + square + wide
    assert muon_flops(shapes, 64) == wide


def test_steps_between_checkpoints():
    assert least_between(2.0, 1.0) == 198  # 2 of 200 seconds
    assert least_between(0.001, 1.0) == 1


def activations(*settings: str) -> float:
    recipe = load_recipe(RECIPES / "parcae" / "small.yaml", settings)
    lines = {line.what: line.value for line in on_cluster(recipe, Cluster(8))}
    return float(lines["activations"].removesuffix(" GB"))


def test_checkpointed_activations_are_fewer():
    whole, of_blocks, of_loops, products, of_host = (
        activations(f"training.gradient_checkpointing={how}")
        for how in ("false", "true", "loops", "selective", "offload")
    )
    assert of_host < of_blocks < products < whole and of_loops < whole
    layers, tokens = 2 + 2 + 2 * 4, 8 * 2048  # with gradients; of a micro batch
    # prelude norm, the input of every injection, value tables; injections; input of the coda, readout
    beside = (2 + 1 + 3) + 2 * 4 + (1 + 3)
    states = (layers + beside) * 4 * 768
    assert of_blocks == pytest.approx((states + 32 * 768 + 8 * 3072) * tokens / 1e9, abs=0.1)


def test_what_can_not_be_planned():
    recipe = load_recipe(RECIPES / "parcae" / "xlarge.yaml")
    with pytest.raises(RecipeError, match="rows_per_step=256 is not a multiple of --gpus 60"):
        on_cluster(recipe, Cluster(60))
    for option, value, said in (("--mfu", "40", "write 40 % as 0.4"), ("--memory", "80", "less than a GiB")):
        with pytest.raises(RecipeError, match=f"{option} {value} is .*{said}"):
            main([str(RECIPES / "parcae" / "xlarge.yaml"), "--gpus", "64", option, value])
    with pytest.raises(RecipeError, match="plans one run, and .* is a sweep"):
        main([str(RECIPES / "readout" / "44m.sweep.yaml"), "--gpus", "64"])


def test_options_stand_before_and_behind_the_recipe(capsys):
    recipe = str(RECIPES / "parcae" / "xlarge.yaml")
    printed_before = printed("--gpus", "64", "--mfu", "0.4", recipe)
    assert printed_before == printed(recipe, "--gpus", "64", "--mfu", "0.4") != printed(recipe, "--gpus", "64")
    assert tuple(ASSUMED) == tuple(field.name for field in fields(Cluster))[1:]
    with pytest.raises(SystemExit):
        main(["--gpus", "8"])
    assert "required: recipe" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="--mfu 0.4 has no effect by itself: say how many GPUs with --gpus"):
        main([recipe, "--mfu", "0.4"])


@pytest.mark.parametrize("option", ["--gpus 0", "--gpus -2", "--gpus 64 --mfu 0", "--gpus 64 --disk nan"])
def test_what_must_be_above_0(option):
    *_, name, value = option.split()
    with pytest.raises(RecipeError, match=f"{name} must be above 0, got {value}"):
        main([str(RECIPES / "parcae" / "xlarge.yaml"), *option.split()])
