"""Generations that share every pass give what each gives alone, whatever comes beside them."""

import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from datasets import Dataset
from transformers import BatchEncoding

from modeling_looped import LoopedModel, continuous, shared_passes
from modeling_looped.compatibility import CACHE
from modeling_looped.row_passes import Tokens
from modeling_looped.row_prompts import Prompt, begin_parts
from modeling_looped.row_table import RowTable
from modeling_looped.row_view import RowView
from modeling_looped.shared_passes import SharedPasses
from tests.helpers import Gone, quick_and_slow, random_ids, tiny_model, wait_until


SYSTEMS = {
    "plain": {"num_core_layers": 1},
    "sections": {"num_prelude_layers": 1, "num_coda_layers": 1, "value_embeddings": True, "exit_gate": "raw"},
    "windows": {"window_pattern": "SL", "sliding_window": 4, "num_key_value_heads": 2, "num_core_layers": 2},
    "learned_positions": {"position_embedding": "learned", "injection": "add"},
    "queries_from_state": {"injection": "attention_all", "qk_norm": "free"},
    "parts_of_loops": {"loop_lora_rank": 2, "loop_norms": True, "loop_embedding": "learned", "rope_pattern": "RN"},
    "second_keys": {"key_value_interval": 2, "num_key_value_heads": 2},
    "first_keys": {"num_key_value_loops": 1, "num_coda_layers": 1, "injection": "add"},
    "softcap": {"attention_softcap": 0.5},
}
WAYS = [
    {},
    {"num_loops": 2},
    {"exit_criterion": "logit_margin", "exit_threshold": 0.3},
    {"exit_criterion": "latent_diff", "exit_threshold": 0.5},
    {"num_loops": 6, "exit_criterion": "kl", "exit_threshold": 0.05, "prompt_loops": 3},
    {"draft_loops": 1},
    {"num_beams": 2},
    {"exit_criterion": "latent_diff", "exit_threshold": 0.5, "exit_selection": "after"},
]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}


def build(system: str):
    """In float64: which rows share a product depends on the threads, and no token is decided by rounding."""
    return tiny_model(**{"num_loops": 4, "max_position_embeddings": 64, **SYSTEMS[system]}).double()


def requests(model, count: int, seed: int = 0, ways=WAYS) -> list[dict]:
    """Of any length, depth and exits, some of them two rows with padding."""
    rng, made = random.Random(seed), []
    for i in range(count):
        ids = random_ids(rng.choice([1, 1, 2]), rng.randint(1, 15), seed=seed + i)
        mask = torch.ones_like(ids)
        mask[1:, : ids.shape[1] // 2] = 0
        inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": rng.randint(1, 12)}
        made.append({**inputs, **rng.choice(ways), **GREEDY})
    return made


def outcome(passes: SharedPasses, request: dict):
    """What it gives or raises."""
    try:
        return passes.generate(**request)
    except BaseException as error:
        return error


def is_full(passes: SharedPasses) -> bool:
    """Whether a request waits for room."""
    with passes._room:
        return len(passes._waiting) > 0


def together(passes: SharedPasses, asked: list[dict], threads: int = 8) -> list:
    """Before the first tick all are there for which there are threads and room."""

    def run(request: dict):
        try:
            return passes.generate(**request)
        except Exception as error:
            return error

    def are_there() -> bool:
        left = [request for request, result in zip(asked, results) if not result.done()]  # also by itself
        rows = sum(len(request["input_ids"]) * request.get("num_beams", 1) for request in left[:threads])
        return passes._rows >= rows or is_full(passes)

    with ThreadPoolExecutor(threads) as pool:
        with passes.turn():
            results = [pool.submit(run, request) for request in asked]
            wait_until(are_there)
        return [result.result() for result in results]


def assert_same(results: list, alone: list):
    for result, expected in zip(results, alone, strict=True):
        assert torch.equal(result.sequences, expected.sequences)
        assert torch.equal(result.token_loops, expected.token_loops)


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, "sections", "windows", "parts_of_loops", "softcap"))
@pytest.mark.some(1)
def test_what_each_gives_alone(system, implementation):
    model = build(system)
    if system != "softcap":  # which eager attention alone has here
        model.set_attn_implementation(implementation)
    if model.config._attn_implementation == "eager":  # whose float64 has no numbers for rows with padding
        model.float()
    asked = requests(model, 14)
    alone = [model.generate(**request) for request in asked]
    with SharedPasses(model, max_rows=6, prompt_tokens=6) as passes:
        assert_same(together(passes, asked), alone)
    assert passes.row_ticks > 2 * passes.ticks  # rows did share passes
    assert not passes.decoders and passes._rows == passes._tokens == 0


def test_rows_with_a_softcap_of_attention_share_passes(monkeypatch):
    """Though no kernel of torch attends with one."""
    model, counts, run = build("softcap"), [], SharedPasses.run
    asked = requests(model, 3, ways=[{"num_loops": 2}, {"num_loops": 3}])
    alone = [model.generate(**request) for request in asked]
    monkeypatch.setattr(SharedPasses, "run", lambda self, calls: counts.append(len(calls)) or run(self, calls))
    with SharedPasses(model) as passes:
        assert_same(together(passes, asked), alone)
    assert max(counts) > 1


SMALL = {"input_ids": random_ids(1, 4), "max_new_tokens": 40, "num_loops": 2, **GREEDY}
LARGE = {"input_ids": random_ids(1, 60, seed=1), "max_new_tokens": 2, **GREEDY}
PARTS, LOOPS = 6, 4  # of its prompt


@contextmanager
def small_one_decodes(passes: SharedPasses):
    """When it has its prompt and two tokens behind it; it goes on when a second request waits for the turn."""
    started = threading.Event()

    class Starts(FailingStreamer):
        def put(self, value):
            self.left -= 1
            if self.left < 0 and not started.is_set():
                started.set()
                wait_until(lambda: passes._rows == 2 and passes._entrance.locked())

    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(passes.generate, streamer=Starts(2), **SMALL)
        assert started.wait(60)
        yield decoding


@pytest.fixture
def uncompiled():
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("ends", [False, True], ids=["goes_on", "hangs_up"])
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.some(1)
def test_a_long_prompt_goes_beside_the_rows_of_others(implementation, ends, monkeypatch):
    model, seen, asked = build("sections"), [], []
    model.set_attn_implementation(implementation)
    alone, after_loop = [model.generate(**request) for request in (SMALL, LARGE)], Prompt.after_loop

    def counts(prompt, state):
        after_loop(prompt, state)
        seen.append((prompt.part.size, passes.row_ticks))
        wait_until(passes._entrance.locked)  # so that the two threads take turns

    def check():
        asked.append(None)
        if ends and len(seen) >= 20:
            raise ConnectionError("the client is gone")

    with SharedPasses(model, prompt_tokens=10) as passes, small_one_decodes(passes) as decoding:
        monkeypatch.setattr(Prompt, "after_loop", counts)
        result = outcome(passes, {**LARGE, "check": check})
        assert_same([decoding.result(timeout=60)], alone[:1])
    if ends:
        assert isinstance(result, ConnectionError)
        assert 20 <= len(seen) < PARTS * LOOPS
    else:
        assert_same([result], alone[1:])
        assert [size for size, _ in seen] == [10] * (PARTS * LOOPS)
    row_ticks = [ticks for _, ticks in seen[:12]]
    assert all(after == before + 1 for before, after in pairwise(row_ticks))  # the small one's row, every time
    assert len(asked) > 5  # by its own thread, which runs half of the ticks
    assert not passes.decoders and passes._rows == passes._tokens == 0


@pytest.mark.parametrize("ends", [False, True], ids=["goes_on", "interrupted"])
@pytest.mark.some(1)
def test_others_go_on_between_the_loops_of_a_prompt_by_itself(ends, monkeypatch):
    model, ticks = build("sections"), []
    large = {**LARGE, "cache_dtype": "int8"}
    alone, give_way = [model.generate(**request) for request in (SMALL, large)], SharedPasses.give_way

    def counts(passes, tokens):
        # a small model is faster than threads take turns
        wait_until(lambda: passes._entrance.locked() or decoding.done())
        give_way(passes, tokens)
        ticks.append(passes.ticks)
        if ends and len(ticks) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(shared_passes, "FEW_TOKENS", 9)
    with SharedPasses(model, prompt_tokens=10) as passes, small_one_decodes(passes) as decoding:
        monkeypatch.setattr(SharedPasses, "give_way", counts)
        result = outcome(passes, large)
        assert_same([decoding.result(timeout=60)], alone[:1])
    gained = [after - before for before, after in zip(ticks, ticks[1:])]
    if ends:
        assert isinstance(result, KeyboardInterrupt)
    else:
        assert len(ticks) == PARTS * LOOPS
        assert_same([result], alone[1:])
    assert len(gained) > 12 and min(gained[:12]) > 0, gained  # a tick comes between any two
    assert not passes.decoders and passes._rows == passes._tokens == 0


def test_a_client_that_leaves_ends_a_prompt_by_itself():
    model, asked, loops = build("plain"), [], []

    def check():
        asked.append(None)
        if len(asked) == 3:  # before the prompt, and after each of its loops
            raise ConnectionError("the client is gone")

    model.model.end_of_loop.register_forward_hook(lambda *_: loops.append(None))
    with SharedPasses(model) as passes:
        result = outcome(passes, {**LARGE, "cache_dtype": "int8", "check": check})
    assert isinstance(result, ConnectionError) and len(loops) == 2
    assert not passes.decoders and passes._rows == passes._tokens == 0


@pytest.mark.parametrize("sharing", ["last", "cyclic-2"])
def test_prompts_are_not_cut_where_loops_share_slots(sharing):
    model = build("sections")
    request = {**LARGE, "max_new_tokens": 12, "cache_sharing": sharing}
    exits = {"exit_criterion": "latent_diff", "exit_threshold": 0.5}
    asked = [{**request, **way} for way in ({}, exits)]
    alone = [model.generate(**each) for each in asked]
    with SharedPasses(model, prompt_tokens=10) as passes:
        assert_same(together(passes, asked), alone)


class PromptOfTokens:
    """A stand-in that counts."""

    engine = SimpleNamespace(copies_past=False)

    def __init__(self, number: int, left: int, under_way: int = 0):
        self.number, self.left = number, [None] * left
        self.part = SimpleNamespace(size=under_way) if under_way else None

    def begin_part(self, most_tokens: int):
        self.part = SimpleNamespace(size=min(most_tokens, len(self.left)))
        return self.part.size


@pytest.mark.parametrize(
    ("prompts", "sizes"),
    [
        ([(0, 7), (1, 12), (2, 5)], [7, 12, 0]),  # of the third there is no room for all, nor for half of a pass
        ([(0, 7), (1, 12), (2, 1)], [7, 12, 1]),
        ([(0, 30), (1, 1)], [20, 0]),
        ([(2, 30), (1, 1)], [19, 1]),  # one that has had a part goes behind those that came meanwhile
        ([(0, 5, 8), (1, 30), (2, 1)], [8, 12, 0]),
        ([(0, 5, 14), (1, 30), (2, 1)], [14, 0, 0]),  # and is not passed while it waits for half of a pass
        ([(0, 5, 8), (1, 12)], [8, 12]),
        ([(0, 0, 20), (1, 1)], [20, 0]),
    ],
)
def test_parts_of_prompts_that_fit_into_a_pass(prompts, sizes):
    made = [PromptOfTokens(*each) for each in prompts]
    begin_parts(made, 20)
    assert [0 if prompt.part is None else prompt.part.size for prompt in made] == sizes


def test_a_short_prompt_goes_before_the_next_part_of_a_long_one(monkeypatch):
    model, after_loop, ended, results = build("plain"), Prompt.after_loop, [], {}
    long, short = ({**LARGE, "input_ids": random_ids(1, length, seed=length)} for length in (60, 3))
    alone = [model.generate(**request) for request in (long, short)]
    asked, pool = threading.Event(), ThreadPoolExecutor(2)

    def counts(prompt, state):
        after_loop(prompt, state)
        if prompt.part.is_at_end:
            ended.append(prompt.engine.prompt_length)
        if len(ended) == 1 and not asked.is_set():  # the short one comes after the first part of the long one
            asked.set()
            results["short"] = pool.submit(passes.generate, **short)
            wait_until(lambda: passes._rows == 2 and passes._entrance.locked())

    monkeypatch.setattr(Prompt, "after_loop", counts)
    with SharedPasses(model, prompt_tokens=6) as passes, pool:
        results["long"] = pool.submit(passes.generate, **long)
        found = [results[name].result(timeout=60) for name in ("long", "short")]
    assert_same(found, alone)
    assert 3 in ended[:4] and ended.count(60) >= 10


def test_a_prompt_beside_rows_that_cannot_go_by_row(monkeypatch):
    """Those with holes between their tokens alone are copied."""
    model, copied, to_seen = build("plain"), [], RowView.attend_to_seen
    holes = {**SMALL, "attention_mask": torch.tensor([[1, 0, 1, 1]])}
    alone = [model.generate(**request) for request in (holes, LARGE)]

    def counts(view, queries, *others):
        copied.append(len(queries))
        return to_seen(view, queries, *others)

    monkeypatch.setattr(RowView, "attend_to_seen", counts)
    with SharedPasses(model) as passes:
        assert_same(together(passes, [holes, LARGE]), alone)
    assert set(copied) == {1}


def test_a_model_that_is_offloaded():
    model = build("plain")
    asked = requests(model, 4, ways=WAYS[:4])
    alone = [model.generate(**request) for request in asked]
    cpu_offload(model, execution_device=torch.device("cpu"))
    with SharedPasses(model) as passes:
        assert_same(together(passes, asked), alone)


def test_autocast_of_one_is_not_that_of_others():
    model = build("plain").float()  # autocast leaves float64 as it is
    request = {"input_ids": random_ids(1, 9), "max_new_tokens": 30, "output_logits": True, **GREEDY}
    seen, layer = [], model.model.core[0].self_attn.q_proj
    layer.register_forward_hook(lambda module, inputs, queries: seen.append((queries.dtype, threading.get_ident())))

    def rounded():
        with torch.autocast("cpu", torch.bfloat16):
            return passes.generate(**request), threading.get_ident()

    expected = model.generate(**request)
    seen.clear()
    with SharedPasses(model) as passes, ThreadPoolExecutor(2) as pool:
        with passes.turn():
            one, other = pool.submit(rounded), pool.submit(passes.generate, **request)
            wait_until(lambda: passes._rows == 2)
        _, thread = one.result()
        assert_same([other.result()], [expected])
    torch.testing.assert_close(other.result().logits, expected.logits)
    assert {dtype for dtype, _ in seen} == {torch.float32, torch.bfloat16}
    assert {of for dtype, of in seen if dtype == torch.bfloat16} == {thread}


@pytest.mark.parametrize(
    ("others", "waits"),
    [
        ([], False),
        ([(0, 1)], True),
        ([(0, 1), (1, 2)], True),
        ([(3, 1), (0, 0)], False),  # one begins now and one later
        ([(3, 1), (2, 1), (0, 0)], False),
        ([(2, 1), (2, 1), (0, 0)], True),
        ([(2, 2)], False),
    ],
)
def test_who_waits_to_begin_with_others(others, waits):
    """Depth 4. others: loops run, and 0 if it begins, 1 if it is under way, 2 if it has exits."""

    def decoder(loops: int, kind: int, has_begun: bool = True):
        starting, rule = [0] if kind == 0 else [], object() if kind == 2 else None
        return SimpleNamespace(
            rule=rule,
            starting=starting,
            has_begun=has_begun,
            running=lambda: [0],
            loops=[loops],
            engine=SimpleNamespace(limits=[4]),
        )

    new = decoder(0, 0, has_begun=False)
    waiting = continuous.decoders_that_wait([*(decoder(*other) for other in others), new])
    assert waiting == ([new] if waits else [])


def test_rows_of_fixed_depth_are_read_out_together(monkeypatch):
    """Whatever the lengths of their prompts."""
    model, read, read_logits = build("plain"), [], Tokens.read_logits
    asked = [{**SMALL, "input_ids": random_ids(1, length, seed=length)} for length in (3, 15, 8, 27)]
    alone = [model.generate(**request) for request in asked]

    def counts(tokens, loops, state):
        read.append(len(loops))
        return read_logits(tokens, loops, state)

    monkeypatch.setattr(Tokens, "read_logits", counts)
    with SharedPasses(model, prompt_tokens=10) as passes:
        assert_same(together(passes, asked), alone)
    assert sum(read) == 39 * len(asked)  # the prompts' own readouts are not among these
    assert len(read) < 1.5 * 40


def test_rows_under_the_same_rule_are_scored_together(monkeypatch):
    """Of all requests, in one call per rule and tick."""
    model, calls = build("plain"), []
    ways = [{"exit_criterion": name, "exit_threshold": 0.01} for name in ("latent_diff", "entropy_diff")]
    asked = requests(model, 10, ways=ways)
    alone = [model.generate(**request) for request in asked]
    stopping, tick = continuous.stopping, continuous.tick

    def ticks(*args):
        calls.append([])
        return tick(*args)

    def scores(table, rule, places, members, *args):
        calls[-1].append((rule, len({places[i].decoder for i in members})))
        return stopping(table, rule, places, members, *args)

    monkeypatch.setattr(continuous, "stopping", scores)
    monkeypatch.setattr(shared_passes, "tick", ticks)
    with SharedPasses(model) as passes:
        assert_same(together(passes, asked), alone)
    assert all(len({rule for rule, *_ in of_tick}) == len(of_tick) <= 2 for of_tick in calls)
    assert max(decoders for of_tick in calls for *_, decoders in of_tick) > 2


@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.usefixtures("uncompiled")
def test_a_client_that_has_gone_leaves_its_pages(by_itself):
    """Also where the prompt does not run beside the rows of others."""
    model, prompt = build("plain"), random_ids(1, 12)
    model.set_attn_implementation("flex_attention")
    options = {"prefill_chunk_size": 4} if by_itself else {}
    with SharedPasses(model) as passes:
        for _ in range(2):
            with pytest.raises(ConnectionError):
                passes.generate(prompt, max_new_tokens=3, streamer=Gone(1), **options, **GREEDY)
        pages = passes.pages.core
        assert len(pages.free) == pages.num_pages > 0 and not passes.decoders


def test_batches_of_prompts(monkeypatch):
    model, made, leave = build("windows"), [], SharedPasses.__exit__
    monkeypatch.setattr(SharedPasses, "__exit__", lambda passes, *error: made.append(passes) or leave(passes, *error))
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (3, 1, 9, 5)]
    depths, thresholds = [2, 4, 3, 6], [0.1, 0.9, 0.4, 0.2]
    asked = {"exit_criterion": "latent_diff", "exit_threshold": thresholds, "max_new_tokens": 6, **GREEDY}
    results = model.generate_batch(prompts, num_loops=depths, **asked)
    of_tensor = model.generate_batch(prompts, num_loops=torch.tensor(depths), **asked)
    assert [each.generated_tokens for each in of_tensor.values()] == [r.generated_tokens for r in results.values()]
    assert list(results) == [f"req_{i}" for i in range(4)]
    assert len(made) == 2 and all(passes.row_ticks > passes.ticks for passes in made)
    for result, prompt, depth, threshold in zip(results.values(), prompts, depths, thresholds):
        ids = torch.tensor([prompt])
        alone = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            num_loops=depth,
            exit_criterion="latent_diff",
            exit_threshold=threshold,
            **GREEDY,
        )
        assert result.error is None and result.is_finished() and result.prompt_ids == prompt
        assert result.generated_tokens == alone.sequences[0, len(prompt) :].tolist()
        assert result.token_loops == alone.token_loops[0].tolist()


def test_batches_of_prompts_by_what_is_saved():
    model = build("plain")
    prompt = random_ids(1, 5)
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, num_loops=2, **GREEDY)
    model.generation_config.exit_criterion, model.generation_config.exit_threshold = "latent_diff", 1e9
    model.generation_config.min_loops = model.generation_config.prompt_loops = 2
    result = model.generate_batch(prompt.tolist(), max_new_tokens=5, **GREEDY)["req_0"]
    assert result.generated_tokens == expected.sequences[0, 5:].tolist() and set(result.token_loops) == {2}


def test_bad_batches_of_prompts():
    model = build("plain")
    with pytest.raises(ValueError, match="num_loops has 2 values for 1 prompts: pass one value, or one per prompt"):
        model.generate_batch([[3, 4]], num_loops=[2, 3])
    with pytest.raises(ValueError, match="progress_bar: leave out, .*; or leave out num_loops=2"):
        model.generate_batch([[3, 4]], num_loops=2, progress_bar=True)
    with pytest.raises(ValueError, match="num_return_sequences=2: batches give one answer to each prompt"):
        model.generate_batch([[3, 4]], num_loops=2, do_sample=True, num_return_sequences=2)
    for wrong, message in (
        ({"num_loops": [[1], [2]]}, r"num_loops=\[\[1\], \[2\]\] holds lists: pass one value, or one per prompt"),
        ({"num_loops": [2, 0]}, "num_loops is the number of loops to run: .*; got 0"),
        ({"num_loops": 2, "min_loops": 9}, "without exit_criterion|min_loops"),
        ({"exit_criterion": "klx"}, "exit_criterion='klx' is not known"),
        ({"exit_criterium": "kl"}, "did you mean `exit_criterion`"),
        ({"num_lops": 1}, "did you mean `num_loops`"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate_batch([[3, 4], [5]], max_new_tokens=2, **wrong)
    # what is wrong for all prompts is an error of the call, what is wrong for one is its own
    for wrong, message in (
        ({"attention_mask": torch.ones(2, 2)}, "attention_mask: leave out"),
        ({"position_ids": torch.ones(2, 2), "labels": None}, "^position_ids: leave out"),
        ({"foo": 1}, "not used by the model: .'foo'"),
        ({"max_new_tokens": -1}, "max_new_tokens.* but is -1"),
        ({"exit_criterion": "kl", "num_beams": 2}, "exit_criterion='kl' goes with greedy decoding"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate_batch([[3, 4], [5]], **{"num_loops": 2, "max_new_tokens": 2, **wrong})
    results = model.generate_batch([[3, 4], []], num_loops=[2, 2], max_new_tokens=2, **GREEDY)
    assert results["req_0"].error is None and len(results["req_0"].generated_tokens) == 2
    assert "at least one token" in results["req_1"].error and results["req_1"].generated_tokens == []


def test_kinds_of_lists_of_prompts():
    model, asked = build("plain"), {"num_loops": 2, "max_new_tokens": 3, **GREEDY}
    ids = random_ids(2, 5)
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **asked).sequences[:, 5:].tolist()
    column = Dataset.from_dict({"ids": ids.tolist()})["ids"]
    for prompts in (list(ids), list(ids.numpy()), tuple(ids.tolist()), [list(row) for row in ids.numpy()], column):
        results = model.generate_batch(prompts, **asked).values()
        assert [result.generated_tokens for result in results] == alone
        assert [result.prompt_ids for result in results] == ids.tolist()


@pytest.mark.parametrize("depth", [{}, {"num_loops": 2}])
def test_what_is_no_list_of_prompts(depth):
    model = build("plain")
    for inputs, given in (
        ({"input_ids": [[3, 4]]}, "dict {'input_ids'"),
        (BatchEncoding({"input_ids": [[3, 4]]}), "BatchEncoding {'input_ids'"),
        ("a text", "str 'a text'"),
        (["a text", "another"], r"list \['a text', 'another'\]"),
        ([3, 4], r"list \[3, 4\]"),
        ([[True, False]], r"list \[\[True, False\]\]"),
        (random_ids(2, 4), r"Tensor tensor\(\["),
        ([[3.0, 4.0]], r"list \[\[3.0, 4.0\]\]"),
        ([[[3], [4]]], r"list \[\[\[3\], \[4\]\]\]"),
        (None, "NoneType None"),
    ):
        with pytest.raises(TypeError, match=f"got {given}.*pass tokenizer.*input_ids"):
            model.generate_batch(inputs, max_new_tokens=2, **depth)


class FailingStreamer:
    """A client that goes away after some tokens."""

    def __init__(self, after: int):
        self.left = after

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the client is gone")

    def end(self):
        pass


def failing_processor(ids, scores):
    if ids.shape[1] > 6:
        raise ArithmeticError("a processor fails")
    return scores


def test_one_that_fails_ends_by_itself():
    model = build("plain")
    asked = requests(model, 10, ways=WAYS[:4])
    alone = [model.generate(**request) for request in asked]
    ids = random_ids(1, 4)
    bad = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 20, **GREEDY}
    with SharedPasses(model) as passes:
        results = together(
            passes,
            [
                asked[0],
                {**bad, "streamer": FailingStreamer(3)},
                *asked[1:5],
                {**bad, "logits_processor": [failing_processor]},
                {**bad, "exit_criterion": "nonsense"},
                *asked[5:],
            ],
        )
        assert isinstance(results.pop(7), ValueError)
        assert isinstance(results.pop(6), ArithmeticError)
        assert isinstance(results.pop(1), ConnectionError)
        assert_same(results, alone)
    assert not passes.decoders and passes._rows == passes._tokens == 0


def test_a_pass_that_fails_for_one():
    """Positions end: the others' tokens are not touched by the tick that failed."""
    model = build("learned_positions")  # 64 positions
    asked = requests(model, 6, ways=WAYS[:4])
    alone = [model.generate(**request) for request in asked]
    ids = random_ids(1, 60)
    long = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 30, **GREEDY}
    with SharedPasses(model) as passes:
        results = together(passes, [long, *asked])
    assert "64" in str(results[0]) and isinstance(results[0], ValueError)
    assert_same(results[1:], alone)


def test_requests_wait_for_room():
    model = build("plain")
    asked = requests(model, 12, ways=WAYS[:3])
    alone = [model.generate(**request) for request in asked]
    most = max(
        len(request["input_ids"]) * (request["input_ids"].shape[1] + request["max_new_tokens"]) for request in asked
    )
    with SharedPasses(model, max_rows=2, max_tokens=most) as passes:
        assert_same(together(passes, asked), alone)
        assert passes.row_ticks <= 2 * passes.ticks
        with pytest.raises(ValueError, match=f"is more than max_tokens={most}: pass a shorter prompt"):
            passes.generate(random_ids(1, most), max_new_tokens=1, num_loops=1)
        for rows, beams in ((2, 1), (1, 2)):
            with pytest.raises(ValueError, match=f"a request of {2 * most} tokens, prompt and new ones"):
                passes.generate(random_ids(rows, most - 1), max_new_tokens=1, num_loops=1, num_beams=beams)
        with pytest.raises(ValueError, match="3 sequences in one call are more than max_rows=2"):
            passes.generate(random_ids(3, 2), max_new_tokens=1)
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        SharedPasses(model, max_rows=0)


def test_ranks_of_tensor_parallelism_share_no_passes():
    model = build("plain")
    model._tp_size = 2
    with pytest.raises(ValueError, match="tensor parallelism .tp_size=2.*call generate"):
        SharedPasses(model)
    with pytest.raises(ValueError, match="tensor parallelism .tp_size=2.*call generate"):
        model.generate_batch([[3, 4]], max_new_tokens=2, num_loops=2)


def test_a_client_that_leaves_while_it_waits_for_room(monkeypatch):
    """It gives its place to the one behind it."""
    monkeypatch.setattr(shared_passes, "CHECK_SECONDS", 0.01)
    model, ids, has_left = build("plain"), random_ids(2, 3), threading.Event()

    def check():
        if has_left.is_set():
            raise ConnectionError("the client is gone")

    both = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 2, **GREEDY}
    one = {**both, "input_ids": ids[:1], "attention_mask": torch.ones_like(ids[:1])}
    alone = model.generate(**one)
    with SharedPasses(model, max_rows=2) as passes, ThreadPoolExecutor() as pool, passes.room(1, 5):
        results = []
        for request in ({**both, "check": check}, one):
            results.append(pool.submit(outcome, passes, request))
            wait_until(lambda: len(passes._waiting) == len(results))
        has_left.set()
        assert isinstance(results[0].result(timeout=30), ConnectionError)
        assert_same([results[1].result(timeout=30)], [alone])


@pytest.mark.parametrize("way", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_a_client_that_leaves_ends_what_transformers_decodes(way):
    """After the token at which it is asked for the third time."""
    model, ids, calls = build("plain"), random_ids(1, 3), []

    def check():
        calls.append(None)
        if len(calls) == 3:
            raise ConnectionError("the client is gone")

    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "min_new_tokens": 40, **GREEDY, **way}
    with SharedPasses(model) as passes:
        with pytest.raises(ConnectionError, match="the client is gone"):
            passes.generate(ids, check=check, **asked)
        assert passes._rows == passes._tokens == 0


def test_a_length_that_is_no_number_is_refused():
    model, ids = build("plain"), random_ids(1, 3)
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": float("nan")}
    with SharedPasses(model, max_tokens=64) as passes, pytest.raises(ValueError, match="a request of nan tokens"):
        passes.generate(ids, **asked, check=lambda: pytest.fail("it waits for room"))


@pytest.mark.parametrize("way", [WAYS[5], WAYS[6], WAYS[7]], ids=["drafts", "beams", "after"])
def test_what_decodes_in_other_ways_waits_for_room_too(way):
    model, ids, rows, embed = build("plain"), random_ids(1, 3), [], LoopedModel.embed
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, **GREEDY, **way}
    alone = model.generate(**asked)

    def watched(*args, **kwargs):
        if not rows:
            wait_until(lambda: passes._rows == 2)
        rows.append(passes._rows)
        return embed(model.model, *args, **kwargs)

    model.model.embed = watched
    with SharedPasses(model, max_rows=2) as passes:
        assert_same(together(passes, [asked] * 4), [alone] * 4)
    assert set(rows) <= {1, 2} and passes._rows == 0


def test_calls_outside_are_as_before():
    model, other = build("plain"), build("plain")
    ids, mask = random_ids(1, 4), torch.ones(1, 4, dtype=torch.long)
    with SharedPasses(model) as passes:
        model.generate(ids, attention_mask=mask, max_new_tokens=2, **GREEDY)
        assert passes.ticks == 0
        passes.model = other
        passes.generate(ids, attention_mask=mask, max_new_tokens=2, **GREEDY)
        assert passes.ticks > 0


def test_calls_in_inference_mode_beside_others():
    model = build("plain")
    asked = requests(model, 8, ways=WAYS[:4])
    alone = [model.generate(**request) for request in asked]

    def run(i: int):
        with torch.inference_mode(i % 2 == 1):
            return passes.generate(**asked[i])

    with SharedPasses(model) as passes, ThreadPoolExecutor(8) as pool:
        assert_same(list(pool.map(run, range(8))), alone)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_call_within_a_call(by_name):
    """A processor that asks the model itself, at the prompt's end and later."""
    model, ids = build("plain"), random_ids(1, 4)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, **GREEDY}
    alone, within = model.generate(ids, **settings), []

    def asks(_, scores):
        within.append((passes if by_name else model).generate(ids, **settings))
        return scores

    with SharedPasses(model) as passes, ThreadPoolExecutor(1) as pool:
        result = pool.submit(passes.generate, ids, logits_processor=[asks], **settings).result(timeout=60)
    assert_same([result, *within], [alone] * 4)


def test_a_call_within_a_call_that_fills_the_room():
    model, ids, within = build("plain"), random_ids(1, 4), []
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, **GREEDY}

    def asks(_, scores):
        within.append(passes.generate(ids, **settings))
        return scores

    with SharedPasses(model, max_rows=2) as passes, ThreadPoolExecutor(1) as pool:
        pool.submit(passes.generate, ids, num_beams=2, logits_processor=[asks], **settings).result(timeout=60)
    assert_same(within, [model.generate(ids, **settings)] * 3)


def caches_of(model) -> list[weakref.ref]:
    """Those that its generations make from now on."""
    caches, make = [], model._prepare_cache_for_generation

    def made(config, model_kwargs, *args, **kwargs):
        make(config, model_kwargs, *args, **kwargs)
        caches.append(weakref.ref(model_kwargs[CACHE]))

    model._prepare_cache_for_generation = made
    return caches


@pytest.mark.slow
def test_many_requests_leave_nothing_behind():
    model = build("plain")
    caches = caches_of(model)
    threads = threading.active_count()
    with SharedPasses(model, max_rows=4) as passes:
        for request, result in zip(asked := requests(model, 300, ways=WAYS[:4]), together(passes, asked), strict=True):
            assert result.sequences.shape[1] == request["input_ids"].shape[1] + request["max_new_tokens"]
    del result
    gc.collect()
    assert len(caches) == 300 and not any(cache() for cache in caches)
    assert threading.active_count() == threads


@pytest.mark.parametrize("stage", ["run_loop", "read_logits"])
@pytest.mark.some(1)
def test_a_pass_that_fails_for_all(stage, monkeypatch):
    """As where memory is short: each then runs by itself, from where the tick began."""
    model, compute = build("sections"), getattr(Tokens, stage)
    asked = requests(model, 10, ways=[*WAYS[:5], {"exit_criterion": "entropy_diff", "exit_threshold": 0.01}])
    alone, failed = [model.generate(**request) for request in asked], []

    def fails_together(tokens, *args):
        if len(tokens.groups) > 1 and len(failed) % 3 < 2:
            failed.append(None)
            raise RuntimeError("out of memory")
        failed.append(None)
        return compute(tokens, *args)

    monkeypatch.setattr(Tokens, stage, fails_together)
    with SharedPasses(model) as passes:
        assert_same(together(passes, asked), alone)


@pytest.mark.parametrize(("change", "rows"), [("add", [1]), ("remove", [0, 1])])
def test_a_table_that_finds_no_memory_stays_as_it_was(change, rows, monkeypatch):
    table, cat, calls = RowTable(), torch.cat, []
    table.add(2)
    table.put([0, 1], {"state": torch.ones(2, 3), "log_p": torch.ones(2, 5)})

    def fails_at_the_second(tensors):
        calls.append(None)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return cat(tensors)

    monkeypatch.setattr(torch, "cat", fails_at_the_second)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(table, change)(*rows)
    assert table.num_rows == 2 and [len(tensor) for tensor in table.values()] == [2, 2]


@pytest.mark.parametrize("stage", ["run_loop", "read_logits", "streamer"])
@pytest.mark.some(1)
def test_an_interrupt_ends_one(stage, monkeypatch):
    """It comes to the thread that runs the tick of all, at any place of it."""
    model, compute = build("plain"), getattr(Tokens, stage, None)
    asked = [request for request in requests(model, 12, ways=WAYS[:4]) if request["max_new_tokens"] > 4]
    alone, calls = [model.generate(**request) for request in asked], []

    def interrupted(*args):
        calls.append(None)
        if len(calls) == (4 if stage == "streamer" else 12):
            raise KeyboardInterrupt
        return None if compute is None else compute(*args)

    class Interrupted(FailingStreamer):
        def put(self, value):
            interrupted()

    if stage == "streamer":
        asked[0]["streamer"] = Interrupted(0)
    else:
        monkeypatch.setattr(Tokens, stage, interrupted)

    with SharedPasses(model) as passes, ThreadPoolExecutor(len(asked)) as pool:
        results = list(pool.map(partial(outcome, passes), asked))
    failed = [i for i, result in enumerate(results) if isinstance(result, KeyboardInterrupt)]
    assert len(failed) in ((1, 2) if stage == "streamer" else (1,))
    others = [i for i in range(len(asked)) if i not in failed]
    assert_same([results[i] for i in others], [alone[i] for i in others])
    assert not passes.decoders and passes._rows == passes._tokens == 0


def test_leaving_while_a_call_runs_keeps_the_error():
    model, started = tiny_model(num_loops=4), threading.Event()
    ids = torch.ones(1, 3, dtype=torch.long)

    def check():
        started.set()

    def work(passes):
        passes.generate(ids, max_new_tokens=20, min_new_tokens=20, check=check)

    for _ in range(3):  # but for the first, it may not have begun
        with pytest.raises(KeyError), SharedPasses(model) as passes:
            thread = threading.Thread(target=work, args=(passes,))
            thread.start()
            started.wait()
            raise KeyError("what went wrong")
        thread.join()


def test_a_request_that_fails_leaves_no_cache_behind():
    """Not even until garbage is collected."""
    model = build("plain")
    caches = caches_of(model)

    gc.collect()
    gc.disable()
    try:
        with SharedPasses(model) as passes:
            for _ in range(3):
                with pytest.raises(ConnectionError):
                    passes.generate(random_ids(1, 5), max_new_tokens=9, do_sample=False, streamer=Gone(3))
        assert len(caches) == 3 and not any(cache() for cache in caches)
    finally:
        gc.enable()
