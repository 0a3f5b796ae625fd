"""fp16 scales the loss: gradients are divided by the scale once, whatever optimizers there are, or steps left out."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from looped_recipes.engine.beginning import check_precision
from looped_recipes.engine.distributed import make_accelerator
from looped_recipes.engine.step import Steps
from looped_recipes.settings.recipe import RecipeError


@pytest.fixture
def run():
    """Two weights with an optimizer each, as Muon and AdamW beside it."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # which makes it
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    wrapped = [SimpleNamespace(optimizer=each, zero_grad=each.zero_grad) for each in optimizers]
    run = SimpleNamespace(optimizers=wrapped, scaler=scaler, weights=weights)
    run.leave_out = lambda: Steps.leave_out(run)
    return run


def take_gradients(run, value: float):
    """Of the scaled loss, divided by the scale, as clipping does."""
    for weight, optimizer in zip(run.weights, run.optimizers):
        weight.grad = torch.full((3,), value * run.scaler.get_scale())
        run.scaler.unscale_(optimizer.optimizer)


def test_each_optimizer_sees_the_gradients_themselves(run):
    take_gradients(run, 0.25)
    Steps.update(run)
    assert [weight.tolist() for weight in run.weights] == [[0.75] * 3] * 2
    assert all(weight.grad is None for weight in run.weights)


def test_the_run_goes_on_after_a_step_that_was_left_out(run):
    take_gradients(run, float("nan"))
    Steps.leave_out(run)
    assert run.scaler.get_scale() == 512
    take_gradients(run, 0.5)
    Steps.update(run)
    assert [weight.tolist() for weight in run.weights] == [[0.5] * 3] * 2


def test_fp16_on_a_cpu_is_refused(monkeypatch):
    def accelerator(precision: str):
        for state in (AcceleratorState, PartialState):  # those of other tests stay as they are
            monkeypatch.setattr(state, "_shared_state", {})
        return make_accelerator(mixed_precision=precision, cpu=True)

    check_precision(accelerator("bf16"))
    with pytest.raises(RecipeError, match="mixed_precision 'fp16' would have no effect on 'cpu'"):
        check_precision(accelerator("fp16"))
