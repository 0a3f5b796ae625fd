"""Early exit with what else generate does: samples, streams, processors, conversations, configs; what is refused."""

import copy
import math

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StaticCache,
    dynamic_module_utils,
)
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from modeling_looped import LoopedCache, LoopedForCausalLM, generation
from modeling_looped.depth_options import DEPTH_FIELDS

from .helpers import quick_and_slow, random_ids, tiny_model
from .naive_cache import NaiveDecoder, naive_generate
from .naive_exits import NaiveRule
from .test_early_exit import (
    LENGTH,
    LOOPS,
    NEW,
    SYSTEMS,
    exits_of,
    found,
    generate,
    model_of,
    naive_rows,
    over_ways,
    prompts,
    rule_for,
)


over_rules = pytest.mark.parametrize("name", ["logit_margin", "latent_diff"])


@pytest.fixture(scope="module", params=SYSTEMS)
def case(request):
    """A model, left-padded prompts with their mask and alone, and a rule."""
    model, (ids, mask, rows) = model_of(request.param), prompts()
    return model, ids, mask, rows, rule_for(model, "logit_margin", rows[0])


# What is refused


REFUSED = {
    "beam search": {"num_beams": 2},
    "assisted decoding": {"prompt_lookup_num_tokens": 2},
    "use_cache=False": {"use_cache": False},
    "output_hidden_states": {"output_hidden_states": True},
    "custom_generate=_sample": {"custom_generate": GenerationMixin._sample},
}


@pytest.mark.parametrize("mode", REFUSED)
@pytest.mark.parametrize("saved", [False, True], ids=["asked", "saved"])
def test_what_exits_do_not_go_with_is_refused(mode, saved):
    model, exits = model_of("plain"), {"exit_criterion": "kl", "exit_threshold": 0.1}
    arguments = {"max_new_tokens": 3, "return_dict_in_generate": True, **REFUSED[mode]}
    plain = model.generate(random_ids(1, 5), **arguments)
    for name, value in exits.items() if saved else ():
        setattr(model.generation_config, name, value)
    reason = f"exit_criterion='kl' goes with greedy .* and not with {mode}: leave one out, or pass exit_criterion=None"
    with pytest.raises(ValueError, match=reason):
        model.generate(random_ids(1, 5), **arguments, **({} if saved else exits))
    assert torch.equal(model.generate(random_ids(1, 5), exit_criterion=None, **arguments).sequences, plain.sequences)


OWN_LOOP = """
def generate(model, input_ids, **arguments):
    return input_ids
"""
LOOP_FOR_TRANSFORMERS = """
from transformers import GenerationMixin
def generate(model, **arguments):
    return GenerationMixin.generate(model, custom_generate=GenerationMixin._sample, **arguments)
"""


@pytest.mark.parametrize("fields", [{"exit_criterion": "kl"}, {"draft_loops": 1}, {"cache_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("saved", [False, True], ids=["asked", "saved"])
@pytest.mark.parametrize("code", [OWN_LOOP, LOOP_FOR_TRANSFORMERS], ids=["own", "for_transformers"])
def test_a_folder_with_a_loop_of_its_own_goes_at_full_depth(code, saved, fields, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate/generate.py").write_text(code)
    model, ids = model_of("plain"), random_ids(1, 5)
    for name, value in fields.items() if saved else ():
        setattr(model.generation_config, name, value)
    arguments = {"input_ids": ids, "max_new_tokens": 3, "do_sample": False, "trust_remote_code": True}
    with pytest.raises(ValueError, match=f"and not with custom_generate={tmp_path}: leave one out"):
        model.generate(custom_generate=str(tmp_path), **arguments, **({} if saved else fields))
    undone = dict.fromkeys(fields)
    expected = ids if code == OWN_LOOP else model.generate(ids, max_new_tokens=3, do_sample=False, **undone)
    assert torch.equal(model.generate(custom_generate=str(tmp_path), **arguments, **undone), expected)


@pytest.mark.parametrize("mode", [{"dola_layers": "low"}, {"penalty_alpha": 0.6, "top_k": 4}], ids=str)
def test_modes_that_transformers_loads_from_the_hub_refuse_exits(mode, monkeypatch):
    def loaded(self, repository, **arguments):
        return lambda model, **given: GenerationMixin.generate(model, custom_generate=GenerationMixin._sample, **given)

    monkeypatch.setattr(LoopedForCausalLM, "load_custom_generate", loaded)
    model, arguments = model_of("plain"), {"max_new_tokens": 3, "do_sample": False, "trust_remote_code": True, **mode}
    with pytest.raises(ValueError, match="exit_criterion=.* and not with custom_generate=_sample"):
        model.generate(random_ids(1, 5), exit_criterion="kl", **arguments)
    plain = model.generate(random_ids(1, 5), max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(random_ids(1, 5), **arguments), plain)


def test_nothing_exits_beside_an_assistant():
    model, assistant = model_of("plain"), model_of("plain", num_loops=2)
    model.generation_config.exit_criterion = "kl"
    reason = "exit_criterion='kl' goes with greedy .* and not with assisted decoding: leave"
    with pytest.raises(ValueError, match=reason):
        model.generate(random_ids(1, 5), assistant_model=assistant, max_new_tokens=3)


@pytest.mark.parametrize("asked", [{}, {"exit_criterion": None}, {"num_loops": 4}], ids=str)
def test_an_assistant_drafts_without_the_exits_that_it_was_saved_with(asked):
    model, assistant = model_of("plain"), model_of("plain", num_loops=2)
    assistant.generation_config.exit_criterion = "kl"
    arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(
        model.generate(random_ids(1, 5), assistant_model=assistant, **arguments, **asked),
        model.generate(random_ids(1, 5), **arguments),
    )


SEEDED = {"injection": "concat", "state_init": "normal"}
AFTER = {"exit_criterion": "max_prob", "exit_threshold": 0.05, "exit_selection": "after"}


@pytest.mark.parametrize("of_llama", [True, False], ids=["llama", "looped"])
@pytest.mark.parametrize("fields,asked", [({}, AFTER), (SEEDED, {"state_seed": 1})], ids=["after", "seeded"])
def test_an_assistant_of_any_kind_drafts_plainly(fields, asked, of_llama):
    """It gets neither the exits nor the first states of the model."""
    model, ids = tiny_model(vocab_size=97, num_loops=3, eos_token_id=None, **fields), random_ids(1, 5)
    if of_llama:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        assistant = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, **sizes)).eval()
    else:
        assistant = tiny_model(vocab_size=97, num_loops=2, hidden_size=64, eos_token_id=None, **fields)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **asked}
    assert torch.equal(model.generate(ids, assistant_model=assistant, **arguments), model.generate(ids, **arguments))


def test_a_coda_after_every_loop_has_no_cache():
    model, exits = model_of("plain", num_coda_layers=1), {"exit_criterion": "kl", "exit_selection": "after"}
    with pytest.raises(ValueError, match="runs the 1 layers of the coda after every loop.*pass use_cache=False"):
        model.generate(random_ids(1, 5), max_new_tokens=2, **exits)
    assert model.generate(random_ids(1, 5), max_new_tokens=2, use_cache=False, **exits).shape[1] > 5


# Samples


@over_ways
@pytest.mark.covering
@pytest.mark.some(2)
def test_samples_that_never_exit_are_those_of_plain_sampling(case, way):
    model, ids, mask, _, _ = case
    arguments = {"attention_mask": mask, "do_sample": True, "top_k": 20, "temperature": 1.5}
    torch.manual_seed(0)
    expected = model.generate(ids, max_new_tokens=NEW, **arguments)
    torch.manual_seed(0)
    out = generate(model, ids, NaiveRule("entropy", 0.0), way, **arguments)
    assert torch.equal(out.sequences, expected)
    assert not torch.equal(out.sequences, generate(model, ids, NaiveRule("entropy", 0.0), way, **arguments).sequences)


def test_both_ways_draw_the_same_samples_of_one_prompt(case):
    model, _, _, rows, rule = case
    results = []
    for way in ("apart", "together"):
        torch.manual_seed(0)
        results.append(found(generate(model, torch.tensor(rows[:1]), rule, way, do_sample=True), len(rows[0])))
    assert results[0] == results[1] and len(set(results[0][1][0][1:])) > 1


@over_ways
@pytest.mark.covering
def test_several_samples_of_a_prompt_keep_its_depth(case, way):
    """Depths that a row of its own would have; a threshold so sharp that samples are drawn from one token."""
    model, ids, mask, rows, rule = case
    depths = [6, 2, 3]
    out = generate(
        model,
        ids,
        rule,
        way,
        attention_mask=mask,
        num_loops=depths,
        do_sample=True,
        top_k=1,
        num_return_sequences=2,
    )
    tokens, loops = naive_rows(model, rule, rows, depths)
    assert found(out) == ([row for row in tokens for _ in "ab"], [row for row in loops for _ in "ab"])


# Streams and processors


class Collector(BaseStreamer):
    def __init__(self):
        self.events, self.ended = [], False

    def put(self, value):
        self.events.append(("tokens", value.tolist()))

    def put_loops(self, value):
        self.events.append(("loops", value.tolist()))

    def end(self):
        self.ended = True


@over_ways
@pytest.mark.covering
def test_streamer_is_told_loops_before_tokens(case, way):
    model, _, _, rows, rule = case
    streamer, prompt = Collector(), torch.tensor(rows[:1])
    tokens, loops = naive_generate(model, rule, rows[0], LOOPS, NEW)
    generate(model, prompt, rule, way, streamer=streamer)
    expected = [("tokens", prompt.tolist())]
    for token, loop in zip(tokens, loops):
        expected += [("loops", [loop]), ("tokens", [token])]
    assert streamer.ended and streamer.events == expected


class OddTokens(LogitsProcessor):
    """Not one that is known to treat every row by itself."""

    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 0, -math.inf)


# processors that see the padding of a row
PROCESSORS_OF_PADDING = {"no_repeat_ngram_size"}
if Version(transformers.__version__) < Version("5.23"):
    PROCESSORS_OF_PADDING.add("repetition_penalty")


AGAINST_REPEATING = {"repetition_penalty", "no_repeat_ngram_size"}  # change nothing where no token comes twice


def repeats_a_token(sequences: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether a new token stands before it in its row, padding left out."""
    length = mask.shape[1]
    rows = zip(sequences.tolist(), mask.tolist())
    said = [([token for token, held in zip(row, is_token) if held], row[length:]) for row, is_token in rows]
    return any(token in before + new[:i] for before, new in said for i, token in enumerate(new))


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 4, "eos_token_id": list(range(3, 60))},
        {"suppress_tokens": list(range(40))},
        {"bad_words_ids": [[i] for i in range(5, 50)]},
        {"logits_processor": [OddTokens()]},
        {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 7},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
@pytest.mark.covering
@pytest.mark.some(3)
def test_logits_processors(case, arguments):
    """Whichever way a row is decoded, and whatever rows are beside it."""
    model, ids, mask, rows, rule = case
    plain = generate(model, ids, rule, attention_mask=mask)
    batches = [generate(model, ids, rule, way, attention_mask=mask, **arguments) for way in ("apart", "together")]
    assert found(batches[0]) == found(batches[1])
    if repeats_a_token(plain.sequences, mask) or not arguments.keys() & AGAINST_REPEATING:
        assert batches[0].sequences.tolist() != plain.sequences.tolist()
    for i, row in enumerate(rows):
        if i > 0 and PROCESSORS_OF_PADDING & arguments.keys():
            break
        tokens, loops = found(generate(model, torch.tensor([row]), rule, **arguments), len(row))
        padding = [0] * (batches[0].token_loops.shape[1] - len(tokens[0]))
        assert (tokens[0] + padding, loops[0] + padding) == tuple(kind[i] for kind in found(batches[0]))


def test_scores_and_logits(case):
    """Those of the naive decoder; scores after the processors."""
    model, ids, mask, rows, rule = case
    arguments = {"output_scores": True, "output_logits": True, "suppress_tokens": [3, 4]}
    out = generate(model, ids, rule, attention_mask=mask, **arguments)
    assert len(out.scores) == len(out.logits) == NEW
    for i, row in enumerate(rows):
        decoder = NaiveDecoder(model)
        logits = decoder.run(row, LOOPS)
        for step, token in enumerate(out.sequences[i, LENGTH:].tolist()):
            expected = logits[-1].float()
            torch.testing.assert_close(out.logits[step][i], expected, rtol=1e-5, atol=1e-5)
            expected[[3, 4]] = -math.inf
            torch.testing.assert_close(out.scores[step][i], expected, rtol=1e-5, atol=1e-5)
            logits, _ = decoder.run_until(rule, token, LOOPS)


# Conversations


@over_ways
@pytest.mark.parametrize("cache", ["own", "returned", "static"])
@pytest.mark.parametrize("second", [LOOPS, 2])
@pytest.mark.parametrize("passed", ["all", "new"])
@pytest.mark.covering
def test_a_second_turn_goes_on_in_the_same_cache(case, way, cache, second, passed):
    """Also a shallower one, and with the new tokens alone: they are prompt, and none of them exits. What the first
    turn left is what its tokens had at their exits."""
    model, _, _, rows, rule = case
    prompt, more = torch.tensor(rows[:1]), random_ids(1, 3, seed=1)
    caches = {"own": DynamicCache(), "static": StaticCache(model.config, max_cache_len=40), "returned": None}
    first = generate(model, prompt, rule, way, past_key_values=caches[cache])
    text = torch.cat([first.sequences, more], dim=1)
    arguments = {"past_key_values": first.past_key_values, "attention_mask": torch.ones_like(text)}
    ids = text if passed == "all" else text[:, LENGTH + NEW - 1 :]
    out = generate(model, ids, rule, way, num_loops=second, **arguments)

    decoder = NaiveDecoder(model)
    decoder.run(rows[0], LOOPS)
    for token in first.sequences[0, LENGTH:-1].tolist():
        decoder.run_until(rule, token, LOOPS)
    logits = decoder.run(text[0, LENGTH + NEW - 1 :].tolist(), second)
    tokens, took = [], [second]
    for _ in range(NEW):
        tokens.append(int(logits[-1].argmax()))
        logits, count = decoder.run_until(rule, tokens[-1], second)
        took.append(count)
    assert found(out, ids.shape[1]) == ([tokens], [took[:NEW]])
    assert out.past_key_values.get_seq_length() == text.shape[1] + NEW - 1


def test_a_shallower_turn_leaves_its_last_loop_to_deeper_ones():
    model, prompt, rule = model_of("plain"), random_ids(1, 5), NaiveRule("max_prob", math.inf)
    cache, decoder = DynamicCache(config=model.config), NaiveDecoder(model)
    with torch.no_grad():
        model(prompt[:, :4], past_key_values=cache)
        out = generate(model, prompt, rule, past_key_values=cache, num_loops=2)
        following = model(out.sequences[:, -1:], past_key_values=cache).logits[0]
    *tokens, last = out.sequences[0].tolist()
    decoder.run(tokens[:4], LOOPS)
    decoder.run(tokens[4:], 2)
    torch.testing.assert_close(following, decoder.run([last], LOOPS), rtol=1e-9, atol=1e-9)


def test_the_end_of_a_row_is_part_of_the_next_prompt():
    """From its last token on, while another row goes on: as deep as prompts, and left to deeper loops."""
    model, ids, rule = model_of("plain"), random_ids(2, 5), NaiveRule("max_prob", math.inf)
    how = {"attention_mask": torch.ones_like(ids), "prompt_loops": 2}
    said, _ = found(generate(model, ids, rule, **how), 5)
    row, end = next((i, end) for i in (0, 1) for end in (1, 2, 3) if said[i][end] not in said[1 - i] + said[i][:end])
    out = generate(model, ids, rule, eos_token_id=said[row][end], **how)
    tokens = out.sequences[row].tolist()
    assert tokens[5:] == said[row][: end + 1] + [0] * (NEW - end - 1)
    decoder = NaiveDecoder(model)
    decoder.run(tokens[:5], 2)
    for token in tokens[5 : 5 + end]:
        decoder.run([token], LOOPS)
    decoder.run(tokens[5 + end : -1], 2)
    with torch.no_grad():
        following = model(out.sequences[:, -1:], past_key_values=out.past_key_values).logits[row]
    torch.testing.assert_close(following, decoder.run(tokens[-1:], LOOPS), rtol=1e-9, atol=1e-9)


@over_ways
@pytest.mark.parametrize("sharing", ["last", "cyclic-2"])
@pytest.mark.covering
def test_a_second_turn_with_shared_slots(case, way, sharing):
    model, _, _, rows, rule = case
    if model.config.shares_keys:
        pytest.skip("shares already")
    first = generate(model, torch.tensor(rows[:1]), rule, way, cache_sharing=sharing, num_loops=6)
    text = torch.cat([first.sequences, random_ids(1, 3, seed=1)], dim=1)
    out = generate(model, text, rule, way, past_key_values=first.past_key_values, num_loops=6)
    decoder = NaiveDecoder(model, sharing)
    decoder.run(rows[0], 6)
    for token in first.sequences[0, LENGTH:-1].tolist():
        decoder.run_until(rule, token, 6)
    logits = decoder.run(text[0, LENGTH + NEW - 1 :].tolist(), 6)
    for token, loops in zip(found(out, text.shape[1])[0][0], [*found(out, text.shape[1])[1][0][1:], None]):
        assert token == int(logits[-1].argmax())
        logits, count = decoder.run_until(rule, token, 6)
        assert loops in (count, None)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("new_tokens", [NEW, 100])
@pytest.mark.covering
@pytest.mark.some(1)
def test_keys_and_values_are_held_once(given, new_tokens, monkeypatch):
    """The cache that the prompt filled looks into the memory of continuous depth, also where that must grow."""
    model, (_, _, rows) = model_of("plain"), prompts()
    rule = rule_for(model, "logit_margin", rows[0])
    buffers, leave = [], LoopedCache.leave_buffers
    monkeypatch.setattr(LoopedCache, "leave_buffers", lambda cache: (buffers.append(cache.buffers), leave(cache)))
    prompt = random_ids(2, 40)
    arguments = {"past_key_values": LoopedCache(model.config)} if given else {}
    out = generate(model, prompt, rule, new_tokens=new_tokens, **arguments)
    ((found,), length) = buffers, 40 + new_tokens - 1
    storages = {buffer.untyped_storage().data_ptr() for buffer in found}
    for layer in out.past_key_values.layers:
        for tensor in (layer.keys, layer.values):
            assert tensor.shape[-2] == length and tensor.untyped_storage().data_ptr() in storages
    assert found[0].shape[-2] == length + 1  # what the generation could fill, at once or after growing

    assert not out.past_key_values.buffers  # which its layers leave behind when they grow
    naive = NaiveDecoder(model)
    naive.run(prompt[1].tolist(), LOOPS)
    for token in out.sequences[1, 40:-1].tolist():
        naive.run_until(rule, token, LOOPS)
    out.past_key_values.batch_select_indices(torch.tensor([1]))
    expected = model(out.sequences[1:, -1:], past_key_values=out.past_key_values).logits
    torch.testing.assert_close(naive.run(out.sequences[1, -1:].tolist(), LOOPS), expected[0])


ROPE = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 8},
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [3.0, 4.0, 5.0, 6.0],
    },
}


@pytest.mark.parametrize("kind", ROPE)
def test_kinds_of_rotary_positions(kind):
    """Also those that change as the sequence grows beyond the positions of training, here 8."""
    rope = {"rope_type": kind, "rope_theta": 100.0, **ROPE[kind]}
    model = tiny_model(loop_loss="per_loop", max_position_embeddings=8, rope_parameters=rope).double()
    prompt = random_ids(1, 5)
    plain = model.generate(prompt, max_new_tokens=12, do_sample=False)
    never = generate(model, prompt, NaiveRule("logit_margin", math.inf), new_tokens=12)
    assert len(set(plain[0].tolist())) > 5
    assert torch.equal(never.sequences, plain)


def test_angles_of_a_batch_stay_those_of_its_longest_row_when_that_has_ended():
    rope = {"rope_type": "longrope", "rope_theta": 100.0, **ROPE["longrope"]}
    model = tiny_model(loop_loss="per_loop", max_position_embeddings=8, rope_parameters=rope).double()
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :6] = 0
    call = {"attention_mask": mask, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    end = int(model.generate(ids, max_new_tokens=2, **call).sequences[1, -1])
    call |= {"max_new_tokens": 5, "eos_token_id": end, "pad_token_id": 0}
    plain = model.generate(ids, **call)
    never = model.generate(ids, exit_criterion="logit_margin", exit_threshold=1e9, **call)
    assert plain.sequences[1, 11:].eq(0).all() and not plain.sequences[0, 11:].eq(0).any()
    for one, other in zip(plain.logits, never.logits, strict=True):
        torch.testing.assert_close(one[0], other[0])


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("system", ["plain", "windows"])
@pytest.mark.parametrize("name", ["logit_margin", "latent_diff"])
@pytest.mark.covering
def test_a_prompt_as_embeddings(system, padded, name):
    """None of its tokens exits, whether transformers keeps the mask or, where it masks nothing, drops it."""
    model, (ids, mask, rows) = model_of(system), prompts()
    if not padded:
        mask, rows = torch.ones_like(mask), ids.tolist()
    rule = rule_for(model, name, rows[0])
    embeddings = model.get_input_embeddings()(ids)
    out = generate(model, None, rule, inputs_embeds=embeddings, attention_mask=mask)
    assert found(out, 0) == naive_rows(model, rule, rows)


@over_ways
@pytest.mark.parametrize("new_tokens", [1, 2])
@pytest.mark.covering
def test_few_tokens_of_short_prompts(case, way, new_tokens):
    model, _, _, rows, rule = case
    for prompt in rows:
        tokens, loops = naive_generate(model, rule, prompt, LOOPS, new_tokens)
        out = generate(model, torch.tensor([prompt]), rule, way, new_tokens)
        assert found(out, len(prompt)) == ([tokens], [loops])
        assert out.past_key_values.get_seq_length() == len(prompt) + new_tokens - 1


def test_more_positions_than_learned_are_refused():
    model = model_of("learned", max_position_embeddings=9)
    for way in ("apart", "together"):
        with pytest.raises(ValueError, match="10 tokens are more than the max_position_embeddings=9"):
            generate(model, random_ids(1, 5), NaiveRule("kl", 0.1), way)


# Generation configs, precision


@pytest.mark.parametrize("case", quick_and_slow(SYSTEMS, "windows"), indirect=True)
def test_fields_of_the_generation_config_are_saved_and_honoured(case, tmp_path):
    model, ids, mask, rows, rule = case
    rule = rule._replace(min_loops=2, interval=2)
    for name, value in {**exits_of(rule), "num_loops": 6, "prompt_loops": 3}.items():
        setattr(model.generation_config, name, value)
    try:
        expected = naive_rows(model, rule, rows, 6, prompt_loops=3)
        model.save_pretrained(tmp_path)
    finally:
        for name in (*exits_of(rule), "num_loops", "prompt_loops"):
            setattr(model.generation_config, name, None)
    for auto in (AutoModelForCausalLM, LoopedForCausalLM):
        loaded = auto.from_pretrained(tmp_path, dtype=torch.float64)
        loaded.eval()
        arguments = {"attention_mask": mask, "max_new_tokens": NEW, "return_dict_in_generate": True}
        assert found(loaded.generate(ids, **arguments)) == expected
        other = loaded.generate(ids, **arguments, exit_threshold=math.inf, num_loops=2, prompt_loops=2)  # a call wins
        assert (other.token_loops == 2).all()
        with pytest.raises(ValueError, match="min_loops=2 is more than the num_loops=1 .*exit_criterion=None"):
            loaded.generate(ids, **arguments, num_loops=1, prompt_loops=1)
        with pytest.raises(ValueError, match="draft_loops=1 gives .*: pass one of the two as None"):
            loaded.generate(ids, **arguments, draft_loops=1)
        plain = copy.deepcopy(loaded)
        for name in DEPTH_FIELDS:
            setattr(plain.generation_config, name, None)
        for depth, without_exits in ((1, {"num_loops": 1}), (6, {"draft_loops": 1}), (6, {})):
            full = plain.generate(ids, **arguments, num_loops=depth)
            out = loaded.generate(ids, **arguments, exit_criterion=None, **without_exits)
            assert torch.equal(out.sequences, full.sequences) and (out.token_loops == depth).all()


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, LoopedForCausalLM])
@pytest.mark.some(1)
def test_a_depth_that_loading_asks_for_wins_over_a_saved_one(auto, tmp_path):
    model, ids = model_of("plain"), random_ids(1, 4)
    model.generation_config.num_loops = 2
    model.save_pretrained(tmp_path / "saved")
    config = AutoConfig.from_pretrained(tmp_path / "saved", num_loops=6)
    for depth, asked in ((2, {}), (6, {"num_loops": 6}), (LOOPS, {"num_loops": LOOPS}), (6, {"config": config})):
        loaded = auto.from_pretrained(tmp_path / "saved", **asked)
        loaded.save_pretrained(tmp_path / "again")
        for model in (loaded, auto.from_pretrained(tmp_path / "again")):
            out = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True)
            assert (out.token_loops == depth).all()
        loaded.generation_config.num_loops = 3  # set after loading
        assert (loaded.generate(ids, max_new_tokens=3, return_dict_in_generate=True).token_loops == 3).all()
    config.save_pretrained(tmp_path / "saved")
    loaded = auto.from_pretrained(tmp_path / "saved")
    assert loaded.config.num_loops == 6 and loaded.generation_config.num_loops == 2  # nobody asked this time


@pytest.mark.parametrize("config_is_passed", [False, True])
def test_a_threshold_belongs_to_its_criterion(config_is_passed):
    """Another criterion does not take what was saved for the first; the same one does."""
    model, (ids, mask, rows) = model_of("plain"), prompts()
    saved = {"exit_criterion": "max_prob", "exit_threshold": 0.01, "min_loops": 2}
    for name, value in saved.items():
        setattr(model.generation_config, name, value)

    def loops(**arguments):
        if config_is_passed:
            config = GenerationConfig()
            for name, value in arguments.items():
                setattr(config, name, value)
            arguments = {"generation_config": config}
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, return_dict_in_generate=True, **arguments)
        return out.token_loops.tolist()

    exits_at_once = [[LOOPS] + [2] * (NEW - 1)] * len(rows)
    assert loops() == loops(exit_criterion="max_prob") == exits_at_once
    assert loops(exit_criterion="kl") == naive_rows(model, NaiveRule("kl", 1e-3, 2), rows)[1] != exits_at_once
    assert loops(exit_criterion="entropy", exit_threshold=math.inf) == exits_at_once
    with pytest.raises(ValueError, match="'entropy' has no published threshold: pass exit_threshold"):
        loops(exit_criterion="entropy")


def test_numbers_of_numpy():
    model, (ids, mask, _) = model_of("plain"), prompts()
    fields = {"exit_threshold": 0.5, "min_loops": 2, "exit_interval": 2, "prompt_loops": 2}
    rule = NaiveRule("max_prob", 0.5, 2, 2)
    expected = generate(model, ids, rule, attention_mask=mask, num_loops=[4, 2, 3], **fields)
    numpy = {name: np.float32(value) if value == 0.5 else np.int64(value) for name, value in fields.items()}
    out = generate(model, ids, rule, attention_mask=mask, num_loops=np.array([4, 2, 3]), **numpy)
    assert found(out) == found(expected)
    in_config = GenerationConfig(num_loops=np.array([4, 2, 3]), exit_criterion="max_prob", **numpy)
    arguments = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW}
    assert torch.equal(model.generate(ids, in_config, **arguments), out.sequences)
    drafted = {"draft_loops": np.int64(1), "draft_tokens": np.int64(2), "num_loops": np.int64(3)}
    assert torch.equal(model.generate(ids, **drafted), model.generate(ids, num_loops=3))


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_wait_are_announced_where_there_are_several(rows, monkeypatch):
    said = []
    monkeypatch.setattr(generation.logger, "warning_once", said.append)
    generate(model_of("plain"), random_ids(rows, 4), NaiveRule("kl", 0.1))
    assert not said
    generate(model_of("plain"), random_ids(rows, 4), NaiveRule("kl", 0.1), "together")
    assert ["With Unknown the rows of a batch wait" in text for text in said] == [True] * (rows - 1)


@over_ways
def test_bfloat16(way):
    """Runs, exits apart, and says what it did; its tokens are those of its own passes up to ties, so not compared."""
    model, (ids, mask, rows) = model_of("windows"), prompts()
    rule = rule_for(model, "gate", rows[0])
    out = generate(model.bfloat16(), ids, rule, way, attention_mask=mask)
    assert out.sequences.shape == (3, LENGTH + NEW) and out.token_loops.shape == (3, NEW)
    assert len(out.token_loops[:, 1:].unique()) > 1 and (out.token_loops[:, 0] == LOOPS).all()
