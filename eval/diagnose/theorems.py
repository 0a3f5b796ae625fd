"""The models that the theorems of On the Residual Scaling of Looped Transformers are about, in float64.

    looped diagnose theorem_1 --width 512
    looped diagnose theorem_3 --layers 1 2 4 8 16

h <- h + eps W_l relu(h) for l = 0..L-1, N times over, W_ij ~ N(0, 1/d), h_0 ~ N(0, 1): no norm, no attention, no
training. Every measure gives the constants of the theorem's premises beside what the theorem concludes.
"""

import math
from collections.abc import Callable
from statistics import fmean

import torch

from looped_eval.common.progress import progress
from looped_recipes.common.measures import power_law

from .premises import cone_gain, overlap


LEMMA_5 = (1 - 2**-0.5, 3.0)  # limits of the gain of a Gaussian W on the positive cone, at large d


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrices(seed: int, *shape: int) -> torch.Tensor:
    return gaussian(seed, *shape) / shape[-1] ** 0.5


def run(weights: torch.Tensor, h: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return activations u and residuals r = W u, [N, L, d] each, and h_out. weights: [N, L, d, d], a view of
    [L, d, d] if loops share them."""
    activations, residuals = [], []
    for of_loop in weights:
        for weight in of_loop:
            activations.append(h.clamp(min=0))
            residuals.append(weight @ activations[-1])
            h = h + eps * residuals[-1]
    u, r = (torch.stack(vectors).view(*weights.shape[:2], -1) for vectors in (activations, residuals))
    return u, r, h


def rms(vector: torch.Tensor) -> float:
    return (vector.norm() / vector.shape[-1] ** 0.5).item()


def check(width: int, seeds: int, **counts):
    if width < 2 or seeds < 1:
        raise ValueError(f"a width of at least 2 and a seed are needed, got width={width} and seeds={seeds}")
    for name, values in counts.items():
        if len(set(values)) < 3 or min(values) < 1:
            raise ValueError(f"a slope needs at least 3 different {name}, of at least 1, got {list(values)}")


def slopes(x: list[float], y: list[float]) -> dict:
    """Return exponents over all of x and over its deeper half, where terms of lower order matter least."""
    deep = max(3, (len(x) + 1) // 2)
    return {"all": power_law(x, y), "deep": power_law(x[-deep:], y[-deep:])}


def averaged(rows: list[dict]) -> dict:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}


def over_loops(loops: list[int], seeds: int, measure: Callable[[int, int], dict]) -> dict[str, list[float]]:
    """Return {name: averages over seeds of what `measure(loops, seed)` gives, at each of `loops`}."""
    rows = [averaged([measure(count, seed) for seed in range(seeds)]) for count in loops]
    return {name: [row[name] for row in rows] for name in rows[0]}


# Theorem 1: one layer, looped


def sums_of_residuals(weights: torch.Tensor, h_0: torch.Tensor, eps: float) -> dict:
    """Return conclusions and premises of theorem 1, lemma 4 and equation R_N^2 = R_0^2 + B_N + C_N for one run."""
    activations, residuals, out = run(weights, h_0, eps)
    u, r, loops, width = activations[:, 0], residuals[:, 0], len(weights), len(h_0)
    total, activation_sum = r.sum(0), u.sum(0)
    return {
        "sum_squared": total.square().sum().item() / width,
        "R": rms(out),
        "linear": (2 * eps / width * h_0 @ total).item(),  # B_N
        "quadratic": eps**2 * total.square().sum().item() / width,  # C_N
        "mass": u.mean().item(),
        "scale": u.square().mean().item(),
        "activation_sum": rms(activation_sum),  # lemma 4: between mass * N and sqrt(scale) * N
        "activation_overlap": overlap(activation_sum, u.square().sum(), loops),
        "residual_overlap": overlap(total, r.square().sum(), loops),
        "gain": (total.norm() / activation_sum.norm()).item(),
    }


def theorem_1(
    *,
    width: int = 512,
    loops: list[int] = (1, 2, 4, 8, 16, 32, 64),
    alphas: list[float] = (0.5, 1.0, 2.0),
    seeds: int = 10,
) -> dict:
    """||sum_n r_n||^2 / d over N in theorem 1's own model, W shared and independent, eps = N^-alpha.

    With shared W it grows as N^2 if the premises hold with constants that do not depend on N, as for alpha >= 1; for
    smaller alpha, activations grow with N and it grows faster. With independent W (appendix 7.1) it grows as N for
    alpha >= 1/2. R stays bounded for alpha >= 1 and alpha >= 1/2, respectively. All values are averages over seeds;
    m_minus and q_plus are the least and largest averages over N. cone_gain: least and largest gain found over the
    cone; lemma_5 has their limits.
    """
    check(width, seeds, loops=loops)
    loops = sorted(loops)
    gains = [cone_gain(matrices(seed, width, width)) for seed in range(seeds)]
    result = {"width": width, "loops": loops, "seeds": seeds, "cone_gain": [min(g for g, _ in gains)]}
    result["cone_gain"].append(max(g for _, g in gains))
    result |= {"lemma_5": list(LEMMA_5), "arrangements": {}}
    for name, shared, least_alpha, exponent in (("shared", True, 1.0, 2.0), ("independent", False, 0.5, 1.0)):
        result["arrangements"][name] = {}
        for alpha in progress(alphas, "rules"):

            def one(count: int, seed: int, shared=shared, alpha=alpha) -> dict:
                weights = matrices(seed, 1 if shared else count, 1, width, width).expand(count, -1, -1, -1)
                return sums_of_residuals(weights, gaussian(seeds + seed, width), count**-alpha)

            found, holds = over_loops(loops, seeds, one), alpha >= least_alpha
            result["arrangements"][name][f"alpha={alpha:g}"] = {
                "slope_of_sum_squared": {"theory": exponent if holds else None, **slopes(loops, found["sum_squared"])},
                "slope_of_R": {"theory": 0.0 if holds else None, **slopes(loops, found["R"])},
                "m_minus": min(found["mass"]),
                "q_plus": max(found["scale"]),
                **found,
            }
    return result


# Theorem 2: one update of one looped layer


def one_update(weight: torch.Tensor, update: torch.Tensor, h_0: torch.Tensor, loops: int, eps: float, eta: float):
    """Return the change of h_N and the constants of appendix 7.3."""
    both = [run(w.expand(loops, 1, -1, -1), h_0, eps) for w in (weight, weight + update)]
    (before, _, out), (after, _, out_after) = [(u[:, 0], r, h) for u, r, h in both]
    change, activation_sum = out_after - out, before.sum(0)
    leading = update @ activation_sum
    norm, update_norm = (torch.linalg.matrix_norm(w, 2).item() for w in (weight, update))
    largest = after.norm(dim=-1).max().item() / len(h_0) ** 0.5
    reach = eps * norm * loops
    return {
        "change": rms(change),
        "eta_eps_N": eta * eps * loops,
        "C_delta": update_norm / eta,
        "C_W": norm,
        "M": reach,
        "Q_plus": largest,
        "bound": update_norm * largest * math.exp(min(reach, 700.0)) * eps * loops,
        "zeta": (leading.norm() / (eta * activation_sum.norm())).item(),
        "theta": ((change - eps * leading).norm() / (eps * leading).norm()).item(),
    }


def theorem_2(
    *,
    width: int = 512,
    loops: list[int] = (1, 2, 4, 8, 16, 32, 64),
    alphas: list[float] = (0.5, 1.0, 2.0),
    eta: float = 1e-2,
    seeds: int = 10,
) -> dict:
    """Change of h_N by one update of random signs, Delta W = eta / sqrt d S, over N in theorem 1's model.

    If eps N is bounded (alpha >= 1), it is at most C_Delta Q_+ e^M eta eps N, so its exponent of N is at most
    1 - alpha. It is exactly 1 - alpha if zeta, the gain of Delta W along U, is Theta(1) and theta, the share of the
    change that is not linear in Delta W, stays below 1.
    """
    check(width, seeds, loops=loops)
    if not eta > 0:
        raise ValueError(f"eta must be positive, got {eta}")
    loops, result = sorted(loops), {"width": width, "loops": sorted(loops), "eta": eta, "seeds": seeds, "alphas": {}}
    for alpha in progress(alphas, "rules"):

        def one(count: int, seed: int, alpha=alpha) -> dict:
            update = eta / width**0.5 * gaussian(2 * seeds + seed, width, width).sign()
            weight, h_0 = matrices(seed, width, width), gaussian(seeds + seed, width)
            return one_update(weight, update, h_0, count, count**-alpha, eta)

        found = over_loops(loops, seeds, one)
        slope = {"theory": 1 - alpha if alpha >= 1 else None, **slopes(loops, found["change"])}
        result["alphas"][f"alpha={alpha:g}"] = {"slope": slope, **found}
    return result


# Theorem 3 (formally 6) and proposition 7: L layers, looped


def replaced(weights: torch.Tensor, layer: int, by: torch.Tensor) -> torch.Tensor:
    return torch.cat([weights[:layer], by[None], weights[layer + 1 :]])


def branch_outputs(weights: torch.Tensor, h_0: torch.Tensor, loops: int, eps: float):
    """Return Y_l = W_l mean_n relu(h_{n,l}) [L, d], activations [N, L, d] and h_out, for weights [L, d, d]."""
    activations, residuals, out = run(weights.expand(loops, -1, -1, -1), h_0, eps)
    return residuals.mean(0), activations, out


def jacobians(weights: torch.Tensor, activations: torch.Tensor, eps: float):
    """Yield the Jacobian of h_out by the state after branch (n, l), from the last branch to the first."""
    jacobian = torch.eye(weights.shape[-1], dtype=weights.dtype)
    for n in reversed(range(activations.shape[0])):
        for layer in reversed(range(activations.shape[1])):
            yield n, layer, jacobian
            jacobian = jacobian + eps * (jacobian @ weights[layer]) * (activations[n, layer] > 0)


def of_stack(seed: int, width: int, layers: int, loops: int, scale: float) -> dict:
    """Return conclusions and premises of theorem 6 and proposition 7 for one draw, with eps = lambda / (N sqrt L)."""
    eps = scale / (loops * layers**0.5)
    beta = eps * loops
    weights, h_0 = matrices(3 * seed, layers, width, width), gaussian(3 * seed + 1, width)
    fresh = matrices(3 * seed + 2, 2 * layers, width, width)
    outputs, activations, out = branch_outputs(weights, h_0, loops, eps)
    means, changes = [], []
    for layer in range(layers):
        others, _, _ = branch_outputs(replaced(weights, layer, fresh[layer]), h_0, loops, eps)
        # Y_l under two independent W_l: their inner product averages to ||E[Y_l | other weights]||^2
        means.append((outputs[layer] @ others[layer]).item() / width)
        difference = (outputs - others).square().sum(-1) / width / 2
        changes += [difference[i].item() for i in range(layers) if i != layer]
    updates = fresh[layers:].sign() / width**0.5  # Delta W_l / eta
    pushed = torch.zeros_like(out)
    norms, pushes = [], []
    for n, layer, jacobian in jacobians(weights, activations, eps):
        push = updates[layer] @ activations[n, layer]
        norms.append(torch.linalg.matrix_norm(jacobian, 2).item())
        pushes.append(rms(push))
        pushed = pushed + jacobian @ push
    total = loops**2 * outputs.sum(0).square().sum().item() / width
    return {
        "total_squared": total,  # ||sum_l G_l||^2 / d
        "over_L_N2": total / layers / loops**2,
        "R": rms(out),
        "beta": beta,
        "Y_squared": outputs.square().mean(-1),  # of every layer
        "C_0": fmean(means) / beta**2,
        "C_1": fmean(changes) / beta**2 if changes else 0.0,
        "layer_overlap": overlap(outputs.sum(0), outputs.square().sum(), layers),
        "C_delta": max(pushes),  # of one branch, over eta
        "C_J": max(norms),
        "coherence": rms(pushed) / (layers * loops),  # c_coh
        "linear_change": eps * rms(pushed),  # over eta; at most C_J C_delta lambda sqrt L
    }


def stacks(seeds: int, *sizes) -> dict:
    """Return averages over seeds; a_min and a_max are the least and the largest average over layers."""
    rows = [of_stack(seed, *sizes) for seed in range(seeds)]
    squares = torch.stack([row.pop("Y_squared") for row in rows]).mean(0)
    return {**averaged(rows), "a_min": squares.min().item(), "a_max": squares.max().item()}


def theorem_3(
    *,
    width: int = 128,
    layers: list[int] = (1, 2, 4, 8, 16),
    loops: list[int] = (1, 2, 4, 8),
    scale: float = 1.0,
    seeds: int = 10,
) -> dict:
    """||sum_l G_l||^2 / d over L and N in the model of theorem 3, eps = lambda / (N sqrt L), and its premises.

    It grows as L N^2 if every branch keeps its size (a_min, a_max) and the weights of one layer affect another branch
    only through beta = eps N (C_0, C_1, averages over layers); then R is bounded in L and N. linear_change: the
    first-order change by one update of every layer with random signs, over eta. It is at most C_J C_delta lambda
    sqrt L (proposition 7), which is reached if the updates of layers are coherent.
    """
    check(width, seeds, layers=layers, loops=loops)
    if not scale > 0:
        raise ValueError(f"lambda must be positive, got scale={scale}")
    layers, loops = sorted(layers), sorted(loops)
    cells = {
        (num_layers, count): stacks(seeds, width, num_layers, count, scale) for num_layers in layers for count in loops
    }
    totals = {cell: row["total_squared"] for cell, row in cells.items()}
    return {
        "width": width,
        "layers": layers,
        "loops": loops,
        "lambda": scale,
        "seeds": seeds,
        "slope_over_loops": {
            "theory": 2.0,
            **{f"layers={at}": slopes(loops, [totals[at, n] for n in loops]) for at in layers},
        },
        "slope_over_layers": {
            "theory": 1.0,
            **{f"loops={n}": slopes(layers, [totals[at, n] for at in layers]) for n in loops},
        },
        "cells": [{"layers": at, "loops": n, **row} for (at, n), row in cells.items()],
    }
