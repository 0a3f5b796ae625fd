"""cache_dtype="int8": what is kept of keys and values, against a decoder that rounds by hand; bytes; refusals."""

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.generation import BaseStreamer

from modeling_looped import LoopedCache, SharedPasses
from modeling_looped.int8_cache import attend_to_int8, from_int8, sizes_of, steps_of, to_int8

from .helpers import random_ids, tiny_model
from .naive_cache import NaiveDecoder, naive_generate
from .naive_exits import NaiveRule


SYSTEMS = {
    "grouped": {"num_key_value_heads": 2, "num_coda_layers": 1, "injection": "add"},
    "windows": {"num_prelude_layers": 1, "window_pattern": "SSL", "sliding_window": 4},
    "second_keys": {"key_value_interval": 2},
    "softcap": {"attention_softcap": 0.5},
}
NEW = 6


class RoundingDecoder(NaiveDecoder):
    def kept(self, pair):
        return tuple(torch.stack([rounded(head) for head in states]) for states in pair)


def rounded(channels: torch.Tensor) -> torch.Tensor:
    step = float(channels.abs().max()) / 127
    return torch.tensor([round(x / step) * step for x in channels.tolist()], dtype=torch.float64)


def model_of(system: str):
    return tiny_model(**SYSTEMS[system], num_loops=4, eos_token_id=None, pad_token_id=0).double()


def greedy(model, ids, **arguments):
    arguments = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, **arguments}
    return model.generate(ids, **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_half_a_step_is_lost(dtype):
    states = torch.randn(3, 2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    states[0, 0, 0] = 0
    stored = to_int8(states)
    assert stored.dtype == torch.int8 and stored.shape == (3, 2, 5, 20)
    error = (from_int8(stored, torch.float64) - states.double()).abs()
    assert (error <= states.double().abs().amax(-1, keepdim=True) / 254 * (1 + 2**-7)).all()
    assert error.max() > 0 and (error[0, 0, 0] == 0).all()


@pytest.mark.parametrize("head_dim", [6, 7, 16])
def test_single_tokens_of_any_width(head_dim):
    """Wherever the bytes of a step lie in memory."""
    stored = to_int8(torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(0)))
    for each, whole in zip(stored.split(1), from_int8(stored, torch.float32)):
        assert torch.equal(from_int8(each[:, :1], torch.float32)[0, 0], whole[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_padded", [False, True])
def test_attention_is_that_to_what_is_kept(dtype, is_padded):
    generator = torch.Generator().manual_seed(0)
    held = to_int8(torch.randn(3, 2, 2, 5, 8, generator=generator, dtype=torch.float64).to(dtype))
    queries = torch.randn(3, 6, 1, 8, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.arange(5) >= torch.tensor([0, 2, 4])[:, None, None, None] if is_padded else None
    keys, values = from_int8(held, torch.float64).unbind(2)
    expected = scaled_dot_product_attention(queries.double(), keys, values, mask, scale=0.3, enable_gqa=True)
    floats = torch.promote_types(dtype, torch.float32)
    found = attend_to_int8(queries, steps_of(held).to(floats), sizes_of(held), mask, 0.3)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.covering
def test_tokens_and_exits_of_a_decoder_that_rounds(system, num_rows):
    model, ids = model_of(system), random_ids(num_rows, 6)
    rule = NaiveRule("logit_margin", 1.0, 1, 1)
    out = greedy(model, ids, cache_dtype="int8", exit_criterion="logit_margin", exit_threshold=1.0)
    expected = [naive_generate(model, rule, row, 4, NEW, decoder_class=RoundingDecoder) for row in ids.tolist()]
    assert out.sequences[:, 6:].tolist() == [tokens for tokens, _ in expected]
    assert out.token_loops.tolist() == [loops for _, loops in expected]
    assert len(set(out.token_loops[:, 1:].flatten().tolist())) > 1


def test_rounding_is_seen_in_the_logits():
    """They are those of the decoder that rounds, and not of one that does not."""
    model, ids = model_of("grouped"), random_ids(1, 6)
    logits = greedy(model, ids, cache_dtype="int8", output_logits=True).logits[1][0]
    for decoder, is_same in ((RoundingDecoder(model), True), (NaiveDecoder(model), False)):
        token = int(decoder.run(ids[0].tolist(), 4)[-1].argmax())
        expected, _ = decoder.run_until(NaiveRule("logit_margin", torch.inf, 1, 1), token, 4)
        assert torch.allclose(logits.double(), expected[0], rtol=1e-6, atol=1e-6) == is_same
        torch.testing.assert_close(logits.double(), expected[0], rtol=0, atol=0.1 * float(expected.std()))


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 64 * 4 / 68), (torch.bfloat16, 64 * 2 / 68)])
@pytest.mark.parametrize(
    "arguments", [{}, {"draft_loops": 1}, {"num_loops": [2, 4]}, {"cache_sharing": "last"}], ids=str
)
@pytest.mark.some(3)
def test_bytes(dtype, times, arguments):
    model = tiny_model(num_loops=4, head_dim=64, eos_token_id=None, pad_token_id=0).to(dtype)
    exits = {} if "draft_loops" in arguments else {"exit_criterion": "kl", "exit_threshold": 1e-9}
    bytes_of = []
    for cache_dtype in (None, "int8"):
        cache = greedy(model, random_ids(2, 6), cache_dtype=cache_dtype, **exits, **arguments).past_key_values
        bytes_of.append(cache.bytes_of_token)
        assert {layer.keys.dtype for layer in cache.layers} == {dtype}
    assert bytes_of[0] == pytest.approx(times * bytes_of[1])


def test_a_second_turn_goes_on():
    """With the tokens of the decoder that rounds, which reads the last one of its answer with the next question."""
    model, ids = model_of("grouped"), random_ids(1, 6)
    decoder, never = RoundingDecoder(model), NaiveRule("logit_margin", torch.inf, 1, 1)

    def answer(question: list[int]) -> list[int]:
        tokens = [int(decoder.run(question, 4)[-1].argmax())]
        while len(tokens) < NEW:
            tokens.append(int(decoder.run_until(never, tokens[-1], 4)[0].argmax()))
        return tokens

    first = greedy(model, ids, cache_dtype="int8")
    assert first.sequences[0, 6:].tolist() == (said := answer(ids[0].tolist()))
    assert first.past_key_values.get_seq_length() == 6 + NEW - 1
    question = random_ids(1, 2, seed=1)
    text = torch.cat([first.sequences, question], dim=1)
    second = greedy(model, text, cache_dtype="int8", past_key_values=first.past_key_values)
    assert second.sequences[0, text.shape[1] :].tolist() == answer([said[-1], *question[0].tolist()])
    assert second.past_key_values.get_seq_length() == 6 + 2 * NEW + 1


def test_each_turn_says_how_tokens_are_kept():
    """Where a second turn does not ask for 8 bits, its exits and drafts have none either."""
    model, ids = model_of("grouped"), random_ids(1, 6)
    first = greedy(model, ids, cache_dtype="int8")
    cache = first.past_key_values
    text = torch.cat([first.sequences, random_ids(1, 2, seed=1)], dim=1)
    exact = greedy(model, text, past_key_values=copy.deepcopy(cache), output_logits=True)
    never = {"exit_criterion": "kl", "exit_threshold": 0.0}
    found = greedy(model, text, past_key_values=cache, output_logits=True, **never)
    torch.testing.assert_close(found.logits, exact.logits, rtol=1e-6, atol=1e-6)
    given = LoopedCache(model.config)
    greedy(model, ids, past_key_values=given, cache_dtype="int8")
    assert given.bytes_of_token < cache.bytes_of_token  # of the second turn, in the model's own type


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"past_key_values": DynamicCache()}, "cache_dtype='int8' makes its own cache, which a cache contradicts"),
        ({"cache_dtype": "int4"}, "cache_dtype='int4' is not known: choose 'int8'"),
        ({"num_beams": 2}, "cache_dtype='int8' .* not with beam search"),
        ({"cache_implementation": "static"}, "cache_dtype='int8' makes its own cache, which cache_implementation"),
        (
            {"exit_criterion": "kl", "exit_selection": "after"},
            "'after' goes with plain .* not with cache_dtype='int8'",
        ),
        ({"use_cache": False}, "cache_dtype='int8' makes its own cache, which use_cache=False"),
    ],
    ids=str,
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        greedy(model_of("grouped"), random_ids(1, 4), **{"cache_dtype": "int8", **arguments})


class Gone(RuntimeError):
    pass


class Leaves(BaseStreamer):
    """A reader who goes away after a few tokens."""

    def __init__(self, tokens: int):
        self.left = tokens

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise Gone

    def end(self):
        pass


@pytest.mark.parametrize("arguments", [{}, {"exit_criterion": "latent_diff"}, {"draft_loops": 1}], ids=str)
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_cache_can_be_read_after_a_call_that_failed(tokens, is_shared, arguments):
    model, ids = model_of("grouped"), random_ids(2, 5)
    cache, exact = LoopedCache(model.config), LoopedCache(model.config)
    model(ids, cache=exact)
    with SharedPasses(model) as passes, pytest.raises(Gone):
        run = passes.generate if is_shared else model.generate
        run(ids, cache=cache, cache_dtype="int8", streamer=Leaves(tokens), max_new_tokens=NEW, **arguments)
    assert cache.get_seq_length() == 5 and not cache.buffers
    for layer in exact.layers:
        layer.keys, layer.values = (from_int8(to_int8(x), torch.float64) for x in (layer.keys, layer.values))
    last = random_ids(2, 1)
    torch.testing.assert_close(model(last, cache=cache).logits, model(last, cache=exact).logits)
