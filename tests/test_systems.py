"""The presets are the published systems: against naive_systems.py, which knows each from its description alone.

At the initial weights, and at weights where nothing is hidden: embeddings three times as large, outputs that are not
zero, norms and biases that are not one and zero.
"""

import functools

import pytest
import torch

from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.presets import PRESETS
from tests.helpers import shake
from tests.naive import DoubleRotary
from tests.naive_systems import SYSTEMS


SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_core_layers": 4,
    "num_loops": 3,
    "max_position_embeddings": 16,
}
LENGTH = 9
FULLY_LOOPED = ["lt", "lt_input", "lt_attention", "flt", "flt_residual"]
ATTENTION = {
    "three kv heads of six": {"num_key_value_heads": 3},
    "latent": {"kv_latent_size": 10},
    "windows": {"window_pattern": "SSSL"},
}


def make(preset: str, weights: str, **fields) -> LoopedForCausalLM:
    original = LoopedConfig.from_preset(preset)
    outside = {f"num_{part}_layers": min(getattr(original, f"num_{part}_layers"), 2) for part in ("prelude", "coda")}
    dropouts = {f"{part}_dropout": 0.0 for part in ("attention", "residual", "embedding")}
    config = LoopedConfig.from_preset(preset, **{**SIZES, **outside, **dropouts, **fields})
    torch.manual_seed(0)
    model = LoopedForCausalLM(config).double().eval()
    if config.position_embedding == "rope":
        model.model.rotary_emb = DoubleRotary(config)
    if weights == "perturbed":
        with torch.no_grad():
            model.model.embed_tokens.weight *= 3
        shake(model, std=0.2)
    return model


@functools.cache
def inputs(preset: str) -> tuple:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SIZES["vocab_size"], (2, LENGTH), generator=generator)
    if PRESETS[preset].get("state_init") != "normal":
        return ids, {}
    state = torch.randn(2, LENGTH, SIZES["hidden_size"], generator=generator, dtype=torch.float64)
    return ids, {"initial_state": state}


def compare(preset: str, weights: str, depth: int, **fields):
    model = make(preset, weights, **fields)
    ids, arguments = inputs(preset)
    with torch.no_grad():
        outputs = model(ids, num_loops=depth, output_loop_hidden_states=True, output_loop_logits=True, **arguments)
        logits, states = SYSTEMS[preset](preset, model.config, model.state_dict(), ids, depth, **arguments)
    assert len(logits) == len(outputs.loop_logits) == depth
    for k in range(depth):
        torch.testing.assert_close(outputs.loop_hidden_states[k], states[k], rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(outputs.loop_logits[k], logits[k], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(outputs.logits, logits[-1], rtol=1e-8, atol=1e-9)
    return model, ids, arguments, outputs


def test_every_preset_is_described():
    assert set(SYSTEMS) == set(PRESETS)


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("weights", ["initial", "perturbed"])
@pytest.mark.parametrize("preset", SYSTEMS)
@pytest.mark.covering
def test_preset_is_the_published_system(preset, weights, depth):
    compare(preset, weights, depth)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("preset", FULLY_LOOPED)
@pytest.mark.covering
def test_attention_variants_of_fully_looped_transformers(preset, attention):
    """Also decoded from a cache, three tokens and then one by one."""
    model, ids, arguments, outputs = compare(preset, "perturbed", 5, **ATTENTION[attention])
    cache, pieces = None, []
    with torch.no_grad():
        for piece in [ids[:, :3], *ids[:, 3:].split(1, dim=1)]:
            out = model(piece, num_loops=5, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), outputs.logits, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("loss", ["terminal", "last_third", "per_loop"])
@pytest.mark.parametrize("preset", ["lt", "flt", "flt_residual"])
@pytest.mark.covering
def test_loss_placements_of_fully_looped_transformers(preset, loss):
    """END, FEW and STEP: the mean of the losses of the last loop, of those from floor(2K / 3) on, of all."""
    model, (ids, _) = make(preset, "perturbed", loop_loss=loss), inputs(preset)
    weights = {key: value.clone().requires_grad_() for key, value in model.state_dict().items()}
    depth = 5
    logits, _ = SYSTEMS[preset](preset, model.config, weights, ids, depth)
    losses = [torch.nn.functional.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for z in logits]
    read = {"terminal": losses[-1:], "last_third": losses[3:], "per_loop": losses}[loss]
    wanted = torch.stack(read).mean()
    found = model(ids, labels=ids, num_loops=depth, output_logits=False)
    torch.testing.assert_close(found.loss, wanted, rtol=1e-8, atol=1e-9)

    names = [name for name, _ in model.named_parameters()]
    ours = torch.autograd.grad(found.loss, list(model.parameters()))
    theirs = torch.autograd.grad(wanted, [weights[name] for name in names])
    for name, gradient, expected in zip(names, ours, theirs):
        torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    if loss == "last_third":  # readouts that the loss does not read cost nothing, and nothing is said of them
        assert found.loop_losses.isnan().tolist() == [True] * 3 + [False] * 2
        torch.testing.assert_close(found.loop_losses[3:], torch.stack(losses[3:]).detach(), rtol=1e-8, atol=1e-9)
