"""Losses over loops, without ever holding the logits of more than a chunk of tokens.

Every objective here is a sum over loops k and labelled tokens i of w_ki CE_ki, divided by the number of labelled
tokens (or by the Trainer's `num_items_in_batch`):

terminal        w = 1 at a row's last loop
per_loop        w = 1 / K
last_third      w = 1 / (K - floor(2K / 3)) from loop index floor(2K / 3) on
exit_weighted   w = p_ki, the exit distribution; minus beta times its entropy (Ouro, stage I)
gate            no CE gradient: the gate learns to continue where the last loop still helped (Ouro, stage II)

or, for exit_weighted_logits, the CE of one mixture of readouts, sum_k p_ki of what the head reads after loop k: the
head is linear, so this is the CE of the exit-weighted logits (Ouro's released code). Losses that read states,
losses_of_states.py, are added. Tokens without a label are in no sum and in no denominator.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .cpu import may_be_transformed
from .depth import deepest, depth_per_row, depth_tensor, placed
from .losses_of_states import LoopStates, loss_of_states


IGNORE_INDEX = -100
LOGITS_PER_CHUNK = 2**25
MIN_CHUNK = 256  # tokens
LOGITS_PER_BLOCK_ON_CPU = 2**20  # this number in fp32 stays in the processor's cache from one operation to the next
GATE_SHARPNESS, GATE_THRESHOLD = 50.0, 0.005  # Ouro, stage II


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def shift(labels: torch.Tensor) -> torch.Tensor:
    """Label of position i is the token at i + 1; the last position has none."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def denominator(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | int:
    """Labelled tokens: those at hand, or of all that the Trainer accumulates. At least 1: no labels, no loss."""
    items = (labels != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
    return items.to(labels.device).clamp(min=1) if torch.is_tensor(items) else max(items, 1)


def exit_log_probabilities(gates: torch.Tensor, last_loop: torch.Tensor | int) -> torch.Tensor:
    """log p_t = log lambda_t + sum_{j<t} log(1 - lambda_j), lambda = sigmoid(gate); the last loop takes the remainder.

    gates: [loops, ...]; last_loop: index of each element's last loop. -inf beyond it. In logs, because in half
    precision sigmoid rounds to 1, and a sum of probabilities may end below 1.
    """
    gates = at_least_fp32(gates)
    loops = torch.arange(len(gates), device=gates.device).view(-1, *[1] * (gates.ndim - 1))
    stay = F.logsigmoid(-gates)
    survived = torch.cat([torch.zeros_like(stay[:1]), stay[:-1].cumsum(0)])
    log_p = torch.where(loops == last_loop, survived, survived + F.logsigmoid(gates))
    return log_p.masked_fill(loops > last_loop, float("-inf"))


def cross_entropy_of(logits, labels, weights, gradient: torch.Tensor | None) -> torch.Tensor:
    """CE of every row of logits; and into `gradient`, if given, that of the weighted sum: w (softmax - one_hot)."""
    rows = max(1, LOGITS_PER_BLOCK_ON_CPU // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(logits))
    losses = torch.empty_like(weights)
    for start in range(0, len(logits), rows):
        block = slice(start, start + rows)
        log_p = F.log_softmax(at_least_fp32(logits[block]), dim=-1)
        target = labels[block].unsqueeze(-1)
        losses[block] = -log_p.gather(-1, target).squeeze(-1)
        if gradient is not None:
            weight = weights[block].detach().unsqueeze(-1).to(log_p.dtype)
            gradient[block] = log_p.exp_().mul_(weight).scatter_add_(-1, target, -weight)
    return losses


class _WeightedCrossEntropy(torch.autograd.Function):
    """sum w_ki CE_ki, and the CE_ki.

    Each chunk's gradients are taken as soon as its logits exist, then these are freed: one matrix product less than
    recomputing them in the backward pass, and no [tokens, vocabulary] tensor in between.
    """

    @staticmethod
    def forward(ctx, decode, num_states, chunk_size, positions, labels, weights, compared, *tensors):
        states, parameters = tensors[:num_states], tensors[num_states:]
        needed = ctx.needs_input_grad[-len(tensors) :]
        trained = [p for p, need in zip(parameters, needed[num_states:]) if need]
        sums: list[torch.Tensor | None] = [None] * len(trained)  # of the gradients of `trained`, over chunks
        losses = torch.zeros_like(weights)
        state_gradients, buffer = [], None
        for k, state in enumerate(states):
            gradient = torch.zeros_like(state, memory_format=torch.contiguous_format) if needed[k] else None
            tokens = torch.arange(len(labels), device=labels.device) if compared is None else compared[k]
            for chunk in tokens.split(chunk_size):
                with torch.set_grad_enabled(gradient is not None or bool(trained)):
                    hidden = state.flatten(0, 1)[positions[chunk]].detach().requires_grad_(gradient is not None)
                    logits = decode(hidden.view_as(hidden), k)  # hooks of those who count operations take no leaf
                wanted = ([hidden] if gradient is not None else []) + trained
                to_logits = None
                if wanted:
                    if buffer is None or len(buffer) < len(logits):
                        buffer = torch.empty_like(logits)
                    to_logits = buffer[: len(logits)]
                losses[k, chunk] = cross_entropy_of(logits.detach(), labels[chunk], weights[k, chunk], to_logits)
                if not wanted:
                    del logits  # before the next chunk's
                    continue
                found = list(torch.autograd.grad(logits, wanted, to_logits, allow_unused=True))
                del logits
                # a head of int8 gives none
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
        if torch.is_grad_enabled():  # create_graph, to which these gradients would be constants
            raise NotImplementedError(
                "the loss over loops has no second derivatives: compute it from output_loop_logits=True with "
                "torch.nn.functional.cross_entropy, under attn_implementation='eager'"
            )
        losses, *gradients = ctx.saved_tensors
        scaled = [None if g is None else g * grad_total.to(g.dtype) for g in gradients]
        return None, None, None, None, None, losses * grad_total, None, *scaled


def is_traced() -> bool:
    """Whether this is compiled, or transformed by torch.func."""
    return torch.compiler.is_compiling() or may_be_transformed()


def detached(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in tensors]


def weighted_cross_entropy(
    decode: Callable,  # (hidden [tokens, d], k) -> logits [tokens, vocabulary]
    parameters: list[torch.Tensor] | None,  # what `decode` reads; None leaves them to autograd
    states: list[torch.Tensor],  # per loop [batch, length, d]
    positions: torch.Tensor,  # [tokens] labelled positions in batch * length
    labels: torch.Tensor,  # [tokens]
    weights: torch.Tensor,  # [loops, tokens]
    compared: list[torch.Tensor] | None,  # per loop the tokens that ran it; None if all did
    vocab_size: int,
    kernel: Callable | None,  # (hidden [tokens, d], k, labels [tokens]) -> CE [tokens], see loss_kernels.py
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum w_ki CE_ki with gradients, and the CE_ki [loops, tokens] without."""
    if kernel is not None:
        losses = []
        for k, state in enumerate(states):
            tokens = torch.arange(len(labels), device=labels.device) if compared is None else compared[k]
            of_loop = kernel(state.flatten(0, 1)[positions[tokens]], k, labels[tokens]).to(weights.dtype)
            losses.append(torch.zeros_like(weights[k]).index_copy(0, tokens, of_loop))
        losses = torch.stack(losses)
        return (losses * weights).sum(), losses.detach()
    if parameters is None or is_traced():

        def cross_entropy(state, k):
            logits = at_least_fp32(decode(state.flatten(0, 1)[positions], k))
            return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)

        if not is_traced():  # a compiler plans by itself what to keep, and torch.func knows no checkpoints
            cross_entropy = partial(checkpoint, cross_entropy, use_reentrant=False)
        losses = torch.stack([cross_entropy(state, k) for k, state in enumerate(states)])
        return (losses * weights).sum(), losses.detach()
    if not torch.is_grad_enabled():  # torch.autograd.Function does not see no_grad
        states, parameters = detached(states), detached(parameters)
    # with half of the tokens the chunks stay small beside the logits that a model returns; with fewer than
    # MIN_CHUNK, adding up the head's gradients would cost more than the products
    chunk_size = max(1, min(LOGITS_PER_CHUNK // vocab_size, max(MIN_CHUNK, -(-len(labels) // 2))))
    return _WeightedCrossEntropy.apply(
        decode, len(states), chunk_size, positions, labels, weights, compared, *states, *parameters
    )


def loop_loss(
    config,
    decode: Callable,
    parameters: list[torch.Tensor] | None,  # what decode reads, see `weighted_cross_entropy`
    # what decode reads, per loop; or of the last loop alone for the terminal loss, or the mixture of all
    readouts: list[torch.Tensor],
    states: LoopStates | None,  # for losses that read them
    gates: torch.Tensor | None,  # gate logits [loops, batch, length]
    depths: int | list[int],  # of all rows, or per row
    labels: torch.Tensor,  # [batch, length], already shifted
    num_items_in_batch: torch.Tensor | int | None,
    objective: str | None,  # another than the configured
    every_loop: bool,  # also compare the readouts that the loss does not read
    loss_positions: np.ndarray | None,  # where labels has any, see `LoopedForCausalLM`
    kernel: Callable | None,  # see `weighted_cross_entropy`
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The configured loss; and without gradients, the cross-entropy of each of the given readouts: its mean, [loops],
    nan where nothing was compared, and that of every token, [loops, batch, length], 0 where there is no label."""
    objective = config.loop_loss if objective is None else objective
    flat = labels.reshape(-1).to(readouts[0].device)
    wide = torch.promote_types(readouts[0].dtype, torch.float32)
    if is_traced():  # no shapes that depend on data: unlabelled positions stay, with weight 0
        positions, labelled = torch.arange(len(flat), device=flat.device), (flat != IGNORE_INDEX).to(wide)
    else:
        if loss_positions is None:  # a GPU is waited for
            positions = (flat != IGNORE_INDEX).nonzero()[:, 0]
        else:
            positions = placed(loss_positions, flat.device)
        labelled = torch.ones(len(positions), device=flat.device, dtype=wide)
    targets = flat[positions]

    of_rows = depth_tensor(depths, labels.shape[0], flat.device)
    depth = of_rows[:, None].expand(labels.shape).flatten()[positions]  # of each token
    loops = torch.arange(deepest(depths), device=flat.device)[:, None]
    active = (loops < depth) * labelled
    mixed = not isinstance(depths, int)

    extra = torch.zeros((), device=flat.device, dtype=wide)
    if gates is not None:
        gates = gates.flatten(1)[:, positions]
    if len(readouts) == 1 and objective in ("terminal", "exit_weighted_logits"):
        weights = active = labelled[None]
        mixed = False
    elif objective == "terminal":  # the other loops are there to be looked at
        weights = (loops == depth - 1) * labelled
    elif objective == "per_loop":
        weights = active / depth
    elif objective == "last_third":
        first = start_of_last_third(depth)
        read = active * (loops >= first)
        weights = read / (depth - first)
        active, mixed = (active, mixed) if every_loop else (read, True)
    elif objective == "exit_weighted":
        assert gates is not None  # of a model with this loss
        log_p = exit_log_probabilities(gates, depth - 1)
        probability = log_p.exp() * labelled
        weights = probability.to(wide)
        entropy = -(probability * log_p.masked_fill(loops >= depth, 0.0)).sum()
        extra = extra - config.exit_entropy_weight * entropy
    else:  # gate
        weights = torch.zeros_like(active)

    compared = None
    if mixed and not is_traced():
        on_host = positions.cpu().numpy() if loss_positions is None else loss_positions
        last_third = objective == "last_third" and not every_loop
        compared = [placed(part, flat.device) for part in compared_tokens(depths, labels.shape, on_host, last_third)]
    cross_entropy_trains = torch.is_grad_enabled() and objective != "gate"
    with torch.set_grad_enabled(cross_entropy_trains):
        total, losses = weighted_cross_entropy(
            decode, parameters, readouts, positions, targets, weights, compared, config.vocab_size, kernel
        )
    if objective == "gate":
        assert gates is not None
        extra = extra + gate_loss(gates, losses, active, depth)
    if states is not None and config.state_losses:
        extra = extra + loss_of_states(config, states, positions, depth, labelled)
    with torch.no_grad():
        losses = losses * (active > 0)
        means = losses.sum(1) / (active > 0).sum(1)
        of_tokens = losses.new_zeros(len(losses), len(flat)).index_copy_(1, positions, losses)
    return (total + extra) / denominator(flat, num_items_in_batch), means, of_tokens.view(-1, *labels.shape)


def start_of_last_third(depth):
    """Its first loop, counted from 0; of a number, an array or a tensor of depths."""
    return 2 * depth // 3


def compared_tokens(
    depths: int | list[int], shape: torch.Size, positions: np.ndarray, last_third: bool
) -> list[np.ndarray]:
    """Per loop, which of the labelled tokens are compared there: those whose row runs it, or has it in its last
    third."""
    depth = np.array(depth_per_row(depths, shape[0]))[positions // shape[1]]
    first = start_of_last_third(depth) if last_third else 0
    return [np.flatnonzero((first <= loop) & (loop < depth)) for loop in range(deepest(depths))]


def gate_loss(gates: torch.Tensor, losses: torch.Tensor, active: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    """Ouro's stage II: binary cross-entropy of 1 - lambda_t, for t >= 2, against a soft label of how much loop t
    helped.

    The mean over a token's loops t = 2..K, summed over tokens.
    """
    improvement = (losses[:-1] - losses[1:]).clamp(min=0)
    proceed = torch.sigmoid(GATE_SHARPNESS * (improvement - GATE_THRESHOLD))
    gates = at_least_fp32(gates)[1:]
    entropy = -(proceed * F.logsigmoid(-gates) + (1 - proceed) * F.logsigmoid(gates))
    return (entropy * active[1:] / (depth - 1).clamp(min=1)).sum()
