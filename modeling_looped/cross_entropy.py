"""Weighted cross-entropies of many readouts, with the logits of only one chunk of tokens in memory at a time."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .tensors import at_least_fp32, may_be_transformed, wide_dtype


IGNORE_INDEX = -100
LOGITS_PER_CHUNK = {"cpu": 2**25, "cuda": 2**27}  # a GPU needs as long to add up the head's gradients as to multiply
MIN_CHUNK = 256  # tokens
LOGITS_PER_BLOCK_ON_CPU = 2**20  # this many in fp32 stay in the processor's cache between two operations


class Head(NamedTuple):
    """The functions that turn readouts into logits, or into losses."""

    decode: Callable  # (hidden [tokens, d], k) -> logits [tokens, vocabulary]
    parameters: list[torch.Tensor] | None  # read by `decode`; None leaves the gradients to autograd
    kernel: Callable | None = None  # (hidden [tokens, d], k, labels [tokens]) -> CE [tokens], of another library
    cross_entropy: Callable | None = None  # in place of `cross_entropy_of`, with the same arguments


def shift(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels: that of position i becomes the token at i + 1; the last position has none."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def unshift(labels: torch.Tensor) -> torch.Tensor:
    """Invert `shift`, except that the first label, which nothing predicts, is IGNORE_INDEX."""
    return F.pad(labels[..., :-1], (1, 0), value=IGNORE_INDEX)


def cross_entropy_of(logits, labels, weights, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return the CE of every token, and write the gradient of the weighted sum, w (softmax - one_hot), to `gradient`
    if it is not None."""
    rows = max(1, LOGITS_PER_BLOCK_ON_CPU // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(logits))
    losses = torch.empty_like(weights)
    for start in range(0, len(logits), rows):
        block = slice(start, start + rows)
        # a GPU converts the logits to `dtype` as it reads them
        log_p = F.log_softmax(logits[block], dim=-1, dtype=wide_dtype(logits))
        target = labels[block].unsqueeze(-1)
        of_target = log_p.gather(-1, target)
        losses[block] = -of_target.squeeze(-1)
        if gradient is not None:
            weight = weights[block].detach().unsqueeze(-1).to(log_p.dtype)
            to_logits = torch.mul(log_p.exp_(), weight, out=gradient[block])
            to_logits.scatter_(-1, target, (of_target.exp() * weight - weight).to(to_logits.dtype))
    return losses


class _WeightedCrossEntropy(torch.autograd.Function):
    """Compute sum w_ki CE_ki, and the CE_ki.

    The gradients of each chunk are computed as soon as its logits exist, and then the logits are freed. This saves the
    matrix product of recomputing them in the backward pass, and there is never a [tokens, vocabulary] tensor.
    """

    @staticmethod
    def forward(ctx, decode, cross_entropy, num_states, chunk_size, positions, labels, weights, compared, *tensors):
        states, parameters = tensors[:num_states], tensors[num_states:]
        needed = ctx.needs_input_grad[-len(tensors) :]
        trained = [p for p, need in zip(parameters, needed[num_states:]) if need]
        sums: list[torch.Tensor | None] = [None] * len(trained)  # sums over chunks of the gradients of `trained`
        losses = torch.zeros_like(weights)
        state_gradients, buffer = [], None
        for k, state in enumerate(states):
            gradient = torch.zeros_like(state, memory_format=torch.contiguous_format) if needed[k] else None
            tokens = torch.arange(len(labels), device=labels.device) if compared is None else compared[k]
            for chunk in tokens.split(chunk_size):
                with torch.set_grad_enabled(gradient is not None or bool(trained)):
                    hidden = state.flatten(0, 1)[positions[chunk]].detach().requires_grad_(gradient is not None)
                    logits = decode(hidden.view_as(hidden), k)  # a view: FLOP counters' hooks take no leaf
                wanted = ([hidden] if gradient is not None else []) + trained
                to_logits = None
                if wanted:
                    if buffer is None or len(buffer) < len(logits):
                        buffer = torch.empty_like(logits)
                    to_logits = buffer[: len(logits)]
                losses[k, chunk] = cross_entropy(logits.detach(), labels[chunk], weights[k, chunk], to_logits)
                if not wanted:
                    del logits  # before the next chunk makes its logits
                    continue
                found = list(torch.autograd.grad(logits, wanted, to_logits, allow_unused=True))
                del logits
                # an int8 head gives no gradient
                if gradient is not None and (to_hidden := found.pop(0)) is not None:
                    gradient.flatten(0, 1).index_copy_(0, positions[chunk], to_hidden.to(gradient.dtype))
                for i, part in enumerate(found):
                    if part is not None:
                        so_far = sums[i]
                        sums[i] = part if so_far is None else at_least_fp32(so_far).add_(part)
            state_gradients.append(gradient)
        summed = (torch.zeros_like(p) if s is None else s.to(p.dtype) for p, s in zip(trained, sums))
        parameter_gradients = [next(summed) if need else None for need in needed[num_states:]]
        ctx.save_for_backward(losses, *state_gradients, *parameter_gradients)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx, grad_total, _):
        if torch.is_grad_enabled():  # create_graph, which would take these gradients for constants
            raise NotImplementedError(
                "the loss over loops has no second derivatives: compute it from output_loop_logits=True with "
                "torch.nn.functional.cross_entropy, under attn_implementation='eager'"
            )
        losses, *gradients = ctx.saved_tensors
        scaled = [None if g is None else g * grad_total.to(g.dtype) for g in gradients]
        return None, None, None, None, None, None, losses * grad_total, None, *scaled


def is_traced() -> bool:
    """Whether this code is being compiled, or transformed by torch.func."""
    return torch.compiler.is_compiling() or may_be_transformed()


def detached(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in tensors]


def losses_by_kernel(kernel: Callable, states, positions, labels, weights, compared) -> torch.Tensor:
    """Return the CE_ki [loops, tokens] that the kernel of another library computes, 0 where no token is compared."""
    losses = []
    for k, state in enumerate(states):
        tokens = torch.arange(len(labels), device=labels.device) if compared is None else compared[k]
        of_loop = kernel(state.flatten(0, 1)[positions[tokens]], k, labels[tokens]).to(weights.dtype)
        losses.append(torch.zeros_like(weights[k]).index_copy(0, tokens, of_loop))
    return torch.stack(losses)


def losses_by_autograd(decode: Callable, states, positions, labels) -> torch.Tensor:
    """Return the CE_ki [loops, tokens], whose gradients autograd computes, loop by loop."""

    def losses_of_loop(state, k):
        logits = at_least_fp32(decode(state.flatten(0, 1)[positions.to(state.device)], k))
        logits = logits.to(labels.device)  # the head may lie on another device
        return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)

    if not is_traced():  # a compiler decides itself what to keep; torch.func has no checkpoints
        losses_of_loop = partial(checkpoint, losses_of_loop, use_reentrant=False)
    return torch.stack([losses_of_loop(state, k) for k, state in enumerate(states)])


def weighted_cross_entropy(
    head: Head,
    states: list[torch.Tensor],  # per loop [batch, length, d]
    positions: torch.Tensor,  # [tokens] labelled positions in batch * length
    labels: torch.Tensor,  # [tokens]
    weights: torch.Tensor,  # [loops, tokens]
    compared: list[torch.Tensor] | None,  # per loop the tokens that ran it; None if all did
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sum w_ki CE_ki with gradients, and the CE_ki [loops, tokens] without."""
    decode, parameters, kernel, cross_entropy = head
    if kernel is not None:
        losses = losses_by_kernel(kernel, states, positions, labels, weights, compared)
        return (losses * weights).sum(), losses.detach()
    if parameters is None or is_traced():
        losses = losses_by_autograd(decode, states, positions, labels)
        return (losses * weights).sum(), losses.detach()
    if not torch.is_grad_enabled():  # torch.autograd.Function does not see no_grad
        states, parameters = detached(states), detached(parameters)
    # at most half of the tokens, to stay small compared with the logits that a model returns; but not fewer than
    # MIN_CHUNK, since adding up the head's gradients would then cost more than the matrix products
    most = LOGITS_PER_CHUNK.get(labels.device.type, LOGITS_PER_CHUNK["cpu"]) // vocab_size
    chunk_size = max(1, min(most, max(MIN_CHUNK, -(-len(labels) // 2))))
    return _WeightedCrossEntropy.apply(
        decode,
        cross_entropy or cross_entropy_of,
        len(states),
        chunk_size,
        positions,
        labels,
        weights,
        compared,
        *states,
        *parameters,
    )
