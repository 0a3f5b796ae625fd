"""What looped models are watched by: small functions of the states, gradients and weights of one model.

Training metrics and diagnostics both call these, so that nothing is computed twice in two ways.
"""

import torch

from modeling_looped.injection import ConcatInjection, DiagonalInjection


def token_rms(state: torch.Tensor) -> torch.Tensor:
    """||h|| / sqrt d of every token, in at least fp32."""
    return state.to(torch.promote_types(state.dtype, torch.float32)).square().mean(-1).sqrt()


def residual_norms(loop_hidden_states) -> list[float]:
    """R = mean over tokens of ||H_k|| / sqrt d, at every loop."""
    return [token_rms(state).mean().item() for state in loop_hidden_states]


def state_change(loop_hidden_states) -> float | None:
    """Mean over tokens of ||H_T - H_{T-1}|| / sqrt d; None with a single loop."""
    if len(loop_hidden_states) < 2:
        return None
    return token_rms(loop_hidden_states[-1] - loop_hidden_states[-2]).mean().item()


def gradient_norm(module: torch.nn.Module) -> float | None:
    """Euclidean norm of all gradients of a module; None if it has none."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    if not gradients:
        return None
    norm = torch.nn.utils.get_total_norm(gradients)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def spectral_radius(injection: torch.nn.Module) -> float | None:
    """Largest |eigenvalue| of the linear map from the old state to the new; None if the injection has none.

    Diagonal: its largest entry. Concat: of the half of W that meets the state.
    """
    if isinstance(injection, DiagonalInjection):
        decay, _ = injection.decay_and_step()
        return (decay.full_tensor() if hasattr(decay, "full_tensor") else decay).max().item()
    if isinstance(injection, ConcatInjection):
        weight = injection.proj.weight
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        state_half = weight.detach()[:, : weight.shape[0]].to(torch.promote_types(weight.dtype, torch.float32))
        return torch.linalg.eigvals(state_half).abs().max().item()
    return None
