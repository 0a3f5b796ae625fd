"""Products in float8: which layers take part, that they compute nearly the same, and what is refused."""

import sys

import pytest
import torch
from torch import nn

from looped_recipes.engine import float8
from looped_recipes.engine.compiling import blocks_of
from looped_recipes.engine.optimizers import build_optimizers
from looped_recipes.settings.recipe import RecipeError, recipe_from_dict
from looped_recipes.settings.sections import OptimizerConfig
from tests.helpers import random_ids, tiny_model


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_loops": 3}
SECTIONS = {"num_prelude_layers": 1, "num_core_layers": 2, "num_coda_layers": 1}


def step(model):
    """Loss and gradients."""
    model.zero_grad()
    ids = random_ids(2, 32)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", sorted(float8.OLDEST))
def test_every_layer_of_the_blocks_and_no_other(kind):
    linear = pytest.importorskip("torchao.float8.float8_linear", reason="torchao is not installed").Float8Linear
    model = tiny_model(**SIZES, **SECTIONS, value_embeddings=True).train()
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(0.3)  # far from where attention jumps from one token to another
    kept, (loss, gradients) = dict(model.state_dict()), step(model)
    float8.convert(blocks_of(model), kind, emulate=True)

    of_blocks = [layer for block in blocks_of(model) for layer in block.modules() if isinstance(layer, nn.Linear)]
    converted = [layer for layer in model.modules() if isinstance(layer, linear)]
    gates = [layer for layer in of_blocks if layer.init_role == "value_gate"]
    assert gates and {*map(id, converted)} == {*map(id, of_blocks)} - {*map(id, gates)}
    assert len(converted) == 4 * (4 + 3)  # of attention, of a gated MLP
    assert model.state_dict().keys() == kept.keys()
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())

    found, new = step(model)
    assert found == pytest.approx(loss.item(), rel=0.01) and found != loss
    for name, gradient in gradients.items():
        assert (new[name] - gradient).norm() < 0.3 * gradient.norm() + 1e-9, name
    for name in ("adamw", "muon"):  # they ask layers what they are for
        assert build_optimizers(model, OptimizerConfig(name=name), 10)


def test_a_layer_without_a_role_in_a_block_of_ones_own_is_converted():
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.float8.float8_linear import Float8Linear

    block = torch.nn.ModuleDict({"own": torch.nn.Linear(32, 16)})
    float8.convert([block], "tensorwise", emulate=True)
    assert isinstance(block["own"], Float8Linear)


def test_sizes_that_do_not_fit_are_named():
    model = tiny_model(**{**SIZES, "intermediate_size": 100})
    pytest.importorskip("torchao", reason="torchao is not installed")
    with pytest.raises(RecipeError, match="multiples of 16, but mlp.gate_proj has 64 inputs and 100 outputs"):
        float8.convert(blocks_of(model), "tensorwise")


@pytest.mark.parametrize(
    ("capability", "precision", "message"),
    [
        ((8, 9), "bf16", r"float8='rowwise' needs a GPU of compute capability \(9, 0\) or newer, and this .*\(8, 9\)"),
        ((9, 0), "no", "needs accelerate's mixed_precision bf16, not 'no'"),
    ],
)
def test_a_gpu_that_can_not_is_said(capability, precision, message, monkeypatch):
    monkeypatch.setattr(float8, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(RecipeError, match=message):
        float8.take_float8([], "rowwise", precision)


def test_without_torchao_what_to_install_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="training.float8='rowwise' needs torchao: install it"):
        float8.take_float8([], "rowwise", "bf16")


def test_rows_of_other_lengths_are_refused():
    with pytest.raises(RecipeError, match="multiple of 16 tokens, but data.sequence_length=100"):
        recipe_from_dict({"data": {"sequence_length": 100}, "training": {"float8": "rowwise"}})
