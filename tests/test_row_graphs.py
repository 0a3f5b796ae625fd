"""Loops of rows as graphs: here a graph is its function, called again on the tensors that it reads.

tests/gpu records them: all its decoding runs through graphs.
"""

import gc
from contextlib import nullcontext

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_looped import LoopedCache, LoopedForCausalLM, SharedPasses, overrides, row_engine, row_graphs
from tests.helpers import Gone, random_ids, tiny_model
from tests.test_shared_passes import together


SYSTEMS = {
    "plain": {},
    "grouped_windows": {"num_key_value_heads": 2, "window_pattern": "SL", "sliding_window": 14},
    "flt": {"preset": "flt"},
    "flt_res": {"injection": "residual_all", "injection_norm": True},
    "parcae": {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1},
    "huginn": {"preset": "huginn", "num_prelude_layers": 1, "num_coda_layers": 1},
    "gated_change": {"loop_change_gate": True, "injection": "add"},
    "latent": {"kv_latent_size": 8},
}
WAYS = {
    "latent": {"exit_criterion": "latent_diff", "exit_threshold": 0.5},
    "margin": {"exit_criterion": "logit_margin", "exit_threshold": 0.3},
    "mixed_depths": {"num_loops": [1, 4, 2], "exit_criterion": "latent_diff", "exit_threshold": 0.5},
    "warm": {"exit_criterion": "latent_diff", "exit_threshold": 0.5, "warm_start": True},
    "shared_slots": {"cache_sharing": "cyclic-2", "exit_criterion": "latent_diff", "exit_threshold": 0.5},
}


class Repeated:
    """Replacement of a graph on the CPU: calls the function again."""

    def __init__(self, function):
        self.replay = function


@pytest.fixture
def replays(monkeypatch):
    """Graphs on the CPU; the number of times that one was run."""
    counts = []

    def counted(function, device):
        return Repeated(lambda: counts.append(1) or function())

    monkeypatch.setattr(row_graphs, "RECORDED_DEVICES", {"cpu"})
    monkeypatch.setattr(row_graphs, "record", counted)
    monkeypatch.setattr(row_graphs, "LENGTH_STEP", 8)  # so that a generation outgrows its graphs
    return counts


def model_of(system: str, **fields):
    exits = {"num_loops": 4, "loop_loss": "per_loop", "eos_token_id": None, "pad_token_id": 0}
    return tiny_model(**{**exits, **fields, **SYSTEMS[system]}).double().eval()


def decode(model, prompt, mask, **how):
    settings = {"max_new_tokens": 11, "do_sample": False, "return_dict_in_generate": True, **how}
    return model.generate(prompt, attention_mask=mask, **settings)


def padded_prompt():
    prompt = random_ids(3, 6)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    return prompt, mask


@pytest.mark.some(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_tokens_are_those_without_graphs(system, way, replays, monkeypatch):
    model, (prompt, mask) = model_of(system), padded_prompt()
    if way == "warm" and (model.config.state_init == "embedding" or model.model.looks_at_first):
        pytest.skip("this model always begins from its input")
    found = decode(model, prompt, mask, **WAYS[way])
    assert replays
    monkeypatch.setenv(row_graphs.GRAPHS, "0")
    replays.clear()
    expected = decode(model, prompt, mask, **WAYS[way])
    assert not replays
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.token_loops, expected.token_loops)
    for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


def test_no_more_graphs_than_some(replays, monkeypatch):
    """Rows that exit apart make passes of many sizes."""
    model, made = model_of("parcae"), []
    record = row_graphs.record
    monkeypatch.setattr(row_graphs, "record", lambda *given: made.append(1) or record(*given))
    monkeypatch.setattr(row_graphs, "LENGTH_STEP", 64)
    prompt, mask = padded_prompt()
    expected = decode(model, prompt, mask, **WAYS["latent"])
    assert len(made) > 2
    made.clear()
    monkeypatch.setattr(row_graphs, "MOST", 2)
    assert torch.equal(decode(model, prompt, mask, **WAYS["latent"]).sequences, expected.sequences)
    assert len(made) == 2


PLAIN_WAYS = {
    "greedy": {},
    "shallow": {"num_loops": 2},
    "sampled": {"do_sample": True, "top_k": 5},
    "processed": {"repetition_penalty": 1.5},
    "ends": {"eos_token_id": list(range(12, 18)), "max_new_tokens": 20},
}


@pytest.mark.some(11)
@pytest.mark.parametrize("way", PLAIN_WAYS)
@pytest.mark.parametrize("system", [*SYSTEMS, "of_loops", "learned_positions", "scaled"])
def test_plain_decoding_in_step_is_that_of_transformers(system, way, replays, monkeypatch):
    more = {
        "of_loops": {"loop_lora_rank": 2, "loop_norms": True},
        "learned_positions": {"position_embedding": "learned"},
        "scaled": {"residual_scaling": "sqrt"},
    }
    model = tiny_model(num_loops=4, eos_token_id=None, pad_token_id=0, **(more | SYSTEMS)[system]).double().eval()
    outputs = []
    for value in ("1", "0"):
        monkeypatch.setenv(row_graphs.GRAPHS, value)
        torch.manual_seed(0)
        outputs.append(decode(model, *padded_prompt(), **PLAIN_WAYS[way]))
        assert bool(replays) == (value == "1")
        replays.clear()
    found, expected = outputs
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.token_loops, expected.token_loops)
    for name in ("scores", "logits"):
        for ours, theirs in zip(getattr(found, name) or (), getattr(expected, name) or (), strict=True):
            torch.testing.assert_close(ours, theirs)
    if way != "ends":  # rows that have ended are not computed again
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys)
            torch.testing.assert_close(ours.values, theirs.values)


@pytest.mark.parametrize(
    "how",
    [
        {"output_scores": True},
        {"cache_implementation": "static", "disable_compile": True},
        {"num_loops": [1, 4, 2]},
        {"use_cache": False},
        {"num_beams": 2},
        {"output_hidden_states": True},
        {"state_seed": 0},
        {"exit_criterion": "latent_diff", "exit_threshold": 0.5, "exit_selection": "after"},
    ],
    ids=str,
)
def test_other_plain_decoding_is_left_to_transformers(how, monkeypatch):
    monkeypatch.setattr(row_graphs, "RECORDED_DEVICES", {"cpu"})
    called = []
    monkeypatch.setattr("modeling_looped.generation.decode_in_step", called.append)
    fields = {"preset": "huginn", "num_prelude_layers": 1, "num_coda_layers": 1} if "state_seed" in how else {}
    model = tiny_model(num_loops=4, eos_token_id=None, pad_token_id=0, loop_loss="per_loop", **fields).eval()
    decode(model, *padded_prompt(), **how)
    assert not called


@pytest.mark.parametrize("system", SYSTEMS)
def test_passes_are_recorded_once_for_a_length(system, replays, monkeypatch):
    """One row: a loop, and where there are some, prelude and coda."""
    model, recorded = model_of(system), []
    record = row_graphs.record
    monkeypatch.setattr(row_graphs, "record", lambda *given: recorded.append(1) or record(*given))
    decode(model, random_ids(1, 6), None, **WAYS["latent"])
    kinds = 1 + bool(len(model.model.prelude)) + bool(len(model.model.coda))
    lengths = 3  # 8, 16 and 17
    assert 0 < len(recorded) <= kinds * lengths
    assert len(replays) > 3 * len(recorded)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.core[0].mlp.register_forward_hook(lambda *args: None),
        lambda model: model.model.core[0].compile(backend="eager"),
        lambda model: model.train(),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: setattr(model.model.core[0].mlp, "forward", model.model.core[0].mlp.forward),
    ],
    ids=["hook", "compiled", "training", "eager", "forward"],
)
def test_changed_models_run_kernel_by_kernel(change, replays):
    model = model_of("plain")
    change(model)
    # that a block is compiled counts, not what the compiler makes of it
    with torch.compiler.set_stance("force_eager"):
        decode(model, *padded_prompt(), **WAYS["latent"])
    assert not replays


@pytest.mark.parametrize(
    "fields",
    [
        {"loop_embedding": "learned"},
        {"loop_lora_rank": 2},
        {"num_key_value_loops": 1, "injection": "add"},
        {"attention_softcap": 5.0, "attn_implementation": "eager"},
    ],
    ids=str,
)
def test_models_whose_loops_differ_run_kernel_by_kernel(fields, replays):
    decode(model_of("plain", **fields), *padded_prompt(), **WAYS["latent"])
    assert not replays


def test_a_kernel_that_was_registered_as_sdpa_is_called(replays, monkeypatch):
    called, sdpa = [], ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS.register("sdpa", lambda *given, **how: called.append(1) or sdpa(*given, **how))
    try:
        decode(model_of("plain"), *padded_prompt())
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa)
    assert called and not replays


def test_int8_keys_run_kernel_by_kernel(replays):
    decode(model_of("plain"), *padded_prompt(), cache_dtype="int8", **WAYS["latent"])
    assert not replays


@pytest.mark.some(4)
@pytest.mark.parametrize("how", [{}, {"do_sample": True, "top_k": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("system", ["plain", "flt", "parcae"])
def test_drafts_give_the_tokens_without_graphs(system, rows, how, replays, monkeypatch):
    """Passes over tokens in flight, and tokens of all rows where drafts do not pay."""
    model, (prompt, mask) = model_of(system), padded_prompt()
    prompt, mask, outputs = prompt[:rows], mask[:rows], []
    for value in ("1", "0"):
        monkeypatch.setenv(row_graphs.GRAPHS, value)
        torch.manual_seed(0)
        how = {"max_new_tokens": 24, "draft_loops": 2, "draft_tokens": 1, **how}
        outputs.append(decode(model, prompt, mask, **how))
        assert bool(replays) == (value == "1")
        replays.clear()
    if "do_sample" not in how:  # which noise a token meets depends on when it is asked for
        assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert outputs[0].sequences.shape == outputs[1].sequences.shape


def test_what_cannot_be_recorded_runs_kernel_by_kernel(replays, monkeypatch):
    model, (prompt, mask), said = model_of("plain"), padded_prompt(), []
    expected = decode(model, prompt, mask, **WAYS["latent"])
    assert replays
    replays.clear()

    def refuse(function, device):
        function()  # as far as it got
        raise row_graphs.CannotRecord("operation not permitted when stream is capturing")

    monkeypatch.setattr(row_graphs, "record", refuse)
    monkeypatch.setattr(row_graphs, "_failed", [])
    monkeypatch.setattr(row_graphs.logger, "warning", said.append)
    for _ in range(2):  # the second does not try
        found = decode(model, prompt, mask, **WAYS["latent"])
        assert torch.equal(found.sequences, expected.sequences)
    assert not replays and len(said) == 1 and "not permitted when stream is capturing" in said[0]


@pytest.mark.parametrize("fails_at", [9, 10, 20])
def test_a_replay_that_fails_does_not_move_rows(fails_at, replays, monkeypatch):
    """Where requests that share passes are run again, each alone, the device may have gone on."""
    model = model_of("plain")
    requests = [
        {"input_ids": random_ids(rows, 6), "max_new_tokens": 16, "do_sample": False, **WAYS["latent"]}
        for rows in (2, 1)
    ]
    for request in requests:
        request["attention_mask"] = torch.ones_like(request["input_ids"])
    alone, calls = [model.generate(**request) for request in requests], []

    def fails_once(function, device):
        def run():
            found = function()
            calls.append(1)
            if len(calls) == fails_at:
                raise torch.OutOfMemoryError("once")
            return found

        return Repeated(run)

    monkeypatch.setattr(row_graphs, "record", fails_once)
    with SharedPasses(model, max_rows=3) as passes:
        for found, expected in zip(together(passes, requests), alone, strict=True):
            assert torch.equal(found, expected)
    assert len(calls) > fails_at


@pytest.mark.parametrize("system", ["plain", "parcae"])
def test_a_stopped_generation_leaves_the_tokens_in_the_cache_of_the_caller(system, replays, monkeypatch):
    model, prompt, lengths = model_of(system), random_ids(2, 6), []

    for value in ("1", "0"):
        monkeypatch.setenv(row_graphs.GRAPHS, value)
        cache = LoopedCache(model.config)
        how = {"past_key_values": cache, "max_new_tokens": 12, "do_sample": False}
        with pytest.raises(ConnectionError):
            model.generate(prompt[:1], streamer=Gone(6), attention_mask=torch.ones(1, 6, dtype=torch.long), **how)
        lengths.append(cache.get_seq_length())
    assert replays and lengths[0] == lengths[1] > 6


@pytest.mark.parametrize("system", ["plain", "flt", "parcae", "huginn"])
def test_requests_that_share_passes_run_by_the_graphs_of_each(system, replays, monkeypatch):
    model = model_of(system)
    requests = [
        {"input_ids": random_ids(rows, length, seed=length), "max_new_tokens": 10, "do_sample": False, **WAYS[way]}
        for rows, length, way in ((2, 6, "latent"), (1, 4, "margin"), (1, 9, "latent"))
    ]
    for request in requests:
        request["attention_mask"] = torch.ones_like(request["input_ids"])
    monkeypatch.setenv(row_graphs.GRAPHS, "0")
    alone = [model.generate(**request) for request in requests]
    assert not replays
    monkeypatch.setenv(row_graphs.GRAPHS, "1")
    with SharedPasses(model, max_rows=4) as passes:
        found = together(passes, requests)
    assert len(replays) > passes.ticks
    for ours, expected in zip(found, alone, strict=True):
        assert torch.equal(ours, expected)


def test_prompts_that_others_read_meanwhile_take_no_graphs_away(replays, monkeypatch):
    """On a GPU each prompt is read by a pass of its own, whose loops are watched to let others go on."""
    model, seen, prefill = model_of("plain"), [], LoopedForCausalLM._prefill

    def read(self, *given):
        seen.append((overrides.has_hooks(model.model.end_of_loop), row_graphs.can_have_graphs(model, False)))
        return prefill(self, *given)

    monkeypatch.setattr(LoopedForCausalLM, "_prefill", read)
    monkeypatch.setattr(row_engine, "prompt_goes_in_ticks", lambda *given: False)
    with SharedPasses(model) as passes:
        passes.generate(random_ids(1, 6), max_new_tokens=4, do_sample=False, **WAYS["latent"])
    assert seen == [(True, True)]
    model.model.end_of_loop.register_forward_hook(lambda *given: None)  # of somebody else
    assert not row_graphs.can_have_graphs(model, False)


def test_a_graph_for_which_there_is_no_memory_is_done_without(replays, monkeypatch):
    model, (prompt, mask) = model_of("plain"), padded_prompt()
    expected = decode(model, prompt, mask, **WAYS["latent"])
    failures, record = [], row_graphs.record

    def recorded(*given):
        if len(failures) < 2:
            failures.append(1)
            raise torch.OutOfMemoryError("no memory")
        return record(*given)

    monkeypatch.setattr(row_graphs, "record", recorded)
    monkeypatch.setattr(row_graphs, "WITHOUT_MEMORY", 3)
    replays.clear()
    assert torch.equal(decode(model, prompt, mask, **WAYS["latent"]).sequences, expected.sequences)
    assert len(failures) == 2 and replays and not row_graphs._failed


class StandInStream:
    device_index, cuda_stream, device = 0, 7, "cpu"

    def __init__(self, calls):
        self.calls = calls

    def wait_stream(self, other):
        self.calls.append("wait")


class StandInGraph:
    """Of torch.cuda: writes down what it is told."""

    calls: list
    fails = False

    def capture_begin(self, pool, capture_error_mode):
        self.calls.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self):
        self.calls.append("end")
        if StandInGraph.fails:
            raise RuntimeError("the stream waited for the host")

    def replay(self):
        self.calls.append("replay")


@pytest.fixture
def cuda_calls(monkeypatch):
    """In place of the functions of torch.cuda that recording calls, on machines without it."""
    calls = StandInGraph.calls = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: StandInStream(calls))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: StandInStream(calls))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "memory 1")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("clear"), raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(row_graphs, "_rooms", {})
    monkeypatch.setattr(StandInGraph, "fails", False)
    return calls


def test_graphs_of_a_stream_have_their_memory_in_one_place(cuda_calls):
    recorded = ["wait", "clear", "begin in memory 1, thread_local", "end", "clear", "wait"]
    runs = []

    def function():
        assert not gc.isenabled()
        runs.append(1)
        return torch.ones(2)

    first, second = (row_graphs.Recording(function) for _ in range(2))
    assert gc.isenabled()
    assert cuda_calls == 3 * recorded  # the empty graph that keeps the memory, and two more
    assert len(runs) == 4  # each once before it is recorded
    assert first.room is second.room and first.graph is not second.graph
    found = first.replay()
    assert cuda_calls[-1] == "replay" and found is not first.output and torch.equal(found, first.output)


def test_a_recording_that_fails_waits_and_says_why(cuda_calls, monkeypatch):
    row_graphs.Recording(lambda: torch.ones(2))
    monkeypatch.setattr(StandInGraph, "fails", True)
    with pytest.raises(row_graphs.CannotRecord, match="waited for the host"):
        row_graphs.Recording(lambda: torch.ones(2))
    assert cuda_calls[-3:] == ["end", "clear", "wait"]
    with pytest.raises(ZeroDivisionError):  # of the function itself, before anything is recorded
        row_graphs.Recording(lambda: torch.ones(1 // 0))
    assert cuda_calls[-2:] == ["wait", "wait"]
