"""Looped models without injection and residual scaling, and the Llamas that they are when their loops are unrolled."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_looped import LoopedConfig, LoopedForCausalLM


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
}


def sources(looped: LoopedForCausalLM, num_loops: int) -> list[torch.nn.Module]:
    """The block that each layer of the unrolled model copies."""
    trunk = looped.model
    return [*trunk.prelude, *list(trunk.core) * num_loops, *trunk.coda]


def make_looped(attention: str = "sdpa", **fields) -> LoopedForCausalLM:
    torch.manual_seed(0)
    looped = LoopedForCausalLM(LoopedConfig(**{**SIZES, **fields}))
    with torch.no_grad():  # the initial values of norms are 1, which would hide where they are applied
        for parameter in looped.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 1.0))
    looped.set_attn_implementation(attention)
    return looped.eval()


def unroll(looped: LoopedForCausalLM, num_loops: int | None = None) -> LlamaForCausalLM:
    """A Llama with a layer of its own for every layer that `looped` applies."""
    config = looped.config
    blocks = sources(looped, config.num_loops if num_loops is None else num_loops)
    shared = {key: getattr(config, key) for key in SIZES}
    llama = LlamaForCausalLM(
        LlamaConfig(
            **shared,
            num_hidden_layers=len(blocks),
            head_dim=config.head_dim,
            hidden_act=config.hidden_act,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            attn_implementation=config._attn_implementation,
        )
    )
    llama.model.embed_tokens.load_state_dict(looped.model.embed_tokens.state_dict())
    llama.model.norm.load_state_dict(looped.model.norm.state_dict())
    llama.lm_head.load_state_dict(looped.lm_head.state_dict())
    for layer, block in zip(llama.model.layers, blocks, strict=True):
        layer.load_state_dict(block.state_dict())
    return llama.eval()


def tokens(batch_size: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch_size, length), generator=torch.Generator().manual_seed(1))
