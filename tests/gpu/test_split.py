"""A model whose layers lie on two devices, as accelerate's device_map puts them: what it computes on one."""

import copy

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from tests.helpers import random_ids, tiny_model


pytestmark = pytest.mark.gpu

SYSTEMS = {
    "plain": {},
    "residual_all": {"injection": "residual_all"},
    "attention_all": {"injection": "attention_all"},
    "per_loop": {"loop_loss": "per_loop"},
    "tied": {"loop_loss": "per_loop", "tie_word_embeddings": True},
    "exit_weighted": {"loop_loss": "exit_weighted", "exit_gate": "normed"},
    "latent": {"latent_loss": 0.1, "latent_anchor": 0.1, "norm_penalty": 0.1},
}
CALLS = {
    "logits": lambda model, ids: model(ids).logits,
    "mixed_depths": lambda model, ids: model(ids, num_loops=[1, 3]).logits,
    "loss": lambda model, ids: model(ids, labels=ids).loss,
    "every_loop": lambda model, ids: model(ids, labels=ids, output_loop_losses=True).loop_losses,
    "tokens": lambda model, ids: model.generate(ids, max_new_tokens=3, do_sample=False),
    "exits": lambda model, ids: model.generate(
        ids, max_new_tokens=3, do_sample=False, exit_criterion="latent_diff", exit_threshold=0.3
    ),
}


def split(model, device: str):
    """Its second half, and the head unless that is the embedding, on the device: what accelerate.dispatch_model does,
    which knows no device of Python's."""
    trunk = model.model
    half = len(trunk.core) // 2
    parts = [*trunk.core[half:], *trunk.coda, trunk.norm, model.exit_gate]
    parts += [] if model.config.tie_word_embeddings else [model.lm_head]
    on_device = {part for module in parts if module is not None for part in module.modules()}
    whole = {
        *trunk.prelude,
        *trunk.core,
        *trunk.coda,
    }  # their inputs are moved, not only those of what they are made of
    for module in model.modules():
        if module in on_device:
            module.to(device)
        if module is model or module in whole or any(True for _ in module.parameters(recurse=False)):
            how = {"io_same_device": module is model, "skip_keys": model._skip_keys_device_placement}
            place = device if module in on_device else "cpu"
            add_hook_to_module(module, AlignDevicesHook(execution_device=place, place_submodules=False, **how))
    model.hf_device_map = {"first half": "cpu", "second half": device}
    return model


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_model_on_two_devices(system, call, device):
    if device == "cpu":
        pytest.skip("one device")
    model = tiny_model(num_core_layers=4, num_coda_layers=1, num_loops=3, eos_token_id=None, **SYSTEMS[system])
    ids, two = random_ids(2, 6), split(copy.deepcopy(model), device)
    expected, found = (CALLS[call](each, ids) for each in (model, two))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
