"""Losses over loops.

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

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from .cross_entropy import IGNORE_INDEX, Head, is_traced, weighted_cross_entropy
from .depth import deepest, depth_per_row, depth_tensor
from .losses_of_states import LoopStates, loss_of_states
from .tensors import at_least_fp32, on_device, wide_dtype


GATE_SHARPNESS, GATE_THRESHOLD = 50.0, 0.005  # Ouro, stage II


class Labels(NamedTuple):
    tokens: torch.Tensor  # [batch, length], already shifted
    num_items_in_batch: torch.Tensor | int | None = None  # of all accumulated batches; None: of this batch
    positions: np.ndarray | None = None  # indices of labelled tokens, see `LoopedForCausalLM`
    as_given: Mapping[str, Any] = {}  # what the caller passed, for a `loss_function` that was set


class Targets(NamedTuple):
    """The labelled tokens of the flattened batch; or all tokens, if shapes must not depend on data."""

    positions: torch.Tensor  # [tokens] in batch * length
    on_host: np.ndarray | None  # the same on the host, if known there
    labels: torch.Tensor  # [tokens]
    labelled: torch.Tensor  # [tokens] 1, or 0 where there is no label
    depth: torch.Tensor  # [tokens] depth of each token's row


def denominator(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | int:
    """Return the number of labelled tokens here, or in all batches that the Trainer accumulates; 1 if there
    are none. The share of one of several processes may be below 1."""
    items = (labels != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
    if not torch.is_tensor(items):
        return items or 1
    items = items.to(labels.device)
    return items.masked_fill(items == 0, 1)


def exit_log_probabilities(gates: torch.Tensor, last_loop: torch.Tensor | int) -> torch.Tensor:
    """log p_t = log lambda_t + sum_{j<t} log(1 - lambda_j), lambda = sigmoid(gate); the last loop takes the remainder.

    gates: [loops, ...]; last_loop: index of each element's last loop, after which log p is -inf. Logarithms, because
    in half precision sigmoid rounds to 1, and the probabilities may sum to less than 1.
    """
    gates = at_least_fp32(gates)
    loops = torch.arange(len(gates), device=gates.device).view(-1, *[1] * (gates.ndim - 1))
    stay = F.logsigmoid(-gates)
    survived = torch.cat([torch.zeros_like(stay[:1]), stay[:-1].cumsum(0)])
    log_p = torch.where(loops == last_loop, survived, survived + F.logsigmoid(gates))
    return log_p.masked_fill(loops > last_loop, float("-inf"))


def loop_loss(
    config,
    head: Head,
    readouts: list[torch.Tensor],  # the head's input after each loop
    reads_once: bool,  # `readouts` is a single one, of the last loop or a mixture of all
    states: LoopStates | None,  # for losses that read them
    gates: torch.Tensor | None,  # gate logits [loops, batch, length]
    depths: int | list[int],  # of all rows, or per row
    labels: Labels,
    with_unread: bool,  # also compute the CE of readouts that the loss does not read
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss and, without gradients, the cross-entropies of the readouts: their means, [loops], nan where no
    token was compared, and the values per token, [loops, batch, length], 0 where there is no label."""
    objective, shape, device = config.loop_loss, labels.tokens.shape, readouts[0].device
    targets = targets_of(labels, depths, device, wide_dtype(readouts[0]))
    of_targets: Any = None if gates is None else gates.flatten(1)[:, targets.positions]
    log_p: Any = exit_log_probabilities(of_targets, targets.depth - 1) if objective == "exit_weighted" else None
    only_last_third = objective == "last_third" and not with_unread

    compared = None
    if reads_once:
        active = weights = targets.labelled[None]
    else:
        active = active_loops(targets, deepest(depths), only_last_third)
        if (only_last_third or not isinstance(depths, int)) and not is_traced():
            compared = [on_device(part, device) for part in compared_tokens(depths, shape, targets, only_last_third)]
        weights = WEIGHTS[objective](targets, active, log_p)

    with torch.set_grad_enabled(torch.is_grad_enabled() and objective != "gate"):
        loss, losses = weighted_cross_entropy(
            head, readouts, targets.positions, targets.labels, weights, compared, config.vocab_size
        )
    if objective == "exit_weighted":
        loss = loss - config.exit_entropy_weight * exit_entropy(log_p, targets.labelled)
    elif objective == "gate":
        loss = loss + gate_loss(of_targets, losses, active, targets.depth)
    if states is not None:
        loss = loss + loss_of_states(config, states, targets.positions, targets.depth, targets.labelled)
    with torch.no_grad():
        losses = losses * (active > 0)
        means = losses.sum(1) / (active > 0).sum(1)
        everywhere = losses.new_zeros(len(losses), labels.tokens.numel()).index_copy_(1, targets.positions, losses)
    items = denominator(labels.tokens.to(device), labels.num_items_in_batch)
    return loss / items, means, everywhere.view(-1, *shape)


def targets_of(labels: Labels, depths: int | list[int], device: torch.device, dtype: torch.dtype) -> Targets:
    flat, on_host = labels.tokens.reshape(-1).to(device), labels.positions
    if is_traced():  # no shapes that depend on data: unlabelled positions stay, with weight 0
        positions, labelled = torch.arange(len(flat), device=device), (flat != IGNORE_INDEX).to(dtype)
    else:
        if on_host is None:  # this makes the host wait for the GPU
            positions = (flat != IGNORE_INDEX).nonzero()[:, 0]
        else:
            if flat.device.type == "cpu":  # elsewhere the host would wait for the number
                check_positions(on_host, flat)
            positions = on_device(on_host, device)
        labelled = torch.ones(len(positions), device=device, dtype=dtype)
    depth = depth_tensor(depths, len(labels.tokens), device)[:, None].expand(labels.tokens.shape).flatten()[positions]
    return Targets(positions, on_host, flat[positions], labelled, depth)


def check_positions(positions: np.ndarray, labels: torch.Tensor):
    counted = int((labels != IGNORE_INDEX).sum())
    if len(positions) != counted:
        raise ValueError(
            f"loss_positions has {len(positions)} positions, but {counted} have a label: pass all of them, or None"
        )


def active_loops(targets: Targets, num_loops: int, only_last_third: bool) -> torch.Tensor:
    """Return [loops, tokens]: 1 where a token is compared after a loop, else 0."""
    loops = loop_numbers(num_loops, targets)
    first = start_of_last_third(targets.depth) if only_last_third else 0
    return ((first <= loops) & (loops < targets.depth)) * targets.labelled


def loop_numbers(count: int, targets: Targets) -> torch.Tensor:
    """Return the numbers of the loops, counted from 0: [loops, 1]."""
    return torch.arange(count, device=targets.depth.device)[:, None]


def weights_of_last(targets: Targets, active: torch.Tensor, log_p) -> torch.Tensor:
    """w = 1 at a row's last loop, else 0: other loops are compared only if their losses are requested."""
    return (loop_numbers(len(active), targets) == targets.depth - 1) * targets.labelled


def equal_weights(targets: Targets, active: torch.Tensor, log_p) -> torch.Tensor:
    return active / targets.depth


def weights_of_last_third(targets: Targets, active: torch.Tensor, log_p) -> torch.Tensor:
    first = start_of_last_third(targets.depth)
    return active * (loop_numbers(len(active), targets) >= first) / (targets.depth - first)


def exit_weights(targets: Targets, active: torch.Tensor, log_p) -> torch.Tensor:
    return log_p.exp().to(active.dtype)


def no_weights(targets: Targets, active: torch.Tensor, log_p) -> torch.Tensor:
    return torch.zeros_like(active)


# w_ki, [loops, tokens], by objective, for readouts of several loops. log_p: log p_ki, None unless "exit_weighted"
WEIGHTS = {
    "terminal": weights_of_last,
    "per_loop": equal_weights,
    "last_third": weights_of_last_third,
    "exit_weighted": exit_weights,
    "exit_weighted_logits": no_weights,  # the loss is that of their mixture, which is read once
    "gate": no_weights,
}


def exit_entropy(log_p: torch.Tensor, labelled: torch.Tensor) -> torch.Tensor:
    """Return the entropy of the exit distribution, summed over tokens; loops of probability 0 add nothing."""
    finite = log_p.masked_fill(log_p == float("-inf"), 0.0)
    return -(log_p.exp() * labelled * finite).sum()


def start_of_last_third(depth):
    """Return the first loop of the last third, counted from 0, for a number, an array or a tensor of depths."""
    return 2 * depth // 3


def compared_tokens(
    depths: int | list[int], shape: torch.Size, targets: Targets, last_third: bool
) -> list[np.ndarray]:
    """Return, per loop, the indices of the labelled tokens that are compared there: those whose row runs the loop, or
    has it in its last third."""
    positions = targets.positions.cpu().numpy() if targets.on_host is None else targets.on_host
    depth = np.array(depth_per_row(depths, shape[0]))[positions // shape[1]]
    first = start_of_last_third(depth) if last_third else 0
    return [np.flatnonzero((first <= loop) & (loop < depth)) for loop in range(deepest(depths))]


def gate_loss(gates: torch.Tensor, losses: torch.Tensor, active: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    """Return Ouro's stage II loss: binary cross-entropy of 1 - lambda_t, for t >= 2, against a soft label that says
    how much loop t helped.

    It is the sum over a token's loops t = 2..K, divided by K as in the paper, summed over tokens.
    """
    improvement = (losses[:-1] - losses[1:]).clamp(min=0)
    proceed = torch.sigmoid(GATE_SHARPNESS * (improvement - GATE_THRESHOLD))
    gates = at_least_fp32(gates)[1:]
    entropy = -(proceed * F.logsigmoid(-gates) + (1 - proceed) * F.logsigmoid(gates))
    return (entropy * active[1:] / depth).sum()
