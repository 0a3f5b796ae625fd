"""Read checkpoints of the authors' training codes, which are not in transformers' format, for `looped convert`.

    base_checkpoints/d12        model_010000.pt and meta_010000.json    Fully Looped Transformer
    outputs/my_run              last.pt                                 readout blind spot

A folder stands for its newest step; the file of a step may be named too. The Fully Looped Transformer has rotary
tables in bf16, so its logits differ by their rounding.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from looped_recipes.common.hub import file_of_readout, files_of_fully_looped
from looped_recipes.data.tokenizers import word_pieces
from modeling_looped import LoopedConfig, LoopedForCausalLM


Tensors = dict[str, torch.Tensor]


class Trained(NamedTuple):
    model: LoopedForCausalLM
    tokenizer: PreTrainedTokenizerFast | None  # None if the checkpoint has none


def read_training_checkpoint(source: str | Path, num_loops: int | None = None) -> Trained:
    """Read a training checkpoint of a paper's code. num_loops: depth in the config, by default that of training."""
    if num_loops is not None and num_loops < 1:
        raise ValueError(f"num_loops must be at least 1, got {num_loops}")
    files = files_of_fully_looped(source)
    try:
        trained = readout(file_of_readout(source)) if files is None else fully_looped(*files)
    except (LookupError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{source} is not what the training code of the Fully Looped Transformer, or that of the readout paper, "
            f"saves ({type(error).__name__}: {error}): check it, and name a model in another format by its folder"
        ) from error
    config = trained.model.config
    config.trained_num_loops = config.num_loops
    config.num_loops = config.num_loops if num_loops is None else num_loops
    return trained


def loaded(file: Path) -> dict:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load and pickle raise many types of errors
        raise ValueError(f"{file} is damaged, or holds more than tensors and settings: {error}") from error


def filled(config: LoopedConfig, tensors: Tensors, source: Path) -> LoopedForCausalLM:
    model = LoopedForCausalLM(config)
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    different = sorted(model.state_dict().keys() ^ tensors.keys())
    if different:
        raise ValueError(f"{source} and its settings do not agree on {', '.join(different)}")
    model.load_state_dict(tensors)
    return model.eval()


# Fully Looped Transformer

SYSTEMS = {
    "LT": "lt",
    "LT_i": "lt_input",
    "LT_ia": "lt_attention",
    "FLT": "flt",
    "FLT_res": "flt_residual",
    "FLT_rl": "flt",
}
LOSSES = {"END": "terminal", "STEP": "per_loop", "FEW": "last_third"}
FIXED_LOSSES = {"LT_i": "terminal", "LT_ia": "terminal", "FLT_rl": "per_loop"}  # whatever the loss_type
OF_LAYERS = {
    "attn.c_q": "self_attn.q_proj",
    "attn.c_k": "self_attn.k_proj",
    "attn.c_v": "self_attn.v_proj",
    "attn.c_kv_down": "self_attn.kv_down_proj",
    "attn.c_k_up": "self_attn.k_proj",
    "attn.c_v_up": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def fully_looped(file: Path, meta: Path) -> Trained:
    said = json.loads(meta.read_text(encoding="utf-8"))["model_config"]
    if said["model_type"] not in SYSTEMS:
        raise ValueError(f"{meta} has model_type={said['model_type']!r}, known are {', '.join(SYSTEMS)}")
    width, length, windows = said["n_embd"], said["sequence_len"], said.get("window_pattern", "L").upper()
    is_latent = said.get("attn_type") == "mla"  # which attends in full, whatever window_pattern says
    config = LoopedConfig.from_preset(
        SYSTEMS[said["model_type"]],
        vocab_size=said["vocab_size"],
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=said["n_head"],
        num_key_value_heads=said["n_kv_head"],
        num_core_layers=said["n_layer"],
        num_loops=said["K"],
        max_position_embeddings=length,
        loop_loss=FIXED_LOSSES.get(said["model_type"]) or LOSSES[said.get("loss_type", "END")],
        kv_latent_size=said["kv_lora_rank"] if is_latent else None,
        window_pattern=windows_of_layers(windows, said["n_layer"]) if "S" in windows and not is_latent else None,
        bos_token_id=None,
        eos_token_id=None,
    )
    tensors = {}
    for stored, tensor in loaded(file).items():
        name = stored.removeprefix("_orig_mod.")
        if name in ("transformer.wte.weight", "lm_head.weight"):
            ours = "model.embed_tokens.weight" if "wte" in name else name
            tensors[ours] = tensor[: config.vocab_size].float()  # the other rows pad it to a multiple of 64
            continue
        layer, _, part = name.removeprefix("transformer.h.").removesuffix(".weight").partition(".")
        ours = OF_LAYERS[part]
        turned = ours.endswith(("q_proj", "k_proj"))
        tensors[f"model.core.{layer}.{ours}.weight"] = (
            swapped_halves(tensor, config.head_dim) if turned else tensor
        ).float()
    return Trained(filled(config, tensors, file), None)


def windows_of_layers(pattern: str, num_layers: int) -> str:
    """Repeat the pattern to one letter per layer; the last layer always has full attention (L)."""
    return "".join(pattern[i % len(pattern)] for i in range(num_layers - 1)) + "L"


def swapped_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Swap the halves of each head in [heads * head_dim, ...]. This converts from rotary positions that rotate in the
    opposite direction."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).flip(1).flatten(0, 2)


# readout blind spot

SUPERVISION = {"terminal": "terminal", "per-step": "per_loop", "adaptive": "exit_weighted"}
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


def readout(file: Path) -> Trained:
    stored = loaded(file)
    said, supervision = stored["config"]["model"], stored["config"].get("supervision", {})
    for name in ("block_norm_type", "loop_norm_type", "decode_norm_type"):
        if said.get(name, "rmsnorm") != "rmsnorm":
            raise ValueError(f"{file} has model.{name}={said[name]!r}, but only 'rmsnorm' can be converted")
    state, weighted = stored["model_state"], supervision.get("mode") == "adaptive"
    kind = "final_only" if said.get("decode_norm_final_only") else "rmsnorm"
    config = LoopedConfig.from_preset(
        "readout_terminal_rmsnorm",
        vocab_size=len(state["token_embedding.weight"]),
        hidden_size=said["d_model"],
        intermediate_size=said["ff_multiplier"] * said["d_model"],
        num_attention_heads=said["num_heads"],
        num_core_layers=said["num_layers"],
        num_loops=said["num_loops"],
        max_position_embeddings=len(state["position_embedding.weight"]),
        readout_norm=kind if said.get("use_decode_norm", True) else "none",
        inter_loop_norm="own" if said.get("inter_loop_norm", True) else "none",
        loop_damping=bool(said.get("use_spectral_damping", False)),
        tie_word_embeddings=said.get("tie_weights", True),
        loop_loss=SUPERVISION[supervision.get("mode", "terminal")],
        exit_gate="raw" if weighted else "none",
        exit_entropy_weight=supervision.get("entropy_weight", 0.1),
        norm_penalty=supervision.get("norm_penalty_weight", 0.0),
        scale_anchor=supervision.get("scale_anchor_weight", 0.0),
        scale_anchor_target=supervision.get("scale_anchor_target", 1.0),
        bos_token_id=None,
        eos_token_id=None,
    )
    tensors = {
        "model.embed_tokens.weight": state["token_embedding.weight"],
        "model.embed_positions.weight": state["position_embedding.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    optional = {
        "decode_norm.weight": ("model.norm.weight", config.readout_norm != "none"),
        "loop_norm.weight": ("model.inter_loop_norm.weight", config.inter_loop_norm == "own"),
        "exit_gate.weight": ("exit_gate.weight", weighted),
        "exit_gate.bias": ("exit_gate.bias", weighted),
    }
    tensors |= {ours: state[name] for name, (ours, is_used) in optional.items() if is_used}
    if config.loop_damping:
        tensors["model.damping.logit"] = state["raw_alpha"].reshape(1)
    for i in range(config.num_core_layers):
        theirs, ours = f"layers.{i}", f"model.core.{i}"
        parts = state[f"{theirs}.attn.qkv.weight"].chunk(3)
        tensors |= {f"{ours}.self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts)}
        for name, own in (
            ("attn.out_proj", "self_attn.o_proj"),
            ("ffn.w1", "mlp.gate_proj"),
            ("ffn.w3", "mlp.up_proj"),
            ("ffn.w2", "mlp.down_proj"),
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            tensors[f"{ours}.{own}.weight"] = state[f"{theirs}.{name}.weight"]
    model, tokenizer = filled(config, tensors, file), words_of(stored.get("tokenizer", {}))
    if tokenizer is not None:
        model.config.bos_token_id, model.config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        model.config.pad_token_id = tokenizer.pad_token_id
    return Trained(model, tokenizer)


def words_of(state: dict) -> PreTrainedTokenizerFast | None:
    """Build the tokenizer, whose tokens are runs of white space, words and single signs. Its texts start without a
    special token."""
    if state.get("kind") != "regex" or not set(SPECIAL.values()) <= set(state["itos"]):
        return None
    vocabulary = {token: id for id, token in enumerate(state["itos"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = word_pieces()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL)
