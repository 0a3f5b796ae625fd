"""What is watched while a model trains, against its definitions, and when it is said that something drifts."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from looped_recipes.common import measures
from looped_recipes.common.metrics import last_values, read_metrics
from looped_recipes.engine.monitor import RECENT, Monitor, StateNorms
from looped_recipes.pretrain import main

from .helpers import random_ids, tiny_model
from .helpers_pretrain import SMOKE, monitored, smoke_settings


@pytest.mark.parametrize("preset", ["rdm", "parcae", "ouro"])
def test_measurements_are_their_definitions(preset):
    model, ids = tiny_model(preset=preset).double(), random_ids(2, 9)
    outputs = model(ids, labels=ids, num_loops=3, output_loop_hidden_states=True)
    outputs.loss.backward()
    measured = monitored(model, outputs, [3, 3])

    states = [state.detach().numpy() for state in outputs.loop_hidden_states]
    width = states[0].shape[-1]
    for k, state in enumerate(states, start=1):
        norms = np.linalg.norm(state, axis=-1) / width**0.5
        assert measured[f"residual_norm/loop_{k}"] == pytest.approx(norms.mean())
        assert measured[f"state_norm/loop_{k}"] == pytest.approx(np.linalg.norm(state, axis=-1).mean())
    assert measured["residual_norm"] == measured["residual_norm/loop_3"]
    change = np.linalg.norm(states[2] - states[1], axis=-1) / width**0.5
    assert measured["state_change"] == pytest.approx(change.mean())

    correlations = [
        np.corrcoef(row)[~np.eye(len(row), dtype=bool)].mean() for row in states[-1]
    ]  # of numpy's own, of every two tokens
    assert measured["token_correlation"] == pytest.approx(np.mean(correlations))

    section = "prelude" if model.config.num_prelude_layers else "core"
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    squares = sum(g.square().sum().item() for name, g in gradients.items() if f"{section}.0.mlp." in name)
    assert measured["first_mlp_gradient_norm"] == pytest.approx(squares**0.5)

    prefixes = {"lm_head": "lm_head.", "embed_tokens": "model.embed_tokens."}
    for i in range(model.config.num_core_layers):
        prefixes |= {f"core.{i}.{part}": f"model.core.{i}.{part}." for part in ("mlp", "self_attn")}
    assert {key for key in measured if key.startswith("gradient_norm/")} == {f"gradient_norm/{b}" for b in prefixes}
    for block, prefix in prefixes.items():
        prefix = "model.embed_tokens." if block == "lm_head" and model.config.tie_word_embeddings else prefix
        squares = sum(g.square().sum().item() for name, g in gradients.items() if name.startswith(prefix))
        assert measured[f"gradient_norm/{block}"] == pytest.approx(squares**0.5)

    if preset == "ouro":
        assert "spectral_radius" not in measured
    else:  # how the injection answers a small change of the state, from its output alone
        state, embedded = torch.zeros(width).double(), torch.zeros(width).double()
        jacobian = torch.autograd.functional.jacobian(lambda h: model.model.injection(h, embedded), state)
        assert measured["spectral_radius"] == pytest.approx(
            np.abs(np.linalg.eigvals(jacobian.numpy())).max(), rel=1e-6
        )


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_norm_of_gradients_that_lie_on_different_processes(one_process):
    """As under tensor parallelism: matrices on all of them, norms of heads on those that share data."""
    meshes = DeviceMesh("cpu", [[0]], mesh_dim_names=("data", "parts")), DeviceMesh("cpu", [0])
    module = torch.nn.Module()
    for name, shape, mesh in zip(("matrix", "norm"), ((3, 4), (2,)), meshes):
        parameter = torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)] * mesh.ndim))
        parameter.grad = torch.ones_like(parameter)
        setattr(module, name, parameter)
    assert measures.gradient_norm(module) == pytest.approx((3 * 4 + 2) ** 0.5)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e4])
def test_a_spectral_radius_by_squaring_is_that_of_the_eigenvalues(factor):
    draw = torch.Generator().manual_seed(0)
    jordan = 0.9 * torch.eye(4) + torch.diag(torch.ones(3), 1)
    turn = torch.tensor([[0.0, -2.0], [2.0, 0.0]])
    for matrix in (torch.randn(40, 40, generator=draw), jordan, turn, torch.eye(3), jordan.T @ jordan):
        exact = measures.largest_eigenvalue(factor * matrix.double())
        assert measures.largest_eigenvalue_by_squaring(factor * matrix) == pytest.approx(exact, rel=3e-3)
    for nilpotent in (torch.diag(torch.ones(5), 1), torch.zeros(6, 6)):  # zeros: at first after from_dense
        assert measures.largest_eigenvalue_by_squaring(factor * nilpotent) == 0.0


def test_eigenvalues_of_a_wide_injection_are_not_computed(monkeypatch):
    injection = tiny_model(preset="rdm").model.injection
    exact = measures.spectral_radius(injection)
    monkeypatch.setattr(measures, "EXACT_WIDTH", 8)
    monkeypatch.setattr(torch.linalg, "eigvals", None)
    assert measures.spectral_radius(injection) == pytest.approx(exact, rel=1e-3) and exact > 0


def test_the_last_change_of_rows_is_that_of_their_own_last_loops():
    """Whose micro batch they are in does not matter, nor how deep others are."""
    model, ids, depths = tiny_model(preset="parcae").double().train(), random_ids(4, 7), [2, 5, 1, 3]
    noise = model.sample_initial_state(4, 7, torch.Generator().manual_seed(0)).double()
    norms, changes = StateNorms(max(depths), "cpu"), []
    for rows in (slice(0, 2), slice(2, 4)):
        settings = {"initial_state": noise[rows], "output_loop_hidden_states": True}
        outputs = model(ids[rows], num_loops=depths[rows], **settings)
        norms.add([state.detach() for state in outputs.loop_hidden_states], outputs.initial_state, depths[rows])
    for row, depth in enumerate(depths):
        settings = {"initial_state": noise[row : row + 1], "output_loop_hidden_states": True}
        alone = model(ids[row : row + 1], num_loops=depth, **settings).loop_hidden_states
        before = noise[row : row + 1] if depth == 1 else alone[-2]
        changes.append((alone[-1] - before).norm(dim=-1).mean().item() / before.shape[-1] ** 0.5)
    assert norms.metrics(lambda sums: sums)["state_change"] == pytest.approx(sum(changes) / 4)


def fed(monitor: Monitor, name: str, values) -> list[int]:
    """The places in `values` at which it warned."""
    return [i for i, value in enumerate(values) if monitor.warnings({name: value})]


def test_a_metric_that_leaves_its_range_is_said_once_until_it_is_back():
    before = [1.0, 2.0, 1.5, 1.2, 1.8]
    assert len(before) == RECENT
    assert fed(Monitor(), "residual_norm", [*before, 29.9]) == []
    assert fed(Monitor(), "residual_norm", [*before, 30.1, 40.0, 1.5, 1.5, 1.5, 31.0]) == [5, 10]
    assert fed(Monitor(), "first_mlp_gradient_norm", [*before, 74.0, 93.0]) == [6]
    assert fed(Monitor(), "spectral_radius", [0.5, 0.99, 1.0, 1.2, 0.9, 1.1]) == [2, 5]
    assert fed(Monitor(), "residual_norm", [1.1e4, 2e4]) == [0]
    assert fed(Monitor(), "loss", [1.0, 1e9]) == []


def test_norms_that_grow_a_thousandfold_in_many_measurements_are_sound():
    """So they do from a small initialization."""
    assert fed(Monitor(), "residual_norm", [0.1 * 1.5**i for i in range(25)]) == []
    assert fed(Monitor(), "residual_norm", [0.1 * 3.0**i for i in range(10)])[0] == 5


def test_a_state_that_settles_is_no_warning_however_little_it_changed_before():
    monitor = Monitor()
    settled = [{"state_change": change, "residual_norm": 2.0} for change in (*[1e-6] * RECENT, 1e-4, 0.3)]
    assert [monitor.warnings(metrics) for metrics in settled] == [[]] * len(settled)
    (message,) = monitor.warnings({"state_change": 0.41, "residual_norm": 2.0})
    assert message.startswith("state_change = 0.41 is more than 20 times the median of its last 5 measurements")


def test_a_warning_names_the_metric_and_what_helps():
    (message,) = Monitor().warnings({"spectral_radius": 1.25})
    assert message.startswith("spectral_radius = 1.25 reached 1:") and "injection='diagonal'" in message


def test_a_resumed_monitor_goes_on():
    values = [1.0, 1.0, 1.0, 1.0, 1.0, 25.0, 26.0, 1.0, 27.0]
    for cut in range(1, len(values)):
        whole, first, second = Monitor(), Monitor(), Monitor()
        expected = fed(whole, "residual_norm", values)
        found = fed(first, "residual_norm", values[:cut])
        second.load_state_dict(first.state_dict())
        assert found + [cut + i for i in fed(second, "residual_norm", values[cut:])] == expected == [5, 8]


@pytest.mark.slow
def test_a_run_whose_injection_expands_says_so(training_text, tmp_path, capsys):
    """Concat injection at a rate at which the state's half of W grows beyond 1."""
    more = ["optimizer.lr=0.1", "training.steps=8", "logging.monitor_every=1"]
    main([str(SMOKE / "rdm.yaml"), *smoke_settings(training_text, tmp_path, *more)])
    assert ": spectral_radius = " in (printed := capsys.readouterr().out)
    radii = {
        r["step"]: r["spectral_radius"] for r in read_metrics(tmp_path / "metrics.jsonl") if "spectral_radius" in r
    }
    first = next(step for step, radius in radii.items() if radius >= 1)
    assert f"step {first}: spectral_radius = {radii[first]:.4g} reached 1" in printed


def test_last_values_of_loops_are_those_of_one_step():
    records = [
        {
            "step": 0,
            "residual_norm/loop_1": 1.0,
            "residual_norm/loop_2": 0.1,
            "residual_norm": 0.1,
            "gate/loop_2": 0.5,
        },
        {"step": 5, "residual_norm/loop_1": 9.0, "residual_norm": 9.0},
        {"step": 6, "loss": 2.0},
    ]
    kept = {"step": 6, "loss": 2.0, "residual_norm/loop_1": 9.0, "residual_norm": 9.0, "gate/loop_2": 0.5}
    assert last_values(records) == kept
