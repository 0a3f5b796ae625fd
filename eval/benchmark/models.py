"""Builds models for benchmarks, and prints the line with a result."""

import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from looped_recipes.common.provenance import provenance, rounded
from modeling_looped import LoopedConfig, LoopedForCausalLM


def sizes(args) -> dict:
    """Return config fields that looped and plain models share."""
    return {
        "vocab_size": args.vocab,
        "hidden_size": args.width,
        "intermediate_size": args.ff,
        "num_attention_heads": args.width // 64,
        "max_position_embeddings": 4096,
        "eos_token_id": None,
    }


def looped_config(args, **fields) -> LoopedConfig:
    return LoopedConfig(**sizes(args), num_core_layers=args.layers, num_loops=args.num_loops, **fields)


def build(args, config_or_class):
    with torch.device(args.device):  # drawing weights takes a CPU half a minute
        model = (LlamaForCausalLM if isinstance(config_or_class, LlamaConfig) else LoopedForCausalLM)(config_or_class)
    return model.to(device=args.device, dtype=getattr(torch, args.dtype))


def tokens(args, batch=None, length=None):
    return torch.randint(3, args.vocab, (batch or args.batch_size, length or args.length), device=args.device)


def greedy(prompt: torch.Tensor) -> dict:
    """Return the arguments of a greedy generation that goes on from a prompt without padding."""
    return {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}


def print_line(name: str, result: dict, args, digits: int):
    """Print a result as one JSON line."""
    print(
        json.dumps({"benchmark": name, **rounded(result, digits), **provenance(args.command), "dtype": args.dtype}),
        flush=True,
    )


def unrolled_llama(args) -> LlamaForCausalLM:
    """Build a Llama with as many layers as a looped model applies in all loops."""
    return build(args, LlamaConfig(**sizes(args), num_hidden_layers=args.layers * args.num_loops))


def training_step(model, batch, bf16: bool = False, **how):
    """Return a function that runs an optimizer step. bf16: of products only; weights keep their dtype."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step():
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=bf16):
            loss = model(input_ids=batch, labels=batch, use_cache=False, **how).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
