"""Early exit of whole sequences: each stops looping, and leaves its batch, when its mean score passes."""

import torch

from .context import PassContext
from .exit_criteria import ExitRule


class SequenceExits:
    """Which rows of the pass still run. `model` is the causal LM; depths: the most that each row may run."""

    def __init__(self, model, rule: ExitRule, depths: list[int], length: int, device):
        self.model, self.rule, self.length = model, rule, length
        self.running = torch.arange(len(depths), device=device)  # numbers of rows
        self.limits = torch.tensor(depths, device=device)
        self.loops = torch.zeros_like(self.limits)
        self.final: torch.Tensor | None = None  # H at each row's exit
        self.logits: torch.Tensor | None = None  # and its logits, where the criterion reads them
        self.memory = {}

    @property
    def token_loops(self) -> torch.Tensor:
        return self.loops[:, None].expand(-1, self.length)

    @property
    def is_done(self) -> bool:
        return len(self.running) == 0

    def after_loop(self, loop: int, state: torch.Tensor, context: PassContext):
        """`state` of the rows that go on, and which of the rows that ran these are; None if all are."""
        read = {}

        def logits() -> torch.Tensor:
            if "logits" not in read:
                read["logits"] = self.model.decode(self.model.model.run_coda(state, context), loop - 1)
            return read["logits"]

        exits = self.limits[self.running] <= loop
        if self.rule.reads(loop) and not exits.all():
            score, self.memory = self.rule.criterion.after_loop(self.model, state, logits, self.memory)
            if self.rule.checks(loop):
                exits = exits | self.rule.exits(score.double().mean(-1))
        if not exits.any():
            return state, None
        rows = self.running[exits]
        self.loops[rows] = loop
        self.final = with_rows(self.final, len(self.loops), rows, state[exits])
        if self.rule.criterion.needs == "logits":
            self.logits = with_rows(self.logits, len(self.loops), rows, logits()[exits])
        going = (~exits).nonzero()[:, 0]
        self.running = self.running[going]
        self.memory = {name: values[going] for name, values in self.memory.items()}
        return state[going], going


def with_rows(whole: torch.Tensor | None, num_rows: int, rows: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    whole = parts.new_empty(num_rows, *parts.shape[1:]) if whole is None else whole
    return whole.index_copy(0, rows, parts)
