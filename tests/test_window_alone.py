"""A sliding window without a pattern is that of all layers, as in Mistral, whose logits it must give."""

import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from .helpers import tiny_config, tiny_model
from .helpers_llama import SIZES, make_looped, sources, tokens


WINDOW = 4


def mistral_of(looped) -> MistralForCausalLM:
    blocks = sources(looped, looped.config.num_loops)
    config = MistralConfig(**SIZES, sliding_window=WINDOW, num_hidden_layers=len(blocks), attn_implementation="eager")
    mistral = MistralForCausalLM(config)
    for part in ("embed_tokens", "norm"):
        getattr(mistral.model, part).load_state_dict(getattr(looped.model, part).state_dict())
    mistral.lm_head.load_state_dict(looped.lm_head.state_dict())
    for layer, block in zip(mistral.model.layers, blocks, strict=True):
        layer.load_state_dict(block.state_dict())
    return mistral.eval()


@torch.no_grad()
def test_a_window_alone_is_that_of_mistral():
    looped = make_looped("eager", num_core_layers=2, num_loops=2, sliding_window=WINDOW, rms_norm_eps=1e-6)
    mistral, ids = mistral_of(looped), tokens(2, 11)
    wanted = mistral(ids).logits
    torch.testing.assert_close(looped(ids).logits, wanted, rtol=1e-5, atol=1e-5)
    cache = DynamicCache(config=looped.config)
    assert all(cache.is_sliding) and len(cache.is_sliding) == 4
    parts = [looped(ids[:, i : i + 1], past_key_values=cache).logits for i in range(11)]
    torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-4, atol=1e-4)
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    written = mistral.generate(ids, **arguments)
    assert torch.equal(looped.generate(ids, **arguments), written)
    never = {"exit_criterion": "max_prob", "exit_threshold": 1.0}  # rows apart, which no token leaves early
    assert torch.equal(looped.generate(ids, **arguments, **never), written)


def test_fields_that_do_not_apply_make_nothing_fail():
    plain = tiny_model()
    assert not hasattr(plain.config, "layer_types")
    config = tiny_config(state_init_std=0.5)
    config.sliding_window = 64  # as long as any sequence
    assert config.layer_types == ["sliding_attention"] * 6
    other = type(plain)(config).eval()
    other.load_state_dict(plain.state_dict())
    torch.testing.assert_close(other(tokens()).logits, plain(tokens()).logits, rtol=1e-5, atol=1e-5)
    config.sliding_window = 1
    with pytest.raises(ValueError, match="sliding_window=1 must be at least 2"):
        type(plain)(config)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("built_with", [{}, {"sliding_window": WINDOW}, {"window_pattern": "SL"}], ids=str)
def test_windows_that_come_or_go_after_the_model_was_built_are_refused(built_with, cache):
    """A cache would have windows where layers have none, or none where they have: other logits, without a word."""
    model = tiny_model(**built_with)
    model.config.window_pattern = None
    model.config.sliding_window = WINDOW if not built_with else None
    named = f"sliding_window={model.config.sliding_window} were assigned after this model was built"
    with pytest.raises(ValueError, match=f"{named}.*: save it and open it again"):
        model.generate(tokens(), max_new_tokens=3, pad_token_id=0, cache_implementation=cache)


def test_a_window_of_another_length_is_followed():
    """By masks and caches, as in Mistral."""
    model = tiny_model(sliding_window=64)
    model.config.sliding_window = WINDOW
    other = type(model)(tiny_config(sliding_window=WINDOW)).eval()
    other.load_state_dict(model.state_dict())
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for cache in ("dynamic", "static"):
        written = [each.generate(tokens(), cache_implementation=cache, **settings) for each in (model, other)]
        assert torch.equal(*written)
