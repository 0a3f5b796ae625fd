"""What serving engines are tested with: a small model of every preset, prompts, and what `generate` answers."""

import torch

from modeling_looped import LoopedConfig, LoopedForCausalLM


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "head_dim": 64,  # the least that its kernel takes on a CPU
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "num_loops": 3,
}
# what no preset has
OTHERS = {
    "windows": {"window_pattern": "SL", "sliding_window": 8, "num_core_layers": 2},
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": "learned"},
    # loops that attend in the slot of an earlier one
    "keys_of_every_second_loop": {"key_value_interval": 2, "num_core_layers": 2},
    "keys_of_the_first_loop": {"num_key_value_loops": 1},
}
SYSTEMS = [*LoopedConfig.preset_names(), *OTHERS]
PROMPTS = [[5, 9, 33, 7, 100, 101, 102], [3], list(range(11, 38)), [200, 201, 4, 4]]
NEW_TOKENS = 12


def build(system: str) -> LoopedForCausalLM:
    torch.manual_seed(0)
    fields = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **SIZES}
    if system in OTHERS:
        config = LoopedConfig(**{"num_core_layers": 1, **fields, **OTHERS[system]})
    else:
        config = LoopedConfig.from_preset(system, **fields, num_key_value_heads=2)
    model = LoopedForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    return model


def greedy(model, prompt: list[int], num_loops: int | None = None) -> tuple[list[int], list[float], float]:
    """Tokens, their log-probabilities, and what rounding in fp32 may change of these: it grows with the logits."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        num_loops=num_loops,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = result.sequences[0, len(prompt) :].tolist()
    told = [float(logits[0].log_softmax(-1)[token]) for logits, token in zip(result.logits, tokens)]
    return tokens, told, max(2e-5, 4e-6 * max(float(logits.abs().max()) for logits in result.logits))
