# Copyright 2026 The Looped authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The language model: logits after every loop, the losses over them, the exit gate."""

import copy
from collections.abc import Callable
from functools import reduce
from inspect import signature
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache

from .checks import check_inputs
from .compatibility import OtherArguments, named_cache, one_cache, tuples_on_request
from .configuration_looped import LoopedConfig
from .cpu import project
from .cross_entropy import IGNORE_INDEX
from .depth import depth_tensor, read_depths
from .exit_criteria import ExitRule
from .exit_watch import forward_with_exits, refuse_with_exits
from .foreign_names import check_arguments
from .generation import LoopedGenerationMixin
from .layers import linear, with_role
from .loss_of_model import LoopedLossMixin
from .losses import Labels, exit_log_probabilities
from .modeling_looped import LoopedModel, LoopedPreTrainedModel
from .optimization import parameter_groups
from .outputs import AskedOutputs, LoopedCausalLMOutputWithPast, NeededOfPass, kept_positions
from .overrides import is_as_written
from .tensors import at_least_fp32
from .training_warnings import warn_of_objective


class LoopedForCausalLM(LoopedPreTrainedModel, LoopedGenerationMixin, LoopedLossMixin):
    """A looped language model. `forward` and `generate` take `num_loops`. `from_pretrained` opens models of this
    family and other published looped models; `from_dense` makes a looped model from a dense one such as Llama."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    added_fields: ClassVar[dict[str, Any]] = {}  # of the config, that a subclass reads beside ours: their defaults

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        inherited = [vars(base).get("added_fields", {}) for base in reversed(cls.__mro__)]
        cls.added_fields = {name: value for fields in inherited for name, value in fields.items()}
        LoopedConfig.check_added(cls.added_fields, cls.__name__)

    def __init__(self, config: LoopedConfig):
        if self.added_fields:
            config.architectures = [type(self).__name__]  # so that reading it does not warn of fields unknown to it
        for name in self.added_fields.keys() - vars(config).keys():
            setattr(config, name, copy.deepcopy(self.added_fields[name]))
        super().__init__(config)
        self.generation_config._from_model_config = False  # else loading drops fields unknown to transformers
        self.loss_type = "ForCausalLM"  # transformers takes it from the name of the class, which a subclass may change
        self.model = LoopedModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = linear(config.hidden_size, config.vocab_size, "head")
        gate = linear(config.state_size, 1, "gate", bias=True) if config.exit_gate != "none" else None
        self.loss_kernel: Callable | None = None  # one of recipes/engine/loss_kernels.py
        self.compiled_cross_entropy: Callable | None = None  # in place of cross_entropy.cross_entropy_of
        self.exit_gate: nn.Module = gate  # pyrefly: ignore[bad-assignment]  without a gate nothing reads it
        self.post_init()
        # the trunk ignores a gate in a checkpoint; here one that fits no module is an error
        passed_over = set(self._keys_to_ignore_on_load_unexpected or ())
        self._keys_to_ignore_on_load_unexpected = passed_over - set(LoopedModel.without_head)

    def post_init(self):  # called again by subclasses, which may have put a trunk of their own here
        super().post_init()
        if not is_as_written(self, "auxiliary_loss"):
            self.model.auxiliary_loss_of_head = f"auxiliary_loss of {type(self).__name__}"

    @tuples_on_request
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_loops: int | list[int] | torch.Tensor | None = None,
        backprop_loops: int | None = None,
        initial_state: torch.Tensor | None = None,
        exit_rule: ExitRule | None = None,
        output_logits: bool = True,
        output_loop_hidden_states: bool = False,
        output_loop_readout_states: bool = False,
        output_loop_logits: bool = False,
        output_loop_losses: bool = False,
        output_exit_probabilities: bool = False,
        output_exit_logits: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_positions: np.ndarray | None = None,
        past_key_values: Cache | None = None,
        **kwargs: OtherArguments,
    ) -> LoopedCausalLMOutputWithPast:
        r"""
        num_loops, backprop_loops, initial_state, output_loop_hidden_states, output_loop_readout_states: as in
            `LoopedModel`.
        exit_rule: let each token (or, with `per_sequence`, each row) stop at the loop where its criterion is met;
            `num_loops` is then the maximum. selection="after" runs all loops and reads each token out at its exit;
            "weighted" runs all loops and weights the logits of each with the probability of an exit there. In
            hidden_states, the states of a token after its exit are of loops that were not used.
        labels: [batch, length] tokens, shifted here; -100 is ignored. Or `shift_labels`, already shifted. As in
            transformers' models, they may be those of the positions that `logits_to_keep` keeps, and `ignore_index`
            names another label to ignore. A `loss_function` that was set gets all keyword arguments that are not
            listed here; losses over loops refuse one, as it reads logits.
            The returned loss is the training objective, over all loops if `config.loop_loss` says so; for a
            perplexity take the last of `loop_losses`, with output_loop_losses=True.
        loss_positions: indices of the positions that have a shifted label, in the flattened [batch * length], as a
            numpy array. Without it they are found from `labels`, for which the host waits for a GPU.
        output_logits: False skips the logits if only the loss is needed, which saves their memory in training.
        output_loop_logits: the logits after every loop, from this one pass.
        output_loop_losses: the cross-entropy of `labels` after every loop, for any `loop_loss`; no logits are kept.
        output_exit_probabilities: the exit distribution of the gate.
        output_exit_logits: the logits of all loops, weighted with the exit distribution.
        """
        of_loss = {"labels": labels, "num_items_in_batch": num_items_in_batch}
        of_loss = {name: value for name, value in of_loss.items() if value is not None} | kwargs
        ignore_index = kwargs.pop("ignore_index", IGNORE_INDEX)  # not for the trunk
        check_arguments(kwargs, FORWARD_ARGUMENTS, type(self).__name__)
        shape = check_inputs(input_ids, inputs_embeds).shape[:2]
        depths = read_depths(self.config.num_loops if num_loops is None else num_loops, shape[0])
        inputs = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cache": one_cache(cache, past_key_values),
            "use_cache": use_cache,
            "num_loops": depths,
            "initial_state": initial_state,
        }
        asked = AskedOutputs(
            output_loop_logits=output_loop_logits,
            output_loop_hidden_states=output_loop_hidden_states,
            output_loop_readout_states=output_loop_readout_states,
            output_loop_losses=output_loop_losses,
            output_exit_probabilities=output_exit_probabilities,
            output_exit_logits=output_exit_logits,
        )
        # not a named argument: the Trainer would take it for a label that every batch must have
        shift_labels = kwargs.pop("shift_labels", None)
        if exit_rule is not None:
            refused = {"labels": labels, "shift_labels": shift_labels, "backprop_loops": backprop_loops}
            refuse_with_exits(refused | asked._asdict())
            return forward_with_exits(self, exit_rule, inputs, depths, logits_to_keep, output_logits, kwargs)

        keep = kept_positions(logits_to_keep)
        shifted = self._shifted_labels(labels, shift_labels, shape, keep, ignore_index)
        targets = None if shifted is None else Labels(shifted, num_items_in_batch, loss_positions, of_loss)
        needed = asked.needed(self.config, has_loss=targets is not None)
        if targets is not None and not is_as_written(self, "auxiliary_loss"):
            needed = needed._replace(hidden_states=True, readout_states=True)
        outputs = self.model(
            **inputs,
            backprop_loops=backprop_loops,
            output_loop_hidden_states=needed.hidden_states,
            output_loop_readout_states=needed.readout_states,
            has_loss=targets is not None,
            **kwargs,
        )
        logits = self.logits(outputs.last_hidden_state[:, keep]) if output_logits else None
        return self._output(outputs, asked, needed, logits, keep, depths, targets)

    def _output(self, outputs, asked: AskedOutputs, needed: NeededOfPass, logits, keep, depths, labels: Labels | None):
        """Make the losses, exits and requested outputs from the trunk's outputs. keep: the positions of `logits`."""
        gates = self._gates(outputs) if needed.gates else None
        exits = self._exit_probabilities(gates, depths) if needed.exit_probabilities else None
        loss, losses, token_losses = None, None, None
        if labels is not None:
            in_order = logits if isinstance(keep, slice) else None  # chosen positions may be in any order
            every_loop = asked.output_loop_losses
            if not (self.training or every_loop or torch.is_grad_enabled()):
                warn_of_objective(self.config, self.model.auxiliary_loss_of_head)
            loss, losses, token_losses = self._losses(outputs, in_order, gates, exits, depths, labels, every_loop)
            loss = self._with_auxiliary(loss, outputs, depths, labels)
        return LoopedCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            loop_hidden_states=outputs.loop_hidden_states if asked.output_loop_hidden_states else None,
            loop_readout_states=outputs.loop_readout_states if asked.output_loop_readout_states else None,
            loop_logits=self._loop_logits(outputs, keep, depths) if asked.output_loop_logits else None,
            exit_probabilities=exits.movedim(0, -1) if exits is not None and asked.output_exit_probabilities else None,
            exit_logits=self._exit_logits(outputs, keep, exits, depths) if asked.output_exit_logits else None,
            loop_losses=losses,
            loop_token_losses=token_losses,
            initial_state=outputs.initial_state if asked.output_loop_hidden_states else None,
            **named_cache(outputs.cache),
        )

    def _get_resized_lm_head(self, old_lm_head, *args, **kwargs):
        """Give the head that transformers makes for another vocabulary size its role for the init schemes."""
        head = super()._get_resized_lm_head(old_lm_head, *args, **kwargs)
        if head is not old_lm_head:
            with_role(head, "head")
            head._is_hf_initialized = True  # pyrefly: ignore[bad-argument-type]  a flag of transformers
        return head

    def logits(self, hidden_states):
        """Return the logits of normed states."""
        return self.softcapped(project(self.lm_head, hidden_states))

    def softcapped(self, logits):
        if self.config.logit_softcap is None:
            return logits
        cap = self.config.logit_softcap
        exact = logits if self.config.round_logit_softcap else at_least_fp32(logits)
        return (cap * torch.tanh(exact / cap)).to(logits.dtype)

    def logits_after_loop(self, readout_states, loop: int, depths: int | list[int] | torch.Tensor | None = None):
        """Return logits from the readout norm's input after loop index `loop`, or a shallower row's last loop.

        depths: of all rows, per row, or a tensor that broadcasts over the tokens."""
        return self.logits(self._read_out(readout_states, loop, depths))

    def _read_out(self, readout_states, loop: int, depths: int | list[int] | torch.Tensor | None):
        """Return the head's input after loop index `loop`."""
        if torch.is_tensor(depths):
            return self.model.readout(readout_states, depths.clamp(max=loop + 1))
        depth = [min(loop + 1, depth) for depth in depths] if isinstance(depths, list) else loop + 1
        return self.model.readout(readout_states, depth)

    def _loop_logits(self, outputs, keep, depths: int | list[int]) -> tuple[torch.Tensor, ...]:
        readouts = outputs.loop_readout_states
        return tuple(self.logits_after_loop(state[:, keep], loop, depths) for loop, state in enumerate(readouts))

    def gate(self, state):
        """Return the gate logit of H: [batch, length]."""
        if self.exit_gate is None:
            raise ValueError(
                f"an exit gate is read here (loop_loss={self.config.loop_loss!r}), but this model was built without "
                "one: build it with exit_gate='raw' or 'normed'"
            )
        if self.config.exit_gate == "normed":
            state = self.model.norm(state)
        if self.config.loop_loss == "gate":  # stage II trains only the gate
            state = state.detach()
        return project(self.exit_gate, state).squeeze(-1)

    def _gates(self, outputs) -> torch.Tensor:
        """Return the gate logits after every loop, [loops, batch, length]."""
        trains_gate = self.config.loop_loss == "gate" and self.training and torch.is_grad_enabled()
        if trains_gate and not any(weight.requires_grad for weight in self.exit_gate.parameters()):
            raise ValueError(
                "loop_loss='gate' trains the exit gate alone, whose weights are frozen, so that nothing would be "
                "trained: give them requires_grad, with PEFT by modules_to_save=['exit_gate']"
            )
        return torch.stack([self.gate(state) for state in outputs.loop_hidden_states])

    def _exit_probabilities(self, gates, depths: int | list[int]) -> torch.Tensor:
        """Return the exit distribution, [loops, batch, length]."""
        last_loop = depth_tensor(depths, gates.shape[1], gates.device)[:, None] - 1
        return exit_log_probabilities(gates, last_loop).exp()

    def _exit_weighted(self, readouts, exit_probabilities, depths: int | list[int]):
        """Return sum_k p_k times the head's input after loop k, [batch, length, hidden]. The head is linear, so its
        logits of this sum are the exit-weighted logits."""
        terms = (
            probability.unsqueeze(-1) * self._read_out(state, loop, depths)
            for loop, (state, probability) in enumerate(zip(readouts, exit_probabilities))
        )
        return reduce(torch.add, terms).to(readouts[0].dtype)

    def _exit_logits(self, outputs, keep, exit_probabilities, depths: int | list[int]):
        kept = [state[:, keep] for state in outputs.loop_readout_states]
        return self.logits(self._exit_weighted(kept, exit_probabilities[:, :, keep], depths))

    def save_pretrained(self, *args, **kwargs) -> None:
        self._prepare_generation_config_for_saving()
        super().save_pretrained(*args, **kwargs)

    parameter_groups = parameter_groups

    def sample_initial_state(self, batch_size: int, length: int, generator: torch.Generator | None = None):
        return self.model.sample_initial_state(batch_size, length, generator)


FORWARD_ARGUMENTS = frozenset(signature(LoopedForCausalLM.forward).parameters)

__all__ = ["LoopedForCausalLM"]
