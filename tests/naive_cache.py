"""A looped decoder for one sequence whose cache is written out by hand: what each token left at each loop, in a list.

For plain blocks (pre norm, RoPE, gated MLP), with or without prelude, coda, grouped keys, sliding windows and the
"add" injection. In float64, but for the rotary tables, which transformers makes in float32.
"""

import torch
from torch.nn import functional as F


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
        self.tokens = []  # of every past token: {layer name: [its key and value after each of its loops]}

    def left_by(self, token: dict, layer: str, loop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `loop` of a later pass sees of a past token."""
        loops = token[layer]
        if self.sharing == "none":  # its own loop, or the deepest there is
            return loops[min(loop, len(loops) - 1)]
        if self.sharing == "last":
            return loops[-1]
        size = int(self.sharing.removeprefix("cyclic-"))
        in_slot = [t for t in range(len(loops)) if t % size == loop % size]
        return loops[in_slot[-1] if in_slot else -1]

    @torch.no_grad()
    def run(self, ids, num_loops: int) -> torch.Tensor:
        """One pass over `ids` ([length]): logits [length, vocabulary]."""
        trunk, config = self.model.model, self.config
        self.fresh = [{} for _ in ids]
        positions = torch.arange(len(self.tokens), len(self.tokens) + len(ids))
        self.rotary = rotary_tables(config, positions)
        x = trunk.embed_tokens(torch.as_tensor(ids))
        for i, block in enumerate(trunk.prelude):
            x = self.block(block, f"prelude {i}", x, loop=0)
        embedded = x
        for loop in range(num_loops):
            if config.injection == "add":
                x = x + embedded
            for i, block in enumerate(trunk.core):
                x = self.block(block, f"core {i}", x, loop)
        for i, block in enumerate(trunk.coda):
            x = self.block(block, f"coda {i}", x, loop=0)
        self.tokens += self.fresh
        return self.model.lm_head(trunk.norm(x))

    def block(self, block, name: str, x, loop: int):
        x = x + self.attention(block.self_attn, name, block.input_layernorm(x), loop)
        mlp, normed = block.mlp, block.post_attention_layernorm(x)
        return x + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))

    def attention(self, attention, name: str, x, loop: int):
        queries, keys, values = (
            getattr(attention, f"{letter}_proj")(x).view(len(x), -1, self.config.head_dim) for letter in "qkv"
        )
        queries, keys = rotate(queries, self.rotary), rotate(keys, self.rotary)
        for token, key, value in zip(self.fresh, keys, values):
            token.setdefault(name, []).append((key, value))
        past = [self.left_by(token, name, loop) for token in self.tokens]
        outputs = []
        for i, query in enumerate(queries):  # [heads, head_dim]
            seen = past + [token[name][loop] for token in self.fresh[: i + 1]]
            if attention.sliding_window is not None:
                seen = seen[-attention.sliding_window :]
            group = attention.num_key_value_groups
            seen_keys, seen_values = (
                torch.stack(kind).repeat_interleave(group, dim=1).transpose(0, 1) for kind in zip(*seen)
            )  # [heads, seen, head_dim]
            scores = (seen_keys @ query[:, :, None]).squeeze(-1) / self.config.head_dim**0.5
            outputs.append((scores.softmax(-1)[:, None] @ seen_values).flatten())
        return attention.o_proj(torch.stack(outputs))


def naive_greedy(model, prompt: list[int], num_loops: int, new_tokens: int, sharing: str = "none") -> list[int]:
    decoder, ids = NaiveDecoder(model, sharing), list(prompt)
    logits = decoder.run(ids, num_loops)
    for _ in range(new_tokens):
        ids.append(int(logits[-1].argmax()))
        logits = decoder.run(ids[-1:], num_loops)
    return ids
