"""Decoding on the device gives the tokens of the CPU. In float64, where no token is decided by rounding."""

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache

from modeling_looped import SharedPasses, row_graphs
from modeling_looped.exit_criteria import CRITERIA
from tests.helpers import random_ids, tiny_model
from tests.test_shared_passes import together


pytestmark = pytest.mark.gpu

WAYS = {
    "plain": {},
    "shallow": {"num_loops": 2},
    "mixed_depths": {"num_loops": [1, 4, 2]},
    "shared_slots": {"cache_sharing": "last"},
    "speculation": {"draft_loops": 1, "draft_tokens": 3},
    "sampled": {"do_sample": True, "top_k": 1},
}
THRESHOLDS = {  # at which tokens of this model exit after loops of their own
    "logit_margin": 0.05,
    "max_prob": 0.1,
    "entropy": 3.0,
    "entropy_diff": 0.001,
    "kl": 0.2,
    "minp_kl": 0.05,
    "latent_diff": 0.5,
    "cosine": 0.1,
    "argmax_stability": 1,
    "gate": 0.5,
}
WAYS |= {name: {"exit_criterion": name, "exit_threshold": threshold} for name, threshold in THRESHOLDS.items()}


def exiting_model(**fields):
    exits = {"num_loops": 4, "exit_gate": "raw", "loop_loss": "per_loop", "eos_token_id": None, "pad_token_id": 0}
    return tiny_model(**exits, **fields).double()


def decode(model, device: str, **how):
    prompt = random_ids(3, 6)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    settings = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, **how}
    return model.to(device).generate(prompt.to(device), attention_mask=mask.to(device), **settings)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_cpu(way, device):
    model = exiting_model()
    expected, found = (decode(model, place, **WAYS[way]) for place in ("cpu", device))
    assert torch.equal(found.sequences.cpu(), expected.sequences)
    if "exit_criterion" in WAYS[way]:
        assert torch.equal(found.token_loops.cpu(), expected.token_loops)
        assert len(expected.token_loops.unique()) > 1  # else nothing exited


def test_all_criteria_run():
    assert THRESHOLDS.keys() == CRITERIA.keys()


@pytest.mark.parametrize("system", [{}, {"preset": "parcae", "num_prelude_layers": 1}, {"preset": "flt"}], ids=str)
def test_loops_of_rows_are_graphs(system, device, monkeypatch):
    """Replayed, they give the tokens that single kernels give."""
    if device != "cuda":
        pytest.skip("CUDA has graphs; tests/test_row_graphs.py shows the same without them")
    model, replays = exiting_model(**system).to(device), []
    replay = row_graphs.Recording.replay
    monkeypatch.setattr(row_graphs.Recording, "replay", lambda self: replays.append(1) or replay(self))
    monkeypatch.setattr(row_graphs, "LENGTH_STEP", 8)
    how = {"max_new_tokens": 24, "exit_criterion": "latent_diff", "exit_threshold": 0.3}
    for rows in (slice(None), slice(1)):
        prompt = random_ids(3, 6)[rows].to(device)
        how |= {"do_sample": False, "return_dict_in_generate": True, "attention_mask": torch.ones_like(prompt)}
        monkeypatch.delenv(row_graphs.GRAPHS, raising=False)
        found = model.generate(prompt, **how)
        assert len(replays) > 20
        monkeypatch.setenv(row_graphs.GRAPHS, "0")
        replays.clear()
        expected = model.generate(prompt, **how)
        assert not replays and torch.equal(found.sequences, expected.sequences)
        assert torch.equal(found.token_loops, expected.token_loops)


def test_requests_that_share_passes(device):
    model, prompts = exiting_model(), [random_ids(rows, length) for rows, length in ((2, 6), (1, 4), (1, 9))]
    how = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    asked = [{**how, **WAYS[way]} for way in ("plain", "shallow", "latent_diff")]
    alone = [model.generate(ids, **way) for ids, way in zip(prompts, asked)]
    model.to(device)
    requests = [{"input_ids": ids.to(device), **way} for ids, way in zip(prompts, asked)]
    with SharedPasses(model, max_rows=4) as passes:
        if device == "pretended":  # its operators are those of the main thread: only the rows of a request share
            found = [passes.generate(**request) for request in requests]
        else:
            found = together(passes, requests)
    for on_device, expected in zip(found, alone, strict=True):
        assert torch.equal(on_device.sequences.cpu(), expected.sequences)
        assert torch.equal(on_device.token_loops.cpu(), expected.token_loops)
    assert passes.row_ticks > passes.ticks


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@torch.no_grad()
def test_a_cache_of_transformers(is_static, device):
    model = exiting_model().to(device)
    ids = random_ids(2, 9).to(device)
    cache = StaticCache(config=model.config, max_cache_len=16) if is_static else DynamicCache(config=model.config)
    parts = [
        model(part, past_key_values=cache, use_cache=True).logits for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:])
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids).logits)


class Forced(LogitsProcessor):
    """Every next token follows from its place, so that no rounding decides what is decoded."""

    reads_rows_apart = True

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf).index_fill_(1, scores.new_tensor([input_ids.shape[1]]).long(), 0.0)


@pytest.mark.parametrize("way", ["plain", "latent"])
@pytest.mark.parametrize("heads", [4, 2, 1])
def test_half_precision_leaves_what_single_precision_leaves(heads, way, device):
    """Kernels of attention that fp32 and float64 never meet, with heads that share keys and with padding: what the
    tokens leave in the cache is off by no more than rounding."""
    model = exiting_model(num_key_value_heads=heads)
    forced = {"max_new_tokens": 24, "logits_processor": LogitsProcessorList([Forced()])}
    forced |= {"exit_criterion": "latent_diff", "exit_threshold": 0.0} if way == "latent" else {}
    expected = decode(model.float(), "cpu", **forced)
    found = decode(model.bfloat16(), device, **forced)
    assert torch.equal(found.sequences.cpu(), expected.sequences)
    for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        for name in ("keys", "values"):
            # but for the places that hold no token, in the first row
            got, wanted = (getattr(layer, name)[..., 2:, :].float().cpu() for layer in (ours, theirs))
            assert (got - wanted).norm() < 0.05 * wanted.norm()
