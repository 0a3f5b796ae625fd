"""Early exit inside one forward pass, of tokens or of whole sequences: how text is scored under an exit rule.

`continuous.py` is how tokens are generated under one.
"""

import functools
from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicCache

from .borrowed import look_up, named_cache
from .checks import recorded
from .context import PassContext
from .depth import deepest, depth_per_row
from .exit_criteria import CRITERIA, ExitRule
from .outputs import LoopedCausalLMOutputWithPast, kept_positions, unrecorded
from .overrides import is_split
from .tensors import on_device


class ExitWatch:
    """Asked after every loop of a pass. `model` is the causal LM; depths: the most that each row may run."""

    needs_cache: bool  # for what a token leaves at its exit

    def __init__(self, model, rule: ExitRule, depths: list[int], length: int, device):
        self.model, self.rule = model, rule
        self.shallowest, self.deepest = min(depths), max(depths)
        self.limits = on_device(depths, device)[:, None]
        self.token_loops = torch.zeros(len(depths), length, dtype=torch.long, device=device)  # 0 while the token runs
        self.final: torch.Tensor | None = None  # H of each token at its exit
        self.memory = {}

    def may_exit_at(self, depth: int) -> bool:
        """Whether anything can; what is known here needs no waiting for the device."""
        return depth >= self.shallowest or self.rule.checks_at(depth)

    def is_done(self, depth: int) -> bool:
        return self.may_exit_at(depth) and bool(self.token_loops.all())

    def exits(self, depth: int, limits: torch.Tensor, state: torch.Tensor, logits: Callable) -> torch.Tensor:
        """Which tokens or rows stop after `depth` loops, by the criterion or at their limit."""
        exits = limits <= depth
        if depth == self.deepest:
            return exits
        passed, self.memory = self.rule.read(depth, self.model, state, logits, self.memory)
        return exits if passed is None else exits | passed

    def logits(self, depth: int, state: torch.Tensor, context: PassContext) -> torch.Tensor:
        return self.model.logits_after_loop(unrecorded(self.model.model.run_coda, state, context), depth - 1)


class TokenExits(ExitWatch):
    """Tokens that have exited are frozen: the pass goes on for the others until all are done, and what a frozen token
    leaves in deeper slots is what it left at its exit."""

    needs_cache = True

    def after_loop(self, depth: int, state: torch.Tensor, context: PassContext):
        """`state` with exited tokens as they were; no row leaves the batch."""
        exited = self.token_loops > 0
        if self.final is not None:
            state = torch.where(exited.unsqueeze(-1), self.final, state)
        self.final = state
        exits = self.exits(depth, self.limits, state, lambda: self.logits(depth, state, context))
        self.token_loops = torch.where(~exited & exits, depth, self.token_loops)
        context.cache.frozen = self.token_loops > 0
        return state, None


class SequenceExits(ExitWatch):
    """Sequences leave their batch where they exit."""

    needs_cache = False

    def __init__(self, model, rule: ExitRule, depths: list[int], length: int, device):
        super().__init__(model, rule, depths, length, device)
        self.running = torch.arange(len(depths), device=device)  # numbers of rows
        self.final_logits: torch.Tensor | None = None  # at each row's exit, where the criterion reads them

    def after_loop(self, depth: int, state: torch.Tensor, context: PassContext):
        """`state` of the rows that go on, and which of the rows that ran these are; None if all are."""
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
    """A pass of the causal LM in which tokens, or sequences, stop at loops of their own."""
    if not isinstance(rule, ExitRule):
        example = "modeling_looped.ExitRule('max_prob', 0.9)"
        raise TypeError(f"exit_rule={rule!r}: make one of {', '.join(CRITERIA)}, as {example}")
    refuse_with_exits({"layers on several devices": is_split(model)})
    given = inputs["input_ids"] if inputs["input_ids"] is not None else inputs["inputs_embeds"]
    keep, of_rows = kept_positions(logits_to_keep), depth_per_row(depths, len(given))
    rule = rule.checked(model.config, deepest(depths))
    if rule.selection == "weighted":
        token_loops = on_device(of_rows, given.device)[:, None].expand(given.shape[:2])
        return weighted_over_all(model, inputs, token_loops, logits_to_keep, output_logits, options)
    if rule.selection == "after":
        return chosen_after(model, rule, inputs, of_rows, keep if output_logits else None, options)
    inputs = {**inputs, "num_loops": deepest(depths)}
    if rule.per_sequence:
        mask = inputs["attention_mask"]  # tokenizers give one, also where nothing is padded
        hides = mask is not None and not (torch.is_tensor(mask) and mask.ndim == 2 and bool(mask.all()))
        refuse_with_exits({"cache": inputs["cache"], "an attention_mask with padding": hides, **options})
        watch = SequenceExits(model, rule, of_rows, given.shape[1], given.device)
        states = model.model(**{**inputs, "use_cache": False}, exit_watch=watch).last_hidden_state
        logits = None
        if output_logits:
            logits = model.logits(states[:, keep]) if watch.final_logits is None else watch.final_logits[:, keep]
        return LoopedCausalLMOutputWithPast(logits=logits, token_loops=watch.token_loops)

    if model.training and torch.is_grad_enabled() and model.model.computes_again:
        raise ValueError(
            "exit_rule keeps in a cache what tokens leave at their exits, and gradient checkpointing goes without a "
            "cache: turn it off, or call the model under torch.no_grad()"
        )
    cache, returns_cache = inputs["cache"], inputs["cache"] is not None or inputs["use_cache"] is not False
    if len(model.model.coda) and rule.criterion.needs == "logits":  # each check overwrites what the last wrote
        refuse_with_exits({f"a {type(cache).__name__}": is_fixed(cache)})
        if given.shape[1] > 1:  # the check of a token reads what the token before left at its exit
            finds_documents = cache is None and inputs["attention_mask"] is None
            packed = {"position_ids of packed documents": finds_documents and restarts(inputs["position_ids"])}
            refuse_with_exits(recorded(model.config, options) | packed)
            inputs["cache"] = DynamicCache(config=model.config) if cache is None else cache
            arguments = {"num_loops": depths, "exit_rule": rule, "output_logits": output_logits, **options}
            return token_by_token(model, inputs, given.shape[1], keep, returns_cache, arguments)

    watch = TokenExits(model, rule, of_rows, given.shape[1], given.device)
    outputs = model.model(**inputs, exit_watch=watch, **options)
    logits = model.logits(outputs.last_hidden_state[:, keep]) if output_logits else None
    return output_with_exits(outputs, logits, watch.token_loops, outputs.cache if returns_cache else None)


def output_with_exits(
    outputs, logits: torch.Tensor | None, token_loops: torch.Tensor, cache
) -> LoopedCausalLMOutputWithPast:
    """What a pass with exits returns. outputs: of the pass through the model that it was."""
    return LoopedCausalLMOutputWithPast(
        logits=logits,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        token_loops=token_loops,
        **named_cache(cache),
    )


def restarts(position_ids: torch.Tensor | None) -> bool:
    """Where the positions of a row go back, another document begins."""
    return position_ids is not None and bool((position_ids.diff(dim=-1) < 0).any())


def is_fixed(cache) -> bool:
    """Whether the last token's keys and values cannot be taken back."""
    names = ("StaticCache", "QuantizedCache")
    return isinstance(cache, tuple(look_up("transformers.cache_utils", name, ()) for name in names))


def chosen_after(model, rule: ExitRule, inputs: dict, depths: list[int], keep, options: dict):
    """A pass of the causal LM at full depth, whose cache holds all loops; then each token is read out where the rule
    would have let it exit. depths: of rows; keep: None for no logits."""
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
    """A pass of the causal LM at full depth, which reads out every loop with the probability that it is the last."""
    weighted = {"output_logits": False, "output_exit_logits": output_logits}
    outputs = model(**inputs, logits_to_keep=logits_to_keep, **weighted, **options)
    return output_with_exits(outputs, outputs.exit_logits, token_loops, outputs.cache)


def with_rows(whole: torch.Tensor | None, num_rows: int, rows: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    whole = parts.new_empty(num_rows, *parts.shape[1:]) if whole is None else whole
    return whole.index_copy(0, rows, parts)


def token_by_token(model, inputs: dict, length: int, keep, returns_cache: bool, arguments: dict):
    """A pass of the causal LM as one for each of `length` tokens, one after the other on the same cache."""
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
        logits=torch.cat([output.logits for output in outputs], dim=1)[:, keep]
        if arguments["output_logits"]
        else None,
        token_loops=torch.cat([output.token_loops for output in outputs], dim=1),
        **named_cache(cache if returns_cache else None),
    )


def refuse_with_exits(arguments: dict):
    """Those of `arguments` that are given."""
    if given := [name for name, value in arguments.items() if value is not None and value is not False]:
        raise ValueError(
            f"exit_rule stops tokens at loops of their own, which {', '.join(given)} cannot go with: leave one out"
        )
