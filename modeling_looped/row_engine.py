"""A batch whose rows decode independently: its prompt, its cache and its output; checks whether a call allows this.

Passes over its rows: `row_passes.py`.
"""

import math
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch

from .cache import LoopedCache, sharing_of
from .checks import check_length
from .clients import ADAPTERS_OF_ROWS, gives_rows_adapters
from .compatibility import CACHE, look_up, named_cache
from .depth import read_depth_per_row
from .exit_criteria import ExitRule
from .outputs import LoopedGenerateOutput
from .overrides import attention_is_as_written, has_hooks, is_as_written, is_split
from .row_graphs import RowGraphs, can_have_graphs
from .row_pages import PagedRows, Pages
from .row_passes import TOKENS_OF_COPIES, TokensOfEngine, enter
from .row_view import Padding
from .tensors import members_by_number, on_device
from .token_selector import TokenSelector, first_batchwise_part


FLEX = "flex_attention"
# model arguments that passes over rows can serve; a call with any other argument needs ordinary passes
IN_TICKS = {"attention_mask", "position_ids", CACHE, "use_cache", "num_loops"}
IN_TICKS |= {"logits_to_keep", "tokenizer"}  # without effect in these passes


def obstacle_to_row_engine(model, processors, criteria, config, synced_gpus: bool, model_kwargs: dict) -> str | None:
    """Return why this batch cannot be decoded here, or None."""
    cache, implementation = model_kwargs.get(CACHE), model.config._attn_implementation
    sharing = sharing_of(cache)
    quantized = look_up("transformers.cache_utils", "QuantizedCache", ())
    obstacles = {
        f"attn_implementation={implementation!r}": implementation not in ("sdpa", "eager", FLEX),
        f"attn_implementation={implementation!r} and cache_dtype='int8'": implementation == FLEX
        and config.depth_options.is_int8,
        # pages of all layers have tables in common
        f"attn_implementation={implementation!r} and layers on several devices": implementation == FLEX
        and is_split(model),
        "use_cache=False": not model_kwargs.get("use_cache", True),
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "synced_gpus": synced_gpus,
        "an assistant's cache": config.is_assistant,
        "a quantized cache, which cannot be cropped": isinstance(cache, quantized),
        "an offloaded cache": getattr(cache, "offloading", False),
        # in buffers of rows each loop of a slot overwrites the one before
        f"cache_sharing={sharing!r}": sharing in ("first", "average"),
        ADAPTERS_OF_ROWS: gives_rows_adapters(model),
        "a forward, loop or attention that is not the model's own": not has_own_passes(model),
        "hooks on the model, its trunk or its attention_sites": has_hooks_on_passes(model),
    }
    standing = next((name for name, stands in obstacles.items() if stands), None)
    if standing is not None or config.depth_options.draft_loops is None:
        return standing
    if is_split(model):
        return "layers on several devices"
    # with drafts, rows are at different places, and some of their tokens are dropped again
    if (rope_type := rope_type_by_length(model.model)) is not None:
        return f"rope_type={rope_type!r}, whose angles depend on the longest text so far"
    return first_batchwise_part(processors, criteria)


def has_own_passes(model) -> bool:
    """Return whether no method of a pass was replaced: rows here run only parts of a pass, with another attention."""
    trunk = model.model
    blocks = chain(trunk.prelude, trunk.core, trunk.coda)
    attentions = [block.self_attn for block in blocks if hasattr(block, "self_attn")]
    parts = {
        model: ("forward",),
        trunk: ("forward", "loop", "_enter", "_input_embeddings", "attention_masks"),
        **dict.fromkeys(attentions, ("forward", "attend")),
        **dict.fromkeys(trunk.attention_sites, ("forward",)),
    }
    if not attention_is_as_written(trunk.config._attn_implementation):
        return False
    return all(is_as_written(part, *methods) for part, methods in parts.items())


def has_hooks_on_passes(model) -> bool:
    """Return whether modules have hooks that would not run, because decoding here does not call these modules."""
    return any(map(has_hooks, (model, model.model, *model.model.attention_sites)))


def decodes_in_pages(model) -> bool:
    return model.config._attn_implementation == FLEX


def rope_type_by_length(trunk) -> str | None:
    """Return the RoPE type whose angles change with the length of the sequence, or None if the model has none."""
    types = [trunk.rotary_of(kind).rope_type for kind in trunk.ropes]
    return next((each for each in types if "dynamic" in each or each == "longrope"), None)


def may_be_cut(trunk, config, model_kwargs: dict) -> bool:
    """Return whether the prompt may run in parts, each of which sees the earlier parts in the cache."""
    is_whole = config.cache_is_given or model_kwargs.get("inputs_embeds") is not None  # transformers cuts neither well
    is_whole |= sharing_of(model_kwargs.get(CACHE)) != "none"  # what tokens see would depend on the cuts
    return config.prefill_chunk_size is None and not is_whole and rope_type_by_length(trunk) is None


def prompt_goes_in_ticks(model, padding: Padding, config, model_kwargs: dict) -> bool:
    """Return whether prompt tokens can be rows of decoding passes, with the same result as in a separate pass."""
    options, cache = config.depth_options, model_kwargs.get(CACHE)
    is_ours = type(cache) is LoopedCache
    others = {name for name, value in model_kwargs.items() if value is not None} - IN_TICKS
    is_plain = not (options.is_int8 or options.warm_start or padding.has_holes or padding.has_empty_rows or others)
    is_in_one_place = model.tp_size is None and len(set(getattr(model, "hf_device_map", {}).values())) <= 1
    if not (is_ours and is_plain and is_in_one_place and may_be_cut(model.model, config, model_kwargs)):
        return False
    device = model.device.type  # "meta" where layers are offloaded
    if device == "meta" or not padding.goes_with(model_kwargs.get("position_ids")):
        return False
    if decodes_in_pages(model):
        return not any(padding.starts)  # a reserved page marks all its places as tokens, none as padding
    return device == "cpu" and model.config.attention_softcap is None


class PassesOfOthers(NamedTuple):
    """Settings of a batch that shares passes with other batches."""

    prompt_tokens: int  # the most prompt tokens in a pass
    after_loop: Callable[[int], None]  # called after each loop of a separate prompt pass, with its number of tokens
    pages: Pages


class RowEngine:
    """Runs the prompt, and holds what single loops of rows need. model: the causal LM; arguments: of its `_sample`.

    has_graphs: result of `can_have_graphs` where the caller has it already, since that check visits every module.
    others: set if other batches share passes with this one. A prompt that can run in the passes of their rows is left
    to `row_prompts.py`.
    """

    def __init__(
        self,
        model,
        input_ids,
        processors,
        criteria,
        config,
        streamer,
        model_kwargs: dict,
        others: PassesOfOthers | None = None,
        has_graphs: bool | None = None,
    ):
        self.model, self.trunk, self.config, self.options = model, model.model, config, config.depth_options
        self.selector = TokenSelector(input_ids, processors, criteria, config, streamer)
        self.num_rows, self.rule = len(input_ids), self.options.exit_rule(model.config)
        self.prompt_loops = None if self.rule is None else self.options.prompt_loops
        # these depths were repeated along with the prompts, unlike num_loops of the options
        self.limits = read_depth_per_row(model_kwargs.get("num_loops", model.config.num_loops), self.num_rows)
        self.depths_of_prompts = [min(loops, self.prompt_loops or loops) for loops in self.limits]
        self.rotary_table = None  # cos and sin by position
        mask = model_kwargs.get("attention_mask")
        self.padding = Padding(None if mask is None else mask.bool(), self.num_rows)
        self.decodes_in_pages, self.warm_state = decodes_in_pages(model), None
        self.prompt_is_left = others is not None and prompt_goes_in_ticks(model, self.padding, config, model_kwargs)
        if self.prompt_is_left:
            check_length(model.config, input_ids.shape[1])
            logits, self.given_cache, self.prompt_length = None, model_kwargs[CACHE], input_ids.shape[1]
        else:
            logits = self.read_prompt(input_ids, model_kwargs, others)
        self.held_before = self.prompt_length - input_ids.shape[1]  # tokens in the cache without ids
        self.cache: Any = self.hold(None if others is None else others.pages)  # LoopedCache or PagedRows
        self.shifts = self.shifts_of(model_kwargs.get("position_ids"))
        self.furthest = self.prompt_length - 1 + max(self.shifts)  # of all positions so far
        if has_graphs is None:
            has_graphs = can_have_graphs(model, self.options.is_int8)
        self.graphs = RowGraphs(self) if has_graphs else None
        if logits is not None:
            self.emit_first(logits)

    def read_prompt(self, input_ids, model_kwargs: dict, others: PassesOfOthers | None) -> torch.Tensor:
        """Run the prompt, after which the cache holds it. Return the logits of its last token."""
        length, after_loop = input_ids.shape[1], None
        if others is not None:
            after_loop = others.after_loop
            if length > others.prompt_tokens and may_be_cut(self.trunk, self.config, model_kwargs):
                self.config.prefill_chunk_size = others.prompt_tokens
        outputs = self.prefill(input_ids, model_kwargs, after_loop)
        self.given_cache = outputs.cache
        self.prompt_length = int(self.given_cache.get_seq_length())
        return outputs.logits[:, -1]

    def shifts_of(self, positions: torch.Tensor | None) -> list[int]:
        """Return position minus place for each row; positions do not count padding."""
        if positions is None:
            return [0] * self.num_rows
        shifts = (positions[:, -1] - (self.prompt_length - 1)).tolist()
        return shifts * (self.num_rows // len(positions))

    def emit_first(self, logits: torch.Tensor):
        try:
            self.selector.emit(list(range(self.num_rows)), logits, self.depths_of_prompts)
        except BaseException:  # also if a client has disconnected
            self.release()
            raise

    def hold(self, pages: Pages | None) -> LoopedCache | PagedRows:
        """Return the cache of the prompt, or an empty one for it, in a form in which rows can go on independently."""
        is_ours = isinstance(self.given_cache, LoopedCache)
        cache = self.given_cache if is_ours else LoopedCache(self.model.config, num_loops=max(self.limits))
        if self.prompt_is_left:
            cache.begin_empty(self.num_rows, self.trunk.embed_tokens.weight)
        if self.decodes_in_pages:
            pages = Pages(self.model.config) if pages is None else pages
            held = PagedRows(pages, self.given_cache, cache, self.padding.mask)
            if not self.returns_cache:
                self.given_cache.layers.clear()
            return held
        cache.is_int8 = self.options.is_int8  # an earlier call may have set it otherwise
        cache.fill_buffers(self.given_cache, self.config.max_length, self.prompt_length)
        return cache

    def release(self):
        """Give pages back to the pool, and leave the caller's cache readable, also where decoding failed."""
        if self.decodes_in_pages:
            self.cache.release()
        elif self.config.cache_is_given:
            self.cache.leave_buffers()

    @property
    def copies_past(self) -> bool:
        """True if attention of prompts copies what each token sees."""
        return self.decodes_in_pages and self.model.device.type == "cpu"

    @property
    def returns_cache(self) -> bool:
        return self.config.return_dict_in_generate or self.config.cache_is_given

    def prefill(self, input_ids, model_kwargs: dict, after_loop: Callable[[int], None] | None):
        """Run the prompt in an ordinary pass. With a warm start, the next token starts from the last token's state."""
        # a pass with fewer loops would drop the deeper slots of the cache, so the prompt runs with an exit that always
        # passes at prompt_loops
        if self.prompt_loops is not None:
            model_kwargs = {**model_kwargs, "exit_rule": ExitRule("latent_diff", math.inf, self.prompt_loops)}
        states, here = [], threading.get_ident()

        def at_end_of_loop(part, inputs, state):
            if threading.get_ident() != here:  # other threads may run the model, too
                return
            if self.options.warm_start:
                states.append(state[:, -1:])
            if after_loop is not None:
                after_loop(state.shape[0] * state.shape[1])

        watches = self.options.warm_start or after_loop is not None
        hook = self.trunk.end_of_loop.register_forward_hook(at_end_of_loop) if watches else None
        try:
            outputs = self.model._prefill(input_ids, self.config, model_kwargs)
        finally:
            if hook is not None:
                hook.remove()
        self.warm_state = self.trunk.to_next_loop(states[-1]) if states else None
        mask = model_kwargs.get("attention_mask")  # transformers drops a mask without padding
        of_mask = getattr(self.config, "_mask_length", None) or 0 if mask is None else mask.shape[1]
        length = max(input_ids.shape[1], of_mask)
        held = int(outputs.cache.get_seq_length())
        if held != length:
            raise ValueError(
                f"the cache holds {held} tokens of a prompt of {length}: virtual tokens, as prefix and prompt tuning "
                "put before it, go with plain decoding: leave out exits, draft_loops, warm_start and cache_dtype"
            )
        return outputs

    def last_places(self, rows: list[int]) -> list[int]:
        """Return the place of the last token of each row."""
        return [self.held_before + self.selector.lengths[row] - 1 for row in rows]

    def emit(self, rows: list[int], logits: torch.Tensor, loops: list[int], noise: torch.Tensor | None = None):
        """Emit the next token of `rows`, whose last token ran `loops`. Return the rows that received one."""
        self.cache.leave_in_deeper_loops(rows, loops, self.last_places(rows))
        return self.selector.emit(rows, logits, loops, noise)

    def at_last_tokens(self, rows: list[int]) -> TokensOfEngine:
        return TokensOfEngine(self, rows, self.last_places(rows))

    def rotary(self, x: torch.Tensor, positions: torch.Tensor, furthest: int) -> torch.Tensor | None:
        """Return the rotary tables of positions, [rows, 1]: looked up, unless they change with the sequence length."""
        if not self.trunk.ropes:
            return None
        if rope_type_by_length(self.trunk) is not None:  # of the longest row, also after it has ended
            self.furthest = max(self.furthest, furthest)
            return self.stacked_rotary(x, torch.cat([positions, positions.new_full((1, 1), self.furthest)]))[:-1]
        if self.rotary_table is None or furthest >= len(self.rotary_table):
            every = torch.arange(max(furthest + 1, self.cache.capacity), device=x.device)[:, None]
            self.rotary_table = self.stacked_rotary(x, every)
        return self.rotary_table[positions[:, 0]]

    def stacked_rotary(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.stack([table for pair in self.trunk.rotary(x, positions).values() for table in pair], dim=2)

    def compute_ends(self, end: int):
        """Compute, up to place `end`, the last token and the padding of rows that ended before others. They run as
        deep as prompt tokens, because they will be part of a prompt."""
        starts = self.last_places(list(range(self.num_rows)))
        left = sorted((place, row) for row, start in enumerate(starts) for place in range(start, end))
        for first in range(0, len(left), TOKENS_OF_COPIES):
            places, rows = zip(*left[first : first + TOKENS_OF_COPIES])
            for depth, members in members_by_number([self.depths_of_prompts[row] for row in rows]):
                group = TokensOfEngine(self, [rows[i] for i in members], [places[i] for i in members])
                of_sequences = [place - self.held_before for place in group.places]
                index = on_device([group.rows, of_sequences], self.selector.ids.device)
                tokens = enter([group], self.selector.ids[tuple(index)][:, None])
                tokens.run_coda(tokens.run_all_loops(depth))
                self.cache.leave_in_deeper_loops(group.rows, [depth] * len(group.rows), group.places)

    def store_back(self, length: int):
        """Write `length` tokens of every row into `given_cache`, the cache of the call."""
        self.compute_ends(length)
        self.cache.store_back(self.given_cache, length)

    def output(self):
        """Return what `_sample` of transformers returns."""
        sequences, loops = self.selector.finish()
        if self.returns_cache:
            new_tokens = sequences.shape[1] - self.selector.prompt_length - 1  # the last token did not run
            self.store_back(self.prompt_length + new_tokens)
        if not self.config.return_dict_in_generate:
            return sequences
        return LoopedGenerateOutput(
            sequences=sequences,  # pyrefly: ignore[bad-argument-type]  transformers asks for torch.LongTensor
            scores=None if self.selector.scores is None else tuple(self.selector.scores),
            logits=None if self.selector.logits is None else tuple(self.selector.logits),
            token_loops=loops,
            **named_cache(self.given_cache),
        )
