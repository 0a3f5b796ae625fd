"""Decoding in continuous depth: every row of a batch at its own token and its own loop.

At each tick the core runs once for all rows. A row whose token exits emits it and begins its next token at the next
tick, while others still loop. So nobody waits for the row that thinks longest, and the weights, whose reading is what
decoding costs, are read once a tick for the whole batch.
"""

import torch
from transformers.cache_utils import QuantizedCache

from .cache import LoopedCache
from .checks import check_length
from .context import PassContext
from .emission import Emission, batch_bound
from .exit_criteria import BLANK, Reading
from .outputs import LoopedGenerateOutput
from .row_cache import Cursor, RowCache


def can_decode_apart(
    model, input_ids, processors, criteria, config, synced_gpus: bool, model_kwargs: dict
) -> str | None:
    """What stands against it, if anything does; transformers' own loop then decodes."""
    cache = model_kwargs.get("past_key_values")
    obstacles = {
        f"attn_implementation={model.config._attn_implementation!r}": (
            model.config._attn_implementation not in ("sdpa", "eager")
        ),
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
    return found[0] if found else batch_bound(processors, criteria)


def decode_apart(model, input_ids, processors, criteria, config, streamer, model_kwargs):
    """`_sample` of transformers, in continuous depth."""
    decoder = ContinuousDecoder(model, input_ids, processors, criteria, config, streamer, model_kwargs)
    starting = decoder.emission.running()
    while starting or decoder.emission.running():
        decoder.begin(starting)
        starting = decoder.tick()
    return decoder.result()


def has_fixed_rotary(trunk) -> bool:
    """Whether there are rotary positions that are the same at every length of the sequence."""
    if trunk.config.position_embedding != "rope":
        return False
    kind = trunk.rotary_emb.rope_type
    return "dynamic" not in kind and kind != "longrope"


class ContinuousDecoder:
    def __init__(self, model, input_ids, processors, criteria, config, streamer, model_kwargs):
        self.model, self.trunk, self.config = model, model.model, config
        self.rule = model_kwargs.get("exit_rule")
        self.emission = Emission(input_ids, processors, criteria, config, streamer)
        batch = len(input_ids)
        depths = model_kwargs.get("num_loops", model.config.num_loops)  # repeated with the prompts, unlike config's
        self.limits = [depths] * batch if isinstance(depths, int) else depths.tolist()
        self.scale = model.config.residual_factor(
            model.config.num_loops if model.config.residual_depth == "trained" else max(self.limits)
        )

        names = ("attention_mask", "position_ids", "past_key_values")
        mask, positions, ordinary_cache = (model_kwargs.get(name) for name in names)
        valid = None if mask is None else mask.bool()
        sharing = getattr(ordinary_cache, "sharing", "none")
        self.cache = RowCache(model.config, max(self.limits), batch, valid, config.max_length, sharing)
        self.cache_is_given = getattr(config, "_cache_is_given", False)
        if isinstance(ordinary_cache, LoopedCache) and not self.cache_is_given:
            self.cache.await_prompt(ordinary_cache, input_ids.shape[1], model.dtype, input_ids.device)
        outputs, state = self.prefill(input_ids, model_kwargs)
        self.cache.load(outputs.past_key_values)
        length = int(outputs.past_key_values.get_seq_length())

        # per row: of the token that is looped now
        self.places = [length - 1] * batch  # where its keys and values lie in the cache
        self.shifts = [0] * batch  # from there to its position, which leaves out padding
        if positions is not None:
            self.shifts = (positions[:, -1] - (length - 1)).tolist() * (batch // len(positions))
        self.loops = [0] * batch
        self.tensors = {}  # embedded, state, cos, sin and value embeddings, [rows, 1, ...] each
        self.rotary_tables = ((), ())  # by position
        if state is not None:
            self.tensors["state"] = state
        self.memory, self.has_reading = {}, [False] * batch
        self.prompt_length = length
        prompt_loops = self.limits
        if self.rule is not None and self.rule.prompt_loops is not None:
            prompt_loops = [min(limit, self.rule.prompt_loops) for limit in self.limits]
        self.emission.emit(list(range(batch)), outputs.logits[:, -1], prompt_loops)

    def prefill(self, input_ids, model_kwargs):
        """The prompt by an ordinary pass; and the state of its last token, where the next starts from it."""
        if self.rule is not None and self.rule.prompt_loops is None:  # nothing of the prompt exits: a plain pass
            model_kwargs = {name: value for name, value in model_kwargs.items() if name != "exit_rule"}
        states = []
        if self.config.warm_start:
            hook = self.trunk.core[-1].register_forward_hook(lambda block, inputs, state: states.append(state[:, -1:]))
        try:
            outputs = self.model._prefill(input_ids, self.config, model_kwargs)
        finally:
            if self.config.warm_start:
                hook.remove()
        return outputs, self.trunk.between(states[-1]) if states else None

    def take(self, held: dict[str, torch.Tensor], rows: list[int]) -> dict[str, torch.Tensor]:
        """What `rows` have of tensors that are held for all rows."""
        if len(rows) == self.emission.num_rows:
            return dict(held)
        index = self.emission.index(rows)
        return {name: tensor[index] for name, tensor in held.items()}

    def put(self, held: dict[str, torch.Tensor], rows: list[int], tensors: dict[str, torch.Tensor]):
        if len(rows) == self.emission.num_rows:
            held.update(tensors)
            return
        index = self.emission.index(rows)
        for name, values in tensors.items():
            if name not in held:  # of the other rows nothing is known yet
                held[name] = values.new_full((self.emission.num_rows, *values.shape[1:]), BLANK.get(name, 0))
            held[name] = held[name].index_copy(0, index, values)  # not in place, so that two may be one tensor

    def context(self, rows: list[int], loops: list[int], tensors: dict, length: int = 1) -> PassContext:
        """For `length` tokens of each row."""
        cursor = Cursor(self.cache, rows, loops, [self.places[row] for row in rows], length)
        eager = self.model.config._attn_implementation == "eager"
        values = {int(name.removeprefix("values")): t for name, t in tensors.items() if name.startswith("values")}
        return PassContext(
            num_rows=len(rows),
            masks=cursor.masks(self.model.dtype if eager else None),
            position_ids=None,
            position_embeddings=(tensors["cos"], tensors["sin"]) if "cos" in tensors else None,
            value_embeddings=values,
            past_key_values=cursor,
        )

    def enter(self, rows: list[int], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The next token of `rows` ([rows, 1]) through embedding and prelude."""
        for row in rows:
            self.places[row] += 1
        check_length(self.model.config, max(self.places[row] for row in rows) + 1)
        places = [self.places[row] + self.shifts[row] for row in rows]
        positions = torch.tensor(places, device=ids.device)
        x = self.trunk.embed(self.trunk.embed_tokens(ids), positions[:, None])
        tensors = dict(zip(("cos", "sin"), self.rotary(x, positions, max(places)) or ()))
        for layer, table in self.trunk.value_embeddings(ids).items():
            tensors[f"values{layer}"] = table
        context = self.context(rows, [0] * len(rows), tensors) if len(self.trunk.prelude) else None
        tensors["embedded"] = self.trunk.run_prelude(x, context)
        return tensors

    def rotary(self, x, positions: torch.Tensor, furthest: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of one position per row; looked up in tables, unless these depend on how far the sequence has come."""
        if furthest >= self.cache.capacity or not has_fixed_rotary(self.trunk):
            return self.trunk.rotary(x, positions[:, None])
        if furthest >= len(self.rotary_tables[0]):
            all_positions = torch.arange(self.cache.capacity, device=positions.device)
            self.rotary_tables = self.trunk.rotary(x, all_positions[:, None])
        return tuple(table[positions] for table in self.rotary_tables)

    def begin(self, rows: list[int]):
        if not rows:
            return
        for row in rows:
            self.loops[row], self.has_reading[row] = 0, False
        tensors = self.enter(rows, self.emission.last_tokens(rows))
        if not self.config.warm_start:
            tensors["state"] = self.trunk.initial_state(tensors["embedded"], None)
        self.put(self.tensors, rows, tensors)
        if blank := self.memory.keys() & BLANK.keys():
            index = torch.tensor(rows, device=self.cache.device)
            self.memory |= {name: self.memory[name].index_fill(0, index, BLANK[name]) for name in blank}

    def tick(self) -> list[int]:
        """One loop of every running row; those that emitted a token and go on."""
        rows = self.emission.running()
        loops = [self.loops[row] for row in rows]
        first = loops[0] == 0
        if self.trunk.injection.looks_at_first and any((loop == 0) != first for loop in loops):
            first = torch.tensor([loop == 0 for loop in loops], device=self.cache.device)[:, None, None]
        mine = self.take(self.tensors, rows)
        context = self.context(rows, loops, mine)
        state = self.trunk.core_pass(mine["state"], mine["embedded"], 0, first, self.scale, context)
        for row in rows:
            self.loops[row] += 1
        exits = self.exits(rows, state)
        self.put(self.tensors, rows, {"state": self.trunk.between(state)})
        return [row for row in exits if self.emission.unfinished[row]]

    def exits(self, rows: list[int], state: torch.Tensor) -> list[int]:
        """Check the rows that are due, and emit the tokens of those that exit."""
        rule, at = self.rule, {row: i for i, row in enumerate(rows)}
        ends = {row for row in rows if self.loops[row] >= self.limits[row]}
        readers = [row for row in rows if rule is not None and row not in ends and rule.reads(self.loops[row])]
        wants_logits = rule is not None and rule.criterion.needs == "logits"
        if wants_logits and rule.candidates is not None:
            readers = self.screened(readers, state, at)

        read_out = [row for row in rows if row in ends or (wants_logits and row in readers)]
        logits = self.read_out(read_out, state, at)
        stops = set()
        if readers:
            if wants_logits:
                some = logits if readers == read_out else logits[[read_out.index(row) for row in readers]]
                reading = Reading(logits=some)
            else:
                some = state if readers == rows else state[[at[row] for row in readers]]
                some = some[:, 0]
                reading = (
                    Reading(state=some) if rule.criterion.needs == "state" else Reading(gate=self.model.gate(some))
                )
            passed = rule.exits(self.score(readers, reading)).tolist()
            stops = {row for row, stop in zip(readers, passed) if stop and rule.checks(self.loops[row])}
        exits = [row for row in rows if row in ends or row in stops]
        if not exits:
            return exits
        if not wants_logits and stops:
            logits, read_out = self.read_out(exits, state, at), exits
        if exits != read_out:
            logits = logits[[read_out.index(row) for row in exits]]
        loops = [self.loops[row] for row in exits]
        self.cache.leave_in_deeper_loops(exits, loops, [self.places[row] for row in exits])
        self.emission.emit(exits, logits, loops)
        return exits

    def score(self, rows: list[int], reading: Reading) -> torch.Tensor:
        before = self.take(self.memory, rows)
        score, memory = self.rule.criterion.score(reading, before)
        if self.rule.candidates is not None:
            first = torch.tensor([not self.has_reading[row] for row in rows], device=self.cache.device)
            best = reading.logits.topk(min(self.rule.candidates, reading.logits.shape[-1])).indices
            memory["candidates"] = torch.where(first[:, None], best, before.get("candidates", best))
        self.put(self.memory, rows, memory)
        for row in rows:
            self.has_reading[row] = True
        return score

    def screened(self, rows: list[int], state: torch.Tensor, at: dict[int, int]) -> list[int]:
        """The rows whose candidates pass, and those that have none yet; only these need all logits."""
        screened = [row for row in rows if self.rule.screens(first=not self.has_reading[row])]
        if not screened:
            return rows
        candidates = self.memory["candidates"][self.emission.index(screened)]
        normed, head = self.normed(screened, state, at), self.model.lm_head
        if type(head) is torch.nn.Linear and not head.weight.is_meta:
            weights = head.weight[candidates]  # [rows, candidates, hidden]
            logits = self.model.softcapped(torch.matmul(normed, weights.transpose(1, 2)))[:, 0]
        else:  # adapted, quantized or offloaded
            logits = self.model.logits(normed)[:, 0].gather(-1, candidates)
        score, _ = self.rule.criterion.score(Reading(logits=logits), {})
        passed = {row for row, passes in zip(screened, self.rule.exits(score).tolist()) if passes}
        return [row for row in rows if row in passed or not self.has_reading[row]]

    def read_out(self, rows: list[int], state: torch.Tensor, at: dict[int, int]) -> torch.Tensor | None:
        """Logits [rows, vocabulary] of H. What the coda writes stands if the row exits, else it is overwritten."""
        return self.model.logits(self.normed(rows, state, at))[:, -1] if rows else None

    def normed(self, rows: list[int], state: torch.Tensor, at: dict[int, int]) -> torch.Tensor:
        """What the head reads, [rows, 1, hidden]."""
        some = state if len(rows) == len(state) else state[[at[row] for row in rows]]
        context = self.context(rows, [0] * len(rows), self.take(self.tensors, rows)) if len(self.trunk.coda) else None
        return self.trunk.readout(self.trunk.run_coda(some, context), [self.loops[row] for row in rows])

    def result(self):
        sequences, loops = self.emission.finish()
        keeps = self.config.return_dict_in_generate
        if keeps or self.cache_is_given:
            new_tokens = sequences.shape[1] - self.emission.prompt_length - 1  # nothing was computed from the last
            self.cache.store_back(self.prompt_length + new_tokens)
        if not keeps:
            return sequences
        return LoopedGenerateOutput(
            sequences=sequences,
            scores=None if self.emission.scores is None else tuple(self.emission.scores),
            logits=None if self.emission.logits is None else tuple(self.emission.logits),
            past_key_values=self.cache.ordinary,
            token_loops=loops,
        )
