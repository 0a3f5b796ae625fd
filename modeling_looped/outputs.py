"""What a looped model returns beyond what transformers' models do, and which runs of its blocks are recorded."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .borrowed import recorded_states


def kept_positions(logits_to_keep: int | torch.Tensor) -> slice | torch.Tensor:
    """As an index: a number of last positions, 0 for all of them, or the positions that are named."""
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep


def unrecorded(run: Callable, *arguments):
    """What `run` returns; its blocks are not among those that output_hidden_states and output_attentions show."""
    recorded = recorded_states()
    lengths = [len(states) for states in recorded]
    result = run(*arguments)
    for states, length in zip(recorded, lengths):
        del states[length:]
    return result


@dataclass
class LoopedModelOutputWithPast(BaseModelOutputWithPast):
    """
    loop_hidden_states: H_k of every loop, [batch, length, hidden] each. A row that ran fewer loops keeps its last.
    loop_readout_states: what the readout norm reads at every loop: H_k, or what the coda makes of it.
    first_state: h_0, with loop_hidden_states.
    """

    loop_hidden_states: tuple[torch.Tensor, ...] | None = None
    loop_readout_states: tuple[torch.Tensor, ...] | None = None
    first_state: torch.Tensor | None = None


@dataclass
class LoopedCausalLMOutputWithPast(CausalLMOutputWithPast):
    """
    loop_hidden_states, loop_readout_states: as in LoopedModelOutputWithPast.
    loop_logits: logits after every loop, [batch, length, vocabulary] each.
    exit_probabilities: p(exit at loop k), [batch, length, loops].
    exit_logits: sum_k p_k logits_k, [batch, length, vocabulary]; a softcap acts on the sum.
    loop_losses: mean cross-entropy after every loop that the loss reads, [loops], without gradients; nan after others.
    loop_token_losses: the same of every token, [loops, batch, length]: at position i that of token i + 1; 0 without
        label.
    token_loops: the loops that each token ran under an exit rule, [batch, length].
    """

    loop_hidden_states: tuple[torch.Tensor, ...] | None = None
    loop_readout_states: tuple[torch.Tensor, ...] | None = None
    loop_logits: tuple[torch.Tensor, ...] | None = None
    exit_probabilities: torch.Tensor | None = None
    exit_logits: torch.Tensor | None = None
    loop_losses: torch.Tensor | None = None
    loop_token_losses: torch.Tensor | None = None
    token_loops: torch.Tensor | None = None


@dataclass
class LoopedGenerateOutput(GenerateDecoderOnlyOutput):
    """
    token_loops: loops that each new token took, [batch, new tokens]; 0 after the end of a row.
    acceptance_rate: of the drafts that were compared with full depth, the part that it agreed with; what was drafted
        after a wrong one is not compared.
    passes_per_token: of the core, of each row, with drafts: num_loops without them, fewer where they are right.
    stopped_drafting: whether drafts, which did not pay, were left out for a part of the tokens or all.
    """

    token_loops: torch.Tensor | None = None
    acceptance_rate: float | None = None
    passes_per_token: float | None = None
    stopped_drafting: bool | None = None


@dataclass
class LoopedGenerateBeamOutput(GenerateBeamDecoderOnlyOutput):
    """
    token_loops: as in `LoopedGenerateOutput`.
    """

    token_loops: torch.Tensor | None = None
