"""Optimizer groups: every trained parameter once, and rates that follow the unique layers, never the loops."""

import math

import peft
import pytest
import torch

from modeling_looped import LoopedConfig

from .helpers import random_ids, tiny_model


LR, DECAY, EPS = 2e-3, 0.1, 1e-8
FACTORED = {"residual_scaling": "factored", "residual_reference_layers": 2}
BLOCKS = ("model.prelude.", "model.core.", "model.coda.")
# something of every kind that stands outside the blocks
EVERYTHING = {
    "num_prelude_layers": 2,
    "num_core_layers": 4,
    "num_coda_layers": 2,
    "injection": "concat",
    "prelude_norm": True,
    "inter_loop_norm": "own",
    "loop_damping": True,
    "loop_change_gate": True,
    "exit_gate": "normed",
    "coda_input": "linear",
    "position_embedding": "learned",
    "value_embeddings": True,
    "attention_bias": "qkv",
    "qk_norm": "learned",
    "block_norm": "branch_sandwich",
}


def group_of_each(model, groups):
    """Name of a parameter -> its group; every trained parameter must be in exactly one."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = [(names[id(p)], group) for group in groups for p in group["params"]]
    assert len(found) == len(dict(found))
    assert set(dict(found)) == {name for name, p in model.named_parameters() if p.requires_grad}
    return dict(found)


def settings(group):
    return group["lr"], group["weight_decay"], group["eps"]


@pytest.mark.parametrize("preset", LoopedConfig.preset_names())
@pytest.mark.parametrize("scaling", ["none", "factored"])
def test_every_parameter_of_every_preset_is_in_one_group(preset, scaling):
    model = tiny_model(preset=preset, residual_scaling=scaling)
    found = group_of_each(model, model.parameter_groups(LR, DECAY, EPS))
    for name, group in found.items():
        assert group["name"] == ("blocks" if name.startswith(BLOCKS) else "base"), name
    torch.optim.AdamW(model.parameter_groups(LR, DECAY, EPS))


def test_factored_scaling_slows_the_blocks_and_nothing_else():
    model = tiny_model(**EVERYTHING, **FACTORED)
    found = group_of_each(model, model.parameter_groups(LR, DECAY, EPS))
    slower = 1 / math.sqrt(8 / 2)  # 8 unique layers, 2 of reference
    for name, group in found.items():
        if name.startswith(BLOCKS):  # matrices, biases and norms alike
            assert settings(group) == pytest.approx((LR * slower, DECAY, EPS * slower), rel=1e-12), name
        else:
            assert settings(group) == (LR, DECAY, EPS), name
    outside = {name.removeprefix("model.").split(".")[0] for name in found if not name.startswith(BLOCKS)}
    assert outside == {
        *("embed_tokens", "embed_positions", "value_embeds", "prelude_norm", "injection", "inter_loop_norm"),
        *("damping", "change_gate", "coda_proj", "norm", "lm_head", "exit_gate"),
    }


def test_wider_reference_speeds_up_shallow_models():
    model = tiny_model(num_core_layers=3, residual_scaling="factored", residual_reference_layers=12)
    blocks = next(group for group in model.parameter_groups(LR, DECAY, EPS) if group["name"] == "blocks")
    assert settings(blocks) == pytest.approx((2 * LR, DECAY, 2 * EPS))


@pytest.mark.parametrize("scaling", ["none", "sqrt", "linear"])
def test_other_scalings_keep_the_base_rates(scaling):
    model = tiny_model(**EVERYTHING, residual_scaling=scaling, residual_reference_layers=2)
    for keep in (False, True):
        groups = model.parameter_groups(LR, DECAY, EPS, keep_decay_product=keep)
        assert {settings(group) for group in groups} == {(LR, DECAY, EPS)}


def test_the_correction_for_depth_can_be_left_out():
    model = tiny_model(**EVERYTHING, **FACTORED)
    for keep in (False, True):
        groups = model.parameter_groups(LR, DECAY, EPS, keep_decay_product=keep, correct_for_depth=False)
        assert {settings(group) for group in groups} == {(LR, DECAY, EPS)}


@pytest.mark.parametrize("residual_depth", ["trained", "run"])
@pytest.mark.parametrize("keep_decay_product", [False, True])
def test_nothing_depends_on_the_loops(residual_depth, keep_decay_product):
    found = []
    for num_loops in (1, 3, 64):
        fields = {"num_core_layers": 4, "residual_depth": residual_depth, **FACTORED}
        model = tiny_model(num_loops=num_loops, **fields)
        groups = model.parameter_groups(LR, DECAY, EPS, keep_decay_product)
        found.append({name: settings(group) for name, group in group_of_each(model, groups).items()})
    assert found[0] == found[1] == found[2]


def test_decay_product_can_be_kept():
    model = tiny_model(**EVERYTHING, **FACTORED)
    groups = model.parameter_groups(LR, DECAY, EPS, keep_decay_product=True)
    for group in groups:
        assert group["lr"] * group["weight_decay"] == pytest.approx(LR * DECAY)
    assert {group["name"]: group["lr"] for group in groups} == {"base": LR, "blocks": pytest.approx(LR / 2)}


@pytest.mark.parametrize("scaling", ["none", "factored"])
def test_frozen_parameters_are_left_out(scaling):
    model = tiny_model(exit_gate="raw", residual_scaling=scaling)
    model.model.core[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    group_of_each(model, model.parameter_groups(LR))
    model.model.requires_grad_(False)  # only head and gate are left, so there is no group of blocks
    groups = model.parameter_groups(LR)
    assert [group["name"] for group in groups] == ["base"] and all(group["params"] for group in groups)
    assert set(group_of_each(model, groups)) == {"lm_head.weight", "exit_gate.weight", "exit_gate.bias"}


def test_tied_head_is_one_parameter_with_the_base_rate():
    model = tiny_model(tie_word_embeddings=True, **FACTORED)
    groups = model.parameter_groups(LR)
    base = next(group for group in groups if group["name"] == "base")
    assert sum(p is model.lm_head.weight for p in base["params"]) == 1
    group_of_each(model, groups)


def test_adapters_take_the_rates_of_what_they_adapt():
    model = tiny_model(num_core_layers=8, **FACTORED)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj", "lm_head"], r=2))
    found = group_of_each(adapted, adapted.parameter_groups(LR, DECAY, EPS))
    assert len(found) == 2 * (8 + 1) and all("lora_" in name for name in found)
    for name, group in found.items():
        assert group["lr"] == pytest.approx(LR if "lm_head" in name else LR / 2)


def test_adamw_moves_every_parameter_by_its_rate():
    """The first step of Adam is lr * g / (|g| + eps): the rate itself, wherever the gradient is not tiny."""
    model = tiny_model(num_core_layers=8, **FACTORED).double()
    optimizer = torch.optim.AdamW(model.parameter_groups(LR, 0.0, 1e-15))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = random_ids(4, 12)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        moved = (p.detach() - before[name]).abs()[p.grad.abs() > 1e-9]
        rate = LR / 2 if name.startswith(BLOCKS) else LR
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-4, atol=0)


def test_schedules_keep_the_ratio():
    model = tiny_model(num_core_layers=8, **FACTORED)
    optimizer = torch.optim.AdamW(model.parameter_groups(LR))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        optimizer.step()
        schedule.step()
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"base": pytest.approx(LR / 4), "blocks": pytest.approx(LR / 8)}
