"""Makes a trained model wider without changing its outputs, to time passes of sizes that are not trained here."""

import copy

import torch

from modeling_looped import LoopedForCausalLM


WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@torch.no_grad()
def widened(model: LoopedForCausalLM, times: int) -> LoopedForCausalLM:
    """Repeat every channel and every head `times` times; matrices that read them take their mean."""
    config = copy.deepcopy(model.config)
    for name in WIDTHS:
        setattr(config, name, times * getattr(config, name))
    config.tie_word_embeddings = False  # embeddings keep their values, the head divides them
    wide, narrow = LoopedForCausalLM(config).to(model.device).eval(), model.state_dict()
    narrow.setdefault("lm_head.weight", narrow["model.embed_tokens.weight"])
    for name, parameter in wide.state_dict().items():
        copies = [new // old for new, old in zip(parameter.shape, narrow[name].shape, strict=True)]
        is_read_by_tokens = name == "model.embed_tokens.weight"
        readers = copies[1] if len(copies) == 2 and not is_read_by_tokens else 1
        parameter.copy_(narrow[name].float().repeat(copies) / readers)
    wide.generation_config = model.generation_config
    ids = torch.arange(config.vocab_size, device=model.device)[None, :16]
    logits, of_wide = model(ids).logits.float(), wide(ids).logits
    if not torch.allclose(logits, of_wide, rtol=0, atol=1e-4 * float(logits.abs().max())):
        raise SystemExit("--widen: wider, this model computes something else, so nothing could be measured: leave out")
    return wide
