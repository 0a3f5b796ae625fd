"""What the model computes on the device, against the CPU, float64 and transformers' Llama."""

import copy

import pytest
import torch

from tests.helpers import LIKE_GEMMA2, LIKE_OLMO2, random_ids, tiny_model
from tests.helpers_llama import make_looped, unroll
from tests.helpers_llama import tokens as llama_tokens


pytestmark = pytest.mark.gpu

SYSTEMS = {
    "plain": {},
    "grouped_windows": {"num_key_value_heads": 2, "window_pattern": "SL", "sliding_window": 4},
    "flt": {"preset": "flt"},
    "parcae": {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1},
    "huginn": {"preset": "huginn", "num_prelude_layers": 1, "num_coda_layers": 1},
    "ouro": {"preset": "ouro"},
    "residual_scaling": {"preset": "residual_scaling"},
    "of_loops": {"loop_lora_rank": 2, "loop_norms": True, "loop_embedding": "learned"},
    "like_olmo2": LIKE_OLMO2,
    "like_gemma2": LIKE_GEMMA2,
}
LOSSES = {
    "terminal": {},
    "per_loop": {"loop_loss": "per_loop", "norm_penalty": 0.1},
    "last_third": {"loop_loss": "last_third"},
    "exit_weighted": {"preset": "readout_exit_weighted"},
    "exit_weighted_logits": {"preset": "ouro", "loop_loss": "exit_weighted_logits"},
    "gate": {"preset": "ouro", "loop_loss": "gate"},
}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """In the norm of all values, in float64 on the CPU."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return ((found - expected).norm() / expected.norm()).item()


def padded_batch():
    ids = random_ids(3, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def on(device: str, batch: dict) -> dict:
    return {name: tensor.to(device) for name, tensor in batch.items()}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("num_loops", [3, [2, 4, 1]], ids=["one_depth", "mixed_depths"])
@torch.no_grad()
def test_logits_are_those_of_the_cpu_in_fp32(system, num_loops, device):
    model, batch = tiny_model(**SYSTEMS[system]), padded_batch()
    seen = batch["attention_mask"].bool()
    exact = model.double()(**batch, num_loops=num_loops).logits[seen]
    model = model.float()
    on_cpu = model(**batch, num_loops=num_loops).logits[seen]
    found = model.to(device)(**on(device, batch), num_loops=num_loops).logits.cpu()[seen]
    # no sum is in tf32, which would be wrong by 1e-3
    assert relative_error(found, exact) < max(4 * relative_error(on_cpu, exact), 1e-6)


@pytest.mark.parametrize("num_loops", [2, 6])
@torch.no_grad()
def test_bf16_is_as_exact_as_llama_of_the_same_depth(num_loops, device):
    looped = make_looped(num_core_layers=2, num_loops=num_loops)
    llama, ids = unroll(looped), llama_tokens(4, 24)
    exact = llama.double()(ids).logits
    ours, theirs = (model.to(device, torch.bfloat16)(ids.to(device)).logits for model in (looped, llama))
    assert relative_error(ours, exact) <= 1.2 * relative_error(theirs, exact)


@pytest.mark.parametrize("system", ["plain", "grouped_windows", "flt"])
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@torch.no_grad()
def test_attention_implementations_agree(system, implementation, device):
    torch._dynamo.reset()
    # the kernels of flex attention take heads of 16 and more
    model = tiny_model(**{"head_dim": 16, **SYSTEMS[system]}).to(device)
    batch = on(device, padded_batch())
    seen = batch["attention_mask"].bool()
    for num_loops in (3, [2, 4, 1]):
        model.set_attn_implementation("eager")
        expected = model(**batch, num_loops=num_loops).logits[seen]
        model.set_attn_implementation(implementation)
        assert relative_error(model(**batch, num_loops=num_loops).logits[seen], expected) < 1e-3


class RotaryOfTheCpu(torch.nn.Module):
    """Tables of positions are computed in float32, also for a model in float64, and devices differ in the last bit of
    a cosine."""

    def __init__(self, rotary: torch.nn.Module):
        super().__init__()
        self.compute = copy.deepcopy(rotary).forward  # no child, which would move with the model

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor):
        return tuple(table.to(x.device) for table in self.compute(x.cpu(), position_ids.cpu()))


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_the_cpu(loss, device):
    model, ids = tiny_model(**LOSSES[loss]).double(), random_ids(3, 9)
    if model.model.ropes:
        model.model.rotary_emb = RotaryOfTheCpu(model.model.rotary_emb)
    labels = ids.clone()
    labels[0, :4] = -100

    def loss_and_gradients(device):
        model.to(device).zero_grad()
        outputs = model(ids.to(device), labels=labels.to(device), num_loops=[2, 3, 1], use_cache=False)
        outputs.loss.backward()
        gradients = {name: p.grad.clone().cpu() for name, p in model.named_parameters() if p.grad is not None}
        return outputs.loss.item(), outputs.loop_losses, gradients

    expected, of_loops, gradients = loss_and_gradients("cpu")
    found, found_of_loops, found_gradients = loss_and_gradients(device)
    assert found == pytest.approx(expected, rel=1e-9)
    if of_loops is not None:
        torch.testing.assert_close(found_of_loops.cpu(), of_loops, equal_nan=True)
    assert found_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, msg=lambda said, name=name: f"{name}: {said}")
