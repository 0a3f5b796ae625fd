"""Scoring text: all depths in one pass, at a fixed depth, and with sequences that leave the batch when they halt."""

from dataclasses import replace
from typing import NamedTuple

import torch

from modeling_looped.context import PassContext
from modeling_looped.depth import plan_depths
from modeling_looped.exit_criteria import CRITERIA, ExitRule, Reading
from modeling_looped.losses import at_least_fp32
from recipes.common.token_losses import token_losses

from .calibration import Measured


class Scored(NamedTuple):
    losses: torch.Tensor  # [sequences, tokens]
    loops: torch.Tensor  # [sequences] or [sequences, tokens]


def inputs_and_targets(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token but the first is predicted; rows: [sequences, length + 1]."""
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def measure(model, rows: torch.Tensor, num_loops: int, names: list[str], batch_size: int) -> Measured:
    """Losses and scores of every token after every loop, from one pass; logits of one loop at a time."""
    parts = []
    for batch in rows.split(batch_size):
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
            logits = model.decode(readout, loop)
            gate = model.gate(state) if "gate" in names else None
            known = {"loss": token_losses(logits, targets)}
            for name in names:
                reading = Reading(logits, state, gate)
                known[name], memories[name] = CRITERIA[name].score(reading, memories[name])
            of_batch.append({name: values.double().cpu() for name, values in known.items()})
        parts.append(of_batch)
    stacked = {
        name: torch.cat([torch.stack([known[name] for known in part]) for part in parts], 1)
        for name in ("loss", *names)
    }
    return Measured(stacked.pop("loss"), stacked)


@torch.no_grad()
def at_depth(model, rows: torch.Tensor, num_loops: int, batch_size: int) -> Scored:
    """Every sequence at the same depth, and nothing else."""
    losses = []
    for batch in rows.split(batch_size):
        ids, targets = inputs_and_targets(batch)
        losses.append(token_losses(model(ids, num_loops=num_loops, use_cache=False).logits, targets))
    losses = torch.cat(losses)
    return Scored(losses, torch.full((len(losses),), num_loops, device=losses.device))


@torch.no_grad()
def with_token_exits(model, rows: torch.Tensor, rule: ExitRule, num_loops: int, batch_size: int) -> Scored:
    """Every token exits by itself and leaves to deeper loops what it had, as generated tokens do in `generate`."""
    losses, loops = [], []
    for batch in rows.split(batch_size):
        ids, targets = inputs_and_targets(batch)
        outputs = model(ids, num_loops=num_loops, exit_rule=rule)
        losses.append(token_losses(outputs.logits, targets))
        loops.append(outputs.token_loops)
    return Scored(torch.cat(losses), torch.cat(loops))


def with_halting(model, rows: torch.Tensor, rule: ExitRule, num_loops: int, batch_size: int) -> Scored:
    """Each sequence stops looping, and leaves its batch, when the mean score of its tokens passes the threshold."""
    parts = [DynamicBatch(model, batch, rule, num_loops).run() for batch in rows.split(batch_size)]
    return Scored(*(torch.cat(values) for values in zip(*parts)))


def reads(rule: ExitRule, loop: int) -> bool:
    """Whether the score of a sequence is taken after `loop` loops (counted from 1)."""
    return loop >= rule.min_loops or rule.criterion.compares or rule.criterion.every_loop


class Running(NamedTuple):
    """The rows still in a batch, [rows, ...] each."""

    numbers: torch.Tensor  # of the rows in the batch as it was
    embedded: torch.Tensor
    state: torch.Tensor
    value_embeddings: dict[int, torch.Tensor]
    memory: dict[str, torch.Tensor]  # of the criterion

    def take(self, keep: torch.Tensor) -> "Running":
        if keep.all():
            return self
        return Running(*({k: t[keep] for k, t in f.items()} if isinstance(f, dict) else f[keep] for f in self))


class DynamicBatch:
    """Sequences of one length, of which only those that have not halted go on to the next loop."""

    @torch.no_grad()
    def __init__(self, model, rows: torch.Tensor, rule: ExitRule, num_loops: int):
        self.model, self.trunk, self.rule, self.num_loops = model, model.model, rule, num_loops
        ids, self.targets = inputs_and_targets(rows)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        inputs = self.trunk.embed_tokens(ids)
        x = self.trunk.embed(inputs, positions)
        values = self.trunk.value_embeddings(ids)
        self.context = PassContext(
            num_rows=len(ids),
            # there is no padding
            masks=self.trunk.attention_masks(None, inputs[:1], None, positions, plan_depths(num_loops, 1)),
            position_ids=positions,
            position_embeddings=self.trunk.rotary(x, positions),
            value_embeddings=values,
            past_key_values=None,
        )
        embedded = self.trunk.run_prelude(x, self.context)
        state = self.trunk.initial_state(embedded, None)
        self.rows = Running(torch.arange(len(ids), device=ids.device), embedded, state, values, {})
        self.scored = Scored(at_least_fp32(state.new_empty(ids.shape)), torch.empty_like(ids[:, 0]))

    def context_of(self, rows: Running) -> PassContext:
        return replace(self.context, num_rows=len(rows.numbers), value_embeddings=rows.value_embeddings)

    @torch.no_grad()
    def run(self) -> Scored:
        scale = self.model.config.residual_factor(self.model.config.num_loops)
        for loop in range(1, self.num_loops + 1):
            rows = self.rows
            state = self.trunk.core_pass(rows.state, rows.embedded, loop - 1, loop == 1, scale, self.context_of(rows))
            self.rows = rows._replace(state=state)
            halts, logits = self.check(loop)
            if halts.any():
                self.finish(loop, halts, logits)
            if halts.all():
                break
            self.rows = self.rows._replace(state=self.trunk.between(self.rows.state))
        return self.scored

    def check(self, loop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Which running rows halt after this loop; and the logits of all, if the criterion looked at them."""
        is_last = torch.full_like(self.rows.numbers, loop == self.num_loops, dtype=torch.bool)
        if loop == self.num_loops or not reads(self.rule, loop):
            return is_last, None
        needs, state, logits = self.rule.criterion.needs, self.rows.state, None
        if needs == "logits":
            logits = self.logits(self.rows, loop)
            reading = Reading(logits=logits)
        else:
            reading = Reading(**{needs: state if needs == "state" else self.model.gate(state)})
        score, memory = self.rule.criterion.score(reading, self.rows.memory)
        self.rows = self.rows._replace(memory=memory)
        halts = self.rule.exits(score.double().mean(-1))
        return halts if loop >= self.rule.min_loops else is_last, logits

    def finish(self, loop: int, halts: torch.Tensor, logits: torch.Tensor | None):
        """Keep what the halting rows say, and go on without them."""
        leaving = self.rows.take(halts)
        logits = self.logits(leaving, loop) if logits is None else logits[halts]
        self.scored.losses[leaving.numbers] = token_losses(logits, self.targets[leaving.numbers])
        self.scored.loops[leaving.numbers] = loop
        self.rows = self.rows.take(~halts)

    def logits(self, rows: Running, loop: int) -> torch.Tensor:
        return self.model.decode(self.trunk.run_coda(rows.state, self.context_of(rows)), loop - 1)
