"""Weights of unshared layers as shared weights plus per-loop parameters (relaxed recursion, Bae et al.).

K loops of C layers stand for K * C layers of a dense model. The difference of loop t's weights from the shared ones
becomes its low-rank delta, by a truncated SVD; with `loop_norms` it also has separate norms. At full rank the looped
model then equals the unrolled one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..loop_parameters import LoopDelta, layer_of_delta, parameters_by_loop
from ..norms import LoopedNorm
from ..tensors import at_least_fp32


LoopWeights = Mapping[str, torch.Tensor]  # by name inside the core: 0.self_attn.q_proj.weight
MORE_VECTORS, ITERATIONS = 16, 8  # with them even of noise less than 0.1 % more is left out than at best


@torch.no_grad()
def set_loop_residuals(model, per_loop_state: Sequence[LoopWeights]):
    """Set the deltas and norms of loops so that each loop gets its weights in `per_loop_state`, as far as ranks allow.

    per_loop_state: for each loop the full weights of the core's blocks, by their names inside the core, such as
    "0.self_attn.q_proj.weight". Weights without per-loop parameters stay shared.
    """
    check_names(model, per_loop_state)
    shared = shared_parameters(model)
    for path, part in core_of(model).named_modules():
        if isinstance(part, LoopDelta):
            name = layer_of_delta(path)
            for loop, state in enumerate(per_loop_state):
                set_delta(part, loop, state[f"{name}.weight"], shared[f"{name}.weight"])
            if part.bias is not None:
                biases = torch.stack([at_least_fp32(state[f"{name}.bias"]) for state in per_loop_state])
                part.bias.copy_(biases - shared[f"{name}.bias"])
        elif isinstance(part, LoopedNorm) and part.is_by_loop and part.weight is not None:
            part.weight.copy_(torch.stack([at_least_fp32(state[f"{path}.weight"]) for state in per_loop_state]))


def set_delta(delta: LoopDelta, loop: int, weight: torch.Tensor, shared: torch.Tensor):
    """Set one loop's delta to the best one of its rank, with the root of each singular value in both A and B. If the
    rank exceeds that of the residual, the rest is 0 in B and unchanged in A: were both 0, neither would ever learn."""
    residual = at_least_fp32(weight).to(shared.device) - at_least_fp32(shared)
    u, s, v = first_singular_vectors(residual, delta.a.shape[1])
    rank = min(delta.a.shape[1], int((s > s[0] * max(residual.shape) * torch.finfo(s.dtype).eps).sum()))
    roots = s[:rank].sqrt()
    delta.b[loop] = 0
    delta.b[loop, :, :rank] = (u[:, :rank] * roots).to(delta.b.dtype)
    delta.a[loop, :rank] = (roots[:, None] * v[:rank]).to(delta.a.dtype)


def first_singular_vectors(matrix: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Return U, S and V^T of at least `count` singular values; few of many by subspace iteration, which takes a small
    part of the time."""
    few = count + MORE_VECTORS
    if 4 * few > min(matrix.shape):
        return torch.linalg.svd(matrix, full_matrices=False)
    generator = torch.Generator(matrix.device).manual_seed(0)
    basis = torch.randn(matrix.shape[1], few, generator=generator, dtype=matrix.dtype, device=matrix.device)
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix.mT @ torch.linalg.qr(matrix @ basis).Q).Q
    u, s, v = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return u, s, v @ basis.mT


def check_names(model, per_loop_state: Sequence[LoopWeights]):
    sets = model.config.num_loop_sets
    if not model.config.has_sets_in_core:
        raise ValueError(
            "this model's loops have nothing of their own: make it with a loop_lora_rank, and loop_norms=True"
        )
    if len(per_loop_state) != sets:
        raise ValueError(
            f"got weights of {len(per_loop_state)} loops for a model with num_loop_parameters={sets} sets of what "
            "loops have of their own: pass one dict for each"
        )
    shapes = {name: weight.shape for name, weight in shared_parameters(model).items()}
    own = set()
    for path, part in core_of(model).named_modules():
        if isinstance(part, LoopDelta):
            name = layer_of_delta(path)
            own |= {f"{name}.weight"} | ({f"{name}.bias"} if part.bias is not None else set())
        elif isinstance(part, LoopedNorm) and part.is_by_loop and part.weight is not None:
            own.add(f"{path}.weight")
            shapes[f"{path}.weight"] = part.weight.shape[1:]
    for loop, state in enumerate(per_loop_state):
        missing, unknown = sorted(own - state.keys()), sorted(state.keys() - shapes.keys())
        differing = sorted(state.keys() ^ per_loop_state[0].keys())
        if missing or unknown or differing:
            raise ValueError(
                f"weights of loop {loop} do not fit the core: missing {missing[:5]}, not in the model {unknown[:5]}, "
                f"not in all loops {differing[:5]}; names are those inside the core, like 0.self_attn.q_proj.weight"
            )
        for name, weight in state.items():
            if weight.shape != shapes[name]:
                raise ValueError(
                    f"{name} of loop {loop} has shape {tuple(weight.shape)}, but that of the model is "
                    f"{tuple(shapes[name])}"
                )


def core_of(model) -> Any:
    return getattr(model, model.base_model_prefix, model).core


def shared_parameters(model) -> dict[str, torch.Tensor]:
    """Return the parameters of the core that all loops share, by their names inside the core."""
    stacked = {id(parameter) for parameter in parameters_by_loop(core_of(model))}
    return {name: weight for name, weight in core_of(model).named_parameters() if id(weight) not in stacked}
