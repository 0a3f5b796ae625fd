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
"""Looped language models: a decoder that applies the same block of layers `num_loops` times.

`LoopedModel.forward` runs the model, and its method `loop` runs the loops. Each of the other files has one subject.
These are enough to understand the model: configuration_looped (its axes), config_layers (slots of the cache), context
(what a block gets), layers (a block), injection (how a loop starts), depth (which rows run), cache (keys and values of
each loop), causal_lm (the language model on top), loss_of_model, losses. Then generation: exit_criteria (when a
token is done), continuous (rows at different loops), speculation (drafts after few loops). The others serve these, or
other software.
"""

from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from .cache import CacheView, view_for_pass
from .checks import (
    check_computes_again,
    check_hooks_of_weights,
    check_inputs,
    check_last_state,
    check_serves_deeper_loops,
    check_starts_from_noise,
    check_trunk,
    is_recorded,
    leave_out_cache,
    why_no_cache,
)
from .clients import refuse_adapters_of_rows
from .compatibility import CACHE, OtherArguments, captured, config_defaults, named_cache, one_cache
from .compiled_blocks import can_have_regions
from .configuration_looped import READOUTS, LoopedConfig
from .context import LoopInputs, PassContext, name_of_loop
from .cpu import project
from .depth import DepthPlan, one_or_rows, plan_depths
from .exit_watch import SequenceExits, TokenExits
from .foreign_names import check_arguments
from .initialization import small_std
from .injection import INJECTIONS, LoopChangeGate
from .layers import (
    AttentionSite,
    DeeperSite,
    LoopDamping,
    LoopedBlock,
    linear,
    rotary_embeddings,
    rotary_tables,
    with_role,
)
from .loop_embedding import LOOP_EMBEDDINGS
from .loop_parameters import select_set
from .norms import block_norm
from .outputs import LoopedModelOutputWithPast, unrecorded
from .overrides import has_changed_call, has_global_hooks, is_as_written
from .pretrained import LoopedPreTrainedModel
from .readouts import AlphaReadout, has_reached, readout_norm
from .samplers import truncated_normal_
from .tensors import first_rows, wide_dtype
from .training_warnings import warn_of_another_loss, warn_of_training


MOST_LOOPS_WITH_SITES = 1024  # each pass makes the attention sites of deeper loops anew


class LoopedModel(LoopedPreTrainedModel):
    """Embedding, prelude, the loop, coda and readout norm."""

    without_head = [r"exit_gate"]  # the trunk has no gate, so it ignores that of a language model's checkpoint
    _keys_to_ignore_on_load_unexpected = without_head
    auxiliary_loss_of_head: str | None = None  # its name for a warning, where a subclass of the head adds one

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        table = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_tokens = with_role(table, "embedding")
        if config.position_embedding == "learned":
            table = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            self.embed_positions = with_role(table, "position")
        else:
            self.rotary_emb = rotary_embeddings(config)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16) if config.round_embedding_scale else ()
        # on the CPU, since the default device may be meta
        scales = ((dtype, torch.tensor(config.embedding_scale, dtype=dtype, device="cpu")) for dtype in dtypes)
        self.embedding_scales = {dtype: float(scale) for dtype, scale in scales}  # replace config.embedding_scale

        prelude, core, coda = config.section_layer_types()
        self.layer_types = sorted({*prelude, *core, *coda})
        ropes = config.section_ropes()
        self.ropes = sorted({rope for of_section in ropes for rope in of_section if rope is not None})
        sections = (
            self._blocks("prelude", prelude, ropes[0], first_layer=0),
            self._blocks("core", core, ropes[1], first_layer=len(prelude)),
            self._blocks("coda", coda, ropes[2], first_layer=len(prelude + core)),
        )
        self.prelude, self.core, self.coda = (nn.ModuleList(blocks) for blocks in sections)
        # in one flat list by slot, where serving engines look for them
        self.attention_sites = nn.ModuleList(self._sites())
        self.value_embeds = nn.ModuleDict()  # by layer
        for block in chain(*sections):
            if config.has_value_embedding(block.layer):
                table = nn.Embedding(config.vocab_size, block.self_attn.v_proj.out_features)
                self.value_embeds[str(block.layer)] = with_role(table, "value_table")

        self.prelude_norm = block_norm(config) if config.prelude_norm else None
        self.injection = INJECTIONS[config.injection](config)
        self.num_loop_sets = config.num_loop_sets if config.has_sets_in_core else None
        self.loop_embedding = LOOP_EMBEDDINGS[config.loop_embedding](config)
        self.inter_loop_norm = block_norm(config, config.state_size) if config.inter_loop_norm == "own" else None
        self.loops_share_norm = config.inter_loop_norm == "shared"
        self.damping = LoopDamping(config) if config.loop_damping else None
        self.change_gate = LoopChangeGate(config) if config.loop_change_gate else None
        # returns H alone, so that hooks have one place to read it: blocks that share keys return keys and values too
        self.state_alone = nn.Identity() if config.shares_keys else None
        self.coda_proj = (
            linear(config.state_size, config.hidden_size, "readout") if config.coda_input == "linear" else None
        )
        # None where the config has no such readout; `_read` then never uses it
        self.norm: nn.Module = readout_norm(config)  # pyrefly: ignore[bad-assignment]
        alpha_readout = AlphaReadout(config) if "alpha" in READOUTS[config.readout_norm] else None
        self.alpha_readout: AlphaReadout = alpha_readout  # pyrefly: ignore[bad-assignment]
        if config._attn_implementation == "sglang" and config.exit_gate != "none":
            # SGLang builds only the trunk and refuses a checkpoint tensor that has no module
            self.exit_gate = linear(config.state_size, 1, "gate", bias=True)
        self.gradient_checkpointing = False
        self.checkpoints_loops = False  # keep only the state of each loop, recompute the rest in backward
        self.post_init()

    def _blocks(
        self, section: str, layer_types: list[str], ropes: list[str | None], first_layer: int
    ) -> list[LoopedBlock]:
        sizes = self.config.block_sizes(section)
        return [
            LoopedBlock(self.config, sizes, first_layer + i, layer_type, rope)
            for i, (layer_type, rope) in enumerate(zip(layer_types, ropes))
        ]

    def _sites(self) -> list[AttentionSite]:
        loops = min(self.config.num_stored_loops(self.config.num_loops), MOST_LOOPS_WITH_SITES)
        return [AttentionSite(self.config, kind, slot) for slot, kind in enumerate(self.config.types_of_slots(loops))]

    def site(self, slot: int) -> AttentionSite | DeeperSite:
        """Return the attention site of a slot. Beyond the configured depth it is no module; passes make it anew."""
        if slot < len(self.attention_sites):
            return cast(AttentionSite, self.attention_sites[slot])
        first_slot, loop = self.config.split_slot(slot)
        site = cast(AttentionSite, self.attention_sites[first_slot])
        check_serves_deeper_loops(site, first_slot, loop)
        return DeeperSite(site, slot)

    @torch.compiler.assume_constant_result
    def differs_by_call(self) -> bool:
        """Return whether hooks, or functions in the place of others, may see one loop of a block and not the next.
        Asked while a pass is compiled."""
        sites = self.attention_sites
        parts = chain(self.prelude.modules(), self.core.modules(), self.coda.modules(), sites)
        has_own_sites = not all(is_as_written(site, "forward") for site in sites)  # of which a region calls one
        return has_own_sites or has_global_hooks() or any(map(has_changed_call, parts))

    @property
    def computes_again(self) -> bool:
        blocks = chain(self.prelude, self.core, self.coda)  # every_n_layers of transformers may leave out some
        return self.checkpoints_loops or any(getattr(block, "gradient_checkpointing", False) for block in blocks)

    @config_defaults
    @captured
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | list[int] | torch.Tensor | None = None,
        backprop_loops: int | None = None,
        initial_state: torch.Tensor | None = None,
        exit_watch: TokenExits | SequenceExits | None = None,
        past_key_values: Cache | None = None,
        output_loop_hidden_states: bool = False,
        output_loop_readout_states: bool = False,
        has_loss: bool = False,
        **kwargs: OtherArguments,
    ) -> LoopedModelOutputWithPast:
        r"""
        num_loops: depth of this pass, one number or one per sequence; by default `config.num_loops`.
        backprop_loops: gradients flow only through this many last loops of each row; earlier states are constants.
        initial_state: h_0, [batch, length, config.state_size], instead of the one that `state_init` names: noise, or
            a state to continue from, `to_next_loop(H)` of another run. Loops are counted from 0 again.
        exit_watch: decides after every loop which tokens, or which rows, stop there.
        output_loop_hidden_states, output_loop_readout_states: return the states of every loop.
        has_loss: the caller computes the model's own loss from the outputs; without it, a training pass warns of the
            losses that are left out.
        """
        check_arguments(kwargs, TRUNK_ARGUMENTS, type(self).__name__)
        if self.training and torch.is_grad_enabled() and not has_loss:
            warn_of_another_loss(self.config, self.auxiliary_loss_of_head)
        inputs_embeds = self._input_embeddings(input_ids, inputs_embeds)
        depths = self.config.num_loops if num_loops is None else num_loops
        plan = plan_depths(depths, inputs_embeds.shape[0], backprop_loops)
        may_exit = exit_watch is not None and exit_watch.needs_cache
        cache = one_cache(cache, past_key_values)
        cache, use_cache = self._usable_cache(cache, use_cache, plan, output_loop_readout_states)
        every_loop = output_loop_hidden_states or output_loop_readout_states
        check_trunk(
            self, plan, inputs_embeds, attention_mask, position_ids, cache, initial_state, every_loop, options=kwargs
        )
        if plan.is_mixed or exit_watch is not None:
            refuse_adapters_of_rows(self)

        # from here to the end of the loop, rows are sorted by depth
        input_ids, inputs_embeds, attention_mask, position_ids, initial_state = (
            plan.sort(tensor) for tensor in (input_ids, inputs_embeds, attention_mask, position_ids, initial_state)
        )
        inputs = input_ids, inputs_embeds, attention_mask, position_ids
        options = {"use_cache": use_cache, **{name: plan.sort(value) for name, value in kwargs.items()}}
        x, context, cache = self._enter(*inputs, cache, plan, may_exit, options)
        embedded = self.run_prelude(x, context)
        state = self.initial_state(embedded, initial_state)
        if self.training and torch.is_grad_enabled():
            warn_of_training(self, plan, len(embedded), has_first_state=initial_state is not None)
        if exit_watch is None:
            final, states = self.loop(embedded, state, plan, every_loop, context)
            if every_loop and not is_as_written(self, "loop"):
                check_last_state(type(self).__name__, final, states, plan)
        else:
            final, states = self.loop_with_exits(embedded, state, plan, context, exit_watch), []

        loop_readout_states = self.run_coda_after_all(states, plan, context) if output_loop_readout_states else None
        if loop_readout_states is None:
            final = plan.unsort(self.run_coda(final, context))
        else:
            final = loop_readout_states[-1]
        if isinstance(context.cache, CacheView):
            context.cache.finish()
        return LoopedModelOutputWithPast(
            last_hidden_state=self.readout(final, plan.depths if exit_watch is None else exit_watch.token_loops),
            loop_hidden_states=plan.spread(states) if output_loop_hidden_states else None,
            loop_readout_states=loop_readout_states,
            initial_state=plan.first_state(state) if output_loop_hidden_states else None,
            **named_cache(cache),
        )

    def _usable_cache(
        self, cache: Cache | None, use_cache: bool | None, plan: DepthPlan, reads_every_loop: bool
    ) -> tuple[Cache | None, bool | None]:
        """Return the cache of this pass and whether to make one; raise if the caller's cache cannot be filled."""
        if self.training and torch.is_grad_enabled() and self.computes_again:
            check_computes_again(self.config, self.checkpoints_loops)
            loops = min(2, sum(tick.has_gradient for tick in plan.ticks))  # two stand for more
            codas = loops if reads_every_loop else 1
            check_hooks_of_weights([*self.prelude, *list(self.core) * loops, *list(self.coda) * codas])
            leave_out_cache(cache)  # blocks that run a second time would fill it twice
            cache, use_cache = None, False
        reason = why_no_cache(self.config, plan, reads_every_loop)
        if reason is None:
            return cache, use_cache
        if cache is not None:
            raise ValueError(f"this pass cannot fill a cache: {reason}. Run without a cache.")
        return None, False  # use_cache is True by default, so it is no error if no cache can be made

    def _enter(
        self,
        input_ids,
        inputs_embeds,
        attention_mask,
        position_ids,
        cache: Cache | None,
        plan: DepthPlan,
        may_exit: bool,
        options: dict,
    ) -> tuple[torch.Tensor, PassContext, Cache | None]:
        """Return the input of the first layer, the context that all blocks of this pass read, and the cache."""
        has_regions = can_have_regions(cache, attention_mask, position_ids)
        has_regions = has_regions and not (is_recorded(self.config, options) or self.differs_by_call())
        # transformers detects packed documents from positions, which it compares on the device. Those made here never
        # restart, so it gets only the caller's
        of_documents = position_ids
        if position_ids is None:
            position_ids = self._positions(inputs_embeds, attention_mask, cache)
        # masks are made before the cache: with a cache, transformers does not look for documents
        masks = self.attention_masks(attention_mask, inputs_embeds, cache, of_documents, plan)
        if cache is None and (options["use_cache"] or may_exit):
            cache = DynamicCache(config=self.config)
        view = view_for_pass(cache, self.config, plan, may_exit=may_exit)
        x = self.embed(inputs_embeds, position_ids)
        context = PassContext(
            num_rows=inputs_embeds.shape[0],
            masks=masks,
            position_ids=position_ids,
            position_embeddings=self.rotary(x, position_ids),
            value_embeddings=self.value_embeddings(input_ids),
            cache=view,
            site=self.site,
            slots_per_loop=len(self.core),
            kept={self.config.core_slot(0) + i: () for i in range(len(self.core)) if self.config.shares_keys},
            options=options,
            has_regions=has_regions and view is cache,
        )
        return x, context, cache

    def _input_embeddings(self, input_ids, inputs_embeds: Any) -> torch.Tensor:
        check_inputs(input_ids, inputs_embeds)
        if inputs_embeds is None:
            return self.embed_tokens(input_ids)
        if self.config.value_embeddings:
            raise ValueError(
                "value_embeddings are looked up by token: pass input_ids instead of inputs_embeds, which prompt "
                "tuning and its like pass too (prefix tuning and LoRA do not)"
            )
        return inputs_embeds

    def embed(self, inputs_embeds, position_ids):
        """Return the input of the first layer."""
        x = self.scaled(inputs_embeds)
        if self.config.position_embedding == "learned":
            x = x + self.embed_positions(position_ids)
        return self.embedding_dropout(x) if self.training else x

    def scaled(self, inputs_embeds):
        scale = self.embedding_scales.get(inputs_embeds.dtype, self.config.embedding_scale)
        return inputs_embeds if scale == 1 else inputs_embeds * scale

    def rotary(self, x, position_ids) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return the rotary tables, [rows, length, 1, head_dim], of each kind that layers read, in the dtype of x, or
        in at least fp32 if heads are rounded after the rotation."""
        if self.ropes and self.config.rope_rounding == "rotated":
            x = x.new_empty(1, dtype=wide_dtype(x))
        for module in map(self.rotary_of, self.ropes):
            if "dynamic" in str(getattr(module, "rope_type", "")):  # it keeps the angles of the longest text yet
                module.max_seq_len_cached, module.inv_freq = module.original_max_seq_len, module.original_inv_freq
        return {kind: rotary_tables(*self.rotary_of(kind)(x, position_ids=position_ids)) for kind in self.ropes}

    def rotary_of(self, kind: str) -> nn.Module:
        """Return the module that makes the tables of one kind in `self.ropes`."""
        return self.rotary_emb[kind] if isinstance(self.rotary_emb, nn.ModuleDict) else self.rotary_emb

    def run_prelude(self, x, context: PassContext | None):
        """Turn embeddings into the input that every loop may read. Without a prelude, context may be None."""
        once = LoopInputs(self.config.residual_factor(1))
        for slot, block in enumerate(self.prelude):
            assert context is not None
            x = context.run(block, x, slot, once)
        return x if self.prelude_norm is None else self.prelude_norm(x)

    def loop(self, embedded, state, plan: DepthPlan, every_loop: bool, context: PassContext):
        """Return H after each row's last loop, and H after every tick if `every_loop`; rows are sorted by depth.

        With one depth K for all rows this is

            for t in range(K):
                H = core_pass(h, e, t, K)
                h = to_next_loop(H)

        and the rest serves rows of different depth and loops without gradient. `loop_with_exits` is the same with
        exits, `loop_in_step` for tokens that are at different positions.
        """
        running, finished, states = first_rows(state, plan.ticks[0].rows), [], []
        for tick in plan.ticks:
            # sliced outside of no_grad: torch's FLOP counter refuses views that are made inside
            embedded_rows, context_of_rows = first_rows(embedded, tick.rows), context.of_first_rows(tick.rows)
            with nullcontext() if tick.has_gradient else torch.no_grad():
                if running.shape[0] < tick.rows:  # rows that join now
                    running = torch.cat([running, state[running.shape[0] : tick.rows]])
                inputs = running, embedded_rows, tick.loop, tick.depth, context_of_rows
                if self.checkpoints_loops and self.training and torch.is_grad_enabled():
                    x = checkpoint(self.one_loop, *inputs, use_reentrant=False)
                else:
                    x = self.one_loop(*inputs)
                if every_loop:
                    states.append(x)
                if tick.next_rows < tick.rows:
                    finished.append(x[tick.next_rows :])
                if tick.next_rows:
                    running = self.to_next_loop(first_rows(x, tick.next_rows))
        return (finished[0] if len(finished) == 1 else torch.cat(finished[::-1])), states

    def loop_with_exits(self, embedded, state, plan: DepthPlan, context: PassContext, watch):
        """Return H of every token at its exit; rows that `watch` removes from the batch cost nothing afterwards."""
        for loop in range(plan.max_depth):
            state = self.one_loop(state, embedded, loop, plan.max_depth, context)
            state, rows = watch.after_loop(loop + 1, state, context)
            if watch.is_done(loop + 1):
                break
            if rows is not None:
                embedded, context = embedded[rows], context.of_rows(rows, len(rows))
            state = self.to_next_loop(state)
        return watch.final

    def loop_in_step(self, embedded, num_loops: int, context: PassContext):
        """Return H after `num_loops` loops, for tokens at different positions that are all at the same loop; the cache
        view is moved to each loop."""
        state = self.initial_state(embedded, None)
        for loop in range(num_loops):
            context.cache.go_to([loop] * len(embedded))
            state = state if loop == 0 else self.to_next_loop(state)
            state = self.one_loop(state, embedded, loop, num_loops, context)
        return state

    def one_loop(self, state, embedded, loop: Any, depth: int | list[int], context: PassContext):
        """Run `core_pass`, and refuse one that leaves slots of the cache empty."""
        before = len(context.ran)
        state, count = self.core_pass(state, embedded, loop, depth, context), len(context.ran) - before
        if context.cache is not None and count != len(self.core):  # in every loop: words are made only if needed
            raise ValueError(
                f"core_pass ran {count} of the {len(self.core)} core layers in {name_of_loop(loop)}, and the cache "
                "has a slot for each: to leave out a loop, run it and return `state`, or pass use_cache=False"
            )
        return state

    def core_pass(self, state, embedded, loop: Any, depth: int | list[int], context: PassContext):
        """Run one loop: from h_t to H_{t+1}. loop: t, counted from 0; depth: the number of loops of the run. Each is
        one int for all rows, or a list of one per row; `loop` may be a tensor if the model only needs to know whether
        it is the first."""
        x = self.injection(state, embedded)
        time = None if self.loop_embedding is None else self.loop_embedding(loop, depth, x)
        if time is not None and self.config.loop_embedding != "modulation":
            x = x + time
        inputs, first_slot = self.loop_inputs(loop, depth, time, embedded, context), self.config.core_slot(0)
        for layer, block in enumerate(self.core):
            x, queries = self.injection.before_layer(layer, x, state, inputs.is_first)
            x = context.run(block, x, first_slot + layer, inputs, queries)
        if self.change_gate is not None:
            x = self.change_gate(state, x, inputs.is_first)
        return x if self.state_alone is None else self.state_alone(x)

    def loop_inputs(self, loop: Any, depth: int | list[int], time, embedded, context: PassContext) -> LoopInputs:
        """Return what depends on the loop, one value if it is the same for all rows, else a tensor of one per row."""
        config, device, sets = self.config, embedded.device, self.num_loop_sets
        return LoopInputs(
            residual_factor=one_or_rows(self.residual_factor, depth, device, 3, embedded.dtype),
            is_first=one_or_rows(lambda t: t == 0, loop, device, 3) if self.looks_at_first else False,
            # where rows are at different loops (a list), there is no cache, or a view that knows each row's loop
            slots_before=config.stored_loop(loop) * context.slots_per_loop if isinstance(loop, int) else 0,
            time=time,
            loop_set=None if sets is None else select_set(loop, sets, device),
            makes_keys=one_or_rows(config.makes_keys, loop, device, 4) if config.shares_keys else True,
            number=loop,
        )

    @property
    def end_of_loop(self) -> nn.Module:
        """The module that returns H in every loop, for hooks."""
        return self.state_alone or self.change_gate or self.core[-1]

    @property
    def looks_at_first(self) -> bool:
        """Whether the first loop is computed differently from later ones."""
        return getattr(self.injection, "looks_at_first", False) or self.change_gate is not None

    def to_next_loop(self, state):
        """Turn H into the state that the next loop starts from."""
        if self.loops_share_norm:
            state = self.norm(state)
        elif self.inter_loop_norm is not None:
            state = self.inter_loop_norm(state)
        return state if self.damping is None else self.damping(state)

    def run_coda(self, state, context: PassContext | None):
        """Turn H into the input of the readout norm. Without a coda, context may be None."""
        if self.config.coda_input == "norm":
            state = self.norm(state)
        elif self.coda_proj is not None:
            state = project(self.coda_proj, state)
        once = LoopInputs(self.config.residual_factor(1))
        for slot, block in enumerate(self.coda, start=len(self.prelude)):
            assert context is not None
            state = context.of_first_rows(state.shape[0]).run(block, state, slot, once)
        return state

    def run_coda_after_all(self, states: list, plan: DepthPlan, context: PassContext):
        """Return the input of the readout norm after every loop. Only the last run of the coda is recorded."""
        shallower = [unrecorded(self.run_coda, state, context) for state in states[:-1]]
        return plan.spread([*shallower, self.run_coda(states[-1], context)])

    @property
    def reads_alike(self) -> bool:
        """Whether the readout is the same after every loop."""
        return set(READOUTS[self.config.readout_norm]) in ({"raw"}, {"norm"})

    def readout(self, x, depth: int | list[int] | torch.Tensor):
        """Return the head's input after `depth` loops: an int, a list of one per row, or a tensor [rows, length]."""
        below, from_there_on = READOUTS[self.config.readout_norm]
        reached = below == from_there_on or has_reached(self.trained_depth, depth, x.device)
        if isinstance(reached, bool):
            return self._read(from_there_on if reached else below, x, depth)
        deep, shallow = self._read(from_there_on, x, depth), self._read(below, x, depth)
        return torch.where(reached.to(deep.device), deep, shallow.to(deep.device))

    def _read(self, kind: str, x, depth):
        if kind == "alpha":
            return self.alpha_readout(x, depth)
        return x if kind == "raw" else self.norm(x)

    def initial_state(self, embedded, given: torch.Tensor | None):
        if given is not None:
            if self.looks_at_first and self.config.state_init != "normal":
                raise ValueError(
                    "this model runs its first loop otherwise than later ones (injection="
                    f"{self.config.injection!r}, loop_change_gate={self.config.loop_change_gate}), so it begins from "
                    f"the state that state_init={self.config.state_init!r} says alone: leave out initial_state"
                )
            if given.shape[-1] != self.config.state_size:
                raise ValueError(
                    f"initial_state has shape {tuple(given.shape)}, but the state of a token has "
                    f"state_size={self.config.state_size} numbers: pass as many, or override `initial_state` in a "
                    "trunk of your own whose states are wider"
                )
            return given.to(embedded)
        if self.config.state_init == "embedding":
            return embedded
        return embedded.new_zeros(*embedded.shape[:-1], self.config.state_size)

    def sample_initial_state(self, batch_size: int, length: int, generator: torch.Generator | None = None):
        """Draw noise for `initial_state`, cut at three standard deviations. The model itself never draws noise."""
        check_starts_from_noise(self.config)
        std = self.config.state_init_std
        if std is None:
            std = small_std(self.config.hidden_size) * self.config.embedding_scale
        device = self.device if generator is None else generator.device
        state = torch.empty(batch_size, length, self.config.state_size, device=device)
        return truncated_normal_(state, std, generator)

    def value_embeddings(self, input_ids) -> dict[int, torch.Tensor]:
        return {int(layer): table(input_ids) for layer, table in self.value_embeds.items()}

    def residual_factor(self, depth: int) -> float:
        """Return eps, the residual factor of the core, in a run of `depth` loops."""
        return self.config.residual_factor(depth if self.config.residual_depth == "run" else self.trained_depth)

    def _positions(self, inputs_embeds, attention_mask, cache):
        """Return positions that continue the cache. Learned ones skip padding, since unlike RoPE they are absolute."""
        length = inputs_embeds.shape[1]
        if (
            self.config.position_embedding == "learned"
            and torch.is_tensor(attention_mask)
            and attention_mask.ndim == 2
        ):
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        past = cache.get_seq_length() if cache is not None else 0
        return (torch.arange(length, device=inputs_embeds.device) + past).unsqueeze(0)

    def attention_masks(self, attention_mask, inputs_embeds, cache, position_ids, plan: DepthPlan) -> dict:
        if isinstance(attention_mask, dict):  # prepared by generate
            return {layer_type: plan.sort(mask) for layer_type, mask in attention_mask.items()}
        arguments = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            CACHE: cache if isinstance(cache, Cache) else None,  # a paged cache does not determine masks
            "position_ids": position_ids,
        }
        makers: dict[str, Callable] = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
        }
        is_bare = attention_mask is None and cache is None and position_ids is None
        # the kernel's own causal mask suffices, but in an exported graph it cannot tell one token from many
        is_plain = is_bare and self.config._attn_implementation == "sdpa" and not torch.compiler.is_exporting()
        if is_plain and torch.jit.is_tracing():  # else a trace lacks the windows that its example does not fill
            arguments["attention_mask"] = torch.ones_like(inputs_embeds[..., 0])
        if is_plain and torch.compiler.is_compiling():
            makers["full_attention"] = lambda **_: None  # older transformers make a mask in every compiled pass
        return {layer_type: makers[layer_type](**arguments) for layer_type in self.layer_types}


TRUNK_ARGUMENTS = frozenset(signature(LoopedModel.forward).parameters)

__all__ = ["LoopedModel", "LoopedPreTrainedModel"]
