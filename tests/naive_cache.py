"""A looped decoder for one sequence whose cache is written out by hand: what each token left at each loop, in a list.

For plain blocks (pre norm, gated MLP), with or without prelude, coda, grouped keys, sliding windows, learned
positions, value embeddings, an exit gate and the "add" injection. In float64, but for the rotary tables, which
transformers makes in float32.
"""

import torch
from torch.nn import functional as F

from .naive import has_keys
from .naive_exits import NaiveRule, Readings


def rotary_tables(config, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = positions.float()[:, None] * (1.0 / config.rope_parameters["rope_theta"] ** exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().double(), angles.sin().double()


def rotate(x: torch.Tensor, tables) -> torch.Tensor:  # [length, heads, head_dim]
    cos, sin = (table[:, None] for table in tables)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class NaiveDecoder:
    def __init__(self, model, sharing: str = "none"):
        self.model, self.config, self.sharing = model, model.config, sharing
        self.tokens = []  # of every past token: {layer name: [its key and value at each loop that has some]}
        self.layer_types = sum(model.config.section_layer_types(), [])

    def left_by(self, loops: list, loop: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `loop` of a later pass sees of a past token; `place` is its own among the loops with keys."""
        if self.sharing == "none":  # its own loop, or the deepest there is
            return loops[min(place, len(loops) - 1)]
        if self.sharing in ("last", "first"):
            return loops[-1 if self.sharing == "last" else 0]
        if self.sharing == "average":
            return tuple(sum(part) / len(loops) for part in zip(*loops))
        size = int(self.sharing.removeprefix("cyclic-"))
        in_slot = [t for t in range(len(loops)) if t % size == loop % size]
        return loops[in_slot[-1] if in_slot else -1]

    def kept(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """A key and a value as the cache keeps them; a token that is decoded reads its own from there, too."""
        return pair

    def last_with_keys(self, loop: int) -> int:
        """A place among the loops that have keys and values."""
        return sum(has_keys(self.config, t) for t in range(loop + 1)) - 1

    @torch.no_grad()
    def run(self, ids, num_loops: int) -> torch.Tensor:
        """One pass over `ids` ([length]): logits [length, vocabulary]."""
        self.is_decoding = False
        embedded = state = self.begin(ids)
        for loop in range(num_loops):
            state = self.one_loop(state, embedded, loop)
        logits = self.read_out(state, num_loops)
        self.tokens += self.fresh
        return logits

    @torch.no_grad()
    def run_until(self, rule: NaiveRule, token: int, num_loops: int) -> tuple[torch.Tensor, int]:
        """A token until it exits: its logits [1, vocabulary] and the loops that it took."""
        self.is_decoding = True
        embedded = state = self.begin([token])
        readings = Readings([], [], [])
        for loop in range(num_loops):
            state = self.one_loop(state, embedded, loop)
            readings.logits.append(self.read_out(state, loop + 1)[0])
            readings.states.append(state[0])
            gate = self.model.exit_gate
            readings.gates.append(0.0 if gate is None else float(gate(state)))
            if rule.stops(readings):
                break
        self.tokens += self.fresh
        return readings.logits[-1][None], loop + 1

    def begin(self, ids):
        trunk, config = self.model.model, self.config
        self.fresh = [{} for _ in ids]
        self.ids = torch.as_tensor(ids)
        positions = torch.arange(len(self.tokens), len(self.tokens) + len(ids))
        x = trunk.embed_tokens(self.ids)
        if config.position_embedding == "learned":
            x, self.rotary = x + trunk.embed_positions(positions), None
        else:
            self.rotary = rotary_tables(config, positions)
        for i, block in enumerate(trunk.prelude):
            x = self.block(block, f"prelude {i}", i, x, loop=0)
        return x

    def one_loop(self, x, embedded, loop: int):
        if loop > 0 and self.config.inter_loop_norm == "shared":
            x = self.model.model.norm(x)
        if self.config.injection == "add":
            x = x + embedded
        for i, block in enumerate(self.model.model.core):
            x = self.block(block, f"core {i}", self.config.num_prelude_layers + i, x, loop)
        return x

    def read_out(self, x, depth: int):
        """Logits after `depth` loops; of the coda's keys and values those of the last call stay."""
        trunk, config = self.model.model, self.config
        for i, block in enumerate(trunk.coda):
            for token in self.fresh:
                token.pop(f"coda {i}", None)
            x = self.block(block, f"coda {i}", config.num_prelude_layers + config.num_core_layers + i, x, loop=0)
        is_deep = depth >= config.num_loops
        is_raw = {"final_only": not is_deep, "final_raw": is_deep}.get(config.readout_norm, False)
        return self.model.lm_head(x if is_raw else trunk.norm(x))

    def block(self, block, name: str, layer: int, x, loop: int):
        x = x + self.attention(block.self_attn, name, layer, block.input_layernorm(x), loop)
        mlp, normed = block.mlp, block.post_attention_layernorm(x)
        return x + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))

    def attention(self, attention, name: str, layer: int, x, loop: int):
        queries, keys, values = (
            getattr(attention, f"{letter}_proj")(x).view(len(x), -1, self.config.head_dim) for letter in "qkv"
        )
        if self.rotary is not None:
            queries, keys = rotate(queries, self.rotary), rotate(keys, self.rotary)
        if self.config.value_embeddings and str(layer) in self.model.model.value_embeds:
            table = self.model.model.value_embeds[str(layer)](self.ids).view(values.shape)
            values = values + 2 * torch.sigmoid(attention.value_gate(x[:, :32]))[:, :, None] * table
        for token, key, value in zip(self.fresh, keys, values) if has_keys(self.config, loop) else ():
            token.setdefault(name, []).append((key, value))
        place = self.last_with_keys(loop)
        past = [self.kept(self.left_by(token[name], loop, place)) for token in self.tokens]
        fresh = [token[name][place] for token in self.fresh]
        fresh = [self.kept(pair) for pair in fresh] if self.is_decoding else fresh
        outputs = []
        for i, query in enumerate(queries):  # [heads, head_dim]
            seen = past + fresh[: i + 1]
            if self.layer_types[layer] == "sliding_attention":
                seen = seen[-self.config.sliding_window :]
            group = self.config.num_attention_heads // self.config.num_key_value_heads
            seen_keys, seen_values = (
                torch.stack(kind).repeat_interleave(group, dim=1).transpose(0, 1) for kind in zip(*seen)
            )  # [heads, seen, head_dim]
            scores = (seen_keys @ query[:, :, None]).squeeze(-1) / self.config.head_dim**0.5
            if (cap := self.config.attention_softcap) is not None:
                scores = cap * torch.tanh(scores / cap)
            outputs.append((scores.softmax(-1)[:, None] @ seen_values).flatten())
        return attention.o_proj(torch.stack(outputs))


def naive_greedy(model, prompt: list[int], num_loops: int, new_tokens: int, sharing: str = "none") -> list[int]:
    decoder, ids = NaiveDecoder(model, sharing), list(prompt)
    logits = decoder.run(ids, num_loops)
    for _ in range(new_tokens):
        ids.append(int(logits[-1].argmax()))
        logits = decoder.run(ids[-1:], num_loops)
    return ids


def naive_generate(
    model,
    rule: NaiveRule,
    prompt,
    num_loops: int,
    new_tokens: int,
    sharing: str = "none",
    prompt_loops=None,
    eos=None,
    decoder_class=NaiveDecoder,
) -> tuple[list[int], list[int]]:
    """Greedy with exits: the new tokens, and the loops that each of them took."""
    decoder, loops, tokens, took = decoder_class(model, sharing), prompt_loops or num_loops, [], []
    logits = decoder.run(prompt, loops)
    while True:
        tokens.append(int(logits[-1].argmax()))
        took.append(loops)
        if len(tokens) == new_tokens or tokens[-1] == eos:
            return tokens, took
        logits, loops = decoder.run_until(rule, tokens[-1], num_loops)
