"""Records or replaces states inside a forward pass, by hooks on the modules and around the loops.

A batch holds the keyword arguments of forward. Where it has labels, tokens of label -100 are read, but are no targets,
and what is averaged over tokens leaves them out.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from looped_recipes.common.token_losses import next_token_losses
from modeling_looped.cross_entropy import IGNORE_INDEX
from modeling_looped.evaluating import evaluating


@contextmanager
def own_randomness(seed: int = 0):
    """Draw random numbers from `seed`, and restore the state of the generators afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def hooks(*handles):
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


@contextmanager
def around_loops(model, run: Callable):
    """Run every loop by `run(core_pass, state, embedded, loop, depth, context)`, which returns H. Unlike hooks on
    modules, it sees what a replaced `core_pass` returns."""
    trunk = model.model
    core_pass, replaced = trunk.core_pass, vars(trunk).get("core_pass")
    trunk.core_pass = partial(run, core_pass)
    try:
        yield
    finally:
        del trunk.core_pass
        if replaced is not None:
            trunk.core_pass = replaced


@dataclass
class Trace:
    """States of one pass at one depth, [batch, length, d] each, or [tokens, d] of a batch with labels."""

    embedded: list[torch.Tensor] = field(default_factory=list)  # embedding, after each prelude layer, e
    entering: list[torch.Tensor] = field(default_factory=list)  # h_t, the input of each loop
    stages: list[list[torch.Tensor]] = field(default_factory=list)  # per loop: after injection, layers, gate
    states: list[torch.Tensor] = field(default_factory=list)  # H_k after every loop

    @property
    def trajectory(self) -> list[torch.Tensor]:
        """h_0, H_1, ..., H_K."""
        return self.entering[:1] + self.states


def trace(model, batch: dict, num_loops: int | None = None) -> Trace:
    """Record one pass of a causal LM. Works also if the first loops of a deeper pass are not a shallower pass."""
    base, seen = model.model, Trace()

    def kept(state):
        return of_counted(state.detach(), batch)

    def run(core_pass, state, embedded, *inputs):
        if not seen.entering:
            seen.embedded.append(kept(embedded))
        seen.entering.append(kept(state))
        seen.stages.append([])
        after = core_pass(state, embedded, *inputs)
        seen.states.append(kept(after))
        return after

    def enters(_, arguments):
        if not seen.stages[-1]:  # else a layer that is tied to the first
            seen.stages[-1].append(kept(arguments[0]))

    def leaves(_, arguments, output):  # a tuple also holds keys and values that loops share
        seen.stages[-1].append(kept(output[0] if isinstance(output, tuple) else output))

    handles = [base.core[0].register_forward_pre_hook(enters)]
    for block in {*base.core, *([] if base.change_gate is None else [base.change_gate])}:
        handles.append(block.register_forward_hook(leaves))
    if len(base.prelude):
        handles.append(base.prelude[0].register_forward_pre_hook(lambda _, a: seen.embedded.append(kept(a[0]))))
    for block in base.prelude:
        handles.append(block.register_forward_hook(lambda _, a, output: seen.embedded.append(kept(output))))
    with hooks(*handles), around_loops(model, run), evaluating(model), torch.no_grad():
        base(**inputs_of(batch), num_loops=num_loops, use_cache=False)
    return seen


@contextmanager
def last_state(model):
    """Yield a list that holds H after the last loop of the pass run inside."""
    kept = [None]

    def run(core_pass, *inputs):
        kept[0] = core_pass(*inputs)
        return kept[0]

    with around_loops(model, run):
        yield kept


@contextmanager
def rewritten_states(model, rewrite: Callable[[int, torch.Tensor], torch.Tensor]):
    """Replace H by `rewrite(loop, H)` before readouts and later loops see it; loops count from 1."""

    def run(core_pass, state, embedded, loop, *inputs):
        return rewrite(loop + 1, core_pass(state, embedded, loop, *inputs))

    with around_loops(model, run):
        yield


def inputs_of(batch: dict) -> dict:
    return {name: value for name, value in batch.items() if name != "labels"}


def labels_of(batch: dict) -> torch.Tensor:
    return batch.get("labels", batch["input_ids"])


def training_loss(model, batch: dict) -> torch.Tensor:
    """Return the loss of a training pass at the model's own depth, from zeros also where noise is usual, so that what
    is measured depends on nothing that is drawn."""
    start, ids = None, batch["input_ids"]
    if model.config.state_init == "normal":
        start = torch.zeros(*ids.shape, model.config.state_size, device=ids.device)
    how = {"initial_state": start, "output_logits": False, "use_cache": False}
    return model(**inputs_of(batch), labels=labels_of(batch), **how).loss


def of_counted(values: torch.Tensor, batch: dict) -> torch.Tensor:
    """Return those of [batch, length, ...] that belong to tokens which count, [tokens, ...]; without labels all
    count, and values are returned unchanged."""
    return values[batch["labels"] != IGNORE_INDEX] if "labels" in batch else values


def before_targets(values: torch.Tensor, batch: dict) -> torch.Tensor:
    """Return those of [batch, length - 1, ...] at positions whose next token is a target, in the form of
    `of_counted`."""
    return values[batch["labels"][:, 1:] != IGNORE_INDEX] if "labels" in batch else values


def losses_of_targets(logits: torch.Tensor, batch: dict) -> torch.Tensor:
    """Return the loss of every target."""
    return before_targets(next_token_losses(logits, labels_of(batch)), batch)


def check_batch(batch: dict):
    """Refuse padding, which measures would count as text."""
    mask = batch.get("attention_mask")
    if torch.is_tensor(mask) and mask.ndim == 2 and not mask.all():
        raise ValueError(
            f"the attention_mask leaves out {int((mask == 0).sum())} of {mask.numel()} tokens, but measures count "
            "every token of a batch as text: pass rows of one length, or one row at a time"
        )


def depth_of(model, batch: dict, num_loops: int | None) -> int:
    """Return `num_loops` if it is set and valid, else the depth at which the model was trained; check the batch."""
    check_batch(batch)
    if num_loops is None:
        return model.trained_depth
    if isinstance(num_loops, bool) or not isinstance(num_loops, int) or num_loops < 1:
        raise ValueError(f"num_loops must be a whole number of at least 1, got {num_loops!r}")
    return num_loops


@torch.no_grad()
def final_loss(model, batch: dict, num_loops: int) -> float:
    """Mean cross-entropy of the readout after the last loop."""
    logits = model(**inputs_of(batch), num_loops=num_loops, use_cache=False).logits
    return losses_of_targets(logits, batch).mean().item()
