"""Passes over rows of a batch that stand at tokens and loops of their own: what decoding row by row is made of.

`continuous.py` and `speculation.py` decide which rows run which loop of which token; here it is run.
"""

import torch
from transformers.cache_utils import QuantizedCache

from .cache import LoopedCache
from .checks import check_length
from .context import PassContext
from .cursor import Cursor, Padding
from .outputs import LoopedGenerateOutput
from .token_selector import TokenSelector, whole_batch_part


def obstacle_to_rows_apart(
    model, input_ids, processors, criteria, config, synced_gpus: bool, model_kwargs: dict
) -> str | None:
    """Why rows of this batch cannot be decoded apart, or None; if they cannot, transformers' own loop decodes."""
    cache, implementation = model_kwargs.get("past_key_values"), model.config._attn_implementation
    obstacles = {
        f"attn_implementation={implementation!r}": implementation not in ("sdpa", "eager"),
        "use_cache=False": not model_kwargs.get("use_cache", True),
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "synced_gpus": synced_gpus,
        "inputs_embeds": input_ids.shape[1] == 0,
        "an assistant's cache": config.is_assistant,
        "a quantized cache, which cannot be cropped": isinstance(cache, QuantizedCache),
        "an offloaded cache": getattr(cache, "offloading", False),
        "a core with key/value heads of its own": (
            model.config.block_sizes("core").num_key_value_heads != model.config.num_key_value_heads
        ),
    }
    found = [name for name, stands in obstacles.items() if stands]
    return found[0] if found else whole_batch_part(processors, criteria)


class RowEngine:
    """A prompt, and then any loop of any token of any rows. `model` is the causal LM.

    place: of a token in the cache; a position leaves out padding. Tensors of tokens are [rows, length, ...].
    """

    def __init__(self, model, input_ids, processors, criteria, config, streamer, model_kwargs):
        self.model, self.trunk, self.config, self.options = model, model.model, config, config.depth_options
        self.selector = TokenSelector(input_ids, processors, criteria, config, streamer)
        self.num_rows, device = len(input_ids), input_ids.device
        depths = model_kwargs.get("num_loops", model.config.num_loops)  # repeated with the prompts, unlike config's
        self.limits = [depths] * self.num_rows if isinstance(depths, int) else depths.tolist()
        runs = model.config.num_loops if model.config.residual_depth == "trained" else max(self.limits)
        self.scale = model.config.residual_factor(runs)
        self.rotary_tables = None  # cos and sin by position, [positions, 1, head_dim] each

        mask, positions, given = (model_kwargs.get(n) for n in ("attention_mask", "position_ids", "past_key_values"))
        self.padding = Padding(None if mask is None else mask.bool(), self.num_rows)
        self.cache = given
        if not isinstance(given, LoopedCache):  # of another kind: taken over after the prompt, given back at the end
            self.cache = LoopedCache(model.config, num_loops=max(self.limits))
        elif not self.config.cache_is_given:
            shape = (self.num_rows, model.config.num_key_value_heads, 0, model.config.head_dim)
            keys = torch.empty(shape, dtype=model.dtype, device=device)
            self.cache.expect_prompt(input_ids.shape[1], config.max_length, keys)
        outputs = self.prefill(input_ids, model_kwargs)
        self.given_cache, self.prompt_length = outputs.past_key_values, int(outputs.past_key_values.get_seq_length())
        self.cache.load(self.given_cache, config.max_length)
        self.shifts = [0] * self.num_rows  # from a place to its position
        if positions is not None:
            shifts = (positions[:, -1] - (self.prompt_length - 1)).tolist()
            self.shifts = shifts * (self.num_rows // len(positions))

        rule = model_kwargs.get("exit_rule")
        limit = max(self.limits) if rule is None or rule.prompt_loops is None else rule.prompt_loops
        prompt_loops = [min(loops, limit) for loops in self.limits]
        self.selector.emit(list(range(self.num_rows)), outputs.logits[:, -1], prompt_loops)

    def prefill(self, input_ids, model_kwargs: dict):
        """The prompt by an ordinary pass. With a warm start, the next token starts from the state of the last one."""
        rule, self.warm_state = model_kwargs.get("exit_rule"), None
        if rule is not None and rule.prompt_loops is None:  # nothing of the prompt exits: a plain pass
            model_kwargs = {name: value for name, value in model_kwargs.items() if name != "exit_rule"}
        if not self.options.warm_start:
            return self.model._prefill(input_ids, self.config, model_kwargs)
        states = []
        hook = self.trunk.core[-1].register_forward_hook(lambda block, inputs, state: states.append(state[:, -1:]))
        try:
            outputs = self.model._prefill(input_ids, self.config, model_kwargs)
        finally:
            hook.remove()
        self.warm_state = self.trunk.between(states[-1])
        return outputs

    def last_places(self, rows: list[int]) -> list[int]:
        """Of the last token that each row has said."""
        before = self.prompt_length - self.selector.prompt_length  # tokens that were in the cache beforehand
        return [self.selector.lengths[row] - 1 + before for row in rows]

    def enter(self, rows: list[int], ids: torch.Tensor, places: list[int]) -> torch.Tensor:
        """What the loops of new tokens read: through embedding and prelude."""
        check_length(self.model.config, max(places) + 1)
        inputs = self.trunk.embed_tokens(ids)
        x = self.trunk.embed(inputs, self.positions(rows, places, ids))
        context = self.context(rows, ids, places, [0] * len(rows)) if len(self.trunk.prelude) else None
        return self.trunk.run_prelude(x, context)

    def run_loop(
        self,
        rows: list[int],
        ids: torch.Tensor,
        places: list[int],
        loops: list[int],
        state: torch.Tensor,
        embedded: torch.Tensor,
    ) -> torch.Tensor:
        """From h_t to H_{t+1}. loops: t of each row. places: of the first token of each row."""
        first = loops[0] == 0
        if self.trunk.injection.looks_at_first and any((loop == 0) != first for loop in loops):
            first = torch.tensor([loop == 0 for loop in loops], device=ids.device)[:, None, None]
        context = self.context(rows, ids, places, loops)
        return self.trunk.core_pass(state, embedded, 0, first, self.scale, context)

    def logits(self, rows: list[int], ids: torch.Tensor, places: list[int], loops: list[int], state: torch.Tensor):
        """Of H after `loops` loops. What the coda writes stands if this is the token's last loop, else it is
        overwritten."""
        context = self.context(rows, ids, places, [0] * len(rows)) if len(self.trunk.coda) else None
        return self.model.logits(self.trunk.readout(self.trunk.run_coda(state, context), loops))

    def context(self, rows: list[int], ids: torch.Tensor, places: list[int], loops: list[int]) -> PassContext:
        cursor = Cursor(self.cache, self.padding, rows, loops, places, ids.shape[1])
        eager = self.model.config._attn_implementation == "eager"
        return PassContext(
            num_rows=len(rows),
            masks=cursor.masks(self.model.dtype if eager else None),
            position_ids=None,
            position_embeddings=self.rotary(rows, places, ids),
            value_embeddings=self.trunk.value_embeddings(ids),
            past_key_values=cursor,
            options={"row_attention": cursor.row_attention},
        )

    def positions(self, rows: list[int], places: list[int], ids: torch.Tensor) -> torch.Tensor:
        """[rows, length]"""
        firsts = torch.tensor([[place + self.shifts[row]] for row, place in zip(rows, places)], device=ids.device)
        return firsts if ids.shape[1] == 1 else firsts + torch.arange(ids.shape[1], device=ids.device)

    def rotary(self, rows: list[int], places: list[int], ids: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Looked up by position. Kinds that change with the length of the sequence (dynamic, longrope) give every
        position what it has when the sequence gets there."""
        if self.trunk.config.position_embedding != "rope":
            return None
        known = 0 if self.rotary_tables is None else len(self.rotary_tables[0])
        end = max(place + self.shifts[row] for row, place in zip(rows, places)) + ids.shape[1]
        if end > known:
            kind = self.trunk.rotary_emb.rope_type
            if "dynamic" not in kind and kind != "longrope":
                end = max(end, self.cache.capacity)
            like = torch.empty(0, dtype=self.model.dtype, device=ids.device)
            positions = torch.arange(known, end, device=ids.device)
            new = [table[:, 0] for table in self.trunk.rotary(like, positions[:, None])]
            self.rotary_tables = new if known == 0 else [torch.cat(tables) for tables in zip(self.rotary_tables, new)]
        positions = self.positions(rows, places, ids)
        return tuple(table[positions] for table in self.rotary_tables)

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
            sequences=sequences,
            scores=None if self.selector.scores is None else tuple(self.selector.scores),
            logits=None if self.selector.logits is None else tuple(self.selector.logits),
            past_key_values=self.given_cache,
            token_loops=loops,
        )
