"""Residual scaling's theorems in their own models: exponents, premises against naive recursions and closed forms."""

import json
import math

import pytest
import torch

from looped_eval.diagnose import command as diagnose
from looped_eval.diagnose import theorems
from looped_eval.diagnose.premises import cone_gain, overlap, premises
from modeling_looped import LoopedConfig, LoopedForCausalLM
from tests.helpers import random_ids, tiny_model


def test_theorem_1_has_its_exponents():
    """||sum r||^2 grows as N^2 shared and as N independent at alpha = 1, R stays bounded; shared and 1/2: faster."""
    result = theorems.theorem_1(width=96, loops=[4, 8, 16, 32], alphas=[0.5, 1.0], seeds=4)
    shared, independent = result["arrangements"]["shared"], result["arrangements"]["independent"]
    assert shared["alpha=1"]["slope_of_sum_squared"]["all"]["slope"] == pytest.approx(2, abs=0.05)
    assert independent["alpha=1"]["slope_of_sum_squared"]["all"]["slope"] == pytest.approx(1, abs=0.1)
    for of_alpha in (shared["alpha=1"], *independent.values()):
        assert of_alpha["slope_of_R"]["all"]["slope"] == pytest.approx(0, abs=0.05)
    assert shared["alpha=0.5"]["slope_of_sum_squared"]["all"]["slope"] > 2.5
    assert shared["alpha=0.5"]["slope_of_sum_squared"]["theory"] is None
    for of_alpha in (*shared.values(), *independent.values()):
        for i, n in enumerate(result["loops"]):  # lemma 4
            assert of_alpha["mass"][i] * n < of_alpha["activation_sum"][i] <= of_alpha["scale"][i] ** 0.5 * n
    # what sets them apart is W: activations agree in both
    assert shared["alpha=1"]["residual_overlap"][-1] > 0.9 and independent["alpha=1"]["activation_overlap"][-1] > 0.9
    assert independent["alpha=1"]["residual_overlap"][-1] < 2 / 32


def test_sums_of_residuals_against_a_recursion():
    weights, h_0, eps = theorems.matrices(0, 3, 1, 8, 8), theorems.gaussian(1, 8), 0.7
    found = theorems.sums_of_residuals(weights, h_0, eps)
    h, total, activations, residuals = h_0.clone(), torch.zeros(8).double(), [], []
    for n in range(3):
        activations.append(torch.tensor([max(0.0, value) for value in h.tolist()]).double())
        residuals.append(torch.tensor([sum(w * u for w, u in zip(row, activations[n])) for row in weights[n, 0]]))
        h, total = h + eps * residuals[n], total + residuals[n]
    assert found["R"] == pytest.approx(math.sqrt(sum(value**2 for value in h.tolist()) / 8))
    assert found["sum_squared"] == pytest.approx((total @ total).item() / 8)
    energy = (h_0 @ h_0).item() / 8 + found["linear"] + found["quadratic"]
    assert energy == pytest.approx(found["R"] ** 2)
    pairs = [(a @ b).item() for a in residuals for b in residuals]
    assert found["residual_overlap"] == pytest.approx(sum(pairs) / 3 / sum((r @ r).item() for r in residuals))
    assert found["mass"] == pytest.approx(sum(u.sum().item() for u in activations) / 24)
    assert found["scale"] == pytest.approx(sum((u @ u).item() for u in activations) / 24)


def test_cone_gain_of_matrices_that_are_known():
    assert cone_gain(torch.eye(5, dtype=torch.float64)) == pytest.approx((1, 1))
    # (1, 1) is sent to 0, an axis to length sqrt 2; the spectral norm, 2, belongs to (1, -1), outside the cone
    difference = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert cone_gain(difference) == pytest.approx((0, 2**0.5), abs=1e-6)
    matrix = theorems.matrices(3, 3, 3)
    angles = torch.linspace(0, math.pi / 2, 200, dtype=torch.float64)
    first, second = torch.meshgrid(angles, angles, indexing="ij")
    sphere = torch.stack([first.cos() * second.cos(), first.sin() * second.cos(), second.sin()], -1).flatten(0, 1)
    gains = (sphere @ matrix.T).norm(dim=-1)
    least, largest = cone_gain(matrix)
    assert (least, largest) == pytest.approx((gains.min().item(), gains.max().item()), abs=1e-3)


def test_theorem_2_has_its_exponents_and_its_bound():
    result = theorems.theorem_2(width=64, loops=[4, 8, 16], alphas=[1.0, 2.0], seeds=3)
    for alpha, of_alpha in zip((1, 2), result["alphas"].values()):
        assert of_alpha["slope"]["all"]["slope"] == pytest.approx(1 - alpha, abs=0.05)
        assert all(change < bound for change, bound in zip(of_alpha["change"], of_alpha["bound"]))
        assert all(theta < 1 for theta in of_alpha["theta"])
        # random signs gain as much along U as along any vector
        assert of_alpha["zeta"] == pytest.approx([1.0] * 3, abs=0.1)


def test_one_update_against_two_recursions():
    weight, update, h_0 = theorems.matrices(0, 6, 6), 0.1 * theorems.gaussian(1, 6, 6), theorems.gaussian(2, 6)
    found = theorems.one_update(weight, update, h_0, loops=3, eps=0.4, eta=0.1)
    before, after, activation_sum = h_0, h_0, torch.zeros(6).double()
    for _ in range(3):
        activation_sum = activation_sum + before.relu()
        before, after = before + 0.4 * weight @ before.relu(), after + 0.4 * (weight + update) @ after.relu()
    assert found["change"] == pytest.approx((after - before).square().mean().sqrt().item())
    leading = 0.4 * update @ activation_sum
    assert found["theta"] == pytest.approx(((after - before - leading).norm() / leading.norm()).item())
    assert found["zeta"] == pytest.approx((leading.norm() / 0.4 / 0.1 / activation_sum.norm()).item())


def test_theorem_3_has_its_exponents():
    result = theorems.theorem_3(width=64, layers=[1, 2, 4, 8], loops=[1, 2, 4], seeds=6)
    for name in ("layers=1", "layers=8"):
        assert result["slope_over_loops"][name]["all"]["slope"] == pytest.approx(2, abs=0.1)
    assert result["slope_over_layers"]["loops=4"]["all"]["slope"] == pytest.approx(1, abs=0.15)
    for cell in result["cells"]:
        assert 0.3 < cell["a_min"] <= cell["a_max"] < 1.2 and cell["R"] < 2
        limit = cell["C_J"] * cell["C_delta"] * cell["layers"] ** 0.5  # proposition 7
        assert cell["linear_change"] <= limit
        assert cell["linear_change"] == pytest.approx(cell["coherence"] * cell["layers"] ** 0.5)


def test_jacobians_are_those_of_autograd():
    weights, h_0, eps = theorems.matrices(0, 2, 5, 5), theorems.gaussian(1, 5), 0.6
    activations, _, _ = theorems.run(weights.expand(3, -1, -1, -1), h_0, eps)
    for n, layer, jacobian in theorems.jacobians(weights, activations, eps):

        def out(pushed, n=n, layer=layer):
            h = h_0
            for i in range(3):
                for j in range(2):
                    h = h + eps * weights[j] @ h.relu()
                    if (i, j) == (n, layer):
                        h = h + pushed
            return h

        expected = torch.autograd.functional.jacobian(out, torch.zeros(5, dtype=torch.float64))
        torch.testing.assert_close(jacobian, expected)


def test_replacing_a_layer_by_itself_changes_nothing():
    """C_1 compares Y under two draws of another layer, C_0 under two of its own."""
    weights, h_0 = theorems.matrices(0, 3, 6, 6), theorems.gaussian(1, 6)
    outputs, _, out = theorems.branch_outputs(weights, h_0, 2, 0.3)
    same, _, _ = theorems.branch_outputs(theorems.replaced(weights, 1, weights[1]), h_0, 2, 0.3)
    torch.testing.assert_close(outputs, same)
    torch.testing.assert_close(h_0 + 0.3 * 2 * outputs.sum(0), out)  # h_out = h_0 + eps sum of G_l
    other, _, _ = theorems.branch_outputs(theorems.replaced(weights, 2, 2 * weights[2]), h_0, 1, 0.3)
    first, _, _ = theorems.branch_outputs(weights, h_0, 1, 0.3)
    torch.testing.assert_close(other[:2], first[:2])  # what comes before it in the only loop does not see it
    torch.testing.assert_close(other[2], 2 * first[2])


# The premises on models


def test_premises_of_a_model_against_its_own_states():
    """Sums of what branches add, from hooks on the branches themselves; one layer, so that increments are known."""
    model = tiny_model(num_core_layers=1, residual_scaling="linear").double()
    batch, added = {"input_ids": random_ids(2, 5)}, {"attention": [], "mlp": []}
    block = model.model.core[0]
    handles = [
        block.self_attn.register_forward_hook(lambda _, a, output: added["attention"].append(output[0])),
        block.mlp.register_forward_hook(lambda _, a, output: added["mlp"].append(output)),
    ]
    with torch.no_grad():
        states = model(**batch, output_loop_hidden_states=True, num_loops=3).loop_hidden_states
    for handle in handles:
        handle.remove()
    result = premises(model, batch, num_loops=3)
    assert result["eps"] == pytest.approx(1 / 3) and result["beta"] == pytest.approx(1)
    for name, outputs in added.items():
        found, stacked = result["branches"][f"core_0.{name}"], torch.stack(outputs)
        expected = stacked.sum(0).square().sum(-1) / (3 * stacked.square().sum(-1).sum(0))
        assert found["residual_overlap"] == pytest.approx(expected.mean().item())
        assert found["Y_squared"] == pytest.approx(stacked.mean(0).square().mean().item())
        assert found["least_gain"] <= found["gain"] <= found["spectral_norm"]
        assert 0 < found["negative"] < 1
    layers = torch.stack([torch.stack(outputs).mean(0) for outputs in added.values()])
    expected = layers.sum(0).square().sum(-1) / (2 * layers.square().sum((0, -1)))
    assert result["layer_overlap"] == pytest.approx(expected.mean().item())
    start = model.model.embed_tokens(batch["input_ids"])
    increments = torch.stack([b - a for a, b in zip((start, *states[:-1]), states)]).detach()
    products = torch.einsum("ntkd,mtkd->nm", increments, increments)
    assert result["increment_overlap"] == pytest.approx((products.sum() / (3 * products.trace())).item())


def test_relu_stays_in_the_cone_and_its_loops_overlap():
    config = LoopedConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_core_layers=2, num_loops=16,
        hidden_act="relu", mlp_gated=False, residual_scaling="linear", initializer_range=64**-0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    result = premises(LoopedForCausalLM(config).eval(), {"input_ids": random_ids(2, 16, 64)})
    for layer in (0, 1):
        found = result["branches"][f"core_{layer}.mlp"]
        assert found["negative"] == 0 and found["mass"] > 0
        assert found["activation_overlap"] > 0.8 and found["residual_overlap"] > 0.8 > result["loops_orthogonal"]


def test_overlap_of_one_direction_and_of_none():
    axes = torch.eye(4)
    assert overlap(axes.sum(0), axes.square().sum(), 4) == pytest.approx(1 / 4)
    same = axes[:1].expand(4, -1)
    assert overlap(same.sum(0), same.square().sum(), 4) == pytest.approx(1)


@pytest.mark.slow
def test_theorems_are_measured_without_a_model(tmp_path, capsys):
    sizes = ["--width", "16", "--seeds", "2", "--output", str(tmp_path)]
    for name, extra in (
        ("theorem_1", ["--loops", "1", "2", "4", "--alphas", "1"]),
        ("theorem_2", ["--loops", "1", "2", "4", "--alphas", "1"]),
        ("theorem_3", ["--loops", "1", "2", "4", "--layers", "1", "2", "3"]),
    ):
        diagnose.main([name, *sizes, *extra])
        saved = json.loads((tmp_path / f"{name}.json").read_text())
        assert {"command", "commit", "hardware", "options", "result"} <= set(saved) and "model" not in saved
        assert (tmp_path / f"{name}.svg").read_text().startswith("<svg")


def test_bad_input_is_refused():
    for measure in (theorems.theorem_1, theorems.theorem_2, theorems.theorem_3):
        with pytest.raises(ValueError, match=r"at least 3 different loops, of at least 1, got \[1, 2, 2\]"):
            measure(loops=[1, 2, 2])
        with pytest.raises(ValueError, match="got width=1 and seeds=10"):
            measure(width=1)
    with pytest.raises(ValueError, match="different layers"):
        theorems.theorem_3(layers=[1, 2])
    with pytest.raises(ValueError, match="eta must be positive, got 0"):
        theorems.theorem_2(eta=0.0)
    with pytest.raises(ValueError, match="lambda must be positive, got scale=-1"):
        theorems.theorem_3(scale=-1.0)
    with pytest.raises(ValueError, match="at least 2 of them, got num_loops=1"):
        premises(tiny_model(), {"input_ids": random_ids(1, 4)}, num_loops=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_that_are_zero_overlap_in_nothing(dtype):
    zeros = torch.zeros(2, 3, dtype=dtype)
    assert overlap(zeros, zeros.square().sum(-1), 4) == 0
