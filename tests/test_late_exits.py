"""Exits that are read back once per some checks are those of every check."""

import pytest
import torch

from modeling_looped import SharedPasses
from modeling_looped.exit_criteria import ExitRule

from .helpers import random_ids, tiny_model
from .test_shared_passes import together


SYSTEMS = {
    "plain": {},
    "windows": {"window_pattern": "SL", "sliding_window": 3},
    "sections": {"num_prelude_layers": 1, "num_coda_layers": 1},
    "parcae": {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1},
    "second_keys": {"key_value_interval": 2},
}
EXITS = {
    "logit_margin": 1.0,
    "entropy_diff": 0.3,
    "latent_diff": 0.3,
    "cosine": 0.03,
    "minp_kl": 0.3,
    "argmax_stability": 2,
    "gate": 0.9,
}


def made(system: str):
    more = {"num_loops": 6, "exit_gate": "raw", "loop_loss": "per_loop", "eos_token_id": 7, "pad_token_id": 0}
    return tiny_model(**more, **SYSTEMS[system]).double()


def asked(criterion: str, **more) -> dict:
    exits = {"exit_criterion": criterion, "exit_threshold": EXITS[criterion], **more}
    return {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, **exits}


def assert_same(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.token_loops, expected.token_loops)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("criterion", EXITS)
@pytest.mark.parametrize("more", [{}, {"min_loops": 2, "exit_interval": 2}, {"num_loops": [2, 6, 5]}], ids=str)
@pytest.mark.parametrize("reads", [2, 3, 10])
@pytest.mark.covering(2)
@pytest.mark.some(7)
def test_tokens_loops_and_cache_are_the_same(system, criterion, more, reads):
    model, ids = made(system), random_ids(3, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    how = asked(criterion, attention_mask=mask, **more)
    expected, found = model.generate(ids, **how), model.generate(ids, exit_read_interval=reads, **how)
    assert_same(found, expected)
    places = torch.cat([mask.bool(), expected.token_loops[:, :-1] > 0], dim=1)
    for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers):
        kept = places[:, -theirs.keys.shape[2] :]
        for name in ("keys", "values"):
            of_places = (getattr(layer, name).transpose(1, 2)[kept] for layer in (ours, theirs))
            torch.testing.assert_close(*of_places, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        {"do_sample": True, "top_k": 20},
        {"cache_dtype": "int8"},
        {"prompt_loops": 2, "repetition_penalty": 1.3, "output_scores": True},
    ],
    ids=str,
)
@pytest.mark.some(1)
def test_of_one_row_in_two_turns(more):
    model, ids, turns = made("sections"), random_ids(1, 6), []
    for reads in (1, 4):
        torch.manual_seed(0)
        how = asked("latent_diff", exit_read_interval=reads, **more)
        first = model.generate(ids, **how)
        longer = torch.cat([first.sequences, random_ids(1, 3)], dim=1)
        turns.append((first, model.generate(longer, past_key_values=first.past_key_values, **how)))
    for expected, found in zip(*turns):
        assert_same(found, expected)
        if "output_scores" in more:
            torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores))


@pytest.mark.slow
def test_in_pages():
    model, ids = made("plain").float(), random_ids(2, 6)  # flex_attention has no float64 on a CPU
    model.set_attn_implementation("flex_attention")
    assert_same(*(model.generate(ids, exit_read_interval=n, **asked("latent_diff", max_new_tokens=6)) for n in (3, 1)))


def test_a_head_on_another_device(monkeypatch):
    """Its score is then there, and what is kept is where the states are."""
    model, ids, places = made("plain"), random_ids(1, 6), []
    exits = ExitRule.exits

    class Passed(torch.Tensor):
        def to(self, place):
            places.append(place)
            return super().as_subclass(torch.Tensor).to(place)

    monkeypatch.setattr(ExitRule, "exits", lambda rule, score: exits(rule, score).as_subclass(Passed))
    model.generate(ids, exit_read_interval=2, **asked("logit_margin"))
    assert places and set(places) == {model.device}


def test_some_tokens_exit_between_reads():
    loops = made("plain").generate(random_ids(3, 6), **asked("latent_diff")).token_loops
    assert {1, 2, 3, 4, 5} & set(loops.flatten().tolist()) - {2, 4}


def test_warm_start_goes_on_from_the_exit():
    model, ids = made("parcae"), random_ids(2, 6)
    how = asked("latent_diff", warm_start=True)
    assert_same(model.generate(ids, exit_read_interval=4, **how), model.generate(ids, **how))


def test_requests_with_reads_of_their_own_share_passes():
    model = made("sections")
    settings = [{}, {"exit_read_interval": 2}, {"exit_read_interval": 5}]
    requests = [{**asked(name), **more} for name in ("latent_diff", "logit_margin") for more in settings]
    prompts = [random_ids(1, 3 + i, seed=i) for i in range(len(requests))]
    with SharedPasses(model, max_rows=6) as passes:
        found = together(passes, [{"input_ids": ids, **how} for ids, how in zip(prompts, requests)])
    assert passes.row_ticks > passes.ticks
    for ids, how, output in zip(prompts, requests, found, strict=True):
        assert_same(output, model.generate(ids, **{**how, "exit_read_interval": 1}))


@pytest.mark.parametrize(
    "error, message, more",
    [
        (ValueError, "exit_read_interval=2.*cache_sharing='last'.*leave one out", {"cache_sharing": "last"}),
        (TypeError, "exit_read_interval must be an int, got 1.5", {"exit_read_interval": 1.5}),
        (ValueError, "exit_read_interval must be at least 1, got 0", {"exit_read_interval": 0}),
        (ValueError, "exit_read_interval without exit_criterion", {"exit_criterion": None, "exit_threshold": None}),
    ],
)
def test_what_is_refused(error, message, more):
    with pytest.raises(error, match=message):
        made("plain").generate(random_ids(1, 4), **{**asked("latent_diff"), "exit_read_interval": 2, **more})
