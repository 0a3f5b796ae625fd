"""torch.compile without graph breaks, and without compiling what is compiled already.

The quick tests trace whole graphs and run them as they are; the slow ones run what inductor makes of them.
"""

import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from packaging.version import Version
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from transformers import CompileConfig

from looped_recipes.engine.compiling import blocks_of, compile_blocks, compile_parts
from looped_recipes.engine.validation import validate
from looped_recipes.settings.recipe import load_recipe
from modeling_looped import compiled_blocks, cross_entropy
from modeling_looped.layers import AttentionSite
from tests.helpers import LIKE_GEMMA2, LIKE_OLMO2, Graphs, quick_and_slow, random_ids, tiny_model
from tests.helpers_data import plain_rows
from tests.helpers_pretrain import SMOKE


pytestmark = pytest.mark.usefixtures("fresh_compiler")
SYSTEMS = {
    "plain": {},
    "windows": {"num_prelude_layers": 1, "num_coda_layers": 1, "window_pattern": "SL", "sliding_window": 4},
    "flt": {"preset": "flt"},
    "parcae": {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1},
    "huginn": {"preset": "huginn", "num_prelude_layers": 1, "num_coda_layers": 1},
    "ouro": {"preset": "ouro"},
    "first_keys": {"num_key_value_loops": 1, "injection": "add"},
    "per_loop": {"loop_loss": "per_loop", "norm_penalty": 0.1},
    "gate": {"preset": "ouro", "loop_loss": "gate"},
    "of_loops": {"loop_lora_rank": 2, "loop_norms": True, "loop_embedding": "learned"},
    "gated_change": {"loop_change_gate": True, "injection": "add"},
    "like_olmo2": LIKE_OLMO2,
    "like_gemma2": LIKE_GEMMA2,
}
over_systems = pytest.mark.parametrize("system", SYSTEMS)


def quickly(*quick):
    return pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, *quick))


def build(system: str, **fields):
    fields = {"num_core_layers": 1, "num_loops": 2, "eos_token_id": None, "pad_token_id": 0, **fields}
    return tiny_model(**{**fields, **SYSTEMS[system]})


def loss_and_gradients(model, forward, **inputs):
    model.zero_grad()
    outputs = forward(**inputs)
    outputs.loss.backward()
    return outputs.loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_trains_alike(model, compiled, **tolerance):
    ids = random_ids(2, 7)
    labels = ids.clone()
    labels[0, :3] = -100
    inputs = {"input_ids": ids, "labels": labels, "use_cache": False}
    loss, found = loss_and_gradients(model, compiled, **inputs)
    expected_loss, expected = loss_and_gradients(model, model, **inputs)
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in found.items():  # compiled, what is not reached may have zeros
        torch.testing.assert_close(gradient, expected.get(name, torch.zeros_like(gradient)), **tolerance)
    assert expected.keys() <= found.keys()
    return found.keys() - expected.keys()


# Forward passes


@over_systems
@pytest.mark.slow
def test_one_graph_without_breaks(system):
    model, graphs = build(system), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad():
        for seed in range(2):
            ids = random_ids(2, 7, seed=seed)
            assert torch.equal(compiled(ids).logits, model(ids).logits)
    assert graphs.count == 1


@quickly("ouro", "first_keys")
@pytest.mark.some(1)
def test_training_in_one_graph(system):
    model, graphs = build(system), Graphs()
    assert not assert_trains_alike(model, torch.compile(model, backend=graphs, fullgraph=True), rtol=1e-4, atol=1e-5)
    assert graphs.count == 1


@pytest.mark.skipif(Version(torch.__version__) < Version("2.12"), reason="this torch takes every graph for an export")
def test_a_pass_without_padding_makes_no_mask():
    """Which would keep a GPU from its fastest kernels."""
    attentions = []

    def backend(graph, example_inputs):
        attentions.extend(node.kwargs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        return graph

    model, ids = build("plain"), random_ids(2, 7)
    torch.compile(model, backend=backend, fullgraph=True)(ids, labels=ids, use_cache=False)
    assert len(attentions) == 2
    assert all(how["attn_mask"] is None and how["is_causal"] for how in attentions)


@pytest.mark.slow
def test_a_depth_is_compiled_once():
    model, graphs, ids = build("plain"), Graphs(), random_ids(2, 7)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    depths = [2, 2, 3, 3, 2, 4, 3, 4, [1, 3], [1, 3], 2, [3, 1], [1, 3]]
    with torch.no_grad():
        for i, num_loops in enumerate(depths):
            found = compiled(ids, num_loops=num_loops).logits
            assert torch.equal(found, model(ids, num_loops=num_loops).logits)
            assert graphs.count == len({str(depth) for depth in depths[: i + 1]})


@pytest.mark.slow
@quickly("plain")
def test_blocks_are_compiled_once_for_all_loops_and_layers(system):
    counts = set()
    for num_loops, num_layers in ((2, 1), (6, 1), (6, 4)):
        torch._dynamo.reset()
        model, graphs = build(system, num_core_layers=num_layers, num_loops=num_loops).train(), Graphs()
        compile_blocks(blocks_of(model), backend=graphs, fullgraph=True)
        model(random_ids(2, 7), labels=random_ids(2, 7), use_cache=False).loss.backward()
        counts.add(graphs.count)
    assert len(counts) == 1 and counts.pop() <= 4


def test_chunks_of_any_number_of_tokens_are_one_graph(monkeypatch):
    model, graphs = build("plain", vocab_size=99).train(), Graphs()
    monkeypatch.setitem(cross_entropy.LOGITS_PER_CHUNK, "cpu", 7 * 99)
    compile_parts(model, backend=graphs)
    before, counts = model.compiled_cross_entropy, []

    def counted(*given):
        found = before(*given)
        counts.append((len(given[0]), graphs.count))
        return found

    model.compiled_cross_entropy = counted
    model(random_ids(2, 9), labels=random_ids(2, 9), use_cache=False, output_logits=False).loss.backward()
    assert [rows for rows, _ in counts] == [7, 7, 2] and len({of_all for _, of_all in counts}) == 1


def test_a_compiled_model_can_be_pickled():
    model, ids = build("parcae").train(), random_ids(2, 9)
    compile_parts(model, backend="eager")
    copied = pickle.loads(pickle.dumps(model))
    found, expected = (each(ids, labels=ids, use_cache=False, output_logits=False).loss for each in (copied, model))
    torch.testing.assert_close(found, expected)


INTERRUPTED = """
import os, signal, time
from looped_recipes.engine.compiling import start_compile_workers

if __name__ == "__main__":
    start_compile_workers()
    from torch._inductor.async_compile import AsyncCompile

    workers = AsyncCompile.process_pool()
    workers.submit(os.getpid).result(100)
    job = workers.submit(time.sleep, 1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *given: print("told to end", flush=True))
        os.kill(0, number)
    job.result(20)
    print("compiled")
"""


@pytest.mark.slow
def test_a_signal_to_all_processes_does_not_end_the_compilers_of_torch(tmp_path):
    """Without its workers torch would wait forever, and the run would not save its step."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, tmp_path / "interrupted.py"],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert done.stdout.split("\n")[:3] == ["told to end", "told to end", "compiled"], done.stderr


@pytest.mark.slow
def test_lengths_are_compiled_twice_at_most():
    model, graphs = build("plain"), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad():
        for length in (5, 6, 9, 17):
            ids = random_ids(2, length)
            torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
    assert graphs.count == 2  # the first length, then any


@pytest.mark.slow
@over_systems
@pytest.mark.parametrize(
    "arguments",
    [
        {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])},
        {"num_loops": [3, 1]},
        {"num_loops": 4, "backprop_loops": 2, "labels": True, "use_cache": False},
        {"num_loops": [1, 4], "backprop_loops": 2, "labels": True, "use_cache": False},
        {"output_loop_logits": True, "output_loop_hidden_states": True, "use_cache": False},
    ],
    ids=["padded", "mixed_depths", "truncated", "truncated_mixed_depths", "every_loop"],
)
def test_every_argument_traces(system, arguments):
    if system == "first_keys" and "backprop_loops" in arguments:
        pytest.skip("its last loops compute no keys, so the model refuses: tests/test_depth.py")
    model, ids = build(system), random_ids(2, 7)
    arguments = {**arguments, "labels": ids} if "labels" in arguments else arguments
    compiled = torch.compile(model, backend=Graphs(), fullgraph=True)
    found, expected = compiled(ids, **arguments), model(ids, **arguments)
    torch.testing.assert_close(found.logits, expected.logits)
    if "labels" in arguments:
        torch.testing.assert_close(found.loss, expected.loss)
    if "output_loop_logits" in arguments:
        for name in ("loop_logits", "loop_hidden_states"):
            for a, b in zip(found[name], expected[name], strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.slow
@over_systems
def test_inductor_trains(system):
    model = build(system)
    assert_trains_alike(model, torch.compile(model, fullgraph=True), rtol=1e-3, atol=1e-4)


# Decoding with a static cache


def tokens_of(model, num_loops, **arguments):
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    arguments |= {"attention_mask": mask, "num_loops": num_loops, "max_new_tokens": 6, "do_sample": False}
    return model.generate(random_ids(2, 5), **arguments)


def decode(model, backend, num_loops, **arguments):
    """Greedy tokens, decoding steps compiled as transformers does on a GPU; and the same uncompiled."""
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": config}
    return tokens_of(model, num_loops, **static, **arguments), tokens_of(model, num_loops, **arguments)


@quickly()
def test_static_cache_decodes_in_one_graph_per_depth(system):
    model, graphs = build(system), Graphs()
    counts = []
    for num_loops in (2, 3, 2, 3):
        found, expected = decode(model, graphs, num_loops)
        assert torch.equal(found, expected)
        counts.append(graphs.count)
    if model.config.has_windows:  # a sliding layer runs other code once its window is full
        assert counts[0] == 2 and counts[1] <= 4 and counts[1:] == [counts[1]] * 3
    else:
        assert counts == [1, 2, 2, 2]


@pytest.mark.skipif(not compiled_blocks.LIMIT, reason="this torch cannot be told how many regions may differ")
@quickly("ouro")
def test_loops_and_layers_share_the_regions_of_a_graph(system):
    """Compiling then takes no longer for a deeper model. Sections of other kinds, and loops that start otherwise or
    make no keys, have regions of their own."""
    model, graphs = build(system, num_core_layers=2).double(), Graphs()
    for num_loops in (2, 3):
        found, expected = decode(model, graphs, num_loops, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(found.logits, expected.logits)
    assert len(graphs.regions) == (4 if model.config.has_windows else 2)
    assert len(set(graphs.regions)) == 1 and 1 <= graphs.regions[0] <= 2


class PlacesKept(Graphs):
    """A backend that runs graphs as they are, and notes which tensors with four dimensions (slots, and masks) change
    their place from call to call, as far as a backend that records CUDA graphs is told: it copies those."""

    def __init__(self):
        super().__init__()
        self.moving, self.staying = [], []

    def compile(self, graph, inputs):
        stays = TracingContext.get().fw_metadata.static_input_indices
        for place, tensor in enumerate(inputs):
            if torch.is_tensor(tensor) and tensor.ndim == 4:
                (self.staying if place in stays else self.moving).append(tuple(tensor.shape))
        return make_boxed_func(graph.forward)

    def __call__(self, graph, example_inputs):
        backend = aot_autograd(fw_compiler=self.compile, inference_compiler=self.compile)
        return backend(super().__call__(graph, example_inputs), example_inputs)


@pytest.mark.slow
def test_slots_that_regions_fill_stay_where_they_are():
    """What a region writes would else be written to the copy that a CUDA graph makes of what moves, and be lost."""
    model, places = build("plain"), PlacesKept()
    found, expected = decode(model, places, 3)
    assert torch.equal(found, expected)
    config = model.config
    slot = (2, config.num_key_value_heads, 10, config.head_dim)
    assert places.staying == [slot] * 2 * 3 * config.num_core_layers
    assert places.moving == [(2, 1, 1, 10)]  # the mask


@pytest.mark.parametrize("output", ["output_hidden_states", "output_attentions"])
@pytest.mark.some(1)
def test_what_blocks_record_in_regions(output):
    model = build("ouro", attn_implementation="eager")
    found, expected = decode(model, Graphs(), 2, return_dict_in_generate=True, **{output: True})
    name = output.removeprefix("output_")
    for step, wanted in zip(found[name][1:], expected[name][1:], strict=True):  # those after the prompt are compiled
        for a, b in zip(step, wanted, strict=True):
            torch.testing.assert_close(a[..., : b.shape[-1]], b)


class ChangesTheSecondLoop(AttentionSite):
    def forward(self, *args, **kwargs):
        output, weights = super().forward(*args, **kwargs)
        return (output + 1 if self.layer_idx == 2 else output), weights


def change_the_second_loop(model, how: str, monkeypatch) -> torch.Tensor:
    """Change it in a model of two loops; how often the changed module was called until now."""
    inner, calls, loop = model.model.core[0].mlp.down_proj, torch.zeros(()), [0]

    def change(module, arguments, output):
        if module is not inner:
            return output
        calls.add_(1)
        loop[0] = (loop[0] + 1) % 2  # a count of all calls would be another number, and another graph, in every pass
        return output + 1 if loop[0] == 0 else output

    if how == "hook":
        inner.register_forward_hook(change)
    elif how == "replaced forward":
        inner.forward = lambda x: change(inner, x, nn.Linear.forward(inner, x))
    elif how == "hook on all modules":
        monkeypatch.setitem(nn.modules.module._global_forward_hooks, "change", change)
    else:
        for site in model.model.attention_sites:
            site.__class__ = ChangesTheSecondLoop
    return calls


WAYS_TO_CHANGE = ["hook", "replaced forward", "hook on all modules", "own sites"]


@pytest.mark.parametrize("how", WAYS_TO_CHANGE)
def test_what_changes_one_loop_is_seen_before_a_pass_is_compiled(how, monkeypatch):
    model = build("plain", num_core_layers=2)
    assert not model.model.differs_by_call()
    change_the_second_loop(model, how, monkeypatch)
    assert model.model.differs_by_call()


@pytest.mark.parametrize("how", quick_and_slow(WAYS_TO_CHANGE, "hook"))
def test_what_changes_one_loop_changes_that_loop_of_a_compiled_pass(how, monkeypatch):
    """A region would be traced once for all loops."""
    model = build("plain", num_core_layers=2)
    unchanged = tokens_of(model, 2)
    calls = change_the_second_loop(model, how, monkeypatch)
    found, expected = decode(model, Graphs(), 2)
    assert torch.equal(found, expected) and not torch.equal(found, unchanged)
    assert calls == (0 if how == "own sites" else 2 * 6 * 2)


def test_prompts_of_mixed_depth_decode_uncompiled():
    model, graphs = build("plain"), Graphs()
    found, expected = decode(model, graphs, [1, 3])
    assert torch.equal(found, expected)
    assert graphs.count == 0


@pytest.mark.slow
@over_systems
def test_inductor_decodes(system):
    model = build(system)
    for num_loops in (2, 3):
        found, expected = decode(model, "inductor", num_loops)
        assert torch.equal(found, expected)


def test_every_pass_of_a_validation_begins_a_step_of_the_graphs(monkeypatch):
    """Else it would be recorded anew, as what follows on the pass before."""
    begun = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(len(begun)))
    settings = ["training.compile=cuda_graphs", "training.micro_batch_size=2", "evaluation.rows=5"]
    recipe = load_recipe(SMOKE / "flt.yaml", settings)
    length, model = recipe.data.sequence_length, tiny_model(preset="flt", vocab_size=64)
    tokens = np.random.default_rng(0).integers(0, 64, 8 * length)
    rows = plain_rows([tokens], length, length, start=1, token_bytes=torch.ones(64))
    alone = SimpleNamespace(
        process_index=0,
        num_processes=1,
        parallelism_config=None,
        device=torch.device("cpu"),
        reduce=lambda tensor, reduction: tensor,
    )
    assert validate(alone, model, model.config, recipe, rows)["validation/loss"] > 0
    assert len(begun) == 3
