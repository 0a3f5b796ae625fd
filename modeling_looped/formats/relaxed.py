"""Weights of unshared layers as shared ones and what each loop has of its own (relaxed recursion, Bae et al.).

K loops of C layers stand for K * C layers of a dense model. What loop t's weights are beyond the shared ones becomes
its low-rank delta, by a truncated SVD of the difference; with `loop_norms` its norms are its own. At full rank the
looped model is then the unrolled one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..loop_parameters import LoopDelta, layer_of_delta, parameters_by_loop
from ..norms import LoopedNorm
from ..tensors import at_least_fp32


LoopWeights = Mapping[str, torch.Tensor]  # by name inside the core: 0.self_attn.q_proj.weight


@torch.no_grad()
def set_loop_residuals(model, per_loop_state: Sequence[LoopWeights]) -> dict[str, float]:
    """Give each loop what its weights are beyond the model's shared ones, as far as the rank goes.

    per_loop_state: for each loop the full weights of the core's blocks, by their names inside the core, such as
    "0.self_attn.q_proj.weight". Returns by name what is left out: the norm of the difference over that of the weight,
    of the loop where it is largest. What no loop can have of its own stays shared, and is reported likewise.
    """
    check_names(model, per_loop_state)
    core, shared = core_of(model), shared_parameters(model)
    held: dict[str, list[torch.Tensor]] = {
        name: [at_least_fp32(weight)] * len(per_loop_state)
        for name, weight in shared.items()
        if name in per_loop_state[0]
    }
    for path, part in core.named_modules():
        if isinstance(part, LoopDelta):
            name = layer_of_delta(path)
            held[f"{name}.weight"] = [
                set_delta(part, loop, state[f"{name}.weight"], shared[f"{name}.weight"])
                for loop, state in enumerate(per_loop_state)
            ]
            if part.bias is not None:
                biases = torch.stack([at_least_fp32(state[f"{name}.bias"]) for state in per_loop_state])
                part.bias.copy_(biases - shared[f"{name}.bias"])
                held[f"{name}.bias"] = list(part.bias + shared[f"{name}.bias"])
        elif isinstance(part, LoopedNorm) and part.is_by_loop and part.weight is not None:
            part.weight.copy_(torch.stack([at_least_fp32(state[f"{path}.weight"]) for state in per_loop_state]))
            held[f"{path}.weight"] = list(part.weight)
    return {
        name: max(difference(state[name], weight) for state, weight in zip(per_loop_state, weights))
        for name, weights in held.items()
    }


def set_delta(delta: LoopDelta, loop: int, weight: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """The best of the delta's rank for one loop, half of each singular value on either side; the weight that this
    makes. At a higher rank than there are singular values, the rest is 0 in B and as it was in A."""
    residual = at_least_fp32(weight).to(shared.device) - at_least_fp32(shared)
    u, s, v = torch.linalg.svd(residual, full_matrices=False)
    rank = min(delta.a.shape[1], len(s))
    roots = s[:rank].sqrt()
    delta.b[loop] = 0
    delta.b[loop, :, :rank] = (u[:, :rank] * roots).to(delta.b.dtype)
    delta.a[loop, :rank] = (roots[:, None] * v[:rank]).to(delta.a.dtype)
    return at_least_fp32(shared) + at_least_fp32(delta.b[loop]) @ at_least_fp32(delta.a[loop])


def difference(wanted: torch.Tensor, held: torch.Tensor) -> float:
    wanted = at_least_fp32(wanted).to(held.device)
    size = wanted.norm().item()
    left = (wanted - at_least_fp32(held)).norm().item()
    return left / size if size else left


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
    """Those of the core that all loops share, by their names inside it."""
    stacked = {id(parameter) for parameter in parameters_by_loop(core_of(model))}
    return {name: weight for name, weight in core_of(model).named_parameters() if id(weight) not in stacked}
