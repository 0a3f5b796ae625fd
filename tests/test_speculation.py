"""Self-speculation: what full depth would say, from less work; and the warm start."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    QuantizedCache,
    StaticCache,
)

from modeling_looped import LoopedCache, speculation
from modeling_looped.proposals import FEWEST_RECORDS, MOST_RECORDS, SURE, PassSeconds, Plan, Planner, ProbeReading
from modeling_looped.speculation import Pipeline

from .helpers import LIKE_GEMMA2, LIKE_OLMO2, SECTIONS, quick_and_slow, random_ids, shake, tiny_model
from .strategies import examples, looped_configs, random_model
from .test_generation import Collector


SYSTEMS = {
    "plain": {},
    "prelude_coda_grouped": {**SECTIONS, "num_key_value_heads": 2, "injection": "add"},
    "windows": {**SECTIONS, "window_pattern": "SSL", "sliding_window": 4},
    "first_keys": {**SECTIONS, "num_key_value_loops": 1, "injection": "add"},
    "second_keys": {"key_value_interval": 2, "num_key_value_heads": 2},
    "latent_learned": {"kv_latent_size": 6, "position_embedding": "learned", "readout_norm": "final_only"},
    "flt": {"preset": "flt"},
    "huginn": {"preset": "huginn", **SECTIONS},
    "parcae": {"preset": "parcae", **SECTIONS},
    "ouro": {"preset": "ouro"},
    "value_embeddings": {**SECTIONS, "value_embeddings": True, "inter_loop_norm": "own", "loop_damping": True},
    "gated_change": {"loop_change_gate": True, "injection": "add"},
    "like_olmo2": LIKE_OLMO2,
    "like_gemma2": LIKE_GEMMA2,
}
over_systems = pytest.mark.parametrize("system", SYSTEMS)
NEW = 14


def model_of(system: str, **fields):
    """In float64, where no two tokens tie, and without an end of sequence."""
    fields = {"eos_token_id": None, "pad_token_id": 0, "num_loops": 4, **SYSTEMS[system], **fields}
    return tiny_model(**fields).double()


def idle_model(**fields):
    """A model whose core changes nothing: every draft is right."""
    model = model_of("prelude_coda_grouped", **{"injection": "none", **fields})
    for block in model.model.core:
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    return model


def greedy(model, ids, **kwargs):
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


def left_padded(batch_size: int, length: int) -> dict:
    """Prompts of different lengths, one of them a single token."""
    padding = torch.tensor([0, length - 1, length // 2, 1])[:batch_size, None]
    mask = (torch.arange(length) >= padding).long()
    return {"inputs": random_ids(batch_size, length) * mask, "attention_mask": mask}


@pytest.fixture
def passes(monkeypatch):
    """The plan of every pass, and the tokens in flight of each row."""
    seen, tick = [], Pipeline.tick

    def watched(self):
        plan = self.planner.plan
        tick(self)
        seen.append((plan, [len(tokens) for tokens in self.of_row]))

    monkeypatch.setattr(Pipeline, "tick", watched)
    return seen


def all_that_is_allowed(planner: Planner, rows: int) -> Plan:
    """Two proposals, and as many tokens in flight as there may be, however few of them are right."""
    first = planner.num_loops // 2 if planner.first is None else planner.first
    return Plan(first, first + 1 if first + 1 < planner.num_loops else None, planner.most_ahead)


@pytest.fixture
def optimist(monkeypatch):
    monkeypatch.setattr(Planner, "choose", all_that_is_allowed)


# Greedy: the tokens of full depth


@over_systems
@pytest.mark.parametrize("draft_loops", [1, 2, 3, "auto"])
@pytest.mark.covering
@pytest.mark.some(4)
def test_greedy_tokens_are_those_of_full_depth(system, draft_loops, optimist):
    model, prompts = model_of(system), left_padded(3, 7)
    full = model.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    for draft_tokens in (1, 2, None):
        arguments = {"draft_loops": draft_loops, "draft_tokens": draft_tokens}
        assert torch.equal(model.generate(**prompts, max_new_tokens=NEW, do_sample=False, **arguments), full)


@pytest.mark.parametrize("fields", [{"key_value_interval": 2}, {"num_key_value_loops": 1}], ids=str)
@pytest.mark.parametrize("draft_loops", [1, 2])
@pytest.mark.some(2)
def test_tokens_in_flight_whose_loops_share_keys(fields, draft_loops, optimist):
    """At one stored loop, of which some write keys and some do not: none may be written for another."""
    model = tiny_model(num_loops=4, **fields).double()
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for seed in range(6):
        shake(model, seed=seed)
        ids = random_ids(1, 6, seed=seed)
        drafted = model.generate(ids, draft_loops=draft_loops, **settings)
        assert torch.equal(drafted, model.generate(ids, **settings)), seed


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("num_loops", [2, 6])
@pytest.mark.covering
@pytest.mark.some(1)
def test_other_depths_than_the_configured(num_loops, attention, optimist):
    for system in ("plain", "windows", "latent_learned"):
        model, prompts = model_of(system), left_padded(2, 7)
        model.set_attn_implementation(attention)
        arguments = {**prompts, "max_new_tokens": NEW, "do_sample": False, "num_loops": num_loops}
        assert torch.equal(model.generate(**arguments, draft_loops=1), model.generate(**arguments))


def test_padding_on_any_side(optimist):
    model, ids = model_of("windows"), random_ids(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 6:] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": NEW}
    assert torch.equal(greedy(model, ids, draft_loops=2, **arguments), greedy(model, ids, **arguments))


@examples(25)
@given(config=looped_configs(residual_depth="trained", num_loops=3), data=st.data())
def test_greedy_over_random_configs(config, data):
    model = random_model(config)
    batch_size, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    padding = torch.tensor(data.draw(st.lists(st.integers(0, length - 1), min_size=batch_size, max_size=batch_size)))
    num_loops = data.draw(st.integers(2, config.num_loops + 2))
    mask = (torch.arange(length) >= padding[:, None]).long()
    arguments = {
        "attention_mask": mask,
        "num_loops": num_loops,
        "max_new_tokens": data.draw(st.integers(1, 9)),
        "eos_token_id": data.draw(st.sampled_from([None, list(range(3, 12))])),
        "pad_token_id": 0,
    }
    ids = random_ids(batch_size, length, config.vocab_size) * mask
    draft_loops = data.draw(st.sampled_from(["auto", *range(1, num_loops)]))
    drafting = {"draft_loops": draft_loops, "draft_tokens": data.draw(st.sampled_from([None, *range(1, 7)]))}
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans(), label="optimist"):
            patch.setattr(Planner, "choose", all_that_is_allowed)
        found = greedy(model, ids, **arguments, **drafting)
    assert torch.equal(found, greedy(model, ids, **arguments))


@pytest.mark.parametrize("system", quick_and_slow(["prelude_coda_grouped", "windows", "huginn"], "windows"))
def test_rows_end_at_different_times(system, optimist):
    model, prompts = model_of(system), left_padded(4, 6)
    free = model.generate(**prompts, max_new_tokens=20, do_sample=False)[:, 6:]
    ends = {int(free[0, 3]), int(free[1, 8]), int(free[2, 1])}  # in the middle of a draft, and at its edges
    arguments = {**prompts, "max_new_tokens": 20, "do_sample": False, "eos_token_id": sorted(ends)}
    full = model.generate(**arguments)
    for draft_tokens in (1, 3, 5):
        out = model.generate(**arguments, draft_loops=3, draft_tokens=draft_tokens, return_dict_in_generate=True)
        assert torch.equal(out.sequences, full)
        lengths = [next((i + 1 for i, token in enumerate(row) if int(token) in ends), len(row)) for row in full[:, 6:]]
        assert len(set(lengths)) > 1
        expected = [[4] * length + [0] * (full.shape[1] - 6 - length) for length in lengths]
        assert out.token_loops.tolist() == expected


@pytest.mark.parametrize("new_tokens", quick_and_slow(range(1, 8), 1, 2, 7))
def test_lengths_are_kept(new_tokens, optimist):
    ids = random_ids(2, 5)
    for model in (model_of("plain"), idle_model()):
        tokens = greedy(model, ids, max_new_tokens=new_tokens, draft_loops=2)
        assert torch.equal(tokens, greedy(model, ids, max_new_tokens=new_tokens))
        assert torch.equal(greedy(model, ids, max_new_tokens=None, max_length=5 + new_tokens, draft_loops=2), tokens)


@pytest.mark.parametrize("position_embedding", ["learned", "rope"])
@pytest.mark.some(1)
def test_up_to_the_last_learned_position(position_embedding, optimist):
    """The last token that is said has no position of its own."""
    model = idle_model(position_embedding=position_embedding, max_position_embeddings=16)
    prompts = left_padded(3, 6)
    for new_tokens in (9, 10, 11):
        arguments = {**prompts, "max_new_tokens": new_tokens, "do_sample": False}
        found = model.generate(**arguments, draft_loops=1, draft_tokens=6)
        assert torch.equal(found, model.generate(**arguments))
    if position_embedding == "learned":
        for drafting in ({}, {"draft_loops": 1}):
            with pytest.raises(ValueError, match="17 tokens are more than the max_position_embeddings=16"):
                model.generate(**prompts, max_new_tokens=12, do_sample=False, **drafting)


def test_scores_and_logits_are_those_of_full_depth(optimist):
    model, prompts = model_of("huginn"), left_padded(3, 6)
    arguments = {**prompts, "max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 3}
    arguments |= {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    full, found = model.generate(**arguments), model.generate(**arguments, draft_loops=3)
    assert torch.equal(found.sequences, full.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(found, name), getattr(full, name), rtol=1e-5, atol=1e-5)


def test_bfloat16_says_what_full_depth_says_but_for_ties(optimist):
    """Processors round bfloat16 in their own ways: where the tokens part, full depth has no clear favourite."""
    model, ids = idle_model().bfloat16(), random_ids(2, 6)
    for drafted, full in zip(greedy(model, ids, draft_loops=1), greedy(model, ids), strict=True):
        parts = (drafted != full).nonzero().flatten().tolist()
        if parts:
            logits = model(full[None, : parts[0]]).logits[0, -1]
            step = torch.finfo(torch.bfloat16).eps * logits.max()
            assert logits[drafted[parts[0]]] >= logits.max() - 2 * step


# What it takes and what it reports


def work_of(model, **arguments):
    """Passes through the core after the prompt, and the tokens that they ran in sum."""
    shapes = []
    hook = model.model.core[0].register_forward_hook(lambda block, inputs, output: shapes.append(inputs[0].shape[:2]))
    out = model.generate(**arguments, do_sample=False, return_dict_in_generate=True)
    hook.remove()
    assert shapes[0][1] == arguments["inputs"].shape[1]
    decoding = shapes[model.config.num_loops :]
    return out, len(decoding), sum(rows * length for rows, length in decoding)


@pytest.mark.parametrize("draft_tokens", [1, 2, None])
@pytest.mark.parametrize("draft_loops", [1, 2])
@pytest.mark.some(3)
def test_right_drafts_save_passes(draft_tokens, draft_loops, optimist):
    """Tokens run as many loops as in plain decoding, but the next one starts before the last one is done."""
    model, ids, new_tokens = idle_model(), random_ids(2, 6), 10
    arguments = {"inputs": ids, "max_new_tokens": new_tokens, "draft_loops": draft_loops, "draft_tokens": draft_tokens}
    out, passes, token_loops = work_of(model, **arguments)
    assert out.acceptance_rate == 1.0
    assert torch.equal(out.sequences, greedy(model, ids, max_new_tokens=new_tokens))
    assert token_loops == 2 * 4 * (new_tokens - 1)  # the prompt says the first token
    starts = [0]
    for i in range(1, new_tokens - 1):
        done = 0 if draft_tokens is None or i <= draft_tokens else starts[i - draft_tokens - 1] + 4
        starts.append(max(starts[-1] + draft_loops, done))
    assert passes == starts[-1] + 4
    assert out.passes_per_token == passes / (new_tokens - 1) < 4


@torch.no_grad()
def by_hand(model, sequence, start: int, plan: Plan):
    """Of one row: the passes until its last token has run, drafts that were compared, and those that were right."""
    passes, compared, right = 0, 0, 0
    for place in range(start, sequence.shape[1] - 1):  # of tokens whose successor is drafted, but for the last one
        cache, last = model(sequence[:, : place - 1]).past_key_values, sequence[:, place - 1 : place]
        said = {}
        for loops in plan[:2]:
            past = copy.deepcopy(cache)
            said[loops] = model(last, past_key_values=past, num_loops=loops).logits[0, -1].topk(2)
        true, first = int(sequence[0, place]), said[plan.first]
        is_sure = (first.values[0] - first.values[1]) >= SURE
        draft, again = int(first.indices[0]), int(said[plan.second].indices[0])
        final = draft if is_sure else again
        compared, right = compared + 1, right + (final == true)
        passes += 4 if final != true else plan.first if draft == final else plan.second
    return passes + 4, compared, right


@pytest.mark.parametrize("system", ["plain", "gated_change", "ouro", "flt"])
@pytest.mark.parametrize("plan", [Plan(1, 2, 3), Plan(1, 3, 3), Plan(2, 3, 3)], ids=str)
@pytest.mark.covering
@pytest.mark.some(2)
def test_passes_and_acceptance_are_those_counted_by_hand(system, plan, monkeypatch):
    """The next token starts after the first draft if it is right, after the second if that one is, or after all."""
    monkeypatch.setattr(Planner, "choose", lambda planner, rows: plan)
    model, ids = model_of(system), random_ids(1, 6)
    model.lm_head.weight.data.mul_(8)  # some drafts are sure, and some are not
    chosen = Planner.__init__

    def starts_with(self, *arguments):
        chosen(self, *arguments)
        self.plan = plan

    monkeypatch.setattr(Planner, "__init__", starts_with)
    out, passes, _ = work_of(model, inputs=ids, max_new_tokens=24, draft_loops=plan.first)
    expected, compared, right = by_hand(model, out.sequences, 7, plan)
    assert passes == expected
    assert out.acceptance_rate == right / compared


def test_no_acceptance_rate_without_drafts():
    out = greedy(model_of("plain"), random_ids(1, 4), max_new_tokens=1, draft_loops=1, return_dict_in_generate=True)
    assert out.acceptance_rate is None


class Switch(Collector):
    """Lets the core idle from a certain token on."""

    def __init__(self, model, at: int):
        super().__init__()
        self.model, self.at = model, at

    def put(self, value):
        super().put(value)
        if len(self.tokens) == self.at:
            for block in self.model.model.core:
                block.self_attn.o_proj.weight.data.zero_()
                block.mlp.down_proj.weight.data.zero_()


def test_falls_back_where_drafts_are_wrong_and_says_so(passes, monkeypatch):
    """Later loops contradict the first; from the 40th token on they agree with it."""
    monkeypatch.setattr(speculation, "PROBE_EVERY", 4)
    monkeypatch.setattr(PassSeconds, "line", lambda self: (1.0, 0.6))
    said = []
    monkeypatch.setattr(speculation.logger, "warning_once", said.append)
    model = model_of("prelude_coda_grouped", injection="none", max_position_embeddings=256)
    switch, ids = Switch(model, at=40), random_ids(1, 6)
    out = greedy(model, ids, draft_loops=1, max_new_tokens=160, streamer=switch, return_dict_in_generate=True)
    plans = [plan for plan, _ in passes]
    given_up = plans.index(None)
    assert given_up < 4 * (FEWEST_RECORDS + 2)
    assert set(plans[given_up : given_up + 80]) == {None}
    assert None not in plans[-40:]  # drafts again
    assert max(count for _, [count] in passes[given_up + 8 : given_up + 80]) <= 1
    assert len(said) == 1 and "draft_loops=1 does not pay here" in said[0]
    assert out.stopped_drafting


def test_no_plan_is_made_for_rows_that_have_ended(monkeypatch):
    said = []
    monkeypatch.setattr(speculation.logger, "info", said.append)
    monkeypatch.setattr(speculation.Planner, "choose", lambda self, rows: None)  # drafts never pay
    model = model_of("prelude_coda_grouped", max_position_embeddings=512)
    for new_tokens in (5, 8, 11, 40):  # the last token of a row is read with the plan, or beside it
        greedy(model, random_ids(2, 6), draft_loops=1, max_new_tokens=new_tokens)
    assert said and all("with 2 rows at work a pass takes" in sentence for sentence in said)


class Coin:
    """Readings of a token, drawn: right with a probability that grows with the loop."""

    def __init__(self, num_loops: int):
        self.generator, self.num_loops = torch.Generator().manual_seed(0), num_loops

    def readings(self) -> list[ProbeReading]:
        right = torch.rand(2, self.num_loops - 1, generator=self.generator)
        chances = torch.linspace(0.5, 0.9, self.num_loops - 1)
        return [ProbeReading(bool(a), bool(b)) for a, b in zip(right[0] < chances, right[1] < 0.4)]


@pytest.mark.parametrize("first,second", [(1, None), (2, 4), (3, 5)])
def test_the_closed_form_is_what_a_pipeline_would_take(first, second):
    """Passes and loops per token, in the mean of measured readings: counted along a row that draws from them."""
    num_loops, coin = 7, Coin(7)
    planner = Planner(num_loops, None, num_loops - 1, readout_cost=0.0)
    readings = [coin.readings() for _ in range(MOST_RECORDS)]
    for each in readings:
        planner.records.append(each)
    plan = Plan(first, second, num_loops - 1)
    passes = loops = 0
    for each in readings:
        early, late = each[first - 1], None if second is None else each[second - 1]
        changes = late is not None and not early.is_sure and late.is_right != early.is_right
        is_right = late.is_right if late is not None and not early.is_sure else early.is_right
        starts = num_loops if not is_right else second if changes else first
        passes, loops = passes + starts, loops + num_loops
        followers = range(first, starts, first)  # began before the right one, in vain
        loops += sum(starts - began for began in followers)
    chances = planner.probabilities(first, second)
    assert planner.time(plan, chances, (1.0, 0.0), rows=3) == pytest.approx(passes / len(readings))
    assert planner.time(plan, chances, (0.0, 1.0), rows=3) == pytest.approx(3 * loops / len(readings))


def test_the_plan_is_the_best_of_all():
    """What is right after two loops is drafted there; nothing is where passes cost nothing but tokens."""
    planner = Planner(8, None, 7, readout_cost=0.2)
    for _ in range(MOST_RECORDS):
        planner.records.append([ProbeReading(loop >= 2, loop >= 2) for loop in range(1, 8)])
    planner.seconds.line = lambda: (1.0, 0.01)
    assert planner.choose(rows=1)[:2] == (2, None)
    for _ in range(MOST_RECORDS):
        planner.records.append([ProbeReading(False, False)] * 7)
    planner.seconds.line = lambda: (0.0, 1.0)
    assert planner.choose(rows=1) is None


def test_seconds_of_passes_are_a_line_over_their_tokens():
    seconds = PassSeconds()
    assert seconds.line() == (1.0, 0.0)
    for tokens in (1, 1, 4, 9, 4, 12):
        seconds.add(tokens, 0.5 + 0.25 * tokens)
        seconds.add(tokens, 7.0)  # the machine had something else to do
    assert seconds.line() == pytest.approx((0.5, 0.25), rel=0.05)


# Sampling


def exact_joint(model, ids, shape_scores, num_loops: int) -> torch.Tensor:
    """p(t1, t2, t3) by running every sequence. shape_scores: logits to those that softmax reads."""
    size = model.config.vocab_size
    joint = torch.ones(1, dtype=torch.float64)
    sequences = ids
    for _ in range(3):
        with torch.no_grad():
            p = shape_scores(model(sequences, num_loops=num_loops).logits[:, -1]).softmax(-1)
        joint = (joint[:, None] * p).flatten()
        sequences = torch.cat(
            [sequences.repeat_interleave(size, 0), torch.arange(size).repeat(len(sequences))[:, None]], dim=1
        )
    return joint


def counts_of(model, ids, rows: int, **arguments) -> torch.Tensor:
    torch.manual_seed(0)
    out = model.generate(
        ids.repeat(rows, 1), do_sample=True, max_new_tokens=3, return_dict_in_generate=True, **arguments
    )
    assert arguments.get("draft_loops") is None or 0.1 < out.acceptance_rate < 0.95
    size = model.config.vocab_size
    outcome = (out.sequences[:, -3:] * torch.tensor([size**2, size, 1])).sum(-1)
    return torch.bincount(outcome, minlength=size**3).double()


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """In standard deviations from its mean, over outcomes that can occur."""
    possible = p > 0
    assert not counts[~possible].any()
    expected = counts.sum() * p[possible]
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def top_2(logits):
    return logits.masked_fill(logits < logits.topk(2).values[:, -1:], -float("inf"))


SHAPES = {
    "as it is": ({"top_k": 0}, lambda logits: logits),
    "temperature": ({"top_k": 0, "temperature": 1.7}, lambda logits: logits / 1.7),
    "top_k": ({"top_k": 2}, top_2),
    "both": ({"top_k": 2, "temperature": 2.0}, lambda logits: top_2(logits / 2.0)),
}


def sampling_model():
    return model_of("prelude_coda_grouped", vocab_size=4, bos_token_id=1, num_loops=3, num_core_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", quick_and_slow(SHAPES, "both"))
def test_sampling_keeps_the_distribution(shape, optimist):
    """Of three tokens: the second is drafted, and the third said from where its draft was right or wrong."""
    model, ids = sampling_model(), torch.tensor([[1, 3, 1, 2]])
    arguments, shape_scores = SHAPES[shape]
    counts = counts_of(model, ids, 6000, draft_loops=1, **arguments)
    assert abs(chi_square(counts, exact_joint(model, ids, shape_scores, num_loops=3))) < 4


@pytest.mark.slow
def test_the_distribution_test_can_fail(monkeypatch, optimist):
    """It tells the depths apart, and sees where two tokens of a round are not drawn independently."""
    model, ids = sampling_model(), torch.tensor([[1, 3, 1, 2]])
    shallow, full = (exact_joint(model, ids, lambda logits: logits, num_loops=loops) for loops in (1, 3))
    counts = counts_of(model, ids, 6000, draft_loops=1, top_k=0)
    assert chi_square(counts, shallow) > 20

    def same_noise(self, tokens):
        if not hasattr(self, "kept"):
            self.kept = torch.empty(self.engine.num_rows, model.config.vocab_size).exponential_()
        return self.kept[[token.row for token in tokens]]

    monkeypatch.setattr(Pipeline, "noise_of", same_noise)
    assert chi_square(counts_of(model, ids, 6000, draft_loops=1, top_k=0), full) > 20


# Caches and streams


CACHES = {
    "returned": lambda model: None,
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=48),
    "looped": lambda model: LoopedCache(model.config),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("system", ["prelude_coda_grouped", "windows", "parcae"])
@pytest.mark.covering
@pytest.mark.some(2)
def test_the_cache_can_be_continued(system, kind, optimist):
    """By a second turn that drafts, and by a third that does not."""
    model, conversation = model_of(system), random_ids(1, 6)
    cache = CACHES[kind](model)
    for seed, drafting in enumerate([{"draft_loops": 3}, {"draft_loops": 1, "draft_tokens": 2}, {}]):
        given = {} if cache is None else {"past_key_values": cache}
        out = greedy(model, conversation, **given, **drafting, max_new_tokens=7, return_dict_in_generate=True)
        assert torch.equal(out.sequences, greedy(model, conversation, max_new_tokens=7))
        cache = out.past_key_values
        assert cache.get_seq_length() == out.sequences.shape[1] - 1
        conversation = torch.cat([out.sequences, random_ids(1, 3, seed=seed + 1)], dim=1)


@pytest.mark.parametrize("kind", ["returned", "static"])
@pytest.mark.parametrize(
    "way", [{"draft_loops": 1}, {"exit_criterion": "latent_diff", "exit_threshold": 0.0}], ids=["drafts", "exits"]
)
@pytest.mark.some(2)
def test_rows_that_ended_apart_can_be_continued(kind, way, optimist):
    """The tokens at which they ended are in the cache, too."""
    model, ids, more = model_of("prelude_coda_grouped"), random_ids(3, 6), random_ids(3, 2, seed=1)
    end, cache = int(greedy(model, ids)[1, 8]), CACHES[kind](model)
    given = {} if cache is None else {"past_key_values": cache}
    first = greedy(model, ids, **way, **given, eos_token_id=end, return_dict_in_generate=True)
    assert 0 < int((first.token_loops[1] > 0).sum()) < first.token_loops.shape[1]
    mask = torch.cat([torch.ones_like(ids), (first.token_loops > 0).long(), torch.ones_like(more)], dim=1)
    text = torch.cat([first.sequences, more], dim=1)
    last = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    second = greedy(model, text, past_key_values=first.past_key_values, attention_mask=mask, **last)
    for row, tokens in enumerate(text):
        alone = greedy(model, tokens[mask[row].bool()][None], **last)
        torch.testing.assert_close(second.logits[0][row], alone.logits[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "middle"])
@pytest.mark.parametrize("system", ["prelude_coda_grouped", "windows", "parcae"])
@pytest.mark.parametrize(
    "way", [{"draft_loops": 1}, {"exit_criterion": "latent_diff", "exit_threshold": 0.0}], ids=["drafts", "exits"]
)
@pytest.mark.some(4)
def test_the_padding_behind_rows_is_in_the_cache_too(system, way, side, optimist):
    """As transformers leaves it: a second turn whose mask is open there, or that passes none, reads it."""
    model, ids, more = model_of(system), random_ids(3, 6), random_ids(3, 2, seed=1)
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[2, 3 if side == "middle" else 0] = 0
    ends = greedy(model, ids, attention_mask=mask, max_new_tokens=7)[[1, 2], [8, 10]].tolist()
    turn = {"attention_mask": mask, "max_new_tokens": 7, "eos_token_id": ends, "return_dict_in_generate": True}
    first = greedy(model, ids, **turn, **way)
    assert len(set((first.token_loops > 0).sum(1).tolist())) > 1
    text = torch.cat([first.sequences, more], dim=1)
    opened = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
    last = {"attention_mask": opened, "max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    second = greedy(model, text, past_key_values=first.past_key_values, **last)
    torch.testing.assert_close(second.logits[0], greedy(model, text, **last).logits[0], rtol=1e-5, atol=1e-5)


def test_static_cache_by_name(optimist):
    model, prompts = model_of("windows"), left_padded(2, 7)
    arguments = {**prompts, "max_new_tokens": NEW, "do_sample": False, "cache_implementation": "static"}
    assert torch.equal(model.generate(**arguments, draft_loops=2), model.generate(**arguments))


class LoopCollector(Collector):
    def __init__(self):
        super().__init__()
        self.loops = []

    def put_loops(self, loops):
        self.loops += loops.tolist()


def test_streamer_is_told_what_full_depth_says_and_no_guess(optimist):
    model, ids, streamer = model_of("parcae"), random_ids(1, 6), LoopCollector()
    tokens = greedy(model, ids, draft_loops=2, streamer=streamer)
    assert streamer.ended and streamer.tokens == tokens[0].tolist()
    assert streamer.loops == [4] * NEW


def test_penalties_of_left_padded_rows_that_run_apart(optimist):
    model, prompts = model_of("plain"), left_padded(3, 7)
    arguments = {**prompts, "max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.5}
    assert torch.equal(model.generate(**arguments, draft_loops=2), model.generate(**arguments))


def test_fields_of_the_generation_config(tmp_path, passes):
    model, ids = model_of("prelude_coda_grouped"), random_ids(1, 6)
    fields = {"draft_loops": 2, "draft_tokens": 3, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    full = greedy(model, ids)
    assert torch.equal(model.generate(ids, generation_config=GenerationConfig(**fields)), full)
    assert passes
    passes.clear()
    model.generation_config.draft_loops, model.generation_config.draft_tokens = 2, 3
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert (loaded.generation_config.draft_loops, loaded.generation_config.draft_tokens) == (2, 3)
    assert torch.equal(greedy(loaded, ids, pad_token_id=0), full)
    assert passes and max(plan.ahead for plan, _ in passes if plan is not None) == 3
    assert max(count for _, counts in passes for count in counts) <= 4


# What is refused


class Another(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


REFUSED = {
    "as deep": ({"draft_loops": 4}, ValueError, "draft_loops=4 must be below num_loops=4"),
    "deeper than asked": ({"draft_loops": 2, "num_loops": 2}, ValueError, "draft_loops=2 must be below num_loops=2"),
    "no loops": ({"draft_loops": 0}, ValueError, "draft_loops must be at least 1, got 0"),
    "less than none": ({"draft_loops": -1}, ValueError, "draft_loops must be at least 1, got -1"),
    "no tokens": ({"draft_loops": 1, "draft_tokens": 0}, ValueError, "draft_tokens must be at least 1, got 0"),
    "a word": ({"draft_loops": "2"}, TypeError, "draft_loops must be an int, got '2'"),
    "a fraction": ({"draft_loops": 1.5}, TypeError, "draft_loops must be an int, got 1.5"),
    "a truth": ({"draft_loops": True}, TypeError, "draft_loops must be an int, got True"),
    "half a token": ({"draft_loops": 1, "draft_tokens": 2.5}, TypeError, "draft_tokens must be an int, got 2.5"),
    "tokens alone": ({"draft_tokens": 3}, ValueError, "draft_tokens=3 without draft_loops"),
    "depths": ({"draft_loops": 1, "num_loops": [3, 4]}, ValueError, "draft_loops needs one num_loops for all rows"),
    "exits": (
        {"draft_loops": 1, "exit_criterion": "max_prob", "exit_threshold": 0.5},
        ValueError,
        "draft_loops=1 gives .* exit_criterion='max_prob' that of early exits: pass one of the two as None",
    ),
    "sharing": ({"draft_loops": 1, "cache_sharing": "last"}, ValueError, "'last' .* draft_loops=1 changes"),
    "beams": (
        {"draft_loops": 1, "num_beams": 2},
        ValueError,
        "draft_loops=1 goes with greedy .* not with beam search",
    ),
    "lookup": (
        {"draft_loops": 1, "prompt_lookup_num_tokens": 2},
        ValueError,
        "draft_loops=1 goes with greedy .* not with assisted decoding",
    ),
    "no cache": (
        {"draft_loops": 1, "use_cache": False},
        ValueError,
        "draft_loops=1 goes with .* and not with use_cache=False: leave one out",
    ),
    "states": (
        {"draft_loops": 1, "output_hidden_states": True, "return_dict_in_generate": True},
        ValueError,
        "draft_loops=1 goes with .* not with output_hidden_states",
    ),
    "a processor": (
        {"draft_loops": 1, "logits_processor": LogitsProcessorList([Another()])},
        ValueError,
        "draft_loops=1 goes with .* not with Another: leave one out, or pass draft_loops=None",
    ),
    "leaving out layers": ({"assistant_early_exit": 2}, ValueError, "assistant_early_exit=2 .* pass draft_loops=k"),
    "warm drafts": ({"draft_loops": 1, "warm_start": True}, ValueError, "warm_start cannot be drafted"),
    "warm depths": ({"warm_start": True, "num_loops": [3, 4]}, ValueError, "warm_start needs one num_loops"),
    "warm number": ({"warm_start": 1}, TypeError, "warm_start must be True or False, got 1"),
    "warm beams": (
        {"warm_start": True, "num_beams": 2},
        ValueError,
        "warm_start=True goes with greedy .* beam search",
    ),
    "warm, no cache": (
        {"warm_start": True, "use_cache": False},
        ValueError,
        "warm_start=True goes .* use_cache=False",
    ),
    "warm, chosen afterwards": (
        {"warm_start": True, "exit_criterion": "kl", "exit_selection": "after"},
        ValueError,
        "exit_selection='after' goes with plain decoding, and not with warm_start=True: leave one out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, error, message = REFUSED[name]
    rows = 1 if "prompt_lookup_num_tokens" in arguments else 2
    with pytest.raises(error, match=message):
        greedy(model_of("huginn"), random_ids(rows, 5), **arguments)


def test_an_assistant_is_refused():
    with pytest.raises(ValueError, match="draft_loops=1 goes with greedy .* not with assisted decoding"):
        greedy(model_of("plain"), random_ids(1, 5), draft_loops=1, assistant_model=model_of("plain"))


@pytest.mark.parametrize("kept", [False, True], ids=["given", "kept"])
def test_a_cache_that_shares_slots_is_refused(kept):
    model, ids = model_of("plain"), random_ids(1, 5)
    cache = LoopedCache(model.config, "cyclic-2", 4)
    if kept:
        cache = greedy(model, ids, cache_sharing="cyclic-2", return_dict_in_generate=True).past_key_values
        ids = random_ids(1, 5 + NEW)
    with pytest.raises(ValueError, match="cache_sharing='cyclic-2' .* draft_loops=1 changes that"):
        greedy(model, ids, draft_loops=1, past_key_values=cache)


def test_models_without_shallow_prefixes_are_refused():
    model = model_of("plain", residual_depth="run", residual_scaling="linear")
    with pytest.raises(ValueError, match="residual_depth='run' the first loops of a deep run are not a shallow run"):
        greedy(model, random_ids(1, 5), draft_loops=1)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic"}, {"rope_type": "longrope", "long_factor": [3.0] * 4}], ids=str
)
def test_positions_that_change_with_the_length_are_refused(rope):
    """A draft that is dropped would have changed them for the tokens after it."""
    rope = {"rope_theta": 100.0, "factor": 4.0, "short_factor": [1.0] * 4, **rope}
    model = model_of("plain", max_position_embeddings=8, rope_parameters=rope)
    with pytest.raises(ValueError, match=f"draft_loops=1 .* not with rope_type='{rope['rope_type']}', whose angles"):
        greedy(model, random_ids(1, 5), draft_loops=1)


def test_a_cache_that_cannot_be_cropped_is_refused():
    model = model_of("plain")
    try:
        cache = QuantizedCache("fp8", model.config)
    except ValueError as error:
        pytest.skip(f"this transformers has no such backend: {error}")
    with pytest.raises(ValueError, match="not with a quantized cache, which cannot be cropped: leave one out"):
        greedy(model, random_ids(1, 5), draft_loops=1, past_key_values=cache)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloaded caches move between the CPU and an accelerator")
def test_an_offloaded_cache_is_refused():
    with pytest.raises(ValueError, match="not with an offloaded cache: leave one out"):
        model = model_of("plain")
        greedy(
            model, random_ids(1, 5), draft_loops=1, past_key_values=DynamicCache(config=model.config, offloading=True)
        )


# Warm start: the next token's loops begin where the last token's ended


WARM = {
    "zeros": {"injection": "add", "state_init": "zeros"},
    "between": {
        **SECTIONS,
        "injection": "concat",
        "state_init": "normal",
        "inter_loop_norm": "own",
        "loop_damping": True,
        "position_embedding": "learned",
    },
    "gated_change": {"loop_change_gate": True, "injection": "add", "state_init": "zeros"},
    "huginn": {"preset": "huginn", **SECTIONS},
    "parcae": {"preset": "parcae", **SECTIONS},
}


@torch.no_grad()
def naive_warm_start(model, ids, threshold: float | None = None):
    """Of one prompt [length]: its tokens and their loops; every token by passes of its own, one of each depth."""
    model, ids = copy.deepcopy(model), ids[None]
    model.config.state_init = "normal"  # which takes an initial state, and in evaluation is zero without one
    out = model(ids, num_loops=4, output_loop_hidden_states=True, use_cache=True)
    cache, tokens, loops = out.past_key_values, [], [4]
    while True:
        state = model.model.to_next_loop(out.loop_hidden_states[-1][:, -1:])
        token = out.logits[:, -1:].argmax(-1)
        tokens.append(int(token))
        if len(tokens) == NEW:
            return tokens, loops
        for depth in [4] if threshold is None else [1, 2, 3, 4]:
            past = copy.deepcopy(cache)
            arguments = {"past_key_values": past, "num_loops": depth, "initial_state": state}
            out = model(token, **arguments, output_loop_hidden_states=True)
            if threshold is not None and out.logits.softmax(-1).max() >= threshold:
                break
        cache = past
        loops.append(depth)


@pytest.mark.parametrize("exits", [False, True], ids=["full depth", "exits"])
@pytest.mark.parametrize("system", WARM)
@pytest.mark.covering
@pytest.mark.some(2)
def test_warm_start(system, exits):
    model, prompts = tiny_model(**{"eos_token_id": None, "num_loops": 4, **WARM[system]}).double(), left_padded(3, 6)
    arguments = {**prompts, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    arguments |= {"output_scores": True, "return_dict_in_generate": True}
    cold, threshold = model.generate(**arguments), None
    if exits:
        threshold = torch.stack(cold.scores).softmax(-1).amax(-1).median().item()
        arguments |= {"exit_criterion": "max_prob", "exit_threshold": threshold}
    out = model.generate(**arguments, warm_start=True)
    for row, (ids, mask) in enumerate(zip(prompts["inputs"], prompts["attention_mask"])):
        tokens, loops = naive_warm_start(model, ids[mask.bool()], threshold)
        assert out.sequences[row, 6:].tolist() == tokens
        assert out.token_loops[row].tolist() == loops
    assert not torch.equal(out.sequences, cold.sequences)
    assert (len(out.token_loops[:, 1:].unique()) > 1) == exits


def test_warm_start_needs_a_state_that_is_not_the_input():
    with pytest.raises(ValueError, match="warm_start needs a state .* state_init='embedding'"):
        greedy(model_of("plain"), random_ids(1, 5), warm_start=True)


# Unusual requests


MODES = {
    "plain": {},
    "exits": {"exit_criterion": "max_prob", "exit_threshold": 0.3},
    "drafts": {"draft_loops": 2},
    "warm": {"warm_start": True},
}
over_modes = pytest.mark.parametrize("mode", MODES)


@over_modes
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0), (5,)], ids=str)
@pytest.mark.covering
def test_prompts_of_no_tokens_are_refused(mode, shape):
    model, ids = model_of("huginn"), torch.zeros(shape, dtype=torch.long)
    for arguments in ({"inputs": ids}, {"input_ids": ids}, {"inputs_embeds": model.model.embed_tokens(ids)}):
        if ids.ndim == 2 or "inputs_embeds" not in arguments:
            with pytest.raises(ValueError, match=r"the prompt has shape .* with at least one token"):
                model.generate(**arguments, max_new_tokens=3, **MODES[mode])


@over_modes
def test_several_samples_of_a_prompt(mode):
    torch.manual_seed(0)
    arguments = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": NEW, **MODES[mode]}
    out = model_of("huginn").generate(**left_padded(2, 6), **arguments, return_dict_in_generate=True)
    assert out.sequences.shape == (6, 6 + NEW) and len(out.sequences.unique(dim=0)) == 6


@over_modes
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.covering
@pytest.mark.some(2)
def test_adapters(mode, padded):
    """Low-rank ones go with every mode; virtual tokens only with plain decoding."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    prompts = left_padded(2, 6) if padded else {"input_ids": random_ids(2, 6)}
    model, arguments = model_of("huginn"), {**prompts, "max_new_tokens": NEW, "do_sample": False}
    arguments["input_ids"] = arguments.pop("inputs", arguments.get("input_ids"))
    cold = model.generate(**arguments, **MODES[mode])
    adapted = peft.get_peft_model(model, lora).eval()
    tokens = adapted.generate(**arguments, **MODES[mode])
    assert not torch.equal(tokens, cold)
    assert torch.equal(tokens, adapted.merge_and_unload().generate(**arguments, **MODES[mode]))
    if mode == "plain":
        return
    for kind in (peft.PrefixTuningConfig, peft.PromptTuningConfig):
        adapted = peft.get_peft_model(model_of("huginn"), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).double()
        with pytest.raises(ValueError, match="holds 9 tokens of a prompt of 6: virtual tokens"):
            adapted.eval().generate(**arguments, **MODES[mode])
