"""A training step never waits for its device.

On the meta device there is nothing to wait for: whatever would be read there, on a GPU at the price of waiting, is an
error.
"""

import math

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from looped_recipes.engine import batches as batches_module
from looped_recipes.engine import step as step_module
from looped_recipes.engine.batches import Batches
from looped_recipes.engine.behind import Behind
from looped_recipes.engine.distributed import make_accelerator
from looped_recipes.engine.interruption import Interruption
from looped_recipes.engine.optimizers import build_optimizers
from looped_recipes.engine.step import Steps
from looped_recipes.settings.recipe import load_recipe
from modeling_looped import LoopedForCausalLM
from modeling_looped.cross_entropy import shift
from tests.helpers import quick_and_slow, random_ids, tiny_model
from tests.helpers_data import plain_rows
from tests.helpers_pretrain import SMOKE


NAMES = [path.stem for path in sorted(SMOKE.glob("*.yaml")) if path.stem != "base"]
SETTINGS = {
    "muon": ["optimizer.name=muon"],
    "normuon": ["optimizer.name=normuon"],
    "without_epsilon": ["optimizer.atan2=true", "optimizer.update_clipping=true"],
    "mixed": ["depth.sampler=poisson", "depth.per=sequence", "depth.mean=2", "training.micro_batch_size=4"],
    "last_third": ["model.loop_loss=last_third", "depth.sampler=uniform", "depth.per=sequence"],
}


@pytest.fixture
def accelerator(monkeypatch):
    def reset():
        for state in (AcceleratorState, GradientState):
            state._reset_state()

    reset()
    accelerator = make_accelerator(cpu=True)
    accelerator.state.device = torch.device("meta")

    # a meta device has no generators
    def noise(model, seed, step, rows, length, device):
        return torch.empty(len(rows), length, model.config.state_size, device=device)

    monkeypatch.setattr(batches_module, "initial_state_of_step", noise)
    monkeypatch.setattr(step_module, "Behind", lambda numbers: numbers)  # the only place that reads
    yield accelerator
    reset()


def steps_on_meta(accelerator, name: str, *settings: str) -> Steps:
    recipe = load_recipe(
        SMOKE / f"{name}.yaml", ["training.rows_per_step=4", "training.micro_batch_size=2", *settings]
    )
    config = recipe.model_config(vocab_size=64)
    with torch.device("meta"):
        model = LoopedForCausalLM(config).train()
    tokens = np.random.default_rng(0).integers(0, 64, 20 * recipe.data.sequence_length)
    length = recipe.data.sequence_length
    rows = plain_rows([tokens], length, length, start=1, token_bytes=torch.ones(64))
    optimizers = build_optimizers(model, recipe.optimizer, 10)
    return Steps(recipe, accelerator, model, optimizers, Batches(recipe, model, rows, accelerator), 10)


def assert_nothing_is_read(steps: Steps):
    assert steps.reads_behind
    for step in range(2):
        report = steps.compute(step, None, Interruption())
        steps.update()
        assert report.numbers.shape == (3,)


@pytest.mark.parametrize("name", quick_and_slow(NAMES, "ouro"))
def test_a_step_of_a_system(accelerator, name):
    assert_nothing_is_read(steps_on_meta(accelerator, name))


@pytest.mark.parametrize("settings", quick_and_slow(SETTINGS, "mixed"))
def test_a_step_with_settings(accelerator, settings):
    assert_nothing_is_read(steps_on_meta(accelerator, "flt", *SETTINGS[settings]))


def test_noise_is_drawn_when_it_is_the_turn_of_its_rows(accelerator, monkeypatch):
    """That of a whole step would fill a device; and its depths are drawn once."""
    events, drawn = [], []
    noise_of, depths_of = batches_module.initial_state_of_step, batches_module.depths_of_step
    monkeypatch.setattr(
        batches_module,
        "initial_state_of_step",
        lambda *args, **kwargs: events.append("noise") or noise_of(*args, **kwargs),
    )
    monkeypatch.setattr(
        batches_module,
        "depths_of_step",
        lambda sampler, mean, seed, step, *args, **kwargs: (
            drawn.append(step) or depths_of(sampler, mean, seed, step, *args, **kwargs)
        ),
    )
    steps = steps_on_meta(accelerator, "rdm")
    steps.model.register_forward_hook(lambda *_: events.append("pass"))
    for step in range(2):
        steps.compute(step, None, Interruption())
        steps.update()
    assert events == ["noise", "pass"] * 4
    assert drawn == [0, 1, 2]  # the next step's, whose rows are read ahead


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_alone_is_seeded(accelerator, monkeypatch, dropout):
    seeds = []
    monkeypatch.setattr(step_module, "set_seed", seeds.append)
    steps_on_meta(accelerator, "flt", f"model.residual_dropout={dropout}").compute(0, None, Interruption())
    assert len(seeds) == (2 if dropout else 0)


def test_reading_would_be_found(accelerator):
    """Without their positions, labels are looked for."""
    steps = steps_on_meta(accelerator, "flt")
    batch = next(steps.batches.of_step(0)).batch
    with pytest.raises((NotImplementedError, RuntimeError), match="nonzero"):
        steps.model(**batch, output_logits=False)


@pytest.mark.parametrize("depths", [3, [3, 1, 2]], ids=["one_depth", "mixed_depths"])
def test_positions_of_labels_change_nothing(depths):
    model, ids = tiny_model(loop_loss="last_third", num_loops=3).train(), random_ids(3, 9)
    labels = ids.clone()
    labels[0, 2:6] = labels[1, :] = -100
    inputs = {"input_ids": ids, "labels": labels, "num_loops": depths, "use_cache": False, "output_logits": False}
    positions = np.flatnonzero(shift(labels).numpy() != -100)
    assert 0 < len(positions) < 16
    found = []
    for more in ({}, {"loss_positions": positions}):
        model.zero_grad()
        loss = model(**inputs, **more).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    for wrong in (positions[1:], positions[:0]):
        with pytest.raises(ValueError, match=f"loss_positions has {len(wrong)} .* but {len(positions)} have a label"):
            model(**inputs, loss_positions=wrong)


def test_numbers_are_waited_for_where_nothing_tells_that_they_are_there():
    class OfAnotherDevice:
        device = torch.device("xpu")

        def to(self, place, non_blocking):
            return torch.full((3,), math.nan if non_blocking else 1.0)

    assert Behind(OfAnotherDevice()).read() == [1.0, 1.0, 1.0]
