"""The optimizers of our own against their formulas, in float64."""

import math

import numpy as np
import pytest
import torch

from looped_recipes.engine import muon
from looped_recipes.engine.muon import POLAR_EXPRESS, NorMuon, SharedMuon
from looped_recipes.engine.stable_adamw import StableAdamW


SHAPES = [(48, 32), (32, 48), (20, 20), (2, 16)]


def run(optimizer_class, gradients: list[list[torch.Tensor]], start: list[torch.Tensor], rates=None, **settings):
    """The weights after every step."""
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = optimizer_class(parameters, **settings)
    history = []
    for step, step_gradients in enumerate(gradients):
        for parameter, gradient in zip(parameters, step_gradients):
            parameter.grad = gradient.clone()
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.step()
        history.append([parameter.detach().clone() for parameter in parameters])
    return history


def some_gradients(shapes, steps: int = 8) -> list[list[torch.Tensor]]:
    """Of changing size; every second row of the first is ten times as large."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for step in range(steps):
        result.append([(1 + step % 3) * torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes])
        result[-1][0][::2] *= 10
    return result


def some_weights(shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [0.1 * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


# Muon of Parcae


def best_quintic(low: float, high: float) -> np.ndarray:
    """(a, b, c) that keep a x + b x^3 + c x^5 closest to 1 on [low, high], by the exchange of Remez."""
    inner = (3 * low + high) / 4, (low + 3 * high) / 4
    for _ in range(100):
        points = np.array([low, *inner, high])
        system = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        a, b, c, _ = np.linalg.solve(system, np.ones(4))
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
    return np.array([a, b, c])


def value(quintic: np.ndarray, x: float) -> float:
    return quintic @ [x, x**3, x**5]


def test_coefficients_are_those_of_polar_express():
    """Its algorithm for five iterations from 1e-3, with a cushion of 0.02 and a safety of 2 % but in the last."""
    low, high = 1e-3, 1.0
    for iteration, expected in enumerate(POLAR_EXPRESS):
        quintic = best_quintic(max(low, 0.02 * high), high)
        if 0.02 * high > low:
            quintic = quintic * 2 / (value(quintic, low) + value(quintic, high))
        if iteration < 4:
            quintic = quintic / [1.02, 1.02**3, 1.02**5]
        assert np.allclose(quintic, expected, rtol=1e-12)
        low = value(quintic, low)
        high = 2 - low


def naive_normuon(gradients, start, lr, momentum, weight_decay, beta):
    """One matrix at a time; the iterations act on singular values."""
    weights = [matrix.clone() for matrix in start]
    momenta = [torch.zeros_like(matrix) for matrix in start]
    moments = [0.0] * len(start)
    for step_gradients in gradients:
        for i, gradient in enumerate(step_gradients):
            rows, columns = gradient.shape
            momenta[i] = momentum * momenta[i] + (1 - momentum) * gradient
            update = (1 - momentum) * gradient + momentum * momenta[i]
            u, s, vh = torch.linalg.svd(update, full_matrices=False)
            s = s / (1.02 * s.square().sum().sqrt() + 1e-6)
            for a, b, c in POLAR_EXPRESS:
                s = a * s + b * s**3 + c * s**5
            update = u * s @ vh
            along = 1 if rows >= columns else 0
            moments[i] = beta * moments[i] + (1 - beta) * (update**2).mean(along, keepdim=True)
            scaled = update / moments[i].sqrt()
            update = scaled * (update**2).sum().sqrt() / (scaled**2).sum().sqrt()
            rate = lr * math.sqrt(max(1, rows / columns))
            agree = (torch.sign(update) * torch.sign(weights[i]) >= 0).double()
            weights[i] = weights[i] - rate * update - rate * weight_decay * agree * weights[i]
    return weights


def test_normuon_is_the_formula():
    gradients, start = some_gradients(SHAPES), some_weights(SHAPES)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.3, "beta": 0.95}
    found = run(NorMuon, gradients, start, dtype=torch.float64, **settings)[-1]
    for matrix, expected in zip(found, naive_normuon(gradients, start, **settings)):
        assert torch.allclose(matrix, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.bfloat16, 1e-4, 0.05), (None, 0, 1e-4)])
def test_normuon_iterates_in_bf16_or_on_cpus_in_fp32(dtype, least, most):
    gradients, start = some_gradients(SHAPES, steps=3), some_weights(SHAPES)
    exact = run(NorMuon, gradients, start, dtype=torch.float64, lr=0.02)[-1]
    found = run(lambda *args, **kwargs: NorMuon(*args, dtype=dtype, **kwargs), gradients, start, lr=0.02)[-1]
    for rounded, expected, before in zip(found, exact, start):
        error = (rounded - expected).norm() / (expected - before).norm()
        assert least < error < most


def test_every_neuron_moves_by_as_much():
    """At the first step the factored moment is that of the update itself: rows, or columns where there are more."""
    (matrices,) = run(NorMuon, some_gradients(SHAPES, steps=1), some_weights(SHAPES), dtype=torch.float64)
    for after, before, (rows, columns) in zip(matrices, some_weights(SHAPES), SHAPES):
        norms = (after - before).norm(dim=1 if rows >= columns else 0)
        assert torch.allclose(norms, norms.mean().expand_as(norms), rtol=1e-9)


def test_weights_decay_where_the_update_shrinks_them():
    gradients, start = some_gradients(SHAPES, steps=1), some_weights(SHAPES)
    (plain,), (decayed,) = (
        run(NorMuon, gradients, start, lr=0.01, weight_decay=decay, dtype=torch.float64) for decay in (0.0, 2.0)
    )
    for without, with_decay, before, (rows, columns) in zip(plain, decayed, start, SHAPES):
        update, rate = without - before, 0.01 * math.sqrt(max(1, rows / columns))
        shrinks = update * before <= 0
        assert 0.2 < shrinks.double().mean() < 0.8
        assert torch.equal(with_decay[~shrinks], without[~shrinks])
        assert torch.allclose((without - with_decay)[shrinks], 2 * rate * before[shrinks])


def test_a_matrix_without_gradient_does_not_move():
    start = some_weights(SHAPES[:1])
    (after,) = run(NorMuon, [[torch.zeros(SHAPES[0], dtype=torch.float64)]], start, weight_decay=0.0)
    assert torch.equal(after[0], start[0])


@pytest.mark.parametrize("optimizer_class", [SharedMuon, NorMuon])
def test_two_processes_that_share_the_matrices_move_them_as_one_does(optimizer_class, monkeypatch):
    """Each computes every second matrix and is sent the others."""
    gradients, start = some_gradients(SHAPES, steps=1), some_weights(SHAPES)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.3}
    expected, sent = run(optimizer_class, gradients, start, **settings)[-1], {}

    def step_of(rank: int) -> list[torch.Tensor]:
        places = iter(range(len(SHAPES)))

        def broadcast(result, src):
            place = next(places)
            if src == rank:
                sent[place] = result.clone()
            elif place in sent:
                result.copy_(sent[place])

        monkeypatch.setattr(muon.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(muon.dist, "broadcast", broadcast)
        return run(optimizer_class, gradients, start, **settings)[-1]

    monkeypatch.setattr(muon.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(muon.dist, "get_world_size", lambda: 2)
    step_of(0)  # what it sends does not depend on what it is sent
    for matrix, whole in zip(step_of(1), expected, strict=True):
        torch.testing.assert_close(matrix, whole)
    assert len(sent) == len(SHAPES)


# AdamW with update clipping and without epsilon


def naive_stable_adamw(gradients, start, rates, betas, eps, weight_decay, clipping, atan2):
    weights, history = [tensor.clone() for tensor in start], []
    first = [torch.zeros_like(tensor) for tensor in start]
    second = [torch.zeros_like(tensor) for tensor in start]
    for t, step_gradients in enumerate(gradients, start=1):
        for i, g in enumerate(step_gradients):
            first[i] = betas[0] * first[i] + (1 - betas[0]) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g**2
            size = 1.0
            if clipping:
                second[i] = torch.maximum(second[i], torch.tensor(eps**2, dtype=torch.float64))
                size = max(1.0, math.sqrt((g**2 / second[i]).mean()))
            deviation = (second[i] / (1 - betas[1] ** t)).sqrt()
            update = torch.atan2(first[i], deviation) if atan2 else first[i] / (deviation + eps)
            update = update / (1 - betas[0] ** t)
            weights[i] = (1 - rates[t - 1] * weight_decay) * weights[i] - rates[t - 1] / size * update
        history.append([weight.clone() for weight in weights])
    return history


@pytest.mark.parametrize("clipping, atan2", [(True, True), (True, False), (False, True)])
def test_stable_adamw_is_the_formula(clipping, atan2):
    shapes = [(6, 5), (9,)]
    gradients, start = some_gradients(shapes, steps=12), some_weights(shapes)
    gradients[7] = [50 * gradient for gradient in gradients[7]]  # a spike
    for step_gradients in gradients:
        step_gradients[0][2] = 0.0  # the embedding of a token that does not occur
    rates = [0.01 * (step + 1) / 12 for step in range(12)]
    # so large an eps bounds the second moment of some elements from below
    settings = {"betas": (0.9, 0.95), "eps": 0.1, "weight_decay": 0.1, "clipping": clipping, "atan2": atan2}
    found = run(StableAdamW, gradients, start, rates, **settings)
    for after, expected in zip(found, naive_stable_adamw(gradients, start, rates, **settings)):
        for weight, exact in zip(after, expected):
            assert torch.allclose(weight, exact, rtol=0, atol=1e-12)


def test_parameters_that_are_clipped_together_are_clipped_as_one_tensor():
    """Against the formula on one tensor that holds both; a spike in the third is no matter of theirs."""
    shapes = [(6, 5), (3, 5), (4, 5)]
    gradients, start = some_gradients(shapes, steps=12), some_weights(shapes)
    gradients[7][1] *= 50
    gradients[9][2] *= 50
    settings = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "clipping": True, "atan2": True}

    def optimizer_class(parameters, **settings):
        two_groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
        elsewhere = torch.nn.Parameter(torch.zeros(2))
        return StableAdamW(two_groups, together=[(parameters[1], elsewhere, parameters[0])], **settings)

    def fused(tensors):
        return [torch.cat(tensors[:2]), tensors[2]]

    found = run(optimizer_class, gradients, start, lr=0.01, **settings)
    expected = naive_stable_adamw([fused(each) for each in gradients], fused(start), [0.01] * 12, **settings)
    for after, exact in zip(found, expected):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(fused(after), exact))
    alone = run(StableAdamW, gradients, start, lr=0.01, **settings)
    assert not torch.allclose(found[-1][0], alone[-1][0], rtol=0, atol=1e-4)


def test_without_clipping_and_atan2_it_is_adamw():
    gradients, start = some_gradients(SHAPES), some_weights(SHAPES)
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    found = run(StableAdamW, gradients, start, clipping=False, atan2=False, **settings)[-1]
    for weight, expected in zip(found, run(torch.optim.AdamW, gradients, start, **settings)[-1]):
        assert torch.allclose(weight, expected, rtol=0, atol=1e-12)


def test_a_spike_moves_a_clipped_tensor_no_further():
    """Adam alone would move by up to (1 - beta1) / sqrt(1 - beta2) rates, here 0.45, more than by usual gradients."""
    shapes, rate = [(40, 40)], 1e-3
    usual = [[gradient.sign()] for (gradient,) in some_gradients(shapes, steps=60)]
    spike = [*usual, [100 * usual[-1][0].abs()]]
    moves = {}
    for clipping in (True, False):
        history = run(StableAdamW, spike, some_weights(shapes), lr=rate, clipping=clipping, atan2=False)
        moves[clipping] = ((history[-1][0] - history[-2][0]).norm() / rate / 40).item()
    assert moves[True] < 0.15 and moves[False] > 0.4


def test_without_epsilon_the_scale_of_gradients_does_not_matter():
    """Down to where squares underflow; Adam's epsilon is felt long before."""
    gradients, start = some_gradients(SHAPES), some_weights(SHAPES)
    tiny = [[1e-20 * gradient for gradient in each] for each in gradients]
    for atan2, same in ((True, True), (False, False)):
        runs = [run(StableAdamW, each, start, clipping=False, atan2=atan2)[-1] for each in (gradients, tiny)]
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) == same for a, b in zip(*runs))


@pytest.mark.parametrize("eps", [1e-8, 1e-30])
def test_clipping_where_a_weight_has_no_gradient(eps):
    """Also where the square of eps is 0 in fp32."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.tensor([1.0, 0.0, 0.0, 0.0])
    StableAdamW([weight], lr=0.1, eps=eps, clipping=True, atan2=True).step()
    assert weight[1:].tolist() == [1.0] * 3 and weight[0] < 1
