"""The outputs of a looped model beyond those of transformers' models, and what a pass must keep for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .compatibility import CACHE, recorded_states
from .config_relations import LOSSES_OF_GATES
from .depth import numpy_as_python


def kept_positions(logits_to_keep: int | torch.Tensor) -> slice | torch.Tensor:
    """Return `logits_to_keep` (a number of last positions, 0 for all, or the caller's positions) as an index."""
    keep = numpy_as_python(logits_to_keep)
    return slice(-keep, None) if isinstance(keep, int) else keep


def unrecorded(run: Callable, *arguments):
    """Call `run` without recording its blocks for output_hidden_states and output_attentions."""
    recorded = recorded_states()
    lengths = [len(states) for states in recorded]
    result = run(*arguments)
    for states, length in zip(recorded, lengths):
        del states[length:]
    return result


class CacheByBothNames:
    """Adds the field `cache`, which was called `past_key_values` before transformers 5.24."""

    if CACHE != "cache":

        @property
        def cache(self):
            return getattr(self, CACHE)


@dataclass
class LoopedModelOutputWithPast(CacheByBothNames, BaseModelOutputWithPast):
    """
    loop_hidden_states: H_k of every loop, [batch, length, hidden] each. A row that ran fewer loops repeats its last H.
    loop_readout_states: the input of the readout norm after every loop: H_k, or the coda's output for H_k.
    initial_state: h_0, returned together with loop_hidden_states.
    depths: the loops that each row runs, [batch, 1], only in the outputs that `auxiliary_loss` reads.
    """

    loop_hidden_states: tuple[torch.Tensor, ...] | None = None
    loop_readout_states: tuple[torch.Tensor, ...] | None = None
    initial_state: torch.Tensor | None = None
    depths: torch.Tensor | None = None


@dataclass
class LoopedCausalLMOutputWithPast(CacheByBothNames, CausalLMOutputWithPast):
    """
    loop_hidden_states, loop_readout_states, initial_state: as in LoopedModelOutputWithPast.
    loop_logits: logits after every loop, [batch, length, vocabulary] each.
    exit_probabilities: p(exit at loop k), [batch, length, loops].
    exit_logits: sum_k p_k logits_k, [batch, length, vocabulary]; a softcap acts on the sum.
    loop_losses: mean cross-entropy after each loop, [loops], without gradients; nan where no token was compared.
    loop_token_losses: the same per token, [loops, batch, length]: position i has that of token i + 1; 0 without a
        label.
    token_loops: the loop at which each token exits under an exit rule, [batch, length]. With selection="after" all
        loops run, and this is the one that is read out; with "weighted" it is the last.
    """

    loop_hidden_states: tuple[torch.Tensor, ...] | None = None
    loop_readout_states: tuple[torch.Tensor, ...] | None = None
    loop_logits: tuple[torch.Tensor, ...] | None = None
    exit_probabilities: torch.Tensor | None = None
    exit_logits: torch.Tensor | None = None
    loop_losses: torch.Tensor | None = None
    loop_token_losses: torch.Tensor | None = None
    token_loops: torch.Tensor | None = None
    initial_state: torch.Tensor | None = None


class NeededOfPass(NamedTuple):
    """What a pass must keep of every loop, for the loss and the requested outputs."""

    hidden_states: bool
    readout_states: bool
    gates: bool
    exit_probabilities: bool


class AskedOutputs(NamedTuple):
    """The outputs that a call of the causal LM asks for, under the names of its arguments."""

    output_loop_logits: bool
    output_loop_hidden_states: bool
    output_loop_readout_states: bool
    output_loop_losses: bool
    output_exit_probabilities: bool
    output_exit_logits: bool

    def needed(self, config, has_loss: bool) -> NeededOfPass:
        reads_exits = self.output_exit_probabilities or self.output_exit_logits
        if reads_exits and config.exit_gate == "none":
            name = "output_exit_probabilities" if self.output_exit_probabilities else "output_exit_logits"
            raise ValueError(f"{name} needs an exit gate, but this model has exit_gate='none'")
        if self.output_loop_losses and not has_loss:
            raise ValueError("output_loop_losses needs labels to compare with: pass labels or shift_labels")
        loss = config.loop_loss if has_loss else None
        gates = reads_exits or loss in LOSSES_OF_GATES
        reads_loops = self.output_loop_losses or loss not in (None, "terminal")
        return NeededOfPass(
            hidden_states=self.output_loop_hidden_states or gates or (has_loss and bool(config.state_losses)),
            readout_states=(
                self.output_loop_logits or self.output_loop_readout_states or self.output_exit_logits or reads_loops
            ),
            gates=gates,
            exit_probabilities=reads_exits or loss == "exit_weighted_logits",
        )


@dataclass
class LoopedGenerateOutput(CacheByBothNames, GenerateDecoderOnlyOutput):
    """
    token_loops: the loops that each new token ran, [batch, new tokens]; 0 after the end of a row. With
        exit_selection="after" these are all; which of them was read out, `forward` says under such an exit_rule.
    acceptance_rate: the fraction of compared drafts that full depth agreed with; drafts after a wrong one are not
        compared.
    passes_per_token: with drafts, passes of a row through the core per token: num_loops without them, fewer if they
        are right.
    stopped_drafting: whether some or all tokens were decoded without drafts, because drafts did not pay.
    """

    token_loops: torch.Tensor | None = None
    acceptance_rate: float | None = None
    passes_per_token: float | None = None
    stopped_drafting: bool | None = None


@dataclass
class LoopedGenerateBeamOutput(CacheByBothNames, GenerateBeamDecoderOnlyOutput):
    """
    token_loops: as in `LoopedGenerateOutput`.
    """

    token_loops: torch.Tensor | None = None
