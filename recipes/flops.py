"""Parameters and floating-point operations, by the papers' formulas (Parcae, appendix D).

Training costs C = (2 N1 + 6 N2) D for D tokens: N1 parameters are applied without gradients (the loops before the last
`backprop_loops`), N2 with; a layer that is looped n times counts n times. The token embedding is left out, the
unembedding is in. Attention adds 4 * width * keys per token and layer for the forward pass, 12 with the backward pass.
"""

from dataclasses import dataclass

import torch

from modeling_looped import LoopedForCausalLM
from modeling_looped.slots import structural_layer_types


@dataclass
class Sizes:
    """Parameter counts by where they are applied."""

    total: int
    embedding: int  # lookups, no matrix product
    outer: int  # prelude and its norm: once
    core: int  # core and injection: once per loop
    coda: int  # coda and what leads into it: once per readout
    head: int  # norm and unembedding: once per readout
    without_embedding: int  # a tied embedding stays, as the head


def count(module) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def sizes(config) -> Sizes:
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    trunk = model.model
    total, embedding = count(model), count(trunk.embed_tokens)
    return Sizes(
        total=total,
        embedding=embedding,
        outer=count(trunk.prelude) + count(trunk.prelude_norm),
        core=count(trunk.core) + count(trunk.injection),
        coda=count(trunk.coda) + count(trunk.coda_proj),
        head=count(trunk.norm) + model.lm_head.weight.numel() + count(model.exit_gate),
        without_embedding=total if config.tie_word_embeddings else total - embedding,
    )


def attention_flops(config, layers: str, length: int) -> int:
    """Forward operations of one token in the attention products of a section's layers."""
    types = dict(zip(("prelude", "core", "coda"), structural_layer_types(config)))[layers]
    width = config.block_sizes(layers).num_attention_heads * config.head_dim
    keys = (min(length, config.sliding_window) if kind == "sliding_attention" else length for kind in types)
    return sum(4 * width * k for k in keys)


def training_flops_per_token(
    config, length: int, depth: float | None = None, backprop_loops: float | None = None
) -> float:
    """`depth` and `backprop_loops` may be means of what is drawn."""
    n = sizes(config)
    depth = config.num_loops if depth is None else depth
    with_gradient = depth if backprop_loops is None else min(backprop_loops, depth)
    readouts = {"terminal": 1, "last_third": depth - 2 * depth // 3}.get(config.loop_loss, depth)
    once = 6 * n.outer + 3 * attention_flops(config, "prelude", length)
    loops = (2 * n.core + attention_flops(config, "core", length)) * (depth + 2 * with_gradient)
    reading = 6 * (n.coda + n.head) + 3 * attention_flops(config, "coda", length)
    return once + loops + readouts * reading


def effective_parameters(config, depth: float | None = None) -> float:
    """N of a model whose loops are unrolled to `depth`: without the embedding, with the unembedding."""
    n = sizes(config)
    return n.outer + (config.num_loops if depth is None else depth) * n.core + n.coda + n.head


def forward_flops_per_token(config, length: int, depth: float | None = None) -> float:
    n = sizes(config)
    depth = config.num_loops if depth is None else depth
    fixed = sum(attention_flops(config, section, length) for section in ("prelude", "coda"))
    return 2 * (n.outer + n.coda + n.head) + fixed + depth * (2 * n.core + attention_flops(config, "core", length))
