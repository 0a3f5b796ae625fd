"""The named systems: their published sizes, and that each of them trains and decodes; the keys of variant tables."""

import typing
from math import sqrt

import pytest
import torch

from modeling_looped import LoopedConfig, LoopedConfigError, LoopedForCausalLM
from modeling_looped.configuration_looped import READOUTS
from modeling_looped.initialization import INIT_SCHEMES
from modeling_looped.injection import INJECTIONS
from modeling_looped.loop_embedding import LOOP_EMBEDDINGS
from modeling_looped.losses import WEIGHTS
from modeling_looped.presets import PRESETS
from tests.helpers import random_ids, tiny_config, tiny_model


def num_parameters(preset: str, **overrides) -> int:
    with torch.device("meta"):
        return LoopedForCausalLM(LoopedConfig.from_preset(preset, **overrides)).num_parameters()


def sections(num_layers: int) -> dict:
    return {f"num_{section}_layers": num_layers for section in ("prelude", "core", "coda")}


@pytest.mark.parametrize(
    ("preset", "overrides", "published"),
    [
        ("parcae", {}, 144_323_136),
        ("parcae", {"hidden_size": 1024, **sections(4)}, 388_003_328),
        ("parcae", {"hidden_size": 1280, **sections(6)}, 776_655_680),
        ("parcae", {"hidden_size": 1536, **sections(8)}, 1_338_591_744),
        ("huginn", {}, 3_564_976_800),
        ("rdm", {}, 114_242_560),
        ("rdm", {"hidden_size": 2048, "intermediate_size": 7040, "num_core_layers": 2}, 382_765_056),
    ],
)
def test_published_parameter_counts(preset, overrides, published):
    assert num_parameters(preset, **overrides) == published


@pytest.mark.parametrize(
    ("preset", "overrides", "published_millions", "digits"),
    [
        ("readout_terminal_rmsnorm", {}, 43.94, 0.01),
        ("readout_terminal_rmsnorm", {"hidden_size": 768, "num_core_layers": 12}, 128.82, 0.01),
        ("residual_scaling", {"num_core_layers": 48}, 438.3, 0.1),
        ("flt", {"num_core_layers": 6}, 127, 1),
        ("flt", {"num_core_layers": 12}, 318, 1),
    ],
)
def test_published_parameter_counts_in_millions(preset, overrides, published_millions, digits):
    assert abs(num_parameters(preset, **overrides) / 1e6 - published_millions) <= digits


def test_a_preset_is_no_field():
    with pytest.raises(LoopedConfigError, match="preset='parcae' is no field: call LoopedConfig.from_preset.'parcae'"):
        LoopedConfig(preset="parcae", num_loops=2)


@pytest.mark.parametrize("preset", PRESETS)
def test_heads_of_a_preset_follow_the_width(preset):
    published = LoopedConfig.from_preset(preset)
    wide = LoopedConfig.from_preset(preset, hidden_size=2 * published.hidden_size)
    assert wide.num_attention_heads == 2 * published.num_attention_heads
    narrow = LoopedConfig.from_preset(preset, hidden_size=64, num_core_layers=1)
    assert 64 % narrow.num_attention_heads == 0


@pytest.mark.parametrize("preset", ["lt", "lt_input", "lt_attention", "flt", "flt_residual"])
@pytest.mark.parametrize("num_layers", [2, 6, 12])
def test_parameters_of_fully_looped_transformers(preset, num_layers):
    """Equations 5 and 6: N = 2 V d + 12 C d^2 with d = 64 C; looping, and how, adds none."""
    width, vocabulary = 64 * num_layers, 151680
    assert vocabulary % 64 == 0
    counted = num_parameters(preset, num_core_layers=num_layers)
    assert counted == 2 * vocabulary * width + 12 * num_layers * width**2


def test_parameters_of_attention_variants():
    """A block has (10 + 2r) d^2 with r key/value heads per query head, or 10 d^2 + 3 R d with a latent of rank R."""
    outside, width = 2 * 151680 * 768, 768
    grouped = num_parameters("flt", num_core_layers=12, num_key_value_heads=2)
    assert grouped == outside + 12 * int((10 + 2 * 2 / 6) * width**2)
    latent = num_parameters("flt", num_core_layers=12, kv_latent_size=128)
    assert latent == outside + 12 * (10 * width**2 + 3 * 128 * width)


@pytest.mark.parametrize("num_layers", [24, 48])
def test_parameters_of_ouro(num_layers):
    """Untied embedding and head, SwiGLU, four norms a layer, one norm, a gate with a bias: 1.4B and 2.6B."""
    d, ff, vocabulary = 2048, 5632, 49152
    layer = 4 * d**2 + 3 * d * ff + 4 * d
    assert num_parameters("ouro", num_core_layers=num_layers) == 2 * vocabulary * d + num_layers * layer + d + (d + 1)


def test_sizes_that_follow_from_the_width():
    small, large = LoopedConfig.from_preset("flt"), LoopedConfig.from_preset("flt", num_core_layers=7)
    assert (small.hidden_size, small.num_attention_heads, small.intermediate_size) == (384, 3, 1536)
    assert (large.hidden_size, large.num_attention_heads, large.intermediate_size) == (448, 4, 1792)
    assert LoopedConfig.from_preset("huginn").embedding_scale == sqrt(5280)
    assert LoopedConfig.from_preset("huginn").head_dim == 96
    assert LoopedConfig.from_preset("rdm", hidden_size=2048).embedding_scale == sqrt(2048)
    parcae = LoopedConfig.from_preset("parcae", hidden_size=1280)
    assert (parcae.num_attention_heads, parcae.intermediate_size) == (10, 5120)
    assert LoopedConfig.from_preset("readout_damping", hidden_size=768).num_attention_heads == 12


def test_overrides_win_and_leave_the_preset_alone():
    assert LoopedConfig.from_preset("flt", hidden_size=256, num_core_layers=2).hidden_size == 256
    LoopedConfig.from_preset("flt").rope_parameters["rope_theta"] = 7.0
    assert LoopedConfig.from_preset("flt").rope_parameters["rope_theta"] == 10000.0
    assert LoopedConfig.from_preset("flt").hidden_size == 384


@pytest.mark.parametrize("preset", PRESETS)
def test_positions_made_longer_keep_the_base_of_the_preset(preset):
    before = LoopedConfig.from_preset(preset)
    rope = {"rope_type": "yarn", "factor": 4.0}
    base, length = before.rope_parameters["rope_theta"], before.max_position_embeddings
    longer = LoopedConfig.from_preset(preset, rope_parameters=rope)
    before.update({"rope_scaling": rope})
    for config in (longer, before):
        assert config.rope_parameters == {**rope, "rope_theta": base, "original_max_position_embeddings": length}


def test_an_unknown_preset_is_named_with_the_choices():
    with pytest.raises(ValueError, match="no preset 'fltt'.*flt_residual"):
        LoopedConfig.from_preset("fltt")


def test_every_system_has_a_preset_of_its_own():
    named = {"lt", "lt_input", "lt_attention", "flt", "flt_residual", "huginn", "rdm", "parcae", "ouro"}
    assert named | {"residual_scaling"} | {name for name in PRESETS if name.startswith("readout_")} == set(PRESETS)
    assert sum(name.startswith("readout_") for name in PRESETS) == 7 + 3 + 2  # table 2, three mitigations, two of 1.4B
    assert LoopedConfig.preset_names() == sorted(PRESETS)
    configs = [LoopedConfig.from_preset(name).to_dict() for name in PRESETS]
    for i, config in enumerate(configs):
        assert config not in configs[:i], list(PRESETS)[i]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.some(8)
def test_a_small_one_trains(preset):
    """Every parameter has a gradient from the first step on, which DDP wants, and the loss of the batch goes down."""
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(preset, initializer_range=0.02)).train()
    ids, arguments = random_ids(4, 12), {}
    if model.config.state_init == "normal":
        arguments["initial_state"] = model.sample_initial_state(4, 12, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=3e-3))
    losses = []
    for _ in range(6):
        loss = model(ids, labels=ids, **arguments).loss
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1, losses


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.some(8)
def test_a_small_one_decodes_with_a_cache(preset):
    model = tiny_model(preset=preset)
    arguments = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    cached, whole = (
        model.generate(random_ids(2, 5), use_cache=use_cache, eos_token_id=None, pad_token_id=0, **arguments)
        for use_cache in (True, False)
    )
    assert cached.past_key_values.get_seq_length() == 5 + 6 - 1
    assert whole.get("past_key_values") is None
    assert torch.equal(cached.sequences, whole.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(whole.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_depth_changes_what_it_says(preset):
    """More loops than trained run, and give other logits."""
    model, ids = tiny_model(preset=preset), random_ids(2, 5)
    with torch.no_grad():
        logits = [model(ids, num_loops=depth).logits for depth in (1, 3, 5)]
    assert all(value.isfinite().all() for value in logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    assert (logits[1] - logits[2]).abs().max() > 1e-3


def literal(name: str) -> set:
    return set(typing.get_args(LoopedConfig.__dataclass_fields__[name].type))


TABLES = {
    "injection": INJECTIONS,
    "init_scheme": INIT_SCHEMES,
    "loop_embedding": LOOP_EMBEDDINGS,
    "readout_norm": READOUTS,
    "loop_loss": WEIGHTS,
}


@pytest.mark.parametrize("field", TABLES)
def test_variants_in_the_config_are_those_of_the_table(field):
    assert literal(field) == set(TABLES[field])


def test_every_residual_rule_has_a_factor():
    for rule in literal("residual_scaling"):
        assert tiny_config(residual_scaling=rule).residual_factor(2) > 0


@pytest.mark.parametrize("field", ["injection", "init_scheme", "residual_scaling", "readout_norm", "loop_loss"])
def test_an_unknown_variant_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}.*got sideways"):
        tiny_config(**{field: "sideways"})


def test_an_error_of_fields_together_is_one_line_of_our_own():
    with pytest.raises(ValueError) as error:
        LoopedConfig(hidden_size=64, num_attention_heads=5)
    assert str(error.value) == "hidden_size=64 is not a multiple of num_attention_heads=5; change one of them"
