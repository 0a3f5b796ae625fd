"""Numbers that are none get neither into the weights nor into a checkpoint, and a run goes on from before them."""

import json
import math
import shutil
import signal

import pytest
import torch

from looped_recipes.common import command_line
from looped_recipes.common.metrics import read_metrics
from looped_recipes.common.optimum import optimum
from looped_recipes.engine import run_checkpoints, training
from looped_recipes.engine import step as step_module
from looped_recipes.engine.checkpoint import read_marker
from looped_recipes.engine.export import export_model
from looped_recipes.engine.finite import Divergence
from looped_recipes.engine.interruption import Interrupted, Interruption
from tests.faults.tiny_run import metrics_of
from tests.helpers import tiny_model


def poison(monkeypatch, name: str, call: int, harm):
    """Do `harm` to the optimizers' parameters at the n-th call of a function of the step."""
    original, calls = getattr(step_module, name), []

    def wrapper(optimizers, *arguments):
        result = original(optimizers, *arguments)
        calls.append(1)
        if len(calls) == call:
            harm(optimizers)
        return result

    monkeypatch.setattr(step_module, name, wrapper)


def nan_gradient(optimizers):
    optimizers[0].param_groups[0]["params"][0].grad.view(-1)[3] = math.nan


@pytest.fixture(params=[False, True], ids=["at_once", "behind"])
def reads_behind(request, monkeypatch):
    """Whether steps are read at once, as on a CPU, or when the next one is on its way."""
    monkeypatch.setattr(step_module.Steps, "reads_behind", request.param)


@pytest.mark.usefixtures("reads_behind")
@pytest.mark.parametrize("clip", ["1.0", pytest.param("null", marks=pytest.mark.slow)])
@pytest.mark.some(1)
def test_a_gradient_that_is_no_number_stops_the_run_before_it_is_saved(runs, tmp_path, monkeypatch, clip):
    """With one checkpoint kept: it is from before, and the run goes on from it as if nothing had been."""
    with monkeypatch.context() as patch:
        poison(patch, "fill_missing_gradients", 4, nan_gradient)
        said = "gradient norm of step 3 is nan on training rows .*checkpoints before it are good.*skip_nonfinite_steps"
        with pytest.raises(Divergence, match=said):
            runs.train(tmp_path, "training.keep_last=1", f"optimizer.clip={clip}", "training.save_every=1")
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-00000002", "step-00000003"}
    if clip == "1.0":
        runs.train(tmp_path)
        assert runs.why_other(tmp_path) is None


def test_a_bad_step_that_is_read_behind_is_found_before_the_next_checkpoint(runs, monkeypatch):
    monkeypatch.setattr(step_module.Steps, "reads_behind", True)
    place = runs.copy(runs.half, "between")
    with monkeypatch.context() as patch:
        poison(patch, "fill_missing_gradients", 1, nan_gradient)
        with pytest.raises(Divergence, match="gradient norm of step 3 is nan"):
            runs.train(place, "training.save_every=100", "evaluation.every=100")
    runs.train(place)
    assert runs.why_other(place) is None


def test_bad_steps_are_left_out_counted_and_limited(runs, tmp_path, monkeypatch):
    place = runs.copy(runs.nothing, "skipping")
    with monkeypatch.context() as patch:
        poison(patch, "fill_missing_gradients", 5, nan_gradient)
        said = runs.train(place, "training.skip_nonfinite_steps=1")
    assert "gradient norm of step 4 is nan: left out, 1 of 1 at most" in said
    counts = [record["skipped_steps"] for record in metrics_of(place) if "skipped_steps" in record]
    assert counts == [0, 0, 0, 0, 1, 1]
    found = read_marker(place / "run" / "checkpoints" / "step-00000006")
    assert found["extra"]["skipped_steps"] == 1
    with monkeypatch.context() as patch:
        poison(patch, "fill_missing_gradients", 1, nan_gradient)
        with pytest.raises(Divergence, match="after 1 steps that were left out"):
            runs.train(place, "training.skip_nonfinite_steps=1", "training.steps=7")


def test_weights_that_are_no_numbers_are_not_saved(runs, tmp_path, monkeypatch):
    place = runs.copy(runs.half, "overflow")

    def harm(optimizers):
        optimizers[0].state[optimizers[0].param_groups[0]["params"][0]]["exp_avg_sq"][:] = math.inf

    poison(monkeypatch, "apply_step_settings", 1, lambda optimizers: harm(optimizers))
    with pytest.raises(Divergence, match="optimizer's exp_avg_sq of .* is not finite after step 3: it is not saved"):
        runs.train(place)
    names = {path.name for path in (place / "run" / "checkpoints").iterdir()}
    assert names == {"step-00000002", "step-00000003"}


def test_a_checkpoint_of_an_older_version_that_holds_them_is_passed_over(runs, monkeypatch):
    place = runs.copy(runs.half, "older")
    with monkeypatch.context() as patch:
        patch.setattr(run_checkpoints.RunCheckpoints, "nonfinite_part", lambda self: None)
        spoil = run_checkpoints.save_checkpoint

        def save(folder, step, model, *arguments, **options):
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)
            return spoil(folder, step, model, *arguments, **options)

        patch.setattr(run_checkpoints, "save_checkpoint", save)
        runs.train(place, "training.stop_after=4", "evaluation.every=100")
    said = runs.train(place)
    assert "step-00000004 is not taken: the weight" in said and "step-00000003 is taken instead" in said
    assert runs.why_other(place) is None
    assert (place / "run" / "checkpoints" / "damaged-step-00000004").is_dir()


def test_a_model_that_is_no_numbers_is_not_exported(tmp_path):
    model = tiny_model()
    export_model(tmp_path / "final", model)
    before = (tmp_path / "final" / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.lm_head.weight[1, 1] = math.inf
    with pytest.raises(Divergence, match="lm_head.weight is not finite: .*final is not written"):
        export_model(tmp_path / "final", model)
    assert (tmp_path / "final" / "model.safetensors").read_bytes() == before


def test_a_validation_that_is_no_number_stops_the_run(runs, monkeypatch):
    place = runs.copy(runs.half, "validation")
    monkeypatch.setattr(training, "validate", lambda *_: {"validation/loss": math.nan})
    with pytest.raises(Divergence, match="validation loss after step 3 is nan"):
        runs.train(place)
    assert not (place / "run" / "final").exists()


def test_rates_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="learning rates must be above 0 and finite"):
        optimum([1e-3, math.nan, 1e-2], [1.0, 0.5, 1.0])


@pytest.fixture
def hears_hangup():
    """SIGHUP as it is without nohup, under which the tests may run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("hears_hangup")
def test_a_signal_saves_the_step(runs, monkeypatch, number):
    place = runs.copy(runs.half, "signalled")
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        poison(patch, "fill_missing_gradients", 2, lambda _: signal.raise_signal(number))
        with pytest.raises(Interrupted) as ended:
            runs.train(place)
    assert ended.value.code == 128 + number and signal.getsignal(number) is before
    assert sorted(path.name for path in (place / "run" / "checkpoints").iterdir())[-1] == "step-00000005"
    runs.train(place)
    assert runs.why_other(place) is None


def test_a_hangup_that_nohup_ignores_is_no_signal_to_a_run(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        command_line.end_on_signals()
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGHUP)
        assert interruption.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_the_best_is_the_best_that_was_evaluated_whatever_stops_the_run(runs, tmp_path):
    """Saved at every step and evaluated at every second one; once in one go and once a step at a time."""
    more = ["training.save_every=1", "training.keep_last=6", "optimizer.lr=0.1"]
    for name in ("whole", "parts"):
        shutil.copytree(runs.half / "shards", tmp_path / name / "shards")
    runs.train(tmp_path / "whole", *more)
    for step in (3, 6):
        runs.train(tmp_path / "parts", *more, f"training.stop_after={step}")
    flags = [
        {path.name: read_marker(path)["is_best"] for path in (tmp_path / name / "run" / "checkpoints").glob("step-*")}
        for name in ("whole", "parts")
    ]
    assert flags[0] == flags[1]
    validations = {
        record["step"] + 1: record["validation/loss"]
        for record in read_metrics(tmp_path / "whole" / "run" / "metrics.jsonl")
        if "validation/loss" in record
    }
    lowest, expected = math.inf, set()
    for step, loss in sorted(validations.items()):
        if loss < lowest:
            lowest = loss
            expected.add(f"step-{step:08d}")
    assert {name for name, is_best in flags[0].items() if is_best} == expected
    assert json.dumps(metrics_of(tmp_path / "whole")) == json.dumps(metrics_of(tmp_path / "parts"))
