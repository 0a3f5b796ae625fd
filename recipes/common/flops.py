"""Parameters and floating-point operations, by the papers' formulas (Parcae, appendix D).

Training costs C = (2 N1 + 6 N2) D for D tokens: N1 parameters are applied without gradients (the loops before the last
`backprop_loops`), N2 with gradients; a layer that is looped n times counts n times. The token embedding is excluded,
the unembedding is included. Attention adds 4 * width * keys per token and layer for the forward pass, and three times
as much with the backward pass.

Tables of value embeddings are counted in two ways, chosen by an argument:
- operations exclude them, like every lookup: `training_flops_per_token(value_tables=False)`. With the best depths of
  Parcae's table 6, only this choice reproduces its exponent of the best number of tokens, 0.78.
- effective parameters N(mu) count each table once: `effective_parameters(value_tables=True)`. The paper does not state
  this. With the tables, the coefficients of table 11 predict the losses of table 5 to 0.9 % and 0.2 %, without them to
  2.8 % and 1.4 %; the paper reports 1.3 % and 0.8 %. The best depths are also nearer to those of table 6.
"""

import math
from dataclasses import dataclass

import torch

from modeling_looped import LoopedForCausalLM
from modeling_looped.loop_parameters import count_in_a_loop
from modeling_looped.losses import start_of_last_third


@dataclass(frozen=True)
class Sizes:
    """Parameter counts by the place where the parameters are applied."""

    total: int
    embedding: int  # token embedding: lookups, no matrix product
    value_tables: int  # value embeddings: lookups too
    outer: int  # prelude and its norm: applied once
    core: int  # core and injection: once per loop; of per-loop parameter sets, one set
    core_keys: int  # the part of `core` that makes keys and values: once per loop that computes them
    coda: int  # coda and the projection before it: once per readout
    head: int  # norm and unembedding: once per readout
    without_embedding: int  # total without the table of the token embedding, also where that table is the head too
    multiplied: int  # all that matrix products and norms use: total without the tables that are only looked up


def count_of_keys(core) -> int:
    """Count the parameters that a loop applies to each token to compute keys and values."""
    names = ("kv_down_proj", "k_proj", "v_proj", "value_gate")
    layers = [getattr(block.self_attn, name, None) for block in core for name in names]
    deltas = [block.self_attn.loop_deltas.of(name) for block in core if block.self_attn.loop_deltas for name in names]
    return sum(map(count, layers)) + sum(p[0].numel() for delta in deltas if delta for p in delta.parameters())


KNOWN: dict[str, Sizes] = {}


def count(module) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def sizes(config) -> Sizes:
    """Return the sizes of a model, which is built on the meta device, once for each config."""
    key = config.to_json_string()
    if key not in KNOWN:
        KNOWN[key] = sizes_of_new_model(config)
    return KNOWN[key]


def sizes_of_new_model(config) -> Sizes:
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    trunk = model.model
    total, embedding, tables = count(model), count(trunk.embed_tokens), count(trunk.value_embeds)
    return Sizes(
        total=total,
        embedding=embedding,
        value_tables=tables,
        outer=count(trunk.prelude) + count(trunk.prelude_norm),
        core=count_in_a_loop(trunk) + count(trunk.injection),
        core_keys=count_of_keys(trunk.core),
        coda=count(trunk.coda) + count(trunk.coda_proj),
        head=count(trunk.norm) + count(trunk.alpha_readout) + model.lm_head.weight.numel() + count(model.exit_gate),
        without_embedding=total - embedding,
        multiplied=total - tables - (0 if config.tie_word_embeddings else embedding),
    )


def block_matrices(model: torch.nn.Module, value_gates: bool) -> list[torch.nn.Parameter]:
    """Return the parameters for Muon: projections of attention and MLP that all loops share. Gates of value embeddings
    are matrices but use AdamW unless `value_gates`; so do matrices that make factors from an embedding of the time."""
    trunk = getattr(model, model.base_model_prefix, model)
    return [
        module.weight
        for section in (trunk.prelude, trunk.core, trunk.coda)
        for module in section.modules()
        if isinstance(module, torch.nn.Linear) and getattr(module, "init_role", None) != "zero"
        if value_gates or getattr(module, "init_role", None) != "value_gate"
        if module.weight.requires_grad
    ]


def attention_flops(config, layers: str, length: int) -> int:
    """Return the forward operations per token in the attention products of a section's layers."""
    types = dict(zip(("prelude", "core", "coda"), config.section_layer_types()))[layers]
    width = config.block_sizes(layers).num_attention_heads * config.head_dim
    keys = (min(length, config.sliding_window) if kind == "sliding_attention" else length for kind in types)
    return sum(4 * width * k for k in keys)


def loops_without_keys(config, depth: float) -> float:
    """Return how many of `depth` loops (or of a mean depth) reuse keys and values of other loops."""
    most = math.inf if config.num_key_value_loops is None else config.num_key_value_loops
    return max(0, depth - min(math.ceil(depth / config.key_value_interval), most))


def cache_numbers_per_token(config, num_loops: int | None = None) -> int:
    """Return how many numbers a cache stores per token: keys and values of all heads in every slot."""
    stored = config.num_stored_loops(config.num_loops if num_loops is None else num_loops)
    core = config.num_core_layers * stored * config.block_sizes("core").num_key_value_heads
    outer = (config.num_prelude_layers + config.num_coda_layers) * config.num_key_value_heads
    return 2 * config.head_dim * (core + outer)


def training_flops_per_token(
    config,
    length: int,
    depth: float,
    backprop_loops: float | None = None,
    value_tables: bool = False,
    only_gate: bool = False,
) -> float:
    """Return the training operations per token. `depth` and `backprop_loops` may be means of sampled values.

    value_tables: count 6 operations for each of their parameters, as if they were multiplied once.
    only_gate: only the exit gate is trained, so that there is no backward pass through the model.
    """
    n = sizes(config)
    only_gate = only_gate or config.loop_loss == "gate"
    with_gradient = 0 if only_gate else depth if backprop_loops is None else min(backprop_loops, depth)
    times = 1 if only_gate else 3  # cost in forward passes: 3 with the backward pass
    codas = 1 if config.loop_loss == "terminal" else depth
    heads = {"exit_weighted_logits": 1, "last_third": depth - start_of_last_third(depth)}.get(config.loop_loss, codas)
    once = times * 2 * value_tables * n.value_tables
    prelude = 2 * n.outer + attention_flops(config, "prelude", length)
    # without an injection its output enters before the first loop alone, which then may have no gradients
    once += prelude * (1 if config.injection == "none" and with_gradient < depth else times)
    loops = (2 * n.core + attention_flops(config, "core", length)) * (depth + 2 * with_gradient)
    unmade = loops_without_keys(config, depth)
    unmade += 2 * (unmade - loops_without_keys(config, depth - with_gradient))
    loops -= 2 * n.core_keys * unmade
    coda = times * (2 * n.coda + attention_flops(config, "coda", length))
    return once + loops + codas * coda + heads * times * 2 * n.head


def effective_parameters(config, depth: float, value_tables: bool = True) -> float:
    """Return N of a model with its loops unrolled to `depth`: without the embedding, with the unembedding.

    value_tables: count each table once, also that of a looped layer.
    """
    n = sizes(config)
    looped = depth * n.core - loops_without_keys(config, depth) * n.core_keys
    return n.outer + looped + n.coda + n.head + value_tables * n.value_tables


def validation_flops_per_token(config, length: int, loops: list[int]) -> float:
    """Return the operations per token to read the loss at each of these depths: of one pass that reads all loops, or
    of a pass for each depth where a pass reads the number of its loops."""
    if config.reads_run_depth is not None:
        return sum(forward_flops_per_token(config, length, depth) for depth in loops)
    n, deepest = sizes(config), max(loops)
    readout = 2 * (n.coda + n.head) + attention_flops(config, "coda", length)
    return forward_flops_per_token(config, length, deepest) + (deepest - 1) * readout


def forward_flops_per_token(config, length: int, depth: float) -> float:
    n = sizes(config)
    fixed = sum(attention_flops(config, section, length) for section in ("prelude", "coda"))
    loops = depth * (2 * n.core + attention_flops(config, "core", length))
    return 2 * (n.outer + n.coda + n.head) + fixed + loops - 2 * n.core_keys * loops_without_keys(config, depth)
