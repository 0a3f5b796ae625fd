"""The loss of the language model, made from the states that the trunk returns, mostly without logits."""

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .cross_entropy import IGNORE_INDEX, Head, shift, unshift
from .depth import depth_tensor
from .evaluating import evaluating
from .losses import Labels, denominator, loop_loss
from .losses_of_states import LoopStates
from .overrides import is_as_written, is_changed


HEAD_METHODS = ("logits", "softcapped", "logits_after_loop", "_read_out")
TRUNK_METHODS = ("readout", "_read")


class LoopedLossMixin:
    """The part of `LoopedForCausalLM` that computes its loss."""

    if TYPE_CHECKING:  # the model has the rest

        def __getattr__(self, name: str) -> Any: ...

    def auxiliary_loss(self, outputs, labels) -> torch.Tensor | None:
        """Return what a subclass adds to the loss, as a mean over the labelled tokens of this pass; None adds nothing.

        outputs: those of the trunk. If this method is overridden, they have the states after every loop, for which a
        coda runs after every loop (such a pass fills no cache), and `depths`, the loops of each row, [batch, 1]. A row
        that ran fewer repeats its last states. `logits_after_loop(outputs.loop_readout_states[k], k, outputs.depths)`
        are logits; `loop_hidden_states` lie before the coda. labels: [batch, length], already shifted, -100 where
        there is none. `loop_losses` are without it.
        """
        return None

    def training_metrics(self) -> dict[str, float | torch.Tensor]:
        """Return numbers, or tensors of one number, that a subclass lets recipes log as `own/NAME`.

        It is asked after the backward pass of each step that is logged, on every process; the main one's are written.
        """
        return {}

    def _losses(
        self, outputs, logits, gates, exit_probabilities, depths: int | list[int], labels: Labels, every_loop: bool
    ):
        """Return the loss and, without gradients, the cross-entropies after every loop (or None): means, per token."""
        if not every_loop and self._has_plain_loss(logits, labels.tokens):
            return self._plain_loss(logits, labels), None, None
        if hasattr(self, "_loss_function"):
            raise ValueError(
                f"a loss_function was set, which reads logits, but the loss of this pass (loop_loss="
                f"{self.config.loop_loss!r}, losses of states: {self.config.state_losses}) is made without them: use "
                "loop_loss='terminal' without losses of states, with the logits of all positions and no "
                "output_loop_losses, or compute your loss from output_loop_logits=True outside of the model"
            )
        if self.config.loop_loss != "exit_weighted_logits":
            loss, losses, token_losses = self._loop_loss(outputs, gates, depths, labels, with_unread=every_loop)
            return loss, losses, token_losses if every_loop else None
        mixed = self._exit_weighted(outputs.loop_readout_states, exit_probabilities, depths)
        loss = self._loop_loss(outputs, gates, depths, labels, mixed=mixed)[0]
        if not every_loop:
            return loss, None, None
        with torch.no_grad():
            _, losses, token_losses = self._loop_loss(outputs, gates, depths, labels)
        return loss, losses, token_losses

    def _with_auxiliary(self, loss, outputs, depths: int | list[int], labels: Labels):
        """Add the auxiliary loss, by the share that this pass has in the labelled tokens of the step."""
        if is_as_written(self, "auxiliary_loss"):
            return loss
        outputs.depths = depth_tensor(depths, len(labels.tokens), labels.tokens.device)[:, None]
        added = self.auxiliary_loss(outputs, labels.tokens)
        if added is None:
            return loss
        labelled = (labels.tokens != IGNORE_INDEX).sum()
        added = torch.where(labelled > 0, added, 0.0)  # a mean over no token is nan
        return loss + added * (labelled / denominator(labels.tokens, labels.num_items_in_batch))

    def _loop_loss(self, outputs, gates, depths, labels: Labels, mixed=None, with_unread: bool = True):
        """Compute the loss without logits: of `mixed` readouts, or of each loop if it is read and the trunk returned
        its readout state, else of the last loop."""
        readouts = outputs.loop_readout_states
        reads_once = mixed is not None or readouts is None or (self.config.loop_loss == "terminal" and not with_unread)
        if reads_once:  # a single state, after the readout norm
            readouts = [outputs.last_hidden_state if mixed is None else mixed]
        head = self._head(reads_once)
        states = None
        if self.config.state_losses:
            targets = self._latent_targets(labels.tokens)
            states = LoopStates(outputs.loop_hidden_states, outputs.initial_state, targets)
        return loop_loss(self.config, head, readouts, reads_once, states, gates, depths, labels, with_unread)

    def _head(self, is_read_out: bool) -> Head:
        """Return the head for states after the readout norm (`is_read_out`) or for states before it."""
        decode, read = self.logits_after_loop, partial(self._read_out, depths=None)
        if is_read_out:
            decode, read = (lambda hidden, loop: self.logits(hidden)), (lambda hidden, loop: hidden)
        kernel, softcap = self.loss_kernel, self.config.logit_softcap
        losses = kernel and (lambda hidden, loop, of: kernel(read(hidden, loop), self.lm_head.weight, of, softcap))
        return Head(decode, self._decode_parameters(with_readout=not is_read_out), losses, self.compiled_cross_entropy)

    def _latent_targets(self, labels):
        """Return the embeddings of the labels, [batch, length, hidden], if a loss compares states with them."""
        if not self.config.latent_loss and not self.config.latent_anchor:
            return None
        table = self.model.embed_tokens
        # NEFTune's hook adds noise to embeddings in training mode
        with torch.no_grad(), evaluating(table) if table._forward_hooks else nullcontext():
            return self.model.scaled(table(labels.clamp(min=0)))

    def _has_plain_loss(self, logits, labels) -> bool:
        """Whether the loss is the usual one of a causal LM, on logits that this pass computes anyway."""
        is_plain = self.config.loop_loss == "terminal" and not self.config.state_losses
        return is_plain and logits is not None and logits.shape[:2] == labels.shape

    def _plain_loss(self, logits, labels: Labels):
        if hasattr(self, "_loss_function"):  # of the user, called as transformers' models call it
            arguments = {"labels": unshift(labels.tokens), **labels.as_given}  # which may have only shift_labels
            return self.loss_function(logits=logits, vocab_size=self.config.vocab_size, **arguments)
        return self.loss_function(
            logits=logits,
            labels=unshift(labels.tokens),
            shift_labels=labels.tokens,
            vocab_size=self.config.vocab_size,
            num_items_in_batch=denominator(labels.tokens, labels.num_items_in_batch),
        )

    def _decode_parameters(self, with_readout: bool) -> list[torch.Tensor] | None:
        """Return the parameters that `decode` reads, or None to leave the gradients to autograd. None if methods that
        `decode` calls were overridden, which may read more parameters, or if its modules carry hooks (a head that FSDP
        shards by itself, tensor parallelism), which provide the weights only to passes that autograd sees."""
        readouts = [self.model.norm, self.model.alpha_readout] if with_readout else []
        modules = [self.lm_head, *(module for module in readouts if module is not None)]
        is_ours = is_as_written(self, *HEAD_METHODS) and is_as_written(self.model, *TRUNK_METHODS)
        parts = [part for module in modules for part in module.modules()]
        if not is_ours or any(map(is_changed, parts)):
            return None
        return [parameter for module in modules for parameter in module.parameters()]

    def _shifted_labels(self, labels, shift_labels, shape, keep, ignore_index: int):
        if labels is None and shift_labels is None:
            return None
        given = labels if shift_labels is None else shift_labels
        of_all = None if given.shape == shape else given.new_full(shape, ignore_index)
        if of_all is not None and of_all[:, keep].shape != given.shape:
            raise ValueError(
                f"labels have shape {tuple(given.shape)}, but the input is {tuple(shape)}: pass one label per token, "
                "or per token of logits_to_keep, unshifted, with -100 where there is nothing to learn"
            )
        shifted = shift(labels) if shift_labels is None else shift_labels.contiguous()
        if of_all is not None:
            of_all[:, keep] = shifted
            shifted = of_all
        shifted = shifted.long()
        return shifted if ignore_index == IGNORE_INDEX else shifted.masked_fill(shifted == ignore_index, IGNORE_INDEX)
