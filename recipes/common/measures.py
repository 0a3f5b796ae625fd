"""Norms, gradients and spectra of a model, for the metrics of training and for diagnostics.

Training metrics and diagnostics both use these functions, so that each quantity has one definition. States are tensors
[..., d]; inner products are computed in at least fp32.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch.nn.utils import get_total_norm

from modeling_looped.injection import AddInjection, ConcatInjection, DiagonalInjection
from modeling_looped.overrides import is_as_written
from modeling_looped.tensors import at_least_fp32


EXACT_WIDTH = 512  # largest width for exact eigenvalues in training: at 5,280 they would take minutes


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a sharded tensor; other tensors are returned unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Norms of states


def token_rms(state: torch.Tensor) -> torch.Tensor:
    """Return ||h|| / sqrt d of every token, in at least fp32."""
    return at_least_fp32(state).square().mean(-1).sqrt()


def token_correlation(state: torch.Tensor) -> torch.Tensor:
    """Return the correlation over channels of two tokens, averaged over all pairs of tokens of a row, [rows]: 1 if all
    tokens are alike."""
    centred = at_least_fp32(state) - at_least_fp32(state).mean(-1, keepdim=True)
    length = state.shape[1]
    together = torch.nn.functional.normalize(centred, dim=-1).sum(1).square().sum(-1)
    return (together - length) / max(length * (length - 1), 1)


def mean_norm(state: torch.Tensor) -> float:
    """Return ||h|| averaged over tokens."""
    return (token_rms(state).mean() * math.sqrt(state.shape[-1])).item()


def residual_norms(loop_hidden_states) -> list[float]:
    """Return R = mean over tokens of ||H_k|| / sqrt d, for every loop."""
    return [token_rms(state).mean().item() for state in loop_hidden_states]


def distribution(values: torch.Tensor) -> dict[str, float]:
    """Return mean, median, p99, maximum and standard deviation of one number per token (readout blind spot, table
    10)."""
    values = at_least_fp32(values).flatten()
    return {
        "mean": values.mean().item(),
        "median": values.quantile(0.5).item(),
        "p99": values.quantile(0.99).item(),
        "max": values.max().item(),
        "std": values.std(correction=0).item(),
    }


# Increments and updates


def increment_products(states) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and inner products / d of increments d_i = h_i - h_{i-1}, averaged over tokens, both [N, N].

    With h_i = h_{i-1} + eps r_i the inner products are the workshop paper's eps^2 <r_i, r_j> / d.
    """
    wide = [at_least_fp32(state) for state in states]
    increments = torch.stack([after - before for before, after in zip(wide, wide[1:])])
    increments = increments.flatten(1, -2).transpose(0, 1)  # [tokens, N, d]
    unit = torch.nn.functional.normalize(increments, dim=-1)
    cosines = (unit @ unit.transpose(1, 2)).mean(0)
    return cosines, (increments @ increments.transpose(1, 2)).mean(0) / increments.shape[-1]


def update_parts(before: torch.Tensor, after: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split each token's update b = F(H) - H along and across H = s u, |u|_rms = 1 (readout blind spot, lemma 2).

    b = a_rad u + b_perp, a_rad = <u, b> / d, <u, b_perp> = 0.
    """
    before, after = at_least_fp32(before), at_least_fp32(after)
    scale = token_rms(before)
    unit, update = before / scale[..., None], after - before
    radial = (unit * update).mean(-1)
    across = update - radial[..., None] * unit
    turn = after / token_rms(after)[..., None] - unit
    return {
        "scale": scale,
        "a_rad": radial,
        "a_rad_size": radial.abs(),
        "b_perp": token_rms(across),
        "b": token_rms(update),
        "turn_times_scale": token_rms(turn) * scale,  # |u' - u|_rms s, by lemma 2 equal to |b_perp|_rms
        "across": across,
    }


# Gradients


def gradient_norm(module: torch.nn.Module) -> float | None:
    """Return the Euclidean norm of all gradients of a module; None if it has none."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return total_norm(gradients).item() if gradients else None


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all tensors together, which may be on different device meshes."""
    return torch.stack([whole(get_total_norm(each)) for each in by_mesh(tensors)]).norm()


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by device mesh: one operation over many tensors needs all of them on the same mesh."""
    lists: dict = {}
    for tensor in tensors:
        lists.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(lists.values())


def watched_blocks(model) -> dict[str, torch.nn.Module]:
    """Return the modules whose gradient norms are logged in training: head, embedding, and attention and MLP of every
    core layer."""
    blocks = {"lm_head": model.lm_head, "embed_tokens": model.model.embed_tokens}
    for i, layer in enumerate(model.model.core):
        blocks |= {f"core.{i}.self_attn": layer.self_attn, f"core.{i}.mlp": layer.mlp}
    return blocks


def radial_fraction(gradient: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return |<g, h>| / (||g|| ||h||) of every token whose gradient and state are not zero."""
    gradient, state = gradient.double(), state.double()
    norms = gradient.norm(dim=-1) * state.norm(dim=-1)
    return ((gradient * state).sum(-1).abs() / norms)[norms > 0]


def oscillation(norms: list[float]) -> float:
    """Return the standard deviation of log(g_{t+1} / g_t) over steps: 0 if a gradient norm is constant or grows at a
    constant rate."""
    if len(norms) < 3:
        raise ValueError(f"the oscillation of a gradient norm needs at least 3 steps, got {len(norms)}")
    if not all(math.isfinite(norm) and norm > 0 for norm in norms):
        raise ValueError("a gradient norm is zero or not finite, so its oscillation has no meaning")
    return torch.tensor(norms, dtype=torch.float64).log().diff().std(correction=0).item()


# Linear maps


def is_ours(injection: torch.nn.Module) -> bool:
    """Return whether an injection computes what this package wrote, which a subclass of ours need not do."""
    return is_as_written(injection, "forward", "before_layer", "normed")


def state_map(injection: torch.nn.Module) -> torch.Tensor | None:
    """Return A of the linear map h -> A h + B e, as a matrix or, if diagonal, its entries; None if no map is
    learned, or it is not known."""
    if not is_ours(injection):
        return None
    if isinstance(injection, DiagonalInjection):
        return whole(injection.decay_and_step()[0]).detach()
    if isinstance(injection, ConcatInjection):
        weight = whole(injection.proj.weight).detach()
        return at_least_fp32(weight[:, : weight.shape[0]])
    return None


def input_map(injection: torch.nn.Module) -> torch.Tensor | None:
    """Return B of the linear map h -> A h + B e; None if no map is learned."""
    if isinstance(injection, DiagonalInjection):
        step, weight = whole(injection.decay_and_step()[1]), whole(injection.input_proj.weight)
        return step.detach()[:, None] * at_least_fp32(weight.detach())
    if isinstance(injection, ConcatInjection):
        weight = whole(injection.proj.weight).detach()
        return at_least_fp32(weight[:, weight.shape[0] :])
    return None


def linear_maps(injection: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A and B, also if they are the identity (Parcae, table 1: addition); None if no linear map is applied to
    the state, or it is not known."""
    if isinstance(injection, AddInjection) and is_ours(injection):
        return torch.ones(1), torch.ones(1)
    state = state_map(injection)
    return None if state is None else (state, input_map(injection))


def largest_eigenvalue(matrix: torch.Tensor) -> float:
    """Return the largest |eigenvalue|; a vector represents a diagonal matrix."""
    return (matrix.abs() if matrix.ndim == 1 else torch.linalg.eigvals(matrix).abs()).max().item()


def largest_eigenvalue_by_squaring(matrix: torch.Tensor) -> float:
    """Approximate the largest |eigenvalue| by matrix products: Gelfand's ||A^n||^(1/n) with n = 2^14, which is too
    high by a fraction (k - 1) ln(n) / n for a Jordan block of size k."""
    power, log = matrix, matrix.new_zeros(())
    for i in range(15):
        power = power if i == 0 else power @ power
        norm = power.norm()
        if norm == 0:
            return 0.0
        power, log = power / norm, log + norm.log() / 2**i
    return log.exp().item()


def spectral_norm(matrix: torch.Tensor) -> float:
    """Return the largest singular value; a vector represents a diagonal matrix."""
    return (matrix.abs().max() if matrix.ndim == 1 else torch.linalg.matrix_norm(matrix, 2)).item()


def spectral_radius(injection: torch.nn.Module) -> float | None:
    """Return the largest |eigenvalue| of the linear map from the old state to the new; None if no map is learned.

    Diagonal: the largest entry. Concat: that of the half of W applied to the state, within about 0.1 % if it is wide.
    """
    state = state_map(injection)
    if state is None:
        return None
    is_small = state.ndim == 1 or len(state) <= EXACT_WIDTH
    return largest_eigenvalue(state) if is_small else largest_eigenvalue_by_squaring(state)


# Fits


def power_law(x: list[float], y: list[float]) -> dict:
    """Fit log y = slope log x + constant by least squares, with the standard error of the slope by the misfit."""
    if len(x) < 3:
        raise ValueError(f"a slope needs at least 3 points, got {len(x)}: {list(x)}")
    if len(set(x)) < 2:
        raise ValueError(f"a slope needs different values of x, got {list(x)}")
    if not all(math.isfinite(value) and value > 0 for value in (*x, *y)):
        return {"slope": None, "why": "a run diverged, or a value is not positive"}
    (slope, _), covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    return {"slope": float(slope), "standard_error": float(covariance[0, 0] ** 0.5), "points": len(x)}
