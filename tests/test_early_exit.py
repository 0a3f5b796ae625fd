"""Early exit in generation, in float64, against one token at a time by hand (tests/naive_cache.py) and, for all
families, against plain passes of every depth. Both ways of decoding: rows apart, and rows that wait for each other.
"""

import copy
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache, StoppingCriteria

from modeling_looped.continuous import ContinuousDecoder
from modeling_looped.exit_criteria import CRITERIA, ExitRule

from .helpers import random_ids, tiny_model
from .naive_cache import NaiveDecoder, naive_generate
from .naive_exits import EXITS_ABOVE, NaiveRule, Readings
from .strategies import VOCAB_SIZE, examples, looped_configs, random_model


SYSTEMS = {
    "plain": {"num_key_value_heads": 2},
    "windows": {
        "num_prelude_layers": 1,
        "num_coda_layers": 1,
        "window_pattern": "SSL",
        "sliding_window": 4,
        "injection": "add",
        "readout_norm": "final_raw",
        "inter_loop_norm": "shared",
    },
    "second_keys": {"key_value_interval": 2, "num_coda_layers": 1, "num_key_value_heads": 2, "injection": "add"},
    "learned": {"position_embedding": "learned", "value_embeddings": True, "readout_norm": "final_only"},
}
PADDING, LENGTH, NEW, LOOPS = [0, 6, 2], 7, 7, 4
over_systems = pytest.mark.parametrize("system", SYSTEMS)
over_criteria = pytest.mark.parametrize("name", CRITERIA)
over_ways = pytest.mark.parametrize("way", ["apart", "together"])


def model_of(system: str, **fields):
    fixed = {"num_loops": LOOPS, "exit_gate": "raw", "loop_loss": "per_loop", "eos_token_id": None, "pad_token_id": 0}
    model = tiny_model(**{**fixed, **SYSTEMS[system], **fields}).double()
    model.exit_gate.weight.data *= 0.1  # gates that are not all open or closed
    return model


def prompts() -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Left-padded prompts, their mask, and each by itself: longer than the window, one token, in between."""
    ids = random_ids(len(PADDING), LENGTH)
    mask = (torch.arange(LENGTH) >= torch.tensor(PADDING)[:, None]).long()
    return ids, mask, [row[pad:].tolist() for row, pad in zip(ids, PADDING)]


class Unknown(StoppingCriteria):
    """Stops nothing; but it might look at more than one row, so that the rows must stay together."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def exits_of(rule: NaiveRule) -> dict:
    """The arguments of generate for a rule."""
    fields = ("exit_criterion", "exit_threshold", "min_loops", "exit_interval")
    return dict(zip(fields, rule))


def generate(model, ids, rule: NaiveRule, way: str = "apart", new_tokens: int = NEW, **kwargs):
    given = {"do_sample": False, **exits_of(rule), **kwargs}
    stops = [Unknown()] if way == "together" else []
    return model.generate(
        ids, max_new_tokens=new_tokens, return_dict_in_generate=True, stopping_criteria=stops, **given
    )


class Never(NamedTuple):
    """Keeps the scores of the loops at which it is asked whether to exit, and does not."""

    rule: NaiveRule
    scores: list

    def stops(self, readings: Readings) -> bool:
        if self.rule.checks_at(len(readings.logits)):
            self.scores.append(self.rule.score(readings))
        return False


def threshold_between(scores: list[float], part: float) -> float | None:
    """Between two scores, so that rounding decides nothing; None if they are too close."""
    scores = sorted(score for score in scores if math.isfinite(score))
    gaps = [(a, b) for a, b in zip(scores, scores[1:]) if b - a > 1e-7 * max(1.0, abs(a))]
    return sum(gaps[int(part * len(gaps))]) / 2 if gaps else None


def rule_for(model, name: str, prompt: list[int], min_loops: int = 1, interval: int = 1, num_loops: int = LOOPS):
    """A rule under which tokens of this model exit at several loops."""
    if name == "argmax_stability":
        return NaiveRule(name, 1.0, min_loops, interval)
    spy = Never(NaiveRule(name, 0.0, min_loops, interval), [])
    naive_generate(model, spy, prompt, num_loops - 1, NEW)
    for part in (0.7, 0.5, 0.3):
        rule = NaiveRule(name, threshold_between(spy.scores, part), min_loops, interval)
        if len(loops_after_the_prompt([naive_generate(model, rule, prompt, num_loops, NEW)[1]])) > 1:
            break
    return rule


def naive_rows(model, rule, rows, num_loops=LOOPS, **kwargs):
    depths = num_loops if isinstance(num_loops, list) else [num_loops] * len(rows)
    results = [naive_generate(model, rule, row, depth, NEW, **kwargs) for row, depth in zip(rows, depths)]
    return [tokens for tokens, _ in results], [loops for _, loops in results]


def found(out, length: int = LENGTH):
    return out.sequences[:, length:].tolist(), out.token_loops.tolist()


def loops_after_the_prompt(loops: list[list[int]]) -> set[int]:
    return {loop for row in loops for loop in row[1:]}


# By hand


@over_ways
@over_systems
@over_criteria
@pytest.mark.covering
@pytest.mark.some(3)
def test_greedy_batch_of_left_padded_prompts(name, system, way):
    model, (ids, mask, rows) = model_of(system), prompts()
    rule = rule_for(model, name, rows[0])
    expected = naive_rows(model, rule, rows)
    assert len(loops_after_the_prompt(expected[1])) > 1  # else nothing is tested
    assert found(generate(model, ids, rule, way, attention_mask=mask)) == expected


@over_ways
@over_systems
@pytest.mark.parametrize("cache", ["static", "of_the_config", "static_of_the_config", "without_arguments"])
@pytest.mark.covering
@pytest.mark.some(2)
def test_caches(system, cache, way):
    model, (ids, mask, rows) = model_of(system), prompts()
    arguments = {
        "static": lambda: {"cache_implementation": "static"},
        "of_the_config": lambda: {"past_key_values": DynamicCache(config=model.config)},
        "static_of_the_config": lambda: {"past_key_values": StaticCache(model.config, max_cache_len=LENGTH + NEW)},
        "without_arguments": lambda: {"past_key_values": DynamicCache()},
    }[cache]
    for name in ("logit_margin", "latent_diff"):
        rule = rule_for(model, name, rows[0])
        out = generate(model, ids, rule, way, attention_mask=mask, **arguments())
        assert found(out) == naive_rows(model, rule, rows)


@over_ways
@over_systems
@pytest.mark.covering
@pytest.mark.some(2)
def test_eager_attention_in_single_precision(system, way):
    """In double transformers' eager attention makes padding not-a-number. The tokens are those of double precision."""
    model, (ids, mask, rows) = model_of(system), prompts()
    rule = rule_for(model, "logit_margin", rows[0])
    expected = naive_rows(model, rule, rows)
    model.float().set_attn_implementation("eager")
    assert found(generate(model, ids, rule, way, attention_mask=mask)) == expected


@over_ways
@over_systems
@pytest.mark.parametrize("num_loops", [3, 6, [6, 2, 4]], ids=str)
@pytest.mark.parametrize(("min_loops", "interval", "prompt_loops"), [(1, 2, None), (2, 1, 2), (2, 2, 1)])
@pytest.mark.covering
@pytest.mark.some(2)
def test_depths(system, way, num_loops, min_loops, interval, prompt_loops):
    """Shallower and deeper than trained and one depth per row; prompts that are shallower than what follows."""
    model, (ids, mask, rows) = model_of(system), prompts()
    for name in ("gate",) if num_loops == 3 else ("gate", "kl"):
        rule = rule_for(model, name, rows[0], min_loops, interval, num_loops if num_loops == 3 else 6)
        expected = naive_rows(model, rule, rows, num_loops, prompt_loops=prompt_loops)
        out = generate(model, ids, rule, way, attention_mask=mask, num_loops=num_loops, prompt_loops=prompt_loops)
        assert found(out) == expected
        assert len(loops_after_the_prompt(expected[1])) > 1


@over_ways
@pytest.mark.parametrize("system", [system for system in SYSTEMS if system != "second_keys"])
@pytest.mark.parametrize("sharing", ["last", "cyclic-2", "cyclic-3"])
@pytest.mark.parametrize(("num_loops", "prompt_loops"), [(6, None), (LOOPS, 1), ([6, 2, 4], None)], ids=str)
@pytest.mark.covering
def test_cache_sharing(system, way, sharing, num_loops, prompt_loops):
    """A slot holds what the last loop that used it left there; one that no loop used, what the last loop left."""
    model, (ids, mask, rows) = model_of(system), prompts()
    rule = rule_for(model, "logit_margin", rows[0])
    expected = naive_rows(model, rule, rows, num_loops, sharing=sharing, prompt_loops=prompt_loops)
    out = generate(
        model,
        ids,
        rule,
        way,
        attention_mask=mask,
        cache_sharing=sharing,
        num_loops=num_loops,
        prompt_loops=prompt_loops,
    )
    assert found(out) == expected
    assert len(loops_after_the_prompt(expected[1])) > 1
    assert {layer.get_seq_length() for layer in out.past_key_values.layers} == {LENGTH + NEW - 1}


@over_ways
@over_systems
@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.covering
def test_rows_end_apart(system, way, at):
    """The first row's token number `at` ends every row that says it, also as its first."""
    model, (ids, mask, rows) = model_of(system), prompts()
    rule = rule_for(model, "entropy", rows[0])
    eos = naive_generate(model, rule, rows[0], LOOPS, NEW)[0][at]
    tokens, loops = naive_rows(model, rule, rows, eos=eos)
    lengths = [len(row) for row in tokens]
    assert min(lengths) <= at + 1 < max(lengths)
    out = generate(model, ids, rule, way, attention_mask=mask, eos_token_id=eos)
    padded = [[row + [0] * (max(lengths) - len(row)) for row in kind] for kind in (tokens, loops)]
    assert found(out) == tuple(padded)


@pytest.mark.parametrize(
    "name",
    ["gate", *(name for name, criterion in CRITERIA.items() if criterion.remembers and not criterion.every_loop)],
)
@pytest.mark.some(2)
def test_rows_that_end_leave_the_memory_of_the_others_alone(name):
    """Where the next loop starts from another state than the criterion reads. Rows by themselves show the same."""
    model = model_of("plain", inter_loop_norm="own", loop_damping=True)
    ids, mask, rows = prompts()
    rule = NaiveRule(name, {"entropy_diff": 0.2, "kl": 1.0, "latent_diff": 1.0}.get(name, 0.5), 1, 1)
    first, _ = found(generate(model, torch.tensor([rows[0]]), rule), len(rows[0]))
    eos = first[0][2]
    alone = [found(generate(model, torch.tensor([row]), rule, eos_token_id=eos), len(row)) for row in rows]
    tokens, loops = found(generate(model, ids, rule, attention_mask=mask, eos_token_id=eos))
    lengths = [len(said[0]) for said, _ in alone]
    assert [(said[:n], took[:n]) for said, took, n in zip(tokens, loops, lengths)] == [(a[0], b[0]) for a, b in alone]
    assert lengths[0] < max(lengths) and len(loops_after_the_prompt(loops) - {0}) > 1


@over_systems
@over_criteria
@pytest.mark.covering
@pytest.mark.some(3)
def test_one_pass_stops_every_token_at_its_own_loop(name, system):
    """Without a prompt, all tokens of a text may exit: one pass equals token by token."""
    model, text = model_of(system), random_ids(2, 11)
    rule = rule_for(model, name, text[0].tolist())
    logits, loops = [], []
    for row in text.tolist():
        decoder = NaiveDecoder(model)
        parts = [decoder.run_until(rule, token, LOOPS) for token in row]
        logits.append(torch.cat([part for part, _ in parts]))
        loops.append([count for _, count in parts])
    assert len({loop for row in loops for loop in row}) > 1
    ours = ExitRule(rule.name, rule.threshold)
    with torch.no_grad():
        whole = model(text, exit_rule=ours)
        cache = DynamicCache(config=model.config)
        pieces = [model(piece, exit_rule=ours, past_key_values=cache) for piece in text.split([4, 1, 6], dim=1)]
    for out in (whole.logits, torch.cat([piece.logits for piece in pieces], dim=1)):
        torch.testing.assert_close(out, torch.stack(logits), rtol=1e-9, atol=1e-9)
    assert whole.token_loops.tolist() == loops
    assert torch.cat([piece.token_loops for piece in pieces], dim=1).tolist() == loops
    # with gradients, without a cache, from embeddings
    arguments = {"exit_rule": ours, "logits_to_keep": 1, "use_cache": False}
    text = {"input_ids": text} if model.config.value_embeddings else {"inputs_embeds": model.model.embed_tokens(text)}
    last = model(**text, **arguments)
    assert last.past_key_values is None
    torch.testing.assert_close(last.logits, whole.logits[:, -1:], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_two_tokens_before_a_coda_exit_as_one_by_one():
    """Also at learned positions, which are counted in the mask."""
    model, text = tiny_model(num_coda_layers=1, num_loops=LOOPS, position_embedding="learned"), random_ids(64, 2)
    rule = ExitRule("max_prob", 0.25)
    whole = model(text, attention_mask=torch.ones_like(text), exit_rule=rule)
    cache = DynamicCache(config=model.config)
    first, second = (model(part, cache=cache, exit_rule=rule) for part in text.split(1, dim=1))
    assert len(whole.token_loops.unique()) > 1
    assert torch.equal(whole.token_loops, torch.cat([first.token_loops, second.token_loops], 1))
    torch.testing.assert_close(whole.logits, torch.cat([first.logits, second.logits], 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("readout", ["final_only", "final_raw", "alpha"])
def test_a_token_is_read_out_as_after_the_loop_of_its_exit(readout):
    inter_loop_norm = "shared" if readout == "final_raw" else "none"
    model, text = tiny_model(readout_norm=readout, inter_loop_norm=inter_loop_norm), random_ids(2, 5)
    out = model(text, exit_rule=ExitRule("latent_diff", math.inf))
    torch.testing.assert_close(out.logits, model(text, num_loops=1).logits)


@pytest.mark.parametrize("name", ["max_prob", "latent_diff"])
def test_states_that_are_given_are_started_from(name):
    """Also where a check behind a coda runs the tokens one by one."""
    model = tiny_model(state_init="normal", injection="add", num_coda_layers=1, num_loops=LOOPS).double()
    text, never = random_ids(2, 5), 1.0 if name == "max_prob" else -math.inf
    state = model.sample_initial_state(2, 5, torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        wanted = model(text, initial_state=state).logits
        found = model(text, initial_state=state, exit_rule=ExitRule(name, never)).logits
        assert not torch.allclose(wanted, model(text).logits, atol=1e-3)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    for wrong, message in ((state[:, :1], r"tokens \(2, "), (state[..., :1], "state_size=32 numbers")):
        with pytest.raises(ValueError, match=f"initial_state has shape .* {message}"):
            model(text, initial_state=wrong, exit_rule=ExitRule(name, never))


@pytest.mark.parametrize("selection", ["stop", "after"])
def test_a_pass_with_exits_gives_what_is_asked_for(selection):
    model, text = tiny_model(num_coda_layers=1, num_loops=LOOPS), random_ids(2, 4)
    rule = ExitRule("max_prob", 0.5, selection=selection)
    asked = {"output_logits": False, "use_cache": False}
    out = model(text, exit_rule=rule, **asked)
    assert out.logits is None and out.token_loops.shape == (2, 4)
    if selection == "stop":  # token by token
        with pytest.raises(ValueError, match="does not go with output_hidden_states"):
            model(text, exit_rule=rule, output_hidden_states=True)
    for refused in ({"labels": text}, {"shift_labels": text}, {"backprop_loops": 1}, {"output_loop_logits": True}):
        with pytest.raises(ValueError, match=f"does not go with {next(iter(refused))}: leave one out"):
            model(text, exit_rule=rule, **refused)
    with pytest.raises(ValueError, match="exit_threshold=-0.5 is out of range"):
        model(text, exit_rule=ExitRule("max_prob", -0.5, selection=selection))
    with pytest.raises(TypeError, match="exit_rule='kl': make one of logit_margin, .*ExitRule"):
        model(text, exit_rule="kl")
    with pytest.raises(ValueError, match="exit_criterion='confidence' is not known: choose one of logit_margin, "):
        ExitRule("confidence", 0.5)


@pytest.mark.parametrize("of_loops", [False, True])
def test_tokens_do_not_exit_where_a_pass_computes_again(of_loops):
    model, text, rule = tiny_model(num_loops=LOOPS).train(), random_ids(2, 4), ExitRule("max_prob", 0.5)
    if of_loops:
        model.model.checkpoints_loops = True
    else:
        model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="exit_rule keeps in a cache .* turn it off, or call .* torch.no_grad"):
        model(text, exit_rule=rule)
    with torch.no_grad():
        assert model(text, exit_rule=rule).token_loops.shape == (2, 4)
    assert model.eval()(text, exit_rule=rule).token_loops.shape == (2, 4)


def test_checks_behind_a_coda_need_a_cache_that_can_be_cropped():
    model, text = model_of("windows"), random_ids(1, 3)
    for length in (1, 3):
        with pytest.raises(ValueError, match="exit_rule .* does not go with a StaticCache"):
            cache = StaticCache(model.config, max_cache_len=4)
            model(text[:, :length], exit_rule=ExitRule("max_prob", 0.5), past_key_values=cache)


# All families: by plain passes


@torch.no_grad()
def by_passes(model, rule, prompt: list[int], num_loops: int, new_tokens: int):
    """Tokens, their loops and their logits. Every depth is a pass of its own over a copy of the cache."""
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor([prompt]), past_key_values=cache, num_loops=num_loops).logits[0, -1]
    tokens, took, loops, kept = [], [], num_loops, []
    while True:
        tokens.append(int(logits.float().argmax()))
        took.append(loops)
        kept.append(logits)
        if len(tokens) == new_tokens:
            return tokens, took, torch.stack(kept)
        readings, token, before = Readings([], [], []), torch.tensor([[tokens[-1]]]), cache
        for loops in range(1, num_loops + 1):
            cache = copy.deepcopy(before)
            out = model(token, past_key_values=cache, num_loops=loops, output_loop_hidden_states=True)
            logits, state = out.logits[0, -1], out.loop_hidden_states[-1][0, -1]
            readings.logits.append(logits)
            readings.states.append(state)
            readings.gates.append(0.0 if model.exit_gate is None else float(model.gate(state)))
            if rule.stops(readings):
                break


@examples(15)
@given(
    st.data(),
    looped_configs(residual_depth="trained", num_loops=4, eos_token_id=None, pad_token_id=0),
    st.one_of(st.integers(3, 6).map(lambda depth: [depth] * 3), st.lists(st.integers(2, 6), min_size=3, max_size=3)),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([{}, {"cache_implementation": "static"}]),
)
def test_any_model_exits_where_plain_passes_would(data, config, num_loops, min_loops, interval, cache):
    """Tokens, loops, and logits: those of a run of that depth on the same cache. Batches change no row."""
    model, new = random_model(config), 5
    ids, padding = random_ids(3, 6, VOCAB_SIZE), data.draw(st.permutations([0, 2, 5]))
    mask = (torch.arange(6) >= torch.tensor(padding)[:, None]).long()
    rows = [row[pad:].tolist() for row, pad in zip(ids, padding)]
    name = data.draw(st.sampled_from([name for name in CRITERIA if name != "gate" or config.exit_gate != "none"]))
    threshold = 1.0
    if name != "argmax_stability":
        spy = Never(NaiveRule(name, 0.0, min_loops, interval), [])
        by_passes(model, spy, rows[0], num_loops[0], 3)
        threshold = threshold_between(spy.scores, data.draw(st.sampled_from([0.3, 0.6])))
        assume(threshold is not None)
    rule = NaiveRule(name, threshold, min_loops, interval)
    expected = [by_passes(model, rule, row, depth, new) for row, depth in zip(rows, num_loops)]
    arguments = {"attention_mask": mask, "num_loops": num_loops, "output_logits": True, **cache}
    for way in ("apart", "together"):
        out = generate(model, ids, rule, way, new, **arguments)
        assert out.sequences[:, 6:].tolist() == [tokens for tokens, _, _ in expected], way
        assert out.token_loops.tolist() == [loops for _, loops, _ in expected], way
        logits = torch.stack([logits for _, _, logits in expected], dim=1).float()  # as transformers gives them
        torch.testing.assert_close(torch.stack(out.logits), logits, rtol=1e-5, atol=1e-5)


@examples(15)
@given(
    st.data(),
    looped_configs(residual_depth="trained", eos_token_id=None, pad_token_id=0),
    st.sampled_from(["apart", "together"]),
)
def test_never_is_full_depth_and_always_is_min_loops(data, config, way):
    policies = [] if config.shares_keys else ["last", "cyclic-2"]
    cache = data.draw(st.sampled_from(["dynamic", "static", *policies]))
    model, ids = random_model(config), random_ids(2, 5, VOCAB_SIZE)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    arguments = {"attention_mask": mask}
    arguments |= {"cache_implementation": "static"} if cache == "static" else {}
    arguments |= {"cache_sharing": cache} if cache not in ("static", "dynamic") else {}
    name = data.draw(st.sampled_from([name for name in CRITERIA if name != "gate" or config.exit_gate != "none"]))
    num_loops = data.draw(st.integers(1, config.num_loops + 2))
    min_loops = data.draw(st.integers(1, num_loops))
    always, never = (-math.inf, math.inf) if name in EXITS_ABOVE else (math.inf, -math.inf)

    def plain(loops):
        return model.generate(ids, max_new_tokens=5, do_sample=False, num_loops=loops, **arguments)

    out = generate(model, ids, NaiveRule(name, never), way, 5, num_loops=num_loops, **arguments)
    assert torch.equal(out.sequences, plain(num_loops)) and (out.token_loops == num_loops).all()
    rule = NaiveRule(name, always, min_loops)
    arguments["prompt_loops"] = min_loops
    out = generate(model, ids, rule, way, 5, num_loops=num_loops, **arguments)
    del arguments["prompt_loops"]
    assert torch.equal(out.sequences, plain(min_loops)) and (out.token_loops == min_loops).all()


def test_both_ways_are_taken(monkeypatch):
    """What `way` says above: whether rows are seen at different tokens."""
    model, (ids, mask, rows), apart = model_of("plain"), prompts(), []
    new_tokens = ContinuousDecoder.new_tokens
    monkeypatch.setattr(
        ContinuousDecoder,
        "new_tokens",
        lambda self: apart.append(len(set(self.selector.lengths)) > 1) or new_tokens(self),
    )
    for way in ("together", "apart"):
        assert not any(apart)
        generate(model, ids, rule_for(model, "logit_margin", rows[0]), way, attention_mask=mask)
    assert any(apart)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("coda", [0, 1])
@pytest.mark.parametrize("name", ["max_prob", "cosine", "latent_diff"])
def test_packed_documents_do_not_see_each_other(name, coda, size):
    """As in a pass without exits: they are found by their positions, where neither mask nor cache is given."""
    model, text = tiny_model(num_coda_layers=coda, num_loops=LOOPS).double(), random_ids(2, 10)
    positions = torch.arange(10).remainder(size).expand(2, -1)
    rule = ExitRule(name, 1.0 if name == "max_prob" else 0.0)
    with torch.no_grad():
        if coda and name == "max_prob":  # token by token, on a cache
            with pytest.raises(ValueError, match="does not go with position_ids of packed documents"):
                model(text, position_ids=positions, exit_rule=rule)
            return
        packed = model(text, position_ids=positions, exit_rule=rule)
        alone = [model(part, exit_rule=rule) for part in text.split(size, dim=1)]
    torch.testing.assert_close(packed.logits, torch.cat([each.logits for each in alone], 1), rtol=1e-9, atol=1e-9)
    assert torch.equal(packed.token_loops, torch.cat([each.token_loops for each in alone], 1))


def test_a_model_on_several_devices_is_refused():
    model = tiny_model()
    vars(model)["hf_device_map"] = {"model": 0, "lm_head": 1}
    with pytest.raises(ValueError, match="does not go with layers on several devices"):
        model(random_ids(1, 3), exit_rule=ExitRule("kl"))
    with pytest.raises(ValueError, match="draft_loops=1 goes with .* and not with layers on several devices"):
        model.generate(random_ids(1, 3), max_new_tokens=3, draft_loops=1)
    vars(model)["hf_device_map"] = {"model": 0, "lm_head": "cpu"}  # offloaded
    assert model(random_ids(1, 3), exit_rule=ExitRule("kl")).token_loops.shape == (1, 3)


def test_a_window_that_records_goes_on_recording():
    """So that tokens can be taken back after a pass with exits too, as the caller has asked."""
    model = tiny_model(window_pattern="SL", sliding_window=4, num_loops=2)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(random_ids(1, 6), cache=cache, exit_rule=ExitRule("latent_diff", 0.0))
    cache.crop(-2)
    assert cache.get_seq_length() == 4  # of 6


@pytest.mark.parametrize("how", [{"exit_criterion": "max_prob", "exit_threshold": 0.5}, {"draft_loops": 1}], ids=str)
@pytest.mark.parametrize("ends", ["at the limit", "with eos"])
def test_nothing_follows_a_prompt_that_fills_a_static_window(how, ends):
    model, ids = tiny_model(window_pattern="SL", sliding_window=3), random_ids(2, 5)[:1]
    settings = {"do_sample": False, "cache_implementation": "static", "return_dict_in_generate": True}
    first = model.generate(ids, max_new_tokens=1, do_sample=False)
    stop = (
        {"max_new_tokens": 1} if ends == "at the limit" else {"eos_token_id": int(first[0, -1]), "max_new_tokens": 4}
    )
    assert torch.equal(model.generate(ids, **settings, **how, **stop).sequences, first)
