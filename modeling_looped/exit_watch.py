"""Early exit of tokens or whole sequences inside one forward pass, for scoring text under an exit rule.

`continuous.py` generates tokens under an exit rule.
"""

import functools
from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicCache

from .checks import recorded
from .compatibility import look_up, named_cache
from .context import PassContext
from .depth import deepest, depth_per_row
from .exit_criteria import CRITERIA, ExitRule
from .outputs import LoopedCausalLMOutputWithPast, kept_positions, unrecorded
from .overrides import is_as_written, is_split, uncompiled
from .tensors import on_device


class ExitWatch:
    """Decides after every loop of a pass what exits. model: the causal LM; depths: the most loops of each row."""

    needs_cache: bool  # for the keys and values that a token has at its exit

    def __init__(self, model, rule: ExitRule, depths: list[int], length: int, device):
        self.model, self.rule = model, rule
        self.shallowest, self.deepest = min(depths), max(depths)
        self.limits = on_device(depths, device)[:, None]
        self.token_loops = torch.zeros(len(depths), length, dtype=torch.long, device=device)  # 0 while the token runs
        self.final: torch.Tensor | None = None  # H of each token at its exit
        self.memory = {}

    def may_exit_at(self, depth: int) -> bool:
        """Return whether anything can exit after `depth` loops, as far as the host knows without the device."""
        return depth >= self.shallowest or self.rule.checks_at(depth)

    def is_done(self, depth: int) -> bool:
        return self.may_exit_at(depth) and bool(self.token_loops.all())

    def exits(self, depth: int, limits: torch.Tensor, state: torch.Tensor, logits: Callable) -> torch.Tensor:
        """Return which tokens or rows stop after `depth` loops, by the criterion or at their limit."""
        exits = limits <= depth
        if depth == self.deepest:
            return exits
        passed, self.memory = self.rule.read(depth, self.model, state, logits, self.memory)
        return exits if passed is None else exits | passed

    def logits(self, depth: int, state: torch.Tensor, context: PassContext) -> torch.Tensor:
        return self.model.logits_after_loop(unrecorded(self.model.model.run_coda, state, context), depth - 1)


class TokenExits(ExitWatch):
    """Freezes tokens that have exited: the pass goes on until all tokens have exited, and the deeper slots of a frozen
    token receive the keys and values that it had at its exit."""

    needs_cache = True

    def after_loop(self, depth: int, state: torch.Tensor, context: PassContext):
        """Return `state` with exited tokens as they were at their exit, and None, because no row leaves the batch."""
        exited = self.token_loops > 0
        if self.final is not None:
            state = torch.where(exited.unsqueeze(-1), self.final, state)
        self.final = state
        exits = self.exits(depth, self.limits, state, lambda: self.logits(depth, state, context))
        self.token_loops = torch.where(~exited & exits, depth, self.token_loops)
        context.cache.frozen = self.token_loops > 0
        return state, None


class SequenceExits(ExitWatch):
    """Removes sequences from the batch when they exit."""

    needs_cache = False

    def __init__(self, model, rule: ExitRule, depths: list[int], length: int, device):
        super().__init__(model, rule, depths, length, device)
        self.running = torch.arange(len(depths), device=device)  # rows of the batch that still loop
        self.final_logits: torch.Tensor | None = None  # at each row's exit, where the criterion reads them

    def after_loop(self, depth: int, state: torch.Tensor, context: PassContext):
        """Return `state` of the rows that go on, and their indices among the rows that ran (None if all go on)."""
        logits = functools.cache(functools.partial(self.logits, depth, state, context))  # read out at most once
        exits = self.exits(depth, self.limits[self.running, 0], state, logits)
        if not self.may_exit_at(depth) or not exits.any():
            return state, None
        rows = self.running[exits]
        self.token_loops[rows] = depth
        self.final = with_rows(self.final, len(self.limits), rows, state[exits])
        if self.rule.criterion.needs == "logits":
            self.final_logits = with_rows(self.final_logits, len(self.limits), rows, logits()[exits])
        going = (~exits).nonzero()[:, 0]
        self.running = self.running[going]
        self.memory = {name: values[going] for name, values in self.memory.items()}
        return state[going], going


def forward_with_exits(
    model, rule: ExitRule, inputs: dict, depths: int | list[int], logits_to_keep, output_logits: bool, options: dict
):
    """Run the causal LM so that each token, or each sequence, stops at its own loop."""
    if not isinstance(rule, ExitRule):
        example = "modeling_looped.ExitRule('max_prob', 0.9)"
        raise TypeError(f"exit_rule={rule!r}: make one of {', '.join(CRITERIA)}, as {example}")
    refuse_other_passes(model, rule)
    given = inputs["input_ids"] if inputs["input_ids"] is not None else inputs["inputs_embeds"]
    keep = kept_positions(logits_to_keep) if output_logits else None
    of_rows, rule = depth_per_row(depths, len(given)), rule.checked(model.config, deepest(depths))
    if rule.selection == "weighted":
        token_loops = on_device(of_rows, given.device)[:, None].expand(given.shape[:2])
        return weighted_over_all(model, inputs, token_loops, logits_to_keep, output_logits, options)
    if rule.selection == "after":
        return chosen_after(model, rule, inputs, of_rows, keep, options)
    inputs = {**inputs, "num_loops": deepest(depths)}
    watched = model, rule, of_rows, given.shape[1], given.device
    if rule.per_sequence:
        return with_exits_of_sequences(model, SequenceExits(*watched), inputs, keep, options)
    return with_exits_of_tokens(model, TokenExits(*watched), inputs, depths, keep, options)


def refuse_other_passes(model, rule: ExitRule):
    """Refuse models whose passes would not be those that run here."""
    # the trunk's `loop` is not called where tokens stop, and no `forward` is called just once in every way below
    of_trunk = ("forward", "loop") if rule.selection == "stop" else ("forward",)
    has_own_passes = is_as_written(model, "forward") and is_as_written(model.model, *of_trunk)
    refuse_with_exits(
        {
            "layers on several devices": is_split(model),
            f"a {' or '.join(of_trunk)} that is not the model's own": not has_own_passes,
        }
    )


def with_exits_of_sequences(model, watch: SequenceExits, inputs: dict, keep, options: dict):
    """Run the trunk so that each sequence stops at its own loop. keep: positions whose logits are returned, None for
    no logits."""
    mask = inputs["attention_mask"]  # tokenizers return one even without padding
    hides = mask is not None and not (torch.is_tensor(mask) and mask.ndim == 2 and bool(mask.all()))
    refuse_with_exits({"cache": inputs["cache"], "an attention_mask with padding": hides, **options})
    trunk = uncompiled(model.model)  # since what runs depends on the data
    states = trunk(**{**inputs, "use_cache": False}, exit_watch=watch).last_hidden_state
    logits = None
    if keep is not None:
        logits = model.logits(states[:, keep]) if watch.final_logits is None else watch.final_logits[:, keep]
    return LoopedCausalLMOutputWithPast(logits=logits, token_loops=watch.token_loops)


def with_exits_of_tokens(model, watch: TokenExits, inputs: dict, depths: int | list[int], keep, options: dict):
    """Run the causal LM so that each token stops at its own loop. keep: as for sequences."""
    if model.training and torch.is_grad_enabled() and model.model.computes_again:
        raise ValueError(
            "exit_rule keeps in a cache what tokens leave at their exits, and gradient checkpointing goes without a "
            "cache: turn it off, or call the model under torch.no_grad()"
        )
    rule, length = watch.rule, watch.token_loops.shape[1]
    cache, returns_cache = inputs["cache"], inputs["cache"] is not None or inputs["use_cache"] is not False
    if len(model.model.coda) and rule.criterion.needs == "logits":  # the coda overwrites its slots at each check
        refuse_with_exits({f"a {type(cache).__name__}": is_fixed(cache)})
        if length > 1:  # a token's check reads what earlier tokens left in the coda at their exits
            finds_documents = cache is None and inputs["attention_mask"] is None
            packed = {"position_ids of packed documents": finds_documents and restarts(inputs["position_ids"])}
            refuse_with_exits(recorded(model.config, options) | packed)
            inputs["cache"] = DynamicCache(config=model.config) if cache is None else cache
            arguments = {"num_loops": depths, "exit_rule": rule, "output_logits": keep is not None, **options}
            return token_by_token(model, inputs, length, keep, returns_cache, arguments)

    outputs = uncompiled(model.model)(**inputs, exit_watch=watch, **options)
    logits = None if keep is None else model.logits(outputs.last_hidden_state[:, keep])
    return output_with_exits(outputs, logits, watch.token_loops, outputs.cache if returns_cache else None)


def output_with_exits(
    outputs, logits: torch.Tensor | None, token_loops: torch.Tensor, cache
) -> LoopedCausalLMOutputWithPast:
    """Build the output of a pass with exits. outputs: what the trunk, or the causal LM, returned in that pass."""
    return LoopedCausalLMOutputWithPast(
        logits=logits,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        token_loops=token_loops,
        **named_cache(cache),
    )


def restarts(position_ids: torch.Tensor | None) -> bool:
    """Return whether a row holds several documents. As in masks of transformers, another one begins where a position
    does not follow the one before: also where it is the same, behind a document of one token."""
    return position_ids is not None and bool((position_ids.diff(dim=-1) != 1).any())


def is_fixed(cache) -> bool:
    """Return whether this cache cannot remove the keys and values of the last token."""
    names = ("StaticCache", "QuantizedCache")
    return isinstance(cache, tuple(look_up("transformers.cache_utils", name, ()) for name in names))


def chosen_after(model, rule: ExitRule, inputs: dict, depths: list[int], keep, options: dict):
    """Run the causal LM at full depth, with all loops in the cache; then read out each token at the loop where the
    rule would have let it exit. depths: of rows; keep: positions whose logits are returned, None for no logits."""
    outputs = model.model(**inputs, output_loop_hidden_states=True, output_loop_readout_states=True, **options)
    states, readouts = outputs.loop_hidden_states, outputs.loop_readout_states
    limits = on_device(depths, states[0].device)[:, None]
    loops, memory, chosen = limits.expand(states[0].shape[:2]), {}, readouts[-1]
    running = torch.ones_like(loops, dtype=torch.bool)
    for depth, (state, readout) in enumerate(zip(states, readouts), start=1):
        decode = functools.partial(model.logits_after_loop, readout, depth - 1, depths)
        passes, memory = rule.read(depth, model, state, decode, memory)
        if passes is not None:
            exits = running & (passes[:, None] if rule.per_sequence else passes) & (depth < limits)
            loops = torch.where(exits, depth, loops)
            chosen = torch.where(exits.unsqueeze(-1), readout, chosen)
            running = running & ~exits
    logits = None if keep is None else model.logits(model.model.readout(chosen, loops)[:, keep])
    return output_with_exits(outputs, logits, loops, outputs.cache)


def weighted_over_all(model, inputs: dict, token_loops, logits_to_keep, output_logits: bool, options: dict):
    """Run the causal LM at full depth and read out every loop, weighted by the probability that it is the last."""
    weighted = {"output_logits": False, "output_exit_logits": output_logits}
    outputs = model(**inputs, logits_to_keep=logits_to_keep, **weighted, **options)
    return output_with_exits(outputs, outputs.exit_logits, token_loops, outputs.cache)


def with_rows(whole: torch.Tensor | None, num_rows: int, rows: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    whole = parts.new_empty(num_rows, *parts.shape[1:]) if whole is None else whole
    return whole.index_copy(0, rows, parts)


def token_by_token(model, inputs: dict, length: int, keep, returns_cache: bool, arguments: dict):
    """Run the causal LM in one pass for each of `length` tokens, one after the other, on the same cache."""
    tokens = {name: inputs[name] for name in ("input_ids", "inputs_embeds", "position_ids", "initial_state")}
    attention_mask, cache = inputs["attention_mask"], inputs["cache"]
    past = int(cache.get_seq_length())
    if attention_mask is not None and not (torch.is_tensor(attention_mask) and attention_mask.ndim == 2):
        refuse_with_exits({"a prepared attention_mask": True})
    outputs = []
    for i in range(length):
        pieces = {name: value[:, i : i + 1] for name, value in tokens.items() if value is not None}
        mask = None if attention_mask is None else attention_mask[:, : past + i + 1]
        outputs.append(model(**pieces, attention_mask=mask, cache=cache, **arguments))
    return LoopedCausalLMOutputWithPast(
        logits=None if keep is None else torch.cat([output.logits for output in outputs], dim=1)[:, keep],
        token_loops=torch.cat([output.token_loops for output in outputs], dim=1),
        **named_cache(cache if returns_cache else None),
    )


def refuse_with_exits(arguments: dict):
    """Refuse those of `arguments` that are set."""
    if given := [name for name, value in arguments.items() if value is not None and value is not False]:
        raise ValueError(
            f"exit_rule stops every token at a loop of its own and does not go with {', '.join(given)}: leave one out"
        )
