"""Programs and files that other runtimes run, at a fixed depth, beside the model itself."""

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.executorch import (
    TorchExportableModuleForDecoderOnlyLM,
    convert_and_export_with_cache,
    export_with_dynamic_cache,
)

from modeling_looped.compatibility import CACHE, named_cache
from tests.helpers import quick_and_slow, random_ids, tiny_model


SYSTEMS = {
    "sections": {"num_prelude_layers": 1, "num_coda_layers": 1, "injection": "add", "value_embeddings": True},
    "windows": {"window_pattern": "SL", "sliding_window": 8},
    "ouro": {"preset": "ouro"},
    "huginn": {"preset": "huginn", "num_prelude_layers": 1, "num_coda_layers": 1},
    "flt": {"preset": "flt"},
    "of_loops": {"loop_lora_rank": 2, "loop_norms": True, "loop_embedding": "learned"},
}
IDS = random_ids(1, 7)
SIZES = {"batch_size": 1, "max_cache_len": 8}


def build(system: str):
    model = tiny_model(**{"num_loops": 2, "eos_token_id": None, "pad_token_id": 0, **SYSTEMS[system]})
    model.generation_config.cache_implementation, model.generation_config.cache_config = "static", dict(SIZES)
    return model


def token_by_token(program, ids) -> torch.Tensor:
    places = torch.arange(ids.shape[1])
    return torch.cat([program(ids[:, i : i + 1], places[i : i + 1]) for i in places], dim=1)


@pytest.mark.parametrize("system", quick_and_slow(SYSTEMS))
def test_a_program_with_a_static_cache(system):
    """For ExecuTorch: one token at a time."""
    model = build(system)
    program = convert_and_export_with_cache(model, strict=False).module()
    found = token_by_token(lambda ids, places: program(input_ids=ids, cache_position=places), IDS)
    torch.testing.assert_close(found, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_program_that_takes_prompts_of_any_length(system):
    model, length = build(system), torch.export.Dim("length", max=7)
    example = {"input_ids": IDS[:, :3], "cache_position": torch.arange(3)}
    shapes = {"input_ids": {1: length}, "cache_position": {0: length}}
    program = TorchExportableModuleForDecoderOnlyLM(model).export(**example, dynamic_shapes=shapes).module()
    places = torch.arange(7)
    chunks = [program(input_ids=IDS[:, part], cache_position=places[part]) for part in (slice(5), slice(5, 7))]
    torch.testing.assert_close(torch.cat(chunks, 1), model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["sections", "ouro"])
def test_a_program_with_a_dynamic_cache(system):
    model = build(system)
    program = export_with_dynamic_cache(model, IDS, torch.ones_like(IDS)).module()
    cache = DynamicCache(config=model.config)
    found = program(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=True, **named_cache(cache))
    torch.testing.assert_close(found.logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert len(found[CACHE].layers) == model.config.num_hidden_layers


@pytest.mark.filterwarnings("ignore")
def test_a_trace_has_windows_that_its_example_did_not_fill():
    """torch.jit.trace, by which OpenVINO reads a model; the window is of 8 tokens."""
    model = build("windows").requires_grad_(False)
    program = torch.jit.trace(lambda ids: model(ids, use_cache=False).logits, IDS, check_trace=False)
    ids = random_ids(2, 20)
    torch.testing.assert_close(program(ids), model(ids).logits, rtol=1e-4, atol=1e-4)


def onnx_session(model, folder, **inputs):
    """Return an onnxruntime session of the model; batch and length of its tensors are free."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", min=2, max=32)
    shapes = {name: {0: batch, 1: length} if torch.is_tensor(value) else None for name, value in inputs.items()}
    settings = {"dynamic_shapes": shapes, "output_names": ["logits"], "dynamo": True}
    with torch.no_grad():
        torch.onnx.export(model, (), folder / "model.onnx", kwargs=inputs, **settings)
    return runtime.InferenceSession(folder / "model.onnx")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("system", SYSTEMS)
def test_onnx(system, tmp_path):
    model = build(system)
    session = onnx_session(model, tmp_path, input_ids=random_ids(2, 7), use_cache=False)
    for ids in (random_ids(2, 7), random_ids(1, 9), random_ids(5, 3)):
        [found] = session.run(["logits"], {"input_ids": ids.numpy()})
        torch.testing.assert_close(torch.tensor(found), model(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("system", ["sections", "windows"])
def test_onnx_of_padded_batches(system, tmp_path):
    """Every row is as without its padding, and at the depth of the export."""
    model, mask = build(system), torch.ones(2, 7, dtype=torch.long)
    session = onnx_session(
        model, tmp_path, input_ids=random_ids(2, 7), attention_mask=mask, num_loops=3, use_cache=False
    )
    ids, mask = random_ids(3, 12), torch.arange(12) >= torch.tensor([[7], [2], [0]])
    [found] = session.run(["logits"], {"input_ids": ids.numpy(), "attention_mask": mask.long().numpy()})
    for row, real in enumerate(mask):
        expected = model(ids[row : row + 1, real], num_loops=3).logits[0]
        torch.testing.assert_close(torch.tensor(found[row])[real], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("system", SYSTEMS)
def test_executorch(system):
    exir = pytest.importorskip("executorch.exir")
    runtime = pytest.importorskip("executorch.runtime")
    model = build(system)
    program = exir.to_edge_transform_and_lower(convert_and_export_with_cache(model)).to_executorch()
    method = runtime.Runtime.get().load_program(program.buffer).load_method("forward")
    found = token_by_token(lambda ids, places: method.execute([ids, places])[0].clone(), IDS)
    torch.testing.assert_close(found, model(IDS).logits, rtol=1e-4, atol=1e-4)
