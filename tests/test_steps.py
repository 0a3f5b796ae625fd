"""The steps of a run: their rows, their random draws, what they report, and the scale of the loss under fp16."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from tqdm import tqdm

from looped_recipes.engine import reports as reports_module
from looped_recipes.engine import step as step_module
from looped_recipes.engine.batches import Batches
from looped_recipes.engine.beginning import check_precision
from looped_recipes.engine.distributed import make_accelerator
from looped_recipes.engine.finite import Divergence
from looped_recipes.engine.interruption import Interruption
from looped_recipes.engine.monitor import Monitor
from looped_recipes.engine.optimizers import build_optimizers
from looped_recipes.engine.reports import StepReports
from looped_recipes.engine.run_checkpoints import Progress
from looped_recipes.engine.step import Steps
from looped_recipes.engine.validation import validate
from looped_recipes.settings.recipe import RecipeError, load_recipe
from modeling_looped import LoopedForCausalLM
from tests.helpers_data import plain_rows

from .helpers_pretrain import SMOKE


@pytest.fixture
def accelerator(monkeypatch):
    """Makes one as the first of a process; those of other tests stay as they are."""

    def make(precision: str = "no"):
        for state in (AcceleratorState, GradientState, PartialState):
            monkeypatch.setattr(state, "_shared_state", {})
        return make_accelerator(mixed_precision=precision, cpu=True)

    return make


@pytest.fixture
def steps(monkeypatch):
    """Makes steps of a model with Muon and AdamW, with a scaler or without. A CPU has no fp16: the scale is there, and
    products stay in fp32."""

    def make(is_scaled: bool, *settings: str, recipe: str = "flt") -> Steps:
        for state in (AcceleratorState, GradientState, PartialState):
            monkeypatch.setattr(state, "_shared_state", {})
        rows = ["training.rows_per_step=4", "training.micro_batch_size=2"]
        recipe = load_recipe(SMOKE / f"{recipe}.yaml", [*rows, *settings])
        accelerator = make_accelerator(cpu=True)
        if is_scaled:
            accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        torch.manual_seed(0)
        model = LoopedForCausalLM(recipe.model_config(vocab_size=64)).train()
        length = recipe.data.sequence_length
        tokens = np.random.default_rng(0).integers(0, 64, 20 * length)
        rows = plain_rows([tokens], length, length, start=1, token_bytes=torch.ones(64))
        optimizers = [accelerator.prepare_optimizer(each) for each in build_optimizers(model, recipe.optimizer, 10)]
        return Steps(recipe, accelerator, model, optimizers, Batches(recipe, model, rows, accelerator), 10)

    return make


def reports_of(steps: Steps, monkeypatch) -> StepReports:
    monkeypatch.setattr(reports_module, "makers_rate", lambda device: 1.0)
    operations = SimpleNamespace(tokens_per_step=10, per_token=lambda step: 1.0)
    logged = {}
    reports = StepReports(steps, Monitor(), Progress(), logged.__setitem__, tqdm(disable=True), operations)
    reports.logged = logged
    return reports


# Seeds


def test_another_seed_is_another_order_other_depths_and_other_noise(steps):
    first, other = (steps(False, f"training.seed={seed}", recipe="parcae").batches for seed in (0, 5))
    assert first.data_rows(0) != other.data_rows(0)
    assert [first.depths(step) for step in range(4)] != [other.depths(step) for step in range(4)]
    assert not torch.equal(first.noise(0, [0, 1]), other.noise(0, [0, 1]))


def test_dropout_differs_from_step_to_step(steps, monkeypatch):
    run, seeds = steps(False, "model.residual_dropout=0.5", "training.rows_per_step=2"), []
    monkeypatch.setattr(step_module, "set_seed", seeds.append)
    for step in (0, 1):
        run.backward(step, None)
    assert len(set(seeds)) == len(seeds) == 2


# Several processes


def test_two_processes_with_dropout_have_the_mean_gradients_of_one(steps, monkeypatch):
    """Each takes other micro batches, with the dropout that these have in one process."""
    run = steps(False, "model.residual_dropout=0.5")
    labels = run.labels_of(0)

    def gradients(index: int, world: int) -> list[torch.Tensor]:
        monkeypatch.setattr(Accelerator, "num_processes", world)
        monkeypatch.setattr(Accelerator, "process_index", index)
        run.batches.read_ahead = run.batches.read_ahead._replace(step=-1)
        run.labels = (0, labels)  # of all processes, as the step before says
        run.model.zero_grad()
        run.backward(0, None)
        return [parameter.grad.clone() for parameter in run.model.parameters()]

    for first, second, whole in zip(gradients(0, 2), gradients(1, 2), gradients(0, 1), strict=True):
        torch.testing.assert_close((first + second) / 2, whole)


def test_the_loss_that_is_logged_is_the_mean_over_processes(steps, monkeypatch):
    reports = reports_of(steps(False, "logging.every=1"), monkeypatch)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    assert reports.read(SimpleNamespace(step=0, known={"loops": 1.0}, read=lambda: (6.0, 0, 1.0)))
    assert reports.logged[0]["loss"] == 3


def test_labels_of_the_next_step_are_those_of_its_rows(steps):
    run = steps(False)
    counts = [run.batches.read(step).num_labels for step in range(3)]
    step = next(step for step in range(2) if counts[step] != counts[step + 1])
    run.compute(step, None, Interruption())
    assert run.labels == (step + 1, counts[step + 1])


def test_the_pass_that_comes_before_the_first_step_leaves_no_gradients(steps, monkeypatch):
    monkeypatch.setattr(step_module, "rebuilds_buckets", lambda model: True)
    run, passes = steps(False), []
    run.model.register_forward_pre_hook(lambda *_: passes.append(1))
    run.begin()
    assert passes and all(parameter.grad is None for parameter in run.model.parameters())


def test_a_step_without_labels_has_a_loss_of_zero(steps):
    run = steps(False)
    run.batches.rows.shards[0][:] = run.batches.rows.start  # which is not predicted
    loss, _, norm = run.compute(0, None, Interruption()).read()
    assert loss == 0 and norm == 0


# Validation


def test_validation_leaves_out_targets_without_label_and_bytes_and_goes_back_to_training(steps):
    run = steps(False, "evaluation.rows=2", "evaluation.loops=[1, 2]")
    rows = run.batches.rows
    rows.token_bytes[5] = 0
    rows.shards[0][3:20] = rows.start  # not predicted
    assert len(rows) > 3  # of which two are read, not the first two
    found = validate(run.accelerator, run.model, run.model.config, run.recipe, rows)
    assert run.model.training
    run.model.eval()
    batch = rows.batch([0, len(rows) // 2])
    targets = batch["labels"][:, 1:]
    labelled = targets != -100
    has_bytes = labelled & (targets != 5)
    for loops in (1, 2):
        with torch.no_grad():
            logits = run.model(batch["input_ids"], num_loops=loops).logits[:, :-1].double()
        nats = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none", ignore_index=-100)
        assert found[f"validation/loss_at_{loops}"] == pytest.approx(nats[labelled].mean().item(), rel=1e-5)
        bits = nats[has_bytes].mean().item() / math.log(2)
        assert found[f"validation/bits_per_byte_at_{loops}"] == pytest.approx(bits, rel=1e-5)


def test_a_process_without_rows_for_validation_counts_none(steps, monkeypatch):
    run, counted = steps(False, "evaluation.rows=1", "evaluation.loops=[1]"), []

    def reduce(accelerator, tensor, reduction):
        counted.append(tensor.clone())
        return torch.ones_like(tensor)

    for name, value in {"num_processes": 2, "process_index": 1, "reduce": reduce}.items():
        monkeypatch.setattr(Accelerator, name, value)
    validate(run.accelerator, run.model, run.model.config, run.recipe, run.batches.rows)
    assert len(counted) == 4 and not any(tensor.any() for tensor in counted)


# What accelerate is refused


def test_fp8_of_accelerate_is_refused():
    with pytest.raises(RecipeError, match="mixed_precision 'fp8' is not supported: choose bf16; with training.float8"):
        check_precision(SimpleNamespace(mixed_precision="fp8", native_amp=True))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "_STEPS=4: a step has training.rows_per_step rows"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "dynamo_backend EAGER compiles the whole model"),
    ],
)
def test_what_accelerate_would_do_beside_the_training_is_refused(accelerator, monkeypatch, variable, value, message):
    accelerator()
    monkeypatch.setenv(variable, value)
    with pytest.raises(RecipeError, match=message):
        accelerator()


def test_fp16_on_a_cpu_is_refused(accelerator):
    check_precision(accelerator("bf16"))
    with pytest.raises(RecipeError, match="mixed_precision 'fp16' would have no effect on 'cpu'"):
        check_precision(accelerator("fp16"))


# The scale of fp16


@pytest.fixture
def run():
    """Two weights with an optimizer each, as Muon and AdamW beside it."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # which makes it
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    wrapped = [SimpleNamespace(optimizer=each, zero_grad=each.zero_grad) for each in optimizers]
    run = SimpleNamespace(optimizers=wrapped, scaler=scaler, weights=weights)
    run.end = lambda: Steps.end(run)
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
    Steps.end(run)
    assert run.scaler.get_scale() == 512
    take_gradients(run, 0.5)
    Steps.update(run)
    assert [weight.tolist() for weight in run.weights] == [[0.5] * 3] * 2


def test_a_scale_changes_nothing_that_is_said_or_done(steps):
    found = []
    for is_scaled in (False, True):
        each = steps(is_scaled, "optimizer.clip=0.1")
        report = each.compute(0, Monitor(), Interruption())
        each.update()
        found.append((report.known, report.read(), [p.detach() for p in each.model.parameters()]))
    (known, numbers, weights), (known_scaled, numbers_scaled, weights_scaled) = found
    assert any(name.startswith("gradient_norm/") for name in known)
    assert known_scaled == pytest.approx(known) and numbers_scaled == pytest.approx(numbers)
    for ours, theirs in zip(weights_scaled, weights, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("clip", ["null", "1.0"])
@pytest.mark.parametrize("optimizer", [0, 1], ids=["muon", "adamw"])
def test_an_overflow_in_one_optimizer_leaves_out_the_step_of_all(steps, monkeypatch, optimizer, clip):
    run = steps(True, f"optimizer.clip={clip}", "logging.every=1")
    reports = reports_of(run, monkeypatch)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    parameter = run.optimizers[optimizer].param_groups[0]["params"][0]

    def overflow(parameter):
        parameter.grad.view(-1)[0] = math.inf

    hook = parameter.register_post_accumulate_grad_hook(overflow)
    assert not reports.read(run.compute(0, None, Interruption()))
    run.end()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(run.model.parameters(), before))
    assert run.scaler.get_scale() == 512 and reports.progress.num_skipped == 0
    assert all(map(math.isfinite, reports.logged[0].values())) and "loss" in reports.logged[0]
    hook.remove()
    assert reports.read(run.compute(1, None, Interruption()))
    run.update()
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())
    assert not all(torch.equal(ours, theirs) for ours, theirs in zip(run.model.parameters(), before))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_device_is_waited_for_where_a_step_may_be_left_out(steps, is_scaled):
    run = steps(is_scaled)
    run.accelerator.state.device = torch.device("meta")
    assert run.reads_behind is not is_scaled


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_a_loss_that_is_no_number_ends_the_run_also_under_a_scale(steps, monkeypatch, loss, is_scaled):
    reports = reports_of(steps(is_scaled), monkeypatch)
    report = SimpleNamespace(step=0, known={"loops": 1.0}, read=lambda: (loss, 0, math.nan))
    with nullcontext() if math.isfinite(loss) and is_scaled else pytest.raises(Divergence):
        assert not reports.read(report)


@pytest.mark.parametrize("scale, is_lowered", [(1.0, True), (0.5, False)])
def test_gradients_that_no_scale_makes_finite_end_the_run(steps, monkeypatch, scale, is_lowered):
    """Else it would go on to its end without an update."""
    run = steps(True)
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    reports = reports_of(run, monkeypatch)
    report = SimpleNamespace(step=0, known={"loops": 1.0}, read=lambda: (1.0, 0, math.inf))
    with nullcontext() if is_lowered else pytest.raises(Divergence, match="the gradient norm of step 0 is inf"):
        assert not reports.read(report)
