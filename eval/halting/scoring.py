"""Scores text at all depths in one pass, at a fixed depth, or with exits of tokens or whole sequences."""

from dataclasses import replace
from typing import NamedTuple

import torch

from looped_eval.common.progress import progress
from looped_recipes.common.token_losses import token_losses
from modeling_looped.exit_criteria import CRITERIA, ExitRule

from .calibration import Measured


class Scored(NamedTuple):
    losses: torch.Tensor  # [sequences, tokens]
    loops: torch.Tensor  # [sequences] or [sequences, tokens]


def inputs_and_targets(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows [sequences, length + 1]: every token but the first is a target."""
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def measure(model, rows: torch.Tensor, num_loops: int, names: list[str], batch_size: int) -> Measured:
    """Return losses and scores of every token after every loop, from one pass; logits exist for one loop at a time."""
    parts = []
    for batch in progress(rows.split(batch_size), "scoring after every loop"):
        ids, targets = inputs_and_targets(batch)
        states = model.model(
            ids,
            num_loops=num_loops,
            use_cache=False,
            output_loop_hidden_states=True,
            output_loop_readout_states=True,
        )
        memories, of_batch = {name: {} for name in names}, []
        for loop, (state, readout) in enumerate(zip(states.loop_hidden_states, states.loop_readout_states)):
            logits = model.logits_after_loop(readout, loop)
            known = {"loss": token_losses(logits, targets)}
            for name in names:
                scored = CRITERIA[name].read(model, state, lambda logits=logits: logits, memories[name])
                known[name], memories[name] = scored
            of_batch.append({name: values.double().cpu() for name, values in known.items()})
        parts.append(of_batch)
    stacked = {
        name: torch.cat([torch.stack([known[name] for known in part]) for part in parts], 1)
        for name in ("loss", *names)
    }
    return Measured(stacked.pop("loss"), stacked)


@torch.no_grad()
def at_depth(model, rows: torch.Tensor, num_loops: int, batch_size: int) -> Scored:
    """Score every sequence at the same depth, without exits."""
    losses = []
    for batch in rows.split(batch_size):
        ids, targets = inputs_and_targets(batch)
        losses.append(token_losses(model(ids, num_loops=num_loops, use_cache=False).logits, targets))
    losses = torch.cat(losses)
    return Scored(losses, torch.full((len(losses),), num_loops, device=losses.device))


@torch.no_grad()
def with_token_exits(model, rows: torch.Tensor, rule: ExitRule, num_loops: int, batch_size: int) -> Scored:
    """Let every token exit separately; as in `generate`, deeper loops see the keys and values it had at its exit."""
    losses, loops = [], []
    for batch in rows.split(batch_size):
        ids, targets = inputs_and_targets(batch)
        outputs = model(ids, num_loops=num_loops, exit_rule=rule)
        losses.append(token_losses(outputs.logits, targets))
        loops.append(outputs.token_loops)
    return Scored(torch.cat(losses), torch.cat(loops))


def with_sequence_exits(model, rows: torch.Tensor, rule: ExitRule, num_loops: int, batch_size: int) -> Scored:
    """Stop the loops of a sequence, and remove it from its batch, when its tokens' mean score passes the threshold."""
    losses, loops = with_token_exits(model, rows, replace(rule, per_sequence=True), num_loops, batch_size)
    return Scored(losses, loops[:, 0])
