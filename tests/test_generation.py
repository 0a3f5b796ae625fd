"""generate() and generate_batch() against an argmax over uncached passes, and against the cache kept by hand."""

import contextlib
import copy
import math
from dataclasses import fields
from inspect import signature
from typing import get_args, get_type_hints

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.generation import ContinuousBatchingConfig, GenerationMixin
from transformers.generation.streamers import BaseStreamer

from modeling_looped import LoopedCache, LoopedForCausalLM, generation
from modeling_looped.depth_options import DepthOptions

from .helpers import LIKE_GEMMA3, LIKE_OLMO2, SECTIONS, quick_and_slow, random_ids, tiny_model
from .helpers_llama import make_looped, unroll
from .naive_cache import NaiveDecoder, naive_greedy


SYSTEMS = {
    "plain": {},
    "windows": {
        **SECTIONS,
        "window_pattern": "SSL",
        "sliding_window": 4,
        "num_key_value_heads": 2,
        "injection": "add",
    },
    "learned_positions": {"position_embedding": "learned", "readout_norm": "final_only"},
    "run_depth": {"residual_depth": "run", "residual_scaling": "linear"},
    "second_keys": {"key_value_interval": 2, "num_coda_layers": 1, "num_key_value_heads": 2},
    "flt": {"preset": "flt"},
    "huginn": {"preset": "huginn", **SECTIONS},
    "parcae": {"preset": "parcae", **SECTIONS},
    "ouro": {"preset": "ouro"},
    "like_olmo2": LIKE_OLMO2,
    "like_gemma3": LIKE_GEMMA3,
}
NAIVE_SYSTEMS = ("plain", "windows")  # those that tests/naive_cache.py can run
over_systems = pytest.mark.parametrize("system", SYSTEMS)
NEW = 9


def model_of(system: str, **fields):
    """In float64, where no two tokens tie, and without an end of sequence."""
    return tiny_model(**{"eos_token_id": None, "pad_token_id": 0, **SYSTEMS[system], **fields}).double()


def depths_of_rows(num_loops, rows: int):
    return num_loops if isinstance(num_loops, list) else [num_loops] * rows


@torch.no_grad()
def argmax_rows(model, prompts: list[torch.Tensor], num_loops, new_tokens: int = NEW) -> list[list[int]]:
    """Every prompt by itself, the whole sequence run anew for every token."""
    results = []
    for ids, depth in zip(prompts, depths_of_rows(num_loops, len(prompts))):
        for _ in range(new_tokens):
            logits = model(ids[None], num_loops=depth, use_cache=False).logits
            ids = torch.cat([ids, logits[0, -1:].argmax(-1)])
        results.append(ids[-new_tokens:].tolist())
    return results


def greedy(model, ids, new_tokens: int = NEW, **kwargs):
    return model.generate(ids, max_new_tokens=new_tokens, do_sample=False, **kwargs)


# Greedy


@over_systems
@pytest.mark.parametrize("num_loops", [None, [5, 1, 2]], ids=str)
@pytest.mark.covering
@pytest.mark.some(4)
def test_greedy_batch_of_left_padded_prompts(system, num_loops):
    """Prompts longer and shorter than the window, one of them a single token."""
    model, ids, padding = model_of(system), random_ids(3, 8), [0, 7, 3]
    mask = (torch.arange(8) >= torch.tensor(padding)[:, None]).long()
    expected = argmax_rows(model, [row[pad:] for row, pad in zip(ids, padding)], num_loops)
    for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"past_key_values": DynamicCache()}):
        tokens = greedy(model, ids, attention_mask=mask, num_loops=num_loops, **cache)
        assert tokens[:, 8:].tolist() == expected, cache


def test_every_way_to_give_depths():
    model, ids = model_of("plain"), random_ids(2, 5)
    for make in (tuple, torch.tensor):
        assert torch.equal(greedy(model, ids, num_loops=make([2, 5])), greedy(model, ids, num_loops=[2, 5]))
    assert torch.equal(
        greedy(model, ids, num_loops=torch.tensor(2), num_beams=2), greedy(model, ids, num_loops=2, num_beams=2)
    )


def test_no_prompt_starts_from_the_first_token():
    model = model_of("windows", bos_token_id=1)
    expected = argmax_rows(model, [torch.tensor([1])], 2)
    assert greedy(model, None, num_loops=2)[:, 1:].tolist() == expected


@pytest.mark.parametrize("system", ["plain", "windows", "huginn"])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.covering
@pytest.mark.some(1)
def test_prompt_in_chunks(system, cache, chunk):
    model, ids = model_of(system), random_ids(2, 11)
    for num_loops in (None, [5, 2]):
        tokens = greedy(
            model, ids, num_loops=num_loops, prefill_chunk_size=chunk, cache_implementation=cache, disable_compile=True
        )
        assert torch.equal(tokens, greedy(model, ids, num_loops=num_loops))


def test_prompt_in_chunks_where_the_core_has_other_heads():
    wide = {"core_hidden_size": 48, "core_num_attention_heads": 6, "injection": "concat", "coda_input": "linear"}
    model = model_of("plain", **SECTIONS, **wide, state_init="zeros", num_key_value_heads=2, head_dim=8)
    assert model.config.block_sizes("core").num_key_value_heads != model.config.num_key_value_heads
    ids = random_ids(2, 11)
    tokens = greedy(model, ids, prefill_chunk_size=4, cache_implementation="static", disable_compile=True)
    assert torch.equal(tokens, greedy(model, ids))


def test_prompt_as_embeddings():
    model, ids = model_of("windows"), random_ids(2, 7)
    tokens = greedy(model, None, inputs_embeds=model.model.embed_tokens(ids), num_loops=[2, 4])
    assert torch.equal(tokens, greedy(model, ids, num_loops=[2, 4])[:, 7:])


@pytest.mark.parametrize("system", ["plain", "windows"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_second_turn_goes_on_in_the_same_cache(system, kind):
    model, ids, more = model_of(system), random_ids(1, 6), random_ids(1, 4, seed=1)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=40)
    first = greedy(model, ids, past_key_values=cache, num_loops=2)
    conversation = torch.cat([first, more], dim=1)
    second = greedy(model, conversation, past_key_values=cache, num_loops=2)
    assert torch.equal(second, greedy(model, conversation, num_loops=2))
    with pytest.raises(ValueError, match="num_loops=3 is deeper than the 2 loops"):
        greedy(model, torch.cat([second, more], dim=1), past_key_values=cache, num_loops=3)


@pytest.mark.parametrize("num_loops", [None, 2, [5, 1]], ids=str)
@pytest.mark.some(1)
def test_loops_of_every_token(num_loops):
    """In every mode; none after the end of a row."""
    model, ids = model_of("windows"), random_ids(2, 6)
    full = greedy(model, ids, num_loops=num_loops)[:, 6:]
    depths = depths_of_rows(3 if num_loops is None else num_loops, 2)
    end = int(full[0, 3])
    arguments = {"num_loops": num_loops, "eos_token_id": end, "return_dict_in_generate": True}
    lengths = [row.tolist().index(end) + 1 if end in row else NEW for row in full]
    expected = [[depth] * length + [0] * (max(lengths) - length) for depth, length in zip(depths, lengths)]
    for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        assert greedy(model, ids, **arguments, **cache).token_loops.tolist() == expected
    beams = greedy(model, ids, num_beams=3, num_return_sequences=2, **arguments)
    expected = [[depths[i // 2] * (beam >= 0) for beam in row] for i, row in enumerate(beams.beam_indices.tolist())]
    assert beams.token_loops.tolist() == expected
    alone = {**arguments, "num_loops": depths[0]}
    for assistant in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        assert greedy(model, ids[:1], **alone, **assistant).token_loops.tolist() == [[depths[0]] * lengths[0]]


def test_scores_and_states_on_request():
    model, ids = model_of("windows"), random_ids(2, 5)
    out = greedy(model, ids, num_loops=2, output_logits=True, output_hidden_states=True, return_dict_in_generate=True)
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], num_loops=2, use_cache=False).logits[:, 4:]
    torch.testing.assert_close(torch.stack(out.logits, dim=1).double(), whole, rtol=1e-6, atol=1e-6)  # given in fp32
    assert len(out.past_key_values.layers) == 1 + 1 + 2 * 2
    assert {len(states) for states in out.hidden_states} == {1 + 1 + 1 + 2 * 2}


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize(
    "arguments",
    [{}, {"num_loops": 2}, {"num_loops": [5]}, {"cache_sharing": "last"}, {"prompt_lookup_num_tokens": 3}],
    ids=str,
)
def test_streamer(arguments):
    model, ids, streamer = model_of("windows"), random_ids(1, 6), Collector()
    tokens = greedy(model, ids, streamer=streamer, **arguments)
    assert streamer.ended and streamer.tokens == tokens[0].tolist()


class TakesLogits(Collector):
    def __init__(self):
        super().__init__()
        self.chosen, self.logits = [], []

    def put_logits(self, tokens, logits):
        self.chosen += tokens.tolist()
        self.logits.append(logits)


@pytest.mark.parametrize("arguments", [{"exit_criterion": "latent_diff", "exit_threshold": 0.5}, {"draft_loops": 1}])
def test_a_streamer_takes_the_logits(arguments):
    """In place of the output, which then keeps none; before the penalty."""
    model, ids, streamer = model_of("windows"), random_ids(1, 6), TakesLogits()
    asked = {"output_logits": True, "return_dict_in_generate": True, "repetition_penalty": 1.5, **arguments}
    plain, streamed = greedy(model, ids, **asked), greedy(model, ids, streamer=streamer, **asked)
    assert streamed.logits is None and streamer.chosen == streamed.sequences[0, 6:].tolist()
    assert torch.equal(streamed.sequences, plain.sequences)
    torch.testing.assert_close(torch.cat(streamer.logits), torch.cat(plain.logits))


# Beams and samples


@pytest.mark.parametrize("system", ["plain", "windows", "learned_positions", "parcae"])
@pytest.mark.parametrize("num_loops", [None, 2, 5, [5, 1]], ids=str)
@pytest.mark.covering
@pytest.mark.some(2)
def test_beam_search_with_a_cache_equals_without(system, num_loops):
    model, ids = model_of(system), random_ids(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    arguments = {
        "attention_mask": mask,
        "num_loops": num_loops,
        "num_beams": 3,
        "num_return_sequences": 2,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    expected = greedy(model, ids, use_cache=False, **arguments)
    assert (expected.beam_indices[:, 1:] % 3 != expected.beam_indices[:, :-1] % 3).any()  # beams do change places
    for cache in ({}, {"cache_implementation": "static"}, {"past_key_values": DynamicCache()}):
        found = greedy(model, ids, **arguments, **cache)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)


@pytest.mark.parametrize("num_loops", [None, [5, 1]], ids=str)
def test_several_samples_of_a_prompt(num_loops):
    model, ids = model_of("windows"), random_ids(2, 7)
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        arguments = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": NEW, "num_loops": num_loops}
        samples.append(model.generate(ids, use_cache=use_cache, **arguments))
    assert samples[0].shape == (6, 7 + NEW)
    assert torch.equal(*samples)
    assert len(samples[0].unique(dim=0)) > 2
    if num_loops is not None:  # the depths went with their prompts
        torch.manual_seed(0)
        swapped = model.generate(ids, **{**arguments, "num_loops": num_loops[::-1]})
        assert not torch.equal(swapped, samples[0])


# Assisted decoding


@contextlib.contextmanager
def depths_seen_by(model):
    """The num_loops that each pass of `model` was asked for."""
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs.get("num_loops")), with_kwargs=True
    )
    yield seen
    handle.remove()


@over_systems
@pytest.mark.parametrize("num_loops", [None, 2, [5]], ids=str)
@pytest.mark.covering
@pytest.mark.some(3)
def test_assisted_by_a_looped_model(system, num_loops):
    """The assistant drafts at its own depth, whatever that of the model."""
    model, ids = model_of(system), random_ids(1, 7)
    expected = greedy(model, ids, num_loops=num_loops)
    with depths_seen_by(model.model) as seen:
        assistant = model_of("plain")
        with depths_seen_by(assistant) as seen_by_assistant:
            assert torch.equal(greedy(model, ids, num_loops=num_loops, assistant_model=assistant), expected)
    assert set(seen_by_assistant) == {None}
    assert set(map(int, seen)) == {5 if num_loops == [5] else num_loops or model.config.num_loops}


@pytest.mark.parametrize("num_loops", [None, 2, 5], ids=str)
@pytest.mark.some(1)
def test_assisted_by_a_llama(num_loops):
    looped = make_looped(num_core_layers=2, num_loops=3, num_prelude_layers=1).double()
    ids, passes = random_ids(1, 7, vocab_size=61), []
    expected = greedy(looped, ids, num_loops=num_loops)
    for depth in (1, 3 if num_loops is None else num_loops):  # a bad assistant, and one that is always right
        assistant = unroll(looped, depth).double()
        with depths_seen_by(looped) as seen:
            assert torch.equal(greedy(looped, ids, num_loops=num_loops, assistant_model=assistant), expected)
        passes.append(len(seen))
    assert passes[1] < passes[0] and passes[1] < NEW


@over_systems
@pytest.mark.parametrize("num_loops", [2, 5])
@pytest.mark.covering
@pytest.mark.some(3)
def test_assisted_by_prompt_lookup(system, num_loops):
    """A prompt that repeats itself and then the answer, so that drafts are found, some of them good."""
    model, start = model_of(system), random_ids(1, 3)
    answer = greedy(model, start.repeat(1, 2), num_loops=num_loops)[:, 6:]
    ids = torch.cat([start, answer, start, answer[:, :2], start], dim=1)
    expected = greedy(model, ids, num_loops=num_loops)
    assert torch.equal(greedy(model, ids, num_loops=num_loops, prompt_lookup_num_tokens=4), expected)


def test_assisted_sampling():
    """With an assistant that is the model at this depth every draft is kept."""
    model, ids = model_of("plain"), random_ids(1, 5)
    assistant = model_of("plain", num_loops=2)
    torch.manual_seed(0)
    with depths_seen_by(model) as seen:
        tokens = model.generate(ids, do_sample=True, max_new_tokens=NEW, assistant_model=assistant, num_loops=2)
    assert tokens.shape == (1, 5 + NEW) and len(seen) < NEW


# Slots shared between loops

SHARING = ["none", "last", "first", "average", "cyclic-2"]


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("system", NAIVE_SYSTEMS)
@pytest.mark.parametrize("num_loops", [None, 2, 5, [5, 1]], ids=str)
@pytest.mark.covering
def test_cache_sharing(system, sharing, num_loops):
    model, ids = model_of(system), random_ids(2, 6)
    out = greedy(model, ids, num_loops=num_loops, cache_sharing=sharing, return_dict_in_generate=True)
    depths = depths_of_rows(3 if num_loops is None else num_loops, 2)
    expected = [naive_greedy(model, row.tolist(), depth, NEW, sharing) for row, depth in zip(ids, depths)]
    assert out.sequences.tolist() == expected
    slots = {"none": max(depths), "cyclic-2": 2}.get(sharing, 1)
    config = model.config
    sections = config.num_prelude_layers + config.num_coda_layers
    assert len(out.past_key_values.layers) == sections + config.num_core_layers * slots


@pytest.mark.parametrize("fields", [{"num_loops": 2}, {"num_loops": [5, 1]}, {"cache_sharing": "last"}], ids=str)
def test_a_decoding_loop_of_the_caller_runs_at_the_depth_that_is_asked_for(fields):
    def argmax(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        for length in [None] + [1] * (NEW - 1):
            inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=length, **model_kwargs)
            outputs = model(**inputs)
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
            input_ids = torch.cat([input_ids, outputs.logits[:, -1:].argmax(-1)], -1)
        return input_ids

    model, ids = model_of("plain"), random_ids(2, 6)
    sharing, depths = fields.get("cache_sharing", "none"), depths_of_rows(fields.get("num_loops", 3), 2)
    expected = [naive_greedy(model, row.tolist(), depth, NEW, sharing) for row, depth in zip(ids, depths)]
    assert greedy(model, ids, custom_generate=argmax, **fields).tolist() == expected


@pytest.mark.parametrize("sharing", ["first", "average"])
def test_exits_refuse_what_their_buffers_cannot_keep(sharing):
    with pytest.raises(ValueError, match=f"not with cache_sharing='{sharing}'"):
        greedy(model_of("plain"), random_ids(1, 4), cache_sharing=sharing, exit_criterion="kl")


def test_cache_sharing_changes_what_is_generated():
    model, ids = model_of("plain"), random_ids(4, 6)
    assert not torch.equal(greedy(model, ids, cache_sharing="last"), greedy(model, ids))
    assert torch.equal(greedy(model, ids, cache_sharing="none"), greedy(model, ids))
    assert torch.equal(greedy(model, ids, cache_sharing="cyclic-3"), greedy(model, ids))


@pytest.mark.parametrize("sharing", SHARING[1:])
@pytest.mark.parametrize("system", NAIVE_SYSTEMS)
@pytest.mark.parametrize("num_loops", [None, 5, [5, 1]], ids=str)
@pytest.mark.covering
@pytest.mark.some(1)
def test_cache_sharing_with_beams(system, sharing, num_loops):
    """The score of every beam is that of the hand-kept cache on its tokens, so the slots moved with the beams."""
    model, ids = model_of(system), random_ids(2, 6)
    arguments = {"num_beams": 3, "num_return_sequences": 3, "output_scores": True, "return_dict_in_generate": True}
    out = greedy(model, ids, num_loops=num_loops, cache_sharing=sharing, length_penalty=0.0, **arguments)
    assert (out.beam_indices[:, 1:] % 3 != out.beam_indices[:, :-1] % 3).any()
    depths = depths_of_rows(3 if num_loops is None else num_loops, 2)
    for i, (sequence, score) in enumerate(zip(out.sequences, out.sequences_scores)):
        decoder, depth, total = NaiveDecoder(model, sharing), depths[i // 3], 0.0
        logits = decoder.run(sequence[:6], depth)
        for token in sequence[6:].tolist():
            total += logits[-1].log_softmax(-1)[token].item()
            logits = decoder.run([token], depth)
        assert score.item() == pytest.approx(total, rel=1e-5)


def test_cache_sharing_refuses_assisted_decoding():
    model, ids = model_of("plain"), random_ids(1, 6)
    ways = [
        {"assistant_model": model_of("flt"), "cache_sharing": "last"},
        {"prompt_lookup_num_tokens": 3, "cache_sharing": "cyclic-2"},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=3), "cache_sharing": "last"},
        {"prompt_lookup_num_tokens": 3, "past_key_values": LoopedCache(model.config, "last")},
    ]
    for arguments in ways:
        with pytest.raises(ValueError, match="cache_sharing='(last|cyclic-2)' .* assisted decoding"):
            model.generate(ids, max_new_tokens=3, **arguments)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("a cache", {"past_key_values": DynamicCache()}),
        ("cache_implementation='static'", {"cache_implementation": "static"}),
        ("use_cache=False", {"use_cache": False}),
    ],
)
def test_cache_sharing_refuses_another_cache(name, arguments):
    with pytest.raises(ValueError, match=f"cache_sharing='last' makes its own cache, which {name} contradicts"):
        greedy(model_of("plain"), random_ids(1, 6), cache_sharing="last", **arguments)


@pytest.mark.parametrize("sharing", ["last", "cyclic-2"])
def test_a_second_turn_with_the_sharing_that_was_saved(sharing):
    model, ids, more = model_of("plain"), random_ids(1, 6), random_ids(1, 2, seed=1)
    results = []
    for saved, asked in ((None, sharing), (sharing, None)):
        model.generation_config.cache_sharing = saved
        first = greedy(model, ids, return_dict_in_generate=True, **({} if asked is None else {"cache_sharing": asked}))
        assert first.past_key_values.sharing == sharing
        text = torch.cat([first.sequences, more], dim=1)
        results.append(greedy(model, text, past_key_values=first.past_key_values))
    assert torch.equal(*results)
    with pytest.raises(ValueError, match=f"cache_sharing='{sharing}' makes its own cache, which a cache contradicts"):
        greedy(model, ids, past_key_values=LoopedCache(model.config, "cyclic-3"))


def test_unknown_cache_sharing():
    with pytest.raises(
        ValueError, match="'mean' is not known: choose 'none', 'last', 'first', 'average' or 'cyclic-S'"
    ):
        greedy(model_of("plain"), random_ids(1, 6), cache_sharing="mean")


# Continuous batching


def small_paged_cache() -> ContinuousBatchingConfig:
    page_size = (
        "page_size" if "page_size" in {field.name for field in fields(ContinuousBatchingConfig)} else "block_size"
    )
    return ContinuousBatchingConfig(num_blocks=12, max_batch_tokens=48, **{page_size: 16})


def batch(model, prompts: list[list[int]]) -> list[list[int]]:
    """In the model's own order of prompts."""
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=small_paged_cache(),
    )
    assert len(results) == len(prompts) and not any(result.error for result in results.values())
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize(
    ("system", "implementation"),
    quick_and_slow(
        [*((system, "sdpa") for system in SYSTEMS), ("plain", "eager"), ("windows", "eager")],
        ("windows", "sdpa"),
        ("second_keys", "sdpa"),
        ("plain", "eager"),
    ),
)
@pytest.mark.some(1)
def test_continuous_batching(system, implementation):
    """Prompts of one token, shorter and longer than the window, more than fit into one pass."""
    model = model_of(system).float()
    model.set_attn_implementation(implementation)
    prompts = [random_ids(1, length, seed=length)[0] for length in (1, 3, 21, 7, 30)]
    assert batch(model, [prompt.tolist() for prompt in prompts]) == argmax_rows(model, prompts, None)


@pytest.mark.slow
def test_continuous_batching_at_another_depth():
    model, prompts = model_of("windows").float(), [random_ids(1, length)[0] for length in (6, 2)]
    expected = argmax_rows(model, prompts, 5)
    model.config.num_loops = 5
    assert batch(model, [prompt.tolist() for prompt in prompts]) == expected
    assert model.generate_batch([]) == {}


@pytest.mark.slow
def test_continuous_batching_says_what_it_passes_over(monkeypatch):
    said, model = [], model_of("plain").float()
    monkeypatch.setattr(generation.logger, "warning_once", said.append)
    model.generation_config.eos_token_id, arguments = -1, {"continuous_batching_config": small_paged_cache()}
    plain = model.generate_batch([[3, 4]], max_new_tokens=3, num_loops=None, exit_criterion=None, **arguments)
    assert not said
    model.generation_config.exit_criterion = "kl"
    deep = model.generate_batch([[3, 4]], max_new_tokens=3, **arguments)
    assert [result.generated_tokens for result in deep.values()] == [r.generated_tokens for r in plain.values()]
    model.generate_batch([[3, 4]], generation_config=GenerationConfig(max_new_tokens=3, eos_token_id=-1), **arguments)
    assert len(said) == 2 and said[0] == said[1]
    assert "config.num_loops=3" in said[0] and "exit_criterion='kl'" in said[0]


@pytest.mark.slow
def test_continuous_batching_reads_arguments_of_generate():
    """transformers passes over all but one."""
    model, prompt = model_of("plain").float(), [3, 4]
    whole = greedy(model, torch.tensor([prompt]))[0, 2:].tolist()
    arguments = {"continuous_batching_config": small_paged_cache(), "max_new_tokens": NEW, "do_sample": False}
    for end in (whole[2], -1):
        (result,) = model.generate_batch([prompt], eos_token_id=end, **arguments).values()
        assert result.generated_tokens == (whole[: whole.index(end) + 1] if end in whole else whole)


def test_none_undoes_what_is_saved_in_batches_too():
    model, prompts = model_of("plain").float(), [[3, 4], [5, 6, 7]]
    model.generation_config.eos_token_id = -1
    model.generation_config.exit_criterion, model.generation_config.exit_threshold = "latent_diff", 1e9

    def loops(**given) -> set[int]:
        results = model.generate_batch(prompts, max_new_tokens=4, **given).values()
        assert not any(result.error for result in results)
        return {number for result in results for number in result.token_loops[1:]}

    assert (
        loops() == {2}
        and loops(exit_criterion=None, num_loops=3) == {3}
        and loops(exit_criterion="kl", exit_threshold=0.0) == {3}
    )
    whole = model.generate_batch(
        prompts, max_new_tokens=4, exit_criterion=None, continuous_batching_config=small_paged_cache()
    )
    plain = [model.generate(torch.tensor([prompt]), max_new_tokens=4, exit_criterion=None) for prompt in prompts]
    assert [found.generated_tokens for found in whole.values()] == [
        ids[0, len(prompt) :].tolist() for ids, prompt in zip(plain, prompts)
    ]


def test_continuous_batching_runs_a_saved_depth():
    model, prompt = model_of("windows").float(), random_ids(1, 6)[0]
    expected = argmax_rows(model, [prompt], 1)
    assert argmax_rows(model, [prompt], None) != expected
    model.generation_config.num_loops, config = 1, model.config
    asked = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    (result,) = model.generate_batch([prompt.tolist()], asked).values()
    assert [result.generated_tokens] == expected and result.token_loops == [1] * NEW
    # that of transformers runs at the depth of the config, which others may be reading
    for run in (model.init_continuous_batching, lambda: batch(model, [prompt.tolist()])):
        with pytest.raises(ValueError, match="config.num_loops=3.*config says num_loops=1.*set model.config"):
            run()
    assert config.num_loops == 3


@pytest.mark.parametrize("in_call", [False, True])
def test_continuous_batching_takes_the_depth_at_which_it_runs(in_call):
    model, asked = model_of("plain").float(), {"max_new_tokens": 3, "do_sample": False, "eos_token_id": -1}

    def run(num_loops):
        fields = {"num_loops": num_loops, **asked}
        fields = fields if in_call else {"generation_config": GenerationConfig(**fields, pad_token_id=0)}
        (result,) = model.generate_batch([[3, 4]], continuous_batching_config=small_paged_cache(), **fields).values()
        return result.generated_tokens

    assert run(3) == greedy(model, torch.tensor([[3, 4]]))[0, 2:5].tolist()
    with pytest.raises(ValueError, match="continuous_batching_config: leave out, .*; or leave out num_loops=2"):
        run(2)


def test_a_mask_may_be_of_what_the_cache_holds_too():
    model, ids = model_of("plain"), random_ids(2, 7)
    mask, cache = torch.ones_like(ids), LoopedCache(model.config)
    mask[1, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(ids[:, :4], attention_mask=mask[:, :4], position_ids=positions[:, :4], cache=cache)
    found = greedy(model, ids[:, 4:], attention_mask=mask, cache=cache)
    assert torch.equal(found[:, 3:], greedy(model, ids, attention_mask=mask)[:, 7:])


def test_paged_cache_of_generate_refuses_a_depth():
    with pytest.raises(ValueError, match="does not take num_loops=2: leave out cache_implementation"):
        greedy(model_of("plain"), random_ids(1, 4), cache_implementation="paged", num_loops=2)


def test_a_core_with_heads_of_its_own():
    """Exits and drafts too; what holds equal heads everywhere is refused."""
    model = tiny_model(
        injection="diagonal",
        state_init="zeros",
        coda_input="linear",
        num_prelude_layers=1,
        num_coda_layers=1,
        core_hidden_size=40,
        core_num_attention_heads=6,
    )
    ids = random_ids(2, 5)
    arguments = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with_cache, without = (model.generate(ids, use_cache=use, **arguments) for use in (True, False))
    assert torch.equal(with_cache, without)
    never = model.generate(ids, exit_criterion="logit_margin", exit_threshold=math.inf, **arguments)
    assert torch.equal(never, with_cache)
    assert torch.equal(model.generate(ids, draft_loops=1, **arguments), with_cache)
    early = model.generate(
        ids, exit_criterion="max_prob", exit_threshold=0.0, min_loops=1, prompt_loops=1, **arguments
    )
    assert torch.equal(early, model.generate(ids, num_loops=1, **arguments))
    with pytest.raises(ValueError, match="core has 6 and the other layers 4"):
        model.generate_batch([[3, 4, 5]], max_new_tokens=2)


def test_editors_see_the_arguments_of_depth():
    shown = signature(LoopedForCausalLM.generate).parameters
    named = {name for name, each in shown.items() if each.kind is each.KEYWORD_ONLY}
    assert named == {field.name for field in fields(DepthOptions)}
    assert [*shown][:3] == [*signature(GenerationMixin.generate).parameters][:3]  # what is passed by position
    hints = get_type_hints(LoopedForCausalLM.generate)
    assert all(type(None) in get_args(hints[name]) for name in named)  # None undoes what is saved


def test_guidance_starts_from_the_states_of_the_call():
    """The part without a prompt is a text of its own: here the model's, from the seed, token by token."""
    model, ids = tiny_model(injection="concat", state_init="normal", num_loops=3).double(), random_ids(1, 5)
    asked = {"state_seed": 7, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(ids, guidance_scale=1.5, **asked)
    states = generation.SeededStates(model, 7)
    text = ids
    for _ in range(4):
        with torch.no_grad():
            with_prompt, without = (
                model(part, initial_state=states.of_inputs({"input_ids": part}), use_cache=False).logits[:, -1]
                for part in (text, text[:, ids.shape[1] - 1 :])
            )
        with_prompt, without = with_prompt.log_softmax(-1), without.log_softmax(-1)
        text = torch.cat([text, (1.5 * (with_prompt - without) + without).argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, text)


@pytest.mark.parametrize("beams", [1, 2])
def test_guidance_runs_its_own_passes_as_deep_as_the_call(beams):
    """Beside the same model with that depth as its config's, and each row beside itself alone."""
    model, ids = model_of("plain"), random_ids(2, 5)
    shallow = copy.deepcopy(model)
    shallow.config.num_loops = 2
    guided = {"guidance_scale": 1.5, "num_beams": beams}
    asked = greedy(model, ids, num_loops=2, **guided)
    assert torch.equal(asked, greedy(shallow, ids, **guided))
    apart = greedy(model, ids, num_loops=[2, 4], **guided)
    assert torch.equal(apart[0], asked[0])
    assert torch.equal(apart[1:], greedy(model, ids[1:], num_loops=4, **guided))
