"""Rows whose keys and values lie in pages decode to the tokens that they have without pages. In float64, where no
token is decided by rounding; the kernel runs as torch defines it, uncompiled, and as this project computes it on CPUs.
"""

import pytest
import torch

from modeling_looped import SharedPasses, row_pages
from modeling_looped.depth import BlockMask
from modeling_looped.row_engine import FLEX
from modeling_looped.row_pages import attend_to_copies
from tests.helpers import quick_and_slow, random_ids
from tests.test_shared_passes import GREEDY, SYSTEMS, assert_same, build, requests, together


pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
]
WAYS = {
    "margin": {"exit_criterion": "logit_margin", "exit_threshold": 0.3},
    "mixed_depths": {"num_loops": [1, 6, 2], "exit_criterion": "latent_diff", "exit_threshold": 0.5},
    "shared_slots": {"cache_sharing": "last", "exit_criterion": "kl", "exit_threshold": 0.05},
    "speculation": {"draft_loops": 1, "draft_tokens": 3},
    "sampled": {"do_sample": True, "exit_criterion": "logit_margin", "exit_threshold": 0.3},
}


@pytest.fixture(params=["copies", "kernel"], autouse=True)
def small_pages(request, monkeypatch):
    """So that most tokens lie in other pages than those before them."""
    monkeypatch.setattr(row_pages, "PAGE", 3)
    if request.param == "kernel":
        monkeypatch.setattr(row_pages, "attend_to_copies", row_pages.attend_to_pages)
    with torch.compiler.set_stance("force_eager"):
        yield


def without_pages(model, request: dict):
    model.set_attn_implementation("eager" if model.config.attention_softcap else "sdpa")
    torch.manual_seed(0)
    result = model.generate(**request)
    model.set_attn_implementation(FLEX)
    torch.manual_seed(0)
    return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.covering
@pytest.mark.some(2)
def test_what_rows_give_without_pages(system, way):
    if way == "shared_slots" and "keys" in system:
        pytest.skip("models that share keys take no shared slots")
    model, ids = build(system), random_ids(3, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[2, 2] = mask[2, 4] = 0  # holes
    request = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 9, **GREEDY, **WAYS[way]}
    expected = without_pages(model, request)
    found = model.generate(**request)
    assert_same([found], [expected])
    for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers):
        held = mask.new_ones(3, 15).bool() & torch.cat([mask.bool(), mask.new_ones(3, 8).bool()], dim=1)
        held = held[:, -theirs.keys.shape[2] :]
        for states in ("keys", "values"):
            kept, wanted = (getattr(layer, states).transpose(1, 2)[held] for layer in (ours, theirs))
            torch.testing.assert_close(kept, wanted)


@pytest.mark.parametrize("small_pages", ["copies", pytest.param("kernel", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, "plain", "windows", "parts_of_loops", "softcap"))
@pytest.mark.some(1)
def test_requests_share_pages(system):
    model = build(system)
    asked = requests(model, 6)
    alone = [without_pages(model, request) for request in asked]
    with SharedPasses(model, max_rows=8, prompt_tokens=6) as passes:  # for all of them
        assert_same(together(passes, asked), alone)
        assert passes.row_ticks > 1.5 * passes.ticks  # rows did share passes, also with a softcap
        pools = passes.pages.core, passes.pages.outer
        held = [pool.num_pages for pool in pools]
        assert held[0] > 0 and [sorted(pool.free) for pool in pools] == [list(range(count)) for count in held]
        together(passes, asked[:4], threads=1)
        assert [pool.num_pages for pool in pools] == held  # what others left is enough


@pytest.mark.some(1)
def test_a_conversation_goes_on():
    """The cache that comes back is one of transformers, and is taken again."""
    model, exits = build("windows"), WAYS["margin"]
    first = {"input_ids": random_ids(2, 5), "max_new_tokens": 6, **GREEDY, **exits}
    expected = without_pages(model, first)
    found = model.generate(**first)
    again = torch.cat([found.sequences, random_ids(2, 3, seed=1)], dim=1)
    after = {"input_ids": again, "max_new_tokens": 6, **GREEDY, **exits}
    expected = without_pages(model, {**after, "past_key_values": expected.past_key_values})
    assert_same([model.generate(**after, past_key_values=found.past_key_values)], [expected])


@pytest.mark.parametrize("is_returned", [False, True])
def test_a_prompt_is_held_twice_only_where_its_cache_is_returned(is_returned, monkeypatch):
    model, caches, fill = build("plain"), [], row_pages.PagedRows.fill

    def watched(rows, cache, *args):
        caches.append(cache)
        fill(rows, cache, *args)

    monkeypatch.setattr(row_pages.PagedRows, "fill", watched)
    request = {"input_ids": random_ids(1, 9), "max_new_tokens": 4, **GREEDY, **WAYS["margin"]}
    request["return_dict_in_generate"] = is_returned
    expected, found = without_pages(model, request), model.generate(**request)
    assert torch.equal(*([x.sequences if is_returned else x for x in (found, expected)]))
    assert bool(caches[0].layers) == is_returned


@pytest.mark.parametrize("small_pages", ["kernel"], indirect=True)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.some(1)
def test_the_kernel_can_be_compiled_for_all_lengths(softcap, monkeypatch):
    """As it was traced it is run here, without the compiler: it takes no number that tracing leaves open."""
    monkeypatch.setattr(row_pages, "PAGE", 128)
    torch._dynamo.reset()
    compiled = torch.compile(row_pages.kernel, dynamic=True, backend="eager", fullgraph=True)
    monkeypatch.setattr(row_pages, "compiled_kernel", lambda: compiled)
    room, queries = torch.randn(2, 2, 3 * 128, 16), 10 * torch.randn(3, 4, 1, 16)  # keys and values in three pages
    lasts, pages_of = torch.tensor([5, 200, 127, 0]), torch.tensor([[0, 0, 0], [2, 1, 0], [1, 0, 0], [0, 0, 0]])
    starts = torch.tensor([[0, 999, 999], [999, 128, 0], [999, 0, 999], [999, 999, 999]])  # of each page, by token
    seen = BlockMask.from_kv_blocks(
        torch.tensor([1, 2, 1, 0], dtype=torch.int32)[:, None, None],
        pages_of.int()[:, None, None].contiguous(),
        BLOCK_SIZE=128,
        mask_mod=lambda token, head, query, index: starts[token, index // 128] + index % 128 <= lasts[token],
        seq_lengths=(1, 3 * 128),
        compute_q_blocks=False,
    )
    with torch.compiler.set_stance("default"):
        found = row_pages.attend_to_pages(queries, room, seen, 0.25, softcap)
    torch.testing.assert_close(found, attend_to_copies(queries, room, seen, 0.25, softcap))


def test_a_call_that_computes_nothing_after_the_prompt():
    request = {"input_ids": random_ids(2, 5), "max_new_tokens": 1, **GREEDY, **WAYS["margin"]}
    model = build("plain")
    expected = without_pages(model, request)
    assert_same([model.generate(**request)], [expected])


@pytest.mark.parametrize("small_pages", quick_and_slow(["copies", "kernel"], "copies"), indirect=True)
def test_memory_that_runs_out_ends_one_and_no_other(monkeypatch):
    model = build("sections")
    small, large = ({"input_ids": random_ids(1, n), "max_new_tokens": 12, **GREEDY, **WAYS["margin"]} for n in (4, 60))
    expected = without_pages(model, small)
    grow, fails = row_pages.Pool.grow, True

    def grows(pool, missing):
        if fails and missing > 10:
            raise torch.OutOfMemoryError("no memory for pages")
        grow(pool, missing)

    monkeypatch.setattr(row_pages.Pool, "grow", grows)
    with SharedPasses(model, max_rows=4) as passes:
        results = together(passes, [small, large, small])
        assert isinstance(results[1], torch.OutOfMemoryError)
        assert_same(results[::2], [expected] * 2)
        for pool in (passes.pages.core, passes.pages.outer):
            assert sorted(pool.free) == list(range(pool.num_pages))
        fails = False
        assert_same(together(passes, [small]), [expected])
        assert len(passes.generate(**large).sequences[0]) == 72


def test_growing_that_stops_half_way():
    """Some layers have got their room, the next has not: nothing that is held is lost, and it can be tried again."""
    pool, states = row_pages.Pool(), torch.randn(1, 2, 3, 4)
    line = row_pages.Line(1)
    for slot in (0, 1):
        pool.hold(slot, states)
    pool.reserve([line], 3)
    index = torch.tensor([line.index(place) for place in range(3)])
    for slot in (0, 1):
        pool.write(slot, index, states, -states)
    held = pool.memory[1]
    pool.memory[1] = None  # pyrefly: ignore[unsupported-operation]  fails when it is to grow
    with pytest.raises(AttributeError):
        pool.reserve([line], 30)
    pool.memory[1] = held
    assert pool.num_pages == 1 and len(line.pages) == 1
    pool.reserve([line], 30)
    assert len(line.pages) == 10 == pool.num_pages
    for slot in (0, 1):
        assert pool.memory[slot].shape[2] == 30
        assert torch.equal(pool.read(slot, index, 1), torch.stack([states, -states]))


def test_what_goes_without_pages():
    model, exits = build("plain"), WAYS["margin"]
    model.set_attn_implementation(FLEX)
    ids = {"input_ids": random_ids(1, 5), "max_new_tokens": 3, **GREEDY}
    with pytest.raises(ValueError, match="attn_implementation='flex_attention' and cache_dtype='int8'"):
        model.generate(**ids, cache_dtype="int8", **exits)
    vars(model)["hf_device_map"] = {"model": 0, "lm_head": 1}
    with pytest.raises(ValueError, match="attn_implementation='flex_attention' and layers on several devices"):
        model.generate(**ids, **exits)
    del model.hf_device_map
    expected = without_pages(model, ids)
    assert_same([model.generate(**ids)], [expected])  # at one depth: transformers' own loop
