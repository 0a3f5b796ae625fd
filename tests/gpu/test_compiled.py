"""Compiled passes and decoding steps, also as CUDA graphs, against the same model uncompiled.

Without a GPU the graphs are traced and run as they are.
"""

import pytest
import torch
from transformers import CompileConfig

from looped_recipes.engine.compiling import begin_step, compile_parts
from modeling_looped import compiled_blocks
from tests.helpers import random_ids, tiny_model


pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]

SYSTEMS = {"plain": {}, "flt": {"preset": "flt"}, "ouro": {"preset": "ouro"}, "huginn": {"preset": "huginn"}}
MODES = ["default", "reduce-overhead"]  # the second records CUDA graphs


def how(device: str, mode: str) -> dict:
    return {"mode": mode} if device == "cuda" else {"backend": "aot_eager"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("system", SYSTEMS)
@torch.no_grad()
def test_forward(system, mode, device):
    model = tiny_model(**SYSTEMS[system]).to(device)
    compiled = torch.compile(model, fullgraph=True, **how(device, mode))
    for seed in range(3):  # warm-up, recording, replay
        ids = random_ids(2, 8, seed=seed).to(device)
        found = compiled(ids, use_cache=False).logits.clone()
        torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_blocks_in_training(mode, device):
    """As a recipe's `training.compile` does; the depth varies, and each loop runs what was compiled for the first."""
    model, ids = tiny_model(num_core_layers=1).to(device), random_ids(2, 8).to(device)

    def gradients(num_loops):
        model.zero_grad()
        model(ids, labels=ids, num_loops=num_loops, use_cache=False, output_logits=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    depths = (3, 2, [1, 3])
    expected = [gradients(depth) for depth in depths]
    for block in model.model.core:
        # CUDA graphs overwrite what a block returned last, which the next loop still needs: blocks take the default
        block.compile(**how(device, "default" if mode == "default" else "max-autotune-no-cudagraphs"))
    for depth, of_depth in zip(depths, expected):
        for name, gradient in gradients(depth).items():
            torch.testing.assert_close(gradient, of_depth[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("system", ["parcae", "ouro"])
def test_parts_in_training(system, device):
    """Injection, blocks and the cross-entropy of chunks, the last of which is shorter."""
    outer = {"num_prelude_layers": 1, "num_coda_layers": 1} if system == "parcae" else {}
    model = tiny_model(preset=system, **outer).to(device).train()
    ids = random_ids(3, 300).to(device)

    def loss_and_gradients():
        model.zero_grad()
        loss = model(ids, labels=ids, num_loops=2, use_cache=False, output_logits=False).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected, gradients = loss_and_gradients()
    compile_parts(model, **({} if device == "cuda" else {"backend": "aot_eager"}))
    for _ in range(2):
        found, found_gradients = loss_and_gradients()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1])
def test_blocks_as_cuda_graphs_in_training(window, device):
    """Several loops, layers and steps replay what was recorded; gradients of two micro batches add up."""
    model = tiny_model(num_core_layers=2).to(device).train()
    batches = [random_ids(2, 8, seed=seed).to(device) for seed in range(8)]

    def gradients(step):
        model.zero_grad()
        begin_step(cuda_graphs=device == "cuda")
        for ids in batches[2 * step : 2 * step + 2]:
            how = {"num_loops": 3, "backprop_loops": window, "use_cache": False, "output_logits": False}
            model(ids, labels=ids, **how).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = [gradients(step) for step in range(4)]
    options = {} if device == "cuda" else {"backend": "aot_eager"}
    compile_parts(model, cuda_graphs=device == "cuda", **options)
    for step, of_step in enumerate(expected):
        for name, gradient in gradients(step).items():
            torch.testing.assert_close(gradient, of_step[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("with_regions", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_generate_with_a_static_cache(system, mode, with_regions, device, monkeypatch):
    monkeypatch.setattr(compiled_blocks, "REGION_DEVICES", {device} if with_regions else set())
    fields = {"eos_token_id": None, "pad_token_id": 0, **SYSTEMS[system]}
    model = tiny_model(**fields).double().to(device)
    prompt = random_ids(2, 5).to(device)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(prompt, **settings)
    config = CompileConfig(fullgraph=True, **({"mode": None} | how(device, mode)))
    config._compile_all_devices = True
    for _ in range(2):  # the second replays what the first recorded
        found = model.generate(prompt, cache_implementation="static", compile_config=config, **settings)
        assert torch.equal(found, expected)
