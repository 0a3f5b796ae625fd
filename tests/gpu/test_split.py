"""A model whose layers lie on two devices, as accelerate's device_map puts them: what it computes on one."""

import copy

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from modeling_looped import SharedPasses
from modeling_looped.continuous import ContinuousDecoder, tick
from modeling_looped.row_engine import PassesOfOthers
from modeling_looped.row_table import RowTable
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


def second_half(model) -> list:
    """All from the middle of the core on, but no head that is the embedding."""
    trunk = model.model
    half = len(trunk.core) // 2
    parts = [*trunk.core[half:], *trunk.coda, trunk.norm, model.exit_gate]
    return parts + ([] if model.config.tie_word_embeddings else [model.lm_head])


APART = {
    "second_half": second_half,
    "first_core_layer": lambda model: [model.model.core[0]],
    "middle_core_layer": lambda model: [model.model.core[1]],
    "readout": lambda model: [model.model.norm, model.lm_head],
}


def split(model, device: str, apart: str = "second_half"):
    """These parts of it on the device: what accelerate.dispatch_model does, which knows no device of Python's."""
    trunk, parts = model.model, APART[apart](model)
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
    model.hf_device_map = {"": "cpu", apart: device}
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


EXITS = {"max_new_tokens": 6, "do_sample": False, "exit_criterion": "logit_margin", "exit_threshold": 0.3}


@pytest.mark.parametrize(
    ("apart", "system"),
    [
        ("second_half", {}),
        ("second_half", {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1}),
        ("first_core_layer", {"loop_change_gate": True}),
        ("middle_core_layer", {"preset": "parcae", "num_prelude_layers": 1}),
        ("middle_core_layer", {"preset": "flt"}),
        ("middle_core_layer", {"preset": "flt_residual"}),
        ("readout", {"readout_norm": "final_only"}),
    ],
    ids=str,
)
def test_rows_that_exit_at_loops_of_their_own(apart, system, device):
    """In float64, where no exit is decided by rounding."""
    if device == "cpu":
        pytest.skip("one device")
    model = tiny_model(num_core_layers=3, eos_token_id=None, tie_word_embeddings=False, **system).double()
    prompt = random_ids(3, 6)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    how = {**EXITS, "attention_mask": mask, "num_loops": [3, 2, 3], "return_dict_in_generate": True}
    expected = model.generate(prompt, **how)
    found = split(model, device, apart).generate(prompt, **how)
    assert len(expected.token_loops.unique()) > 1
    assert torch.equal(found.sequences.cpu(), expected.sequences)
    assert torch.equal(found.token_loops.cpu(), expected.token_loops)


@torch.no_grad()
def test_batches_in_the_same_passes(device):
    """Entered by hand: threads know no device of Python's."""
    if device == "cpu":
        pytest.skip("one device")
    model = tiny_model(num_core_layers=3, eos_token_id=None).double()
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    asked = [
        {**EXITS, "input_ids": random_ids(2, 6), "attention_mask": mask},
        {**EXITS, "input_ids": random_ids(2, 4)},
    ]
    expected = [model.generate(**each) for each in asked]
    passes = SharedPasses(split(model, device, "middle_core_layer"))

    def enter(make_engine, *size):
        decoder = ContinuousDecoder(make_engine(PassesOfOthers(8, lambda tokens: None, passes.pages)), passes.table)
        passes.decoders.append(decoder)
        return decoder.selector.ids

    passes.decode = enter
    with passes:
        for each in asked:
            passes.generate(**each)
    while running := [decoder for decoder in passes.decoders if not decoder.is_done]:
        tick(passes.table, running)  # that of `passes` would run each by itself after an error
    for decoder, sequences in zip(passes.decoders, expected, strict=True):
        assert torch.equal(decoder.output().cpu(), sequences)


def test_rows_of_a_table(device):
    table, here, there = RowTable(), torch.arange(3.0), torch.arange(3.0).to(device)
    table.add(3)
    table.put([0, 1, 2], {"there": there, "here": here})
    assert [values.cpu().tolist() for values in table.take([0, 2], table).values()] == [[0, 2]] * 2
    table.put([1], {"there": here[:1], "here": there[2:]})
    assert table["there"].cpu().tolist() == [0, 0, 2] and table["here"].tolist() == [0, 2, 2]
