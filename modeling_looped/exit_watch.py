"""Early exit inside one forward pass, for beams, assistants and all else that calls forward by itself.

Tokens that have exited are frozen: the pass goes on for the others until all are done, and what a frozen token leaves
in deeper slots is what it left at its exit. Nothing is gathered and scattered, so compute is saved only where a whole
batch may stop; `continuous.py` is the way to decode a batch whose rows exit apart.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cache import PreallocatedLayer
from .context import PassContext
from .exit_criteria import ExitRule
from .outputs import LoopedCausalLMOutputWithPast, kept_positions, unrecorded


class ExitWatch:
    """Which tokens of the pass still run. `model` is the causal LM, `past` the number of tokens in the cache."""

    def __init__(self, model, rule: ExitRule, depths: list[int], past: int, length: int, device):
        self.model, self.rule = model, rule
        limits = torch.tensor(depths, device=device)[:, None].repeat(1, length)
        prompt = torch.arange(past, past + length, device=device) < rule.prompt_length
        if rule.prompt_loops is not None:
            limits[:, prompt] = limits[:, prompt].clamp(max=rule.prompt_loops)
        self.limits, self.is_prompt = limits, prompt  # [batch, length], [length]
        self.token_loops = torch.zeros_like(limits)  # 0 while the token runs
        # of the prompt, only its last token makes a new one
        self.first_reported = max(rule.prompt_length - 1 - past, 0)
        self.final: torch.Tensor | None = None  # H of the last loop, frozen where tokens have exited
        self.memory = {}

    @property
    def exited(self) -> torch.Tensor:
        return self.token_loops > 0

    @property
    def is_done(self) -> bool:
        return bool(self.exited.all())

    def after_loop(self, loop: int, state: torch.Tensor, context: PassContext):
        """`state` with exited tokens as they were; no row leaves the batch. Those tokens exit that the criterion or
        their limit stops at `loop`."""
        if self.final is not None:
            state = torch.where(self.exited.unsqueeze(-1), self.final, state)
        self.final = state
        exits = self.limits <= loop
        if self.rule.reads(loop) and not (exits | self.is_prompt).all():
            score = self.score(loop, state, context)
            if self.rule.checks(loop):
                exits = exits | (self.rule.exits(score) & ~self.is_prompt)
        self.token_loops = torch.where(~self.exited & exits, loop, self.token_loops)
        context.past_key_values.frozen = self.exited
        return state, None

    def score(self, loop: int, state: torch.Tensor, context: PassContext) -> torch.Tensor:
        def logits() -> torch.Tensor:
            read_only = replace(context, past_key_values=ReadOnlyCache(context.past_key_values))
            return self.model.decode(unrecorded(self.model.model.run_coda, state, read_only), loop - 1)

        score, self.memory = self.rule.criterion.after_loop(self.model, state, logits, self.memory)
        return score


class ReadOnlyCache:
    """A cache that shows what `update` would return and keeps nothing."""

    def __init__(self, view):
        self.view = view

    def update(self, keys: torch.Tensor, values: torch.Tensor, slot: int, *args, **kwargs):
        while slot >= len(self.view.cache.layers):  # a dynamic cache grows when it is written to
            self.view.cache.layers.append(self.view.cache.layer_class_to_replicate())
        layer = self.view.cache.layers[slot]
        # a dynamic layer's update puts new tensors in its place, or writes beyond what it holds
        is_dynamic = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, PreallocatedLayer)
        layer = copy.copy(layer) if is_dynamic else copy.deepcopy(layer)
        return layer.update(keys, values, *args, **kwargs)


def cut_into_tokens(rule: ExitRule, past: int, length: int) -> list[slice]:
    """The prompt in one piece, each generated token by itself."""
    first = min(max(rule.prompt_length - past, 0), length)
    return [slice(0, first)] * (first > 0) + [slice(i, i + 1) for i in range(first, length)]


def mask_of_piece(attention_mask, past: int, piece: slice) -> Any:
    """What generate prepared for the whole pass, for some of its queries."""
    if isinstance(attention_mask, dict):
        return {kind: mask_of_piece(mask, past, piece) for kind, mask in attention_mask.items()}
    if attention_mask is None:
        return None
    return attention_mask[:, :, piece] if attention_mask.ndim == 4 else attention_mask[:, : past + piece.stop]


def run_pieces(model, pieces: list[slice], past: int, batch: list, logits_to_keep, arguments: dict):
    """One pass of the causal LM as several, one after the other on the same cache."""
    input_ids, inputs_embeds, attention_mask, position_ids = batch
    outputs = [
        model(
            input_ids=None if input_ids is None else input_ids[:, piece],
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[:, piece],
            attention_mask=mask_of_piece(attention_mask, past, piece),
            position_ids=None if position_ids is None else position_ids[:, piece],
            **arguments,
        )
        for piece in pieces
    ]
    keep = kept_positions(logits_to_keep)
    return LoopedCausalLMOutputWithPast(
        logits=torch.cat([output.logits for output in outputs], dim=1)[:, keep],
        token_loops=torch.cat([output.token_loops for output in outputs], dim=1),
    )


def refuse_with_exits(**arguments):
    if given := [name for name, value in arguments.items() if value is not None and value is not False]:
        raise ValueError(
            f"exit_rule stops tokens at loops of their own, which {', '.join(given)} cannot go with: leave one out"
        )
