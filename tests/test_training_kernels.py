"""Kernels of others that a training may take: what is computed stays what it was, and what is missing is said."""

import os

import pytest
import torch
from torch.nn import functional as F

from looped_recipes.engine import kernels
from looped_recipes.engine.kernels import check_device, take_kernels
from looped_recipes.engine.loss_kernels import LOSS_KERNELS
from looped_recipes.settings.recipe import RecipeError, TrainingConfig, load_recipe
from tests.helpers import quick_and_slow, random_ids, tiny_model
from tests.helpers_pretrain import SMOKE


LOSSES = ["terminal", "per_loop", "last_third", "exit_weighted", "exit_weighted_logits", "gate"]


def plain_cross_entropy(hidden, weight, labels, softcap):
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, reduction="none")


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    outputs = model(**inputs, use_cache=False, output_logits=False)
    outputs.loss.backward()
    return outputs.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(found, expected):
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depths", [3, [3, 1]], ids=["one_depth", "mixed_depths"])
@pytest.mark.parametrize("loss", quick_and_slow(LOSSES, "per_loop", "exit_weighted"))
def test_losses_of_a_kernel(loss, depths):
    gate = "raw" if loss in ("exit_weighted", "exit_weighted_logits", "gate") else "none"
    model = tiny_model(loop_loss=loss, exit_gate=gate, num_loops=3, logit_softcap=5.0).double().train()
    ids = random_ids(2, 9)
    labels = ids.clone()
    labels[0, 3:5] = -100
    inputs = {"input_ids": ids, "labels": labels, "num_loops": depths}
    expected = loss_and_gradients(model, **inputs)
    model.loss_kernel = plain_cross_entropy
    assert_alike(loss_and_gradients(model, **inputs), expected)


@pytest.mark.gpu
def test_cut_cross_entropy(device):
    pytest.importorskip("cut_cross_entropy", reason="the package cut-cross-entropy is not installed")
    if device == "cpu":
        pytest.skip("its kernel is for GPUs")
    model = tiny_model(loop_loss="per_loop", num_loops=3, hidden_size=64, vocab_size=512).to(device).train()
    ids = random_ids(4, 64).to(device)
    exact_loss, exact = loss_and_gradients(model, input_ids=ids, labels=ids)
    errors = []
    for kernel in (None, LOSS_KERNELS["cut_cross_entropy"]):
        model.loss_kernel = kernel
        with torch.autocast(device, torch.bfloat16):
            loss, gradients = loss_and_gradients(model, input_ids=ids, labels=ids)
        torch.testing.assert_close(loss, exact_loss, rtol=1e-2, atol=0)
        assert gradients.keys() == exact.keys()
        errors.append({name: (gradients[name] - exact[name]).norm() / exact[name].norm() for name in exact})
    ours, its = errors
    # it sums the gradients of the states in bf16, which loses some more
    assert all(its[name] < max(3 * ours[name], 0.02) for name in exact), errors


class Scalar(float):
    def to(self, dtype):
        return self


@pytest.fixture
def liger(device, monkeypatch):
    """Its kernels; on a CPU by triton's interpreter, which knows neither functions of CUDA nor floats that can be
    converted."""
    pytest.importorskip("liger_kernel", reason="the package liger-kernel is not installed")
    if device != "cpu":
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET=1 in the environment runs its kernels on a CPU")
    from liger_kernel.ops import cross_entropy, rms_norm
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt
    monkeypatch.setattr(interpreter, "_implicit_cvt", lambda x: Scalar(x) if type(x) is float else convert(x))
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: language.math.rsqrt(x))
    monkeypatch.setattr(cross_entropy, "tanh", lambda x: 2 * language.sigmoid(2 * x) - 1)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("loss", ["per_loop", "exit_weighted"])
def test_cross_entropy_of_liger(loss, softcap, device, liger):
    gate = "raw" if loss == "exit_weighted" else "none"
    model = tiny_model(loop_loss=loss, exit_gate=gate, num_loops=3, logit_softcap=softcap).to(device).train()
    ids = random_ids(2, 9).to(device)
    expected = loss_and_gradients(model, input_ids=ids, labels=ids, num_loops=[3, 1])
    model.loss_kernel = LOSS_KERNELS["liger_kernel"]
    torch.testing.assert_close(loss_and_gradients(model, input_ids=ids, labels=ids, num_loops=[3, 1]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("system", [{}, {"preset": "ouro"}], ids=["plain", "ouro"])
def test_blocks_with_kernels_of_liger(system, device, liger, monkeypatch):
    model, ids = tiny_model(**{"norm_affine": True, **system}).to(device).train(), random_ids(2, 9).to(device)
    expected = loss_and_gradients(model, input_ids=ids, labels=ids)
    called = []
    for name in ("rms_norm", "swiglu"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *given, kernel=kernel: called.append(kernel) or kernel(*given))
    take_kernels(model, TrainingConfig(kernels="liger_kernel"))
    found = loss_and_gradients(model, input_ids=ids, labels=ids)
    assert len(set(called)) == 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_model_without_what_liger_has_is_refused():
    model = tiny_model(mlp_gated=False, norm_affine=False)
    with pytest.raises(RecipeError, match="training.kernels='liger_kernel' would have no effect"):
        take_kernels(model, TrainingConfig(kernels="liger_kernel"))


@pytest.mark.gpu
def test_flex_attention_trains_packed_documents_alike(device):
    """tests/test_attention.py does the same without gradients, which flex attention has on GPUs alone."""
    if device == "cpu":
        pytest.skip("flex attention has no gradients on CPUs")
    model = tiny_model(hidden_size=64).to(device).train()
    ids = random_ids(2, 192).to(device)
    starts = torch.tensor([[0, 40, 41], [0, 100, 150]], device=device)
    places = torch.arange(192, device=device)
    positions = places - torch.where(places >= starts[..., None], starts[..., None], 0).amax(1)
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions}
    expected = loss_and_gradients(model, **inputs)
    take_kernels(model, TrainingConfig(attention="flex_attention"))
    torch.testing.assert_close(loss_and_gradients(model, **inputs), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "settings, device, message",
    [
        ({"cross_entropy": "cut_cross_entropy"}, "cuda", "cross_entropy='cut_cross_entropy'.*pip install cut-cross"),
        ({"cross_entropy": "liger_kernel"}, "cuda", "cross_entropy='liger_kernel'.*pip install liger-kernel"),
        ({"kernels": "liger_kernel"}, "cuda", "kernels='liger_kernel'.*pip install liger-kernel"),
        ({"attention": "flash_attention_2"}, "cuda", "training.attention='flash_attention_2': .*to be installed"),
        ({"attention": "flex_attention"}, "cpu", "training.attention='flex_attention' needs a GPU.*on 'cpu'"),
        ({"float8": "rowwise"}, "cpu", "training.float8='rowwise' needs a GPU.*on 'cpu'"),
        ({"compile": "cuda_graphs"}, "cpu", "training.compile='cuda_graphs' needs a GPU.*on 'cpu'"),
    ],
)
def test_what_is_missing_is_said(settings, device, message, monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=message):
        check_device(TrainingConfig(**settings), device)
        take_kernels(tiny_model(), TrainingConfig(**settings))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_what_needs_a_gpu_is_refused_before_data_are_prepared(tmp_path, monkeypatch):
    from looped_recipes.engine import training

    monkeypatch.setattr(training, "prepare", lambda *_, **__: pytest.fail("data were prepared"))
    recipe = load_recipe(
        SMOKE / "flt.yaml", [f"training.output_dir={tmp_path / 'run'}", "training.attention=flex_attention"]
    )
    with pytest.raises(RecipeError, match="training.attention='flex_attention' needs a GPU"):
        training.Pretraining(recipe)
