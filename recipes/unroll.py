"""A looped model as the Llama that it is when its loops are unrolled:

    python -m recipes.unroll runs/retrofit/dense/final runs/retrofit/llama [NUM_LOOPS]

Every loop gets copies of the core's layers, so P + C * NUM_LOOPS + Q layers; by default as many loops as the model was
trained with. Only what a Llama computes can be one: no injection, nothing between loops, its blocks and its readout.
The tokenizer goes along.
"""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.formats.dense import start_from_dense
from recipes.common.command_line import print_help, run_command


SHARED = """
    vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act
    max_position_embeddings rms_norm_eps rope_parameters attention_dropout tie_word_embeddings initializer_range
    pad_token_id bos_token_id eos_token_id
""".split()
# of a looped config, what is not about what a trained model computes
FREE = {"num_loops", "trained_num_loops", "num_prelude_layers", "num_core_layers", "num_coda_layers", "init_scheme",
        "residual_scale", "residual_reference_layers", "residual_depth", "loop_loss", "exit_entropy_weight",
        "norm_penalty", "scale_anchor", "scale_anchor_target", "latent_loss", "latent_anchor", "residual_dropout",
        "residual_dropout_on", "embedding_dropout", "classifier_dropout", "state_init_std", "readout_alpha",
        "readout_alpha_learned", "num_readout_alphas", "norm_rounding"}  # fmt: skip


def unrolled(model: LoopedForCausalLM, num_loops: int) -> LlamaForCausalLM:
    trunk, config = model.model, model.config
    blocks = [*trunk.prelude, *list(trunk.core) * num_loops, *trunk.coda]
    fields = {name: getattr(config, name) for name in SHARED}
    llama_config = LlamaConfig(**fields, num_hidden_layers=len(blocks))
    differing = differences(config, start_from_dense(llama_config).config)
    if differing:
        raise ValueError(f"no Llama computes what this model does, because of {', '.join(differing)}")
    llama = LlamaForCausalLM(llama_config).to(model.dtype)
    llama.model.embed_tokens.load_state_dict(trunk.embed_tokens.state_dict())
    llama.model.norm.load_state_dict(trunk.norm.state_dict())
    llama.lm_head.load_state_dict(model.lm_head.state_dict())
    for layer, block in zip(llama.model.layers, blocks, strict=True):
        layer.load_state_dict(block.state_dict())
    return llama.eval()


def differences(config: LoopedConfig, plain: LoopedConfig) -> list[str]:
    """Fields that are not those of the looped model that this Llama would be."""
    names = [name for name in LoopedConfig.__annotations__ if name not in FREE]
    return [f"{name}={getattr(config, name)!r}" for name in names if getattr(config, name) != getattr(plain, name)]


@torch.no_grad()
def main(arguments: list[str]) -> Path:
    print_help(arguments, __doc__, least=2)
    source, target = arguments[0], Path(arguments[1])
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} exists and is not empty: choose another folder, or remove it")
    model = LoopedForCausalLM.from_pretrained(source)
    num_loops = int(arguments[2]) if len(arguments) > 2 else model.trained_depth
    if num_loops < 1:
        raise ValueError(f"NUM_LOOPS must be at least 1, got {num_loops}")
    llama = unrolled(model, num_loops)
    llama.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    print(f"{target}: a Llama of {llama.config.num_hidden_layers} layers, {llama.num_parameters():,} parameters")
    return target


if __name__ == "__main__":
    run_command(main)
