"""The parts of a block: attention and MLP around the residual stream.

These modules do not count loops. They get the cache slot that attention fills and, if a layer has a set of parameters
for each loop (loop_parameters.py), the set to use: `loop_set`, else None.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .checks import check_softcap
from .compatibility import (
    KERNELS_FILL_PAGES,
    PagedAttentionCache,
    RotaryEmbedding,
    eager_attention,
)
from .cpu import attend_single_query, is_slow_single_query, project
from .loop_parameters import LoopDeltas
from .norms import LoopedNorm, block_norm, configured_norm
from .overrides import has_global_hooks, has_hooks, is_as_written, sdpa_is_as_written


VALUE_GATE_CHANNELS = 32
LinearOrTable = TypeVar("LinearOrTable", nn.Linear, nn.Embedding)


def rotary_embeddings(config) -> nn.Module:
    """Return the module that makes cos and sin for all layers, or one for each layer type with separate parameters.

    It takes this family's config, which has the fields of Llama's config that it reads.
    """
    if kinds := config.rope_kinds():
        return nn.ModuleDict({kind: RotaryEmbedding(config.with_rope_of(kind)) for kind in kinds})
    return RotaryEmbedding(config)


def rotary_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables for `rotate`, [rows, length, 1, head_dim], made once per pass."""
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(2), torch.cat([-first, second], dim=-1).unsqueeze(2)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to [rows, length, heads, head_dim]: the halves of a head are rotated against each other.

    Bit-identical to transformers' function; the table of sines contains the sign, so that nothing is negated here.
    """
    return heads * cos + heads.roll(heads.shape[-1] // 2, dims=-1) * signed_sin


def linear(in_features: int, out_features: int, role: str, bias: bool = False, width: int | None = None) -> nn.Linear:
    """Return a linear layer marked with its role for the init schemes, see initialization.py. width: the width of its
    stream, if that is not hidden_size."""
    return with_role(nn.Linear(in_features, out_features, bias=bias), role, width)


def with_role(module: LinearOrTable, role: str, width: int | None = None) -> LinearOrTable:
    """Mark a module with its role, which the init schemes read, and return it."""
    vars(module).update(init_role=role, init_width=width)
    return module


def heads_of_rank(heads: torch.Tensor, num_heads: int, layer: nn.Module) -> torch.Tensor:
    """Select this process's heads from [rows, length, heads, head_dim] if tensor parallelism splits the outputs of
    `layer`: transformers does so with DTensors, serving engines with their own layer classes."""
    if heads.shape[-2] == num_heads:
        return heads
    mesh: Any = getattr(layer.weight, "device_mesh", None)
    of_layer: Any = getattr(layer, "tp_rank", None)
    if mesh is not None:
        rank = mesh.get_local_rank(mesh.ndim - 1)
    elif of_layer is not None:
        rank = of_layer
    else:  # a quantised shard, which has no mesh; ranks that split a layer follow each other
        rank = torch.distributed.get_rank() % (heads.shape[-2] // num_heads)
    return heads.narrow(-2, rank * num_heads, num_heads)


class AttentionSite(nn.Module):
    """Attention to the keys and values of one cache slot: no parameters, but the slot as `layer_idx`.

    Attention kernels with their own cache (continuous batching, serving engines) address it by `module.layer_idx`,
    and engines look for one such module per slot. A looped layer fills one slot per loop.
    """

    def __init__(self, config, layer_type: str, slot: int):
        super().__init__()
        self.config, self.layer_idx = config, slot
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.softcap = config.attention_softcap
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads  # the same in the core
        self.attention_dropout = nn.Dropout(config.attention_dropout)  # a module, for trainers that turn dropout off
        self.is_causal = True
        self.sliding_window = config.sliding_window if layer_type == "sliding_attention" else None

    def forward(self, queries, keys, values, attention_mask, **kwargs):
        """Attend, from [rows, heads, length, head_dim] each to [rows, length, heads, head_dim] and weights or None."""
        implementation = self.config._attn_implementation
        if self.softcap is not None:
            check_softcap(self.softcap, implementation)
            kwargs["softcap"] = self.softcap
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        return attention_interface(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout.p if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )


class DeeperSite:
    """The site of a loop beyond those that the model was built for: an existing site with another `layer_idx`, and
    without its hooks."""

    def __init__(self, site: AttentionSite, slot: int):
        self.site, self.layer_idx = site, slot

    def __getattr__(self, name):
        if name == "site":  # read before __init__ when the object is copied or compiled
            raise AttributeError(name)
        return getattr(self.site, name)

    def to(self, *args, **kwargs) -> "DeeperSite":  # accelerate's hooks move every argument that has this method
        return self

    def __call__(self, *args, **kwargs):
        of_class = type(self.site).forward
        if of_class is AttentionSite.forward:
            return of_class(self, *args, **kwargs)  # pyrefly: ignore[bad-argument-type]  as the module
        site = copy.copy(self.site)  # a module, since a forward of others may call that of its base class by `super`
        site.layer_idx = self.layer_idx
        return of_class(site, *args, **kwargs)


def is_our_site(site: AttentionSite | DeeperSite) -> bool:
    """Return whether calling a site is attention as written here, and nothing watches or changes the call."""
    module = site.site if isinstance(site, DeeperSite) else site
    return is_as_written(module, "forward") and not has_hooks(module) and not has_global_hooks()


class LoopedLayer(nn.Module):
    """Base class of attention and MLP: linear layers, to each of which every loop may add its own low-rank delta."""

    def __init__(self):
        super().__init__()
        self.loop_deltas = None

    def add_deltas(self, sizes):
        if sizes.delta_rank is not None:
            self.loop_deltas = LoopDeltas(self, sizes.delta_rank, sizes.num_sets)

    def project(self, name: str, x: torch.Tensor, loop_set: int | torch.Tensor | None) -> torch.Tensor:
        """Apply the layer of this name, with this loop's delta, to [rows, length, in]."""
        y = project(getattr(self, name), x)
        return y if self.loop_deltas is None else y + self.loop_deltas.of(name)(x, loop_set)


class LoopedAttention(LoopedLayer):
    """Grouped-query or latent attention, whose queries may come from another state than its keys and values."""

    def __init__(self, config, sizes, value_embedding: bool):
        super().__init__()
        self.config = config
        width = sizes.hidden_size
        self.head_dim = config.head_dim

        query_size = sizes.num_attention_heads * config.head_dim
        key_value_size = sizes.num_key_value_heads * config.head_dim
        bias, value_bias = config.attention_bias != "none", config.attention_bias in ("qkv", "qkvo")
        self.q_proj = linear(width, query_size, "input", bias, width)
        if config.kv_latent_size is None:
            self.kv_down_proj = None
            key_value_input = width
        else:
            self.kv_down_proj = linear(width, config.kv_latent_size, "input", width=width)
            self.kv_latent_norm = LoopedNorm(config.kv_latent_size, config.rms_norm_eps, affine=False)
            key_value_input = config.kv_latent_size
        self.k_proj = linear(key_value_input, key_value_size, "input", bias, width)
        self.v_proj = linear(key_value_input, key_value_size, "input", value_bias, width)
        self.o_proj = linear(query_size, width, "output", config.attention_bias == "qkvo", width)

        self.rounds_rotated = config.rope_rounding == "rotated"
        self.qk_norm = config.qk_norm
        if self.qk_norm in ("learned", "all_heads"):
            over_head = self.qk_norm == "learned"
            normed_sizes = (config.head_dim,) * 2 if over_head else (query_size, key_value_size)
            self.q_norm, self.k_norm = (
                configured_norm(config, size, num_sets=sizes.num_norm_sets) for size in normed_sizes
            )
        elif self.qk_norm == "free":
            self.free_norm = LoopedNorm(config.head_dim, torch.finfo(torch.float32).eps, affine=False)

        if value_embedding:
            self.value_gate_channels = min(VALUE_GATE_CHANNELS, width)
            self.value_gate = linear(self.value_gate_channels, sizes.num_key_value_heads, "value_gate")
        self.add_deltas(sizes)

    def heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim)

    def rotated_heads(self, part: str, x: torch.Tensor, position_embeddings, loop_set) -> torch.Tensor:
        """Return queries ("q") or keys ("k") ready for attention: normed, rotated, [rows, heads, length, head_dim]."""
        projected = self.project(f"{part}_proj", x, loop_set)
        norm: Any = getattr(self, f"{part}_norm", None)
        heads = self.heads(norm(projected, loop_set) if self.qk_norm == "all_heads" else projected)
        if self.qk_norm == "learned":
            heads = norm(heads, loop_set)
        if position_embeddings is not None:
            heads = rotate(heads, *position_embeddings)
            if self.rounds_rotated:
                heads = heads.to(projected.dtype)
        return (self.free_norm(heads) if self.qk_norm == "free" else heads).transpose(1, 2)

    def keys_and_values(
        self, hidden_states, position_embeddings, value_embedding, loop_set
    ) -> tuple[torch.Tensor, ...]:
        """Return keys and values, [rows, heads, length, head_dim] each."""
        source = hidden_states
        if self.kv_down_proj is not None:
            source = self.kv_latent_norm(self.project("kv_down_proj", hidden_states, loop_set))
        keys = self.rotated_heads("k", source, position_embeddings, loop_set)
        values = self.heads(self.project("v_proj", source, loop_set))
        if value_embedding is not None:
            gate = 2 * torch.sigmoid(project(self.value_gate, hidden_states[..., : self.value_gate_channels]))
            embedded = heads_of_rank(self.heads(value_embedding), values.shape[-2], self.v_proj)
            values = values + gate.unsqueeze(-1) * embedded.to(values.dtype)
        return keys, values.transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [rows, length, hidden]: keys and values
        query_states: torch.Tensor,  # the same, or another state of that shape: queries
        site: AttentionSite | DeeperSite,  # of the cache slot that this loop of the layer fills
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache=None,
        value_embedding: torch.Tensor | None = None,  # [rows, length, key/value heads * head_dim]
        row_attention: Callable | None = None,  # for rows at different loops and positions, in place of the cache
        loop_set: int | torch.Tensor | None = None,
        kept_keys: torch.Tensor | None = None,  # of an earlier loop, read if this loop makes none
        kept_values: torch.Tensor | None = None,
        makes_keys: bool | torch.Tensor = True,  # a tensor [rows, 1, 1, 1] if rows are at different loops
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the branch, attention weights or None, and the keys and values that later loops may read."""
        queries = self.rotated_heads("q", query_states, position_embeddings, loop_set)
        keys: Any = None  # stay None in a loop that makes none
        values: Any = None
        if makes_keys is not False:
            keys, values = self.keys_and_values(hidden_states, position_embeddings, value_embedding, loop_set)

        slot = site.layer_idx
        if row_attention is not None:
            output, weights = row_attention(queries, keys, values, slot, site.scaling), None
            for_later_loops = None, None
        else:
            is_paged = isinstance(cache, PagedAttentionCache)
            if kept_keys is not None and kept_values is not None:
                keys, values = either(makes_keys, keys, kept_keys), either(makes_keys, values, kept_values)
            elif cache is not None and not is_paged:
                keys, values = cache.update(keys, values, slot)
            for_later_loops = keys, values
            if is_paged and KERNELS_FILL_PAGES:
                kwargs["cache"] = cache
            elif is_paged:  # with kept keys too, since it also fills kwargs for the kernel
                keys, values = cache.update(keys, values, slot, kwargs=kwargs)
            output, weights = self.attend(site, queries, keys, values, attention_mask, kwargs)
        output = self.project("o_proj", output.reshape(*hidden_states.shape[:-1], -1), loop_set)
        return output, weights, *for_later_loops

    def attend(self, site, queries, keys, values, mask, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [rows, length, heads, head_dim], and attention weights or None."""
        is_plain = self.config._attn_implementation == "sdpa" and not kwargs.keys() & {"cache", "is_causal"}
        is_plain = is_plain and not (self.training and site.attention_dropout.p)
        if is_plain and is_slow_single_query(queries) and sdpa_is_as_written() and is_our_site(site):
            return attend_single_query(queries, keys, values, mask, site.scaling).transpose(1, 2), None
        if queries.dtype != values.dtype:  # else flash attention reads the dtype of a linear layer in the site
            queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        return site(queries, keys, values, mask, **kwargs)


def either(makes: bool | torch.Tensor, new: torch.Tensor | None, kept: torch.Tensor) -> torch.Tensor:
    """Return the new states of rows that make some, else the kept ones. The last rows may have no kept states yet."""
    if isinstance(makes, bool) or new is None:
        return kept
    return torch.where(makes, new, torch.cat([kept, new[len(kept) :]]))


class LoopedMLP(LoopedLayer):
    """down(scale * act(gate x) * up x), or down(scale * act(up x)) without a gate."""

    # a fused kernel that recipes/engine/kernels.py may set: (gate x, up x) -> act(gate x) * up x
    gated_activation: Callable | None = None

    def __init__(self, config, sizes):
        super().__init__()
        self.scale = config.mlp_activation_scale
        self.activation = ACT2FN[config.hidden_act]
        width, inner = sizes.hidden_size, sizes.intermediate_size
        bias = config.mlp_bias
        self.gate_proj = linear(width, inner, "input", bias, width) if config.mlp_gated else None
        self.up_proj = linear(width, inner, "input", bias, width)
        self.down_proj = linear(inner, width, "output", bias, width)
        self.add_deltas(sizes)

    def forward(self, x, loop_set: int | torch.Tensor | None = None):
        if self.gate_proj is None:
            x = self.activation(self.project("up_proj", x, loop_set))
        else:
            gate, up = self.project("gate_proj", x, loop_set), self.project("up_proj", x, loop_set)
            x = self.activation(gate) * up if self.gated_activation is None else self.gated_activation(gate, up)
        return self.project("down_proj", x if self.scale == 1 else x * self.scale, loop_set)


class Modulation(nn.Module):
    """Factors on the branches of a block, computed from a time embedding: 1 + s on a branch's input, 1 + g on its
    output; both are 1 in a new model. (LoopFormer, whose gates start at 0 instead: its g is 1 + g here.)"""

    def __init__(self, width: int):
        super().__init__()
        self.proj = linear(width, 4 * width, "zero", bias=True)

    def forward(self, embedding: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gates of attention and MLP, then their scales: [rows, 1, width] each."""
        return (1 + project(self.proj, nn.functional.silu(embedding))).chunk(4, dim=-1)


class LoopedBlock(GradientCheckpointingLayer):
    """Attention and MLP around the residual stream, in one of four arrangements (eps is the residual factor):

    pre                 x += eps * f(norm_in x)
    post                x += eps * norm_out(f(x))
    branch_sandwich     x += eps * norm_out(f(norm_in x))
    residual_sandwich   x  = norm_out(x + eps * f(norm_in x))
    """

    def __init__(self, config, sizes, layer: int, layer_type: str, rope: str | None):
        super().__init__()
        self.layer = layer  # index among the unique layers
        self.layer_type = layer_type
        self.rope = rope  # the kind of its rotary tables, or None
        self.arrangement = config.block_norm
        self.self_attn = LoopedAttention(config, sizes, config.has_value_embedding(layer))
        self.mlp = LoopedMLP(config, sizes)
        self.norms_input = self.arrangement != "post"
        if self.norms_input:
            self.input_layernorm = block_norm(config, sizes.hidden_size, sizes.num_norm_sets)
            self.post_attention_layernorm = block_norm(config, sizes.hidden_size, sizes.num_norm_sets)
        if self.arrangement != "pre":
            self.attention_output_norm = block_norm(config, sizes.hidden_size, sizes.num_norm_sets)
            self.mlp_output_norm = block_norm(config, sizes.hidden_size, sizes.num_norm_sets)
        self.modulation = Modulation(sizes.hidden_size) if sizes.is_modulated else None
        self.dropout = nn.Dropout(config.residual_dropout)
        self.dropout_on = config.residual_dropout_on

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual_factor: float | torch.Tensor = 1.0,  # a tensor [rows, 1, 1] where rows run to different depths
        query_states: torch.Tensor | None = None,  # where queries come from, if not from the stream
        value_embedding: torch.Tensor | None = None,
        time: torch.Tensor | None = None,  # time embedding, [rows or 1, 1, hidden]
        loop_set: int | torch.Tensor | None = None,
        kept_keys: torch.Tensor | None = None,
        kept_values: torch.Tensor | None = None,
        keeps_keys: bool = False,  # also return keys and values, for later loops
        **kwargs,  # no tensors with gradients: reentrant checkpointing sees only positional ones
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        factors = [None] * 4 if self.modulation is None else self.modulation(time)
        attention_gate, mlp_gate, attention_scale, mlp_scale = factors
        keys_from = self.entering("input_layernorm", hidden_states, loop_set, attention_scale)
        queries_from = keys_from
        if query_states is not None:
            queries_from = self.entering("input_layernorm", query_states, loop_set, attention_scale)
        kept = {"kept_keys": kept_keys, "kept_values": kept_values}
        branch, _, *attended = self.self_attn(
            keys_from, queries_from, value_embedding=value_embedding, loop_set=loop_set, **kept, **kwargs
        )
        hidden_states = self.join(hidden_states, branch, residual_factor, "attention", loop_set, attention_gate)
        branch = self.mlp(self.entering("post_attention_layernorm", hidden_states, loop_set, mlp_scale), loop_set)
        hidden_states = self.join(hidden_states, branch, residual_factor, "mlp", loop_set, mlp_gate)
        return (hidden_states, *attended) if keeps_keys else hidden_states

    def entering(self, norm: str, stream, loop_set, scale):
        """Return the input of a branch: the stream, normed if the arrangement says so, and scaled."""
        return scaled(getattr(self, norm)(stream, loop_set) if self.norms_input else stream, scale)

    def join(self, stream, branch, scale, part, loop_set, gate):
        if self.arrangement in ("post", "branch_sandwich"):
            branch = getattr(self, f"{part}_output_norm")(branch, loop_set)
        branch = scaled(branch, gate)
        if self.training and self.dropout_on in ("both", part):
            branch = self.dropout(branch)
        stream = stream + (branch if isinstance(scale, float) and scale == 1.0 else branch * scale)
        if self.arrangement == "residual_sandwich":
            stream = getattr(self, f"{part}_output_norm")(stream, loop_set)
        return stream


def scaled(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return x if factor is None else x * factor


class LoopDamping(nn.Module):
    """h * sigmoid(a) with one learned scalar a."""

    def __init__(self, config):
        super().__init__()
        self.logit = nn.Parameter(torch.empty(1))

    def init_parameters(self):
        init.constant_(self.logit, 2.0)

    def forward(self, state):
        return state * torch.sigmoid(self.logit).to(state.dtype)
