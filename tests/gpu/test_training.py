"""Training on the device: checkpointed activations, mixed precision, and a run that goes on where it left off."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from looped_recipes.engine.activations import keep_fewer_activations
from tests.helpers import random_ids, tiny_model
from tests.helpers_pretrain import SMOKE, logged_losses, smoke_settings


pytestmark = pytest.mark.gpu

SYSTEMS = {"plain": {}, "flt": {"preset": "flt"}, "huginn": {"preset": "huginn"}, "ouro": {"preset": "ouro"}}


def loss_and_gradients(model, ids, **how):
    model.zero_grad()
    outputs = model(ids, labels=ids, use_cache=False, output_logits=False, **how)
    outputs.loss.backward()
    return outputs.loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("num_loops", [3, [2, 4]], ids=["one_depth", "mixed_depths"])
@pytest.mark.parametrize("way", [True, "loops", "selective", "offload"], ids=str)
def test_gradient_checkpointing_changes_nothing(way, system, num_loops, device):
    if way == "offload" and device != "cuda":
        pytest.skip("activations lie in the memory of the host anyway, or it cannot be pinned")
    model, ids = tiny_model(**SYSTEMS[system]).to(device).train(), random_ids(2, 8).to(device)
    expected, gradients = loss_and_gradients(model, ids, num_loops=num_loops)
    keep_fewer_activations(model, way)
    found, found_gradients = loss_and_gradients(model, ids, num_loops=num_loops)
    torch.testing.assert_close(found, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("system", SYSTEMS)
def test_mixed_precision_learns_a_batch(system, device):
    """bf16 products, fp32 weights and gradients, as the recipes train: the first losses are those of fp32."""
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(**SYSTEMS[system]).to(device).train()
        ids = random_ids(2, 8).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[dtype] = []
        for _ in range(20):
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                loss, gradients = loss_and_gradients(model, ids)
            assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
            optimizer.step()
            losses[dtype].append(loss.item())
    exact, mixed = losses.values()
    assert mixed[:3] == pytest.approx(exact[:3], rel=0.05)  # from there on, small differences grow
    assert mixed[-1] < 0.8 * mixed[0] and exact[-1] < 0.8 * exact[0]


@pytest.fixture
def same_bits(monkeypatch):
    """Sums in an order that never changes, where torch has such kernels."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recipe", ["parcae", "ouro", "huginn"])
def test_a_step_waits_for_nothing(recipe, device, training_text, tmp_path):
    if device != "cuda":
        pytest.skip("torch tells of waiting on CUDA alone; tests/test_waiting.py shows the same without a device")
    pytest.importorskip("datasets", reason="training reads its text through datasets, which is not installed")
    from looped_recipes.engine.interruption import Interruption
    from looped_recipes.engine.training import Pretraining
    from looped_recipes.settings.recipe import load_recipe

    run = Pretraining(load_recipe(SMOKE / f"{recipe}.yaml", smoke_settings(training_text, tmp_path)))
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            report = run.steps.compute(step, None, Interruption())
            run.steps.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(map(math.isfinite, report.read()))


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("recipe", ["parcae", "flt", "rdm"])
def test_a_run_goes_on_bit_for_bit(recipe, device, training_text, tmp_path):
    """Through a checkpoint after the third step."""
    pytest.importorskip("datasets", reason="training reads its text through datasets, which is not installed")
    from looped_recipes.engine.training import Pretraining
    from looped_recipes.settings.recipe import load_recipe

    path = next(path for path in sorted(SMOKE.glob("*.yaml")) if path.stem.startswith(recipe))

    def train(folder: Path, *more):
        settings = [*smoke_settings(training_text, folder, *more), "training.micro_batch_size=4"]
        Pretraining(load_recipe(path, settings)).train()
        return logged_losses(folder)

    whole = train(tmp_path / "whole")
    assert len(whole) == 6 and all(map(math.isfinite, whole))
    train(tmp_path / "parts", "training.stop_after=3")
    assert train(tmp_path / "parts") == whole
    first, second = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)
