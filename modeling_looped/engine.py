"""Passes over rows of a batch that stand at tokens and loops of their own: what decoding row by row is made of.

`continuous.py` and `speculation.py` decide which rows run which loop of which token; here it is run.
"""

import math
from dataclasses import dataclass, replace

import torch

from .borrowed import found
from .cache import LoopedCache
from .checks import check_length, refuse_if
from .context import PassContext
from .depth import check_depths
from .exit_criteria import ExitRule
from .outputs import LoopedGenerateOutput
from .row_view import Padding, RowView
from .token_selector import TokenSelector, first_batchwise_part


def obstacle_to_row_engine(model, processors, criteria, config, synced_gpus: bool, model_kwargs: dict) -> str | None:
    """Why this batch cannot be decoded here, or None."""
    cache, implementation = model_kwargs.get("past_key_values"), model.config._attn_implementation
    quantized = found("transformers.cache_utils", "QuantizedCache", ())
    obstacles = {
        f"attn_implementation={implementation!r}": implementation not in ("sdpa", "eager"),
        "use_cache=False": not model_kwargs.get("use_cache", True),
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "synced_gpus": synced_gpus,
        "an assistant's cache": config.is_assistant,
        "a quantized cache, which cannot be cropped": isinstance(cache, quantized),
        "an offloaded cache": getattr(cache, "offloading", False),
    }
    standing = next((name for name, stands in obstacles.items() if stands), None)
    drafts = config.depth_options.draft_loops is not None  # of which each row accepts a number of its own
    return first_batchwise_part(processors, criteria) if standing is None and drafts else standing


@dataclass
class Tokens:
    """Tokens of some rows, [rows, length, ...] each, and what all loops of them read."""

    rows: list[int]
    places: list[int]  # in the cache, of the first token of each row
    ids: torch.Tensor
    embedded: torch.Tensor | None = None
    rotary: torch.Tensor | None = None  # cos and sin of each of `trunk.ropes`, [rows, length, 2 kinds, 1, head_dim]


def joined(parts: list[Tokens]) -> Tokens:
    """Tokens that follow each other, of the same rows."""
    ids, embedded = (torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("ids", "embedded"))
    rotary = [part.rotary for part in parts if part.rotary is not None]  # of all or of none
    return Tokens(parts[0].rows, parts[0].places, ids, embedded, torch.cat(rotary, dim=1) if rotary else None)


class RowEngine:
    """Runs the prompt, then single loops for chosen rows. `model` is the causal LM; arguments: of its `_sample`."""

    def __init__(self, model, input_ids, processors, criteria, config, streamer, model_kwargs: dict):
        self.model, self.trunk, self.config, self.options = model, model.model, config, config.depth_options
        self.selector = TokenSelector(input_ids, processors, criteria, config, streamer)
        self.num_rows, self.rule = len(input_ids), self.options.exit_rule(model.config)
        self.prompt_loops = None if self.rule is None else self.options.prompt_loops
        # repeated with the prompts, unlike those of the options
        self.limits = check_depths(model_kwargs.get("num_loops", model.config.num_loops), self.num_rows)
        self.rotary_table = None  # by position

        outputs = self.prefill(input_ids, model_kwargs)
        self.given_cache = outputs.past_key_values
        is_ours = isinstance(self.given_cache, LoopedCache)
        self.cache = self.given_cache if is_ours else LoopedCache(model.config, num_loops=max(self.limits))
        self.cache.load(self.given_cache, config.max_length)
        self.prompt_length = int(self.given_cache.get_seq_length())
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        self.padding = Padding(None if mask is None else mask.bool(), self.num_rows)
        self.shifts = [0] * self.num_rows  # from a place to its position, which leaves out padding
        if positions is not None:
            shifts = (positions[:, -1] - (self.prompt_length - 1)).tolist()
            self.shifts = shifts * (self.num_rows // len(positions))

        prompt_loops = [min(loops, self.prompt_loops or loops) for loops in self.limits]
        self.selector.emit(list(range(self.num_rows)), outputs.logits[:, -1], prompt_loops)

    def prefill(self, input_ids, model_kwargs: dict):
        """The prompt by an ordinary pass. With a warm start, the next token starts from the state of the last one."""
        if self.prompt_loops is not None:  # at which any change of the state is small enough to stop
            model_kwargs = {**model_kwargs, "exit_rule": ExitRule("latent_diff", math.inf, self.prompt_loops)}
        states = []
        hook = self.trunk.end_of_loop.register_forward_hook(lambda part, inputs, state: states.append(state[:, -1:]))
        try:
            outputs = self.model._prefill(input_ids, self.config, model_kwargs)
        finally:
            hook.remove()
        self.warm_state = self.trunk.to_next_loop(states[-1]) if self.options.warm_start else None
        mask = model_kwargs.get("attention_mask")  # transformers drops one without padding
        length = max(input_ids.shape[1], self.config._mask_length or 0 if mask is None else mask.shape[1])
        held = int(outputs.past_key_values.get_seq_length())
        refuse_if(
            held != length,
            f"the cache holds {held} tokens of a prompt of {length}: virtual tokens, as prefix and prompt tuning put "
            "before it, go with plain decoding: leave out exits, draft_loops and warm_start",
        )
        return outputs

    def last_places(self, rows: list[int]) -> list[int]:
        """Of the last token of each row."""
        before = self.prompt_length - self.selector.prompt_length  # tokens that were in the cache beforehand
        return [self.selector.lengths[row] - 1 + before for row in rows]

    def enter(self, rows: list[int], ids: torch.Tensor, places: list[int]) -> Tokens:
        """New tokens, one of each row, through embedding and prelude."""
        check_length(self.model.config, max(places) + 1)
        positions = [[place + self.shifts[row]] for row, place in zip(rows, places)]
        furthest, positions = max(positions)[0], torch.tensor(positions, device=ids.device)
        x = self.trunk.embed(self.trunk.embed_tokens(ids), positions)
        tokens = Tokens(rows, places, ids, rotary=self.rotary(x, positions, furthest))
        context = self.context(tokens, [0] * len(rows)) if len(self.trunk.prelude) else None
        return replace(tokens, embedded=self.trunk.run_prelude(x, context))

    def rotary(self, x: torch.Tensor, positions: torch.Tensor, furthest: int) -> torch.Tensor | None:
        """Of these positions, [rows, 1]; looked up, unless they change with the length of the sequence."""
        if not self.trunk.ropes:
            return None
        rope_types = [self.trunk.rotary_of(kind).rope_type for kind in self.trunk.ropes]
        if any("dynamic" in rope_type or rope_type == "longrope" for rope_type in rope_types):
            return self.stacked_rotary(x, positions)
        if self.rotary_table is None or furthest >= len(self.rotary_table):
            every = torch.arange(max(furthest + 1, self.cache.capacity), device=x.device)[:, None]
            self.rotary_table = self.stacked_rotary(x, every)
        return self.rotary_table[positions[:, 0]]

    def stacked_rotary(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.stack([table for pair in self.trunk.rotary(x, positions).values() for table in pair], dim=2)

    def rotary_by_kind(self, stacked: torch.Tensor | None) -> dict[str, tuple[torch.Tensor, ...]]:
        """What was stacked, as `trunk.rotary` gives it."""
        if stacked is None:
            return {}
        tables = stacked.unbind(2)
        return dict(zip(self.trunk.ropes, zip(tables[::2], tables[1::2])))

    def run_loop(self, tokens: Tokens, loops: list[int], state: torch.Tensor) -> torch.Tensor:
        """From h_t to H_{t+1}. loops: t of each row."""
        loop = loops[0] if len(set(loops)) == 1 else loops
        return self.trunk.core_pass(state, tokens.embedded, loop, max(self.limits), self.context(tokens, loops))

    def logits(self, tokens: Tokens, loops: list[int], state: torch.Tensor) -> torch.Tensor:
        """Of H after `loops` loops. What the coda writes stands if they are a token's last, else it is overwritten."""
        context = self.context(tokens, [0] * len(loops)) if len(self.trunk.coda) else None
        return self.model.logits(self.trunk.readout(self.trunk.run_coda(state, context), loops))

    def context(self, tokens: Tokens, loops: list[int]) -> PassContext:
        view = RowView(self.cache, self.padding, tokens.rows, loops, tokens.places, tokens.ids.shape[1])
        eager = self.model.config._attn_implementation == "eager"
        return PassContext(
            num_rows=len(loops),
            masks=view.masks(self.model.dtype if eager else None),
            position_ids=None,
            position_embeddings=self.rotary_by_kind(tokens.rotary),
            value_embeddings=self.trunk.value_embeddings(tokens.ids),
            past_key_values=view,
            options={"row_attention": view.row_attention},
        )

    def output(self):
        """What `_sample` of transformers returns."""
        sequences, loops = self.selector.finish()
        keeps = self.config.return_dict_in_generate
        if keeps or self.config.cache_is_given:
            new_tokens = sequences.shape[1] - self.selector.prompt_length - 1  # nothing was computed from the last
            self.cache.store_back(self.given_cache, self.prompt_length + new_tokens)
        if not keeps:
            return sequences
        return LoopedGenerateOutput(
            sequences=sequences,  # pyrefly: ignore[bad-argument-type]  transformers asks for torch.LongTensor
            scores=None if self.selector.scores is None else tuple(self.selector.scores),
            logits=None if self.selector.logits is None else tuple(self.selector.logits),
            past_key_values=self.given_cache,
            token_loops=loops,
        )
