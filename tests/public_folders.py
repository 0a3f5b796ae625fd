"""Tiny folders in the layouts of published looped models, and what these models compute, written from their published
descriptions: config.json, names and shapes of tensors, and one plain float64 function for each, which reads nothing
but the stored tensors."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu, softplus


# trained models of published systems, which `from_pretrained` opens
PUBLIC_REPOSITORIES = {
    "nanbeige": ("Nanbeige/Nanbeige4.2-3B",),
    "huginn": ("tomg-group-umd/huginn-0125",),
    "ouro": (
        "ByteDance/Ouro-1.4B",
        "ByteDance/Ouro-1.4B-Thinking",
        "ByteDance/Ouro-2.6B",
        "ByteDance/Ouro-2.6B-Thinking",
    ),
    "parcae": (
        "SandyResearch/parcae-140m",
        "SandyResearch/parcae-370m",
        "SandyResearch/parcae-770m",
        "SandyResearch/parcae-1.3b",
    ),
}


def random_tensors(shapes: dict[str, tuple], seed: int = 0, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = (1 + 0.2 * values if len(shape) == 1 else 0.3 * values).to(dtype)
    return tensors


def write_folder(folder, config: dict, tensors: dict, num_shards: int = 1, pickled: bool = False) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    elif num_shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        names, weight_map = list(tensors), {}
        for shard in range(num_shards):
            file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
            part = names[shard::num_shards]
            save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# Llama's layers: Ouro and Nanbeige

LLAMA_SIZES = {
    "vocab_size": 47,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_cache": True,
}


def llama_shapes(config: dict, norms: tuple[str, ...]) -> dict[str, tuple]:
    d, inner, hd = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        parts = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": shape for part, shape in parts.items()}
        parts = {"gate": (inner, d), "up": (inner, d), "down": (d, inner)}
        shapes |= {f"{layer}.mlp.{part}_proj.weight": shape for part, shape in parts.items()}
        shapes |= {f"{layer}.{norm}.weight": (d,) for norm in norms}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    return shapes


def ouro(**changes) -> tuple[dict, dict]:
    config = {
        "architectures": ["OuroForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"},
        "model_type": "ouro",
        **LLAMA_SIZES,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "layer_types": ["full_attention"] * 2,
        "max_window_layers": 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "total_ut_steps": 3,
        "early_exit_threshold": 1.0,
        "torch_dtype": "float32",
        "transformers_version": "4.55.0",
        **changes,
    }
    norms = (
        "input_layernorm",
        "input_layernorm_2",
        "post_attention_layernorm",
        "post_attention_layernorm_2",
    )
    shapes = llama_shapes(config, norms)
    shapes |= {"model.early_exit_gate.weight": (1, config["hidden_size"]), "model.early_exit_gate.bias": (1,)}
    return config, random_tensors(shapes, 1)


def nanbeige(**changes) -> tuple[dict, dict]:
    config = {
        "architectures": ["NanbeigeForCausalLM"],
        "model_type": "nanbeige",
        **LLAMA_SIZES,
        "rope_theta": 7e7,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "num_loops": 2,
        "skip_loop_final_norm": False,
        "loop_loss_weights": [],
        "kv_channels": 10,
        "qk_layernorm": False,
        "emb_neighbor_num": None,
        "insert_ngram_layer_idx": [],
        "enable_mhc": False,
        "num_residual_streams": 4,
        "torch_dtype": "float32",
        **changes,
    }
    return config, random_tensors(llama_shapes(config, ("input_layernorm", "post_attention_layernorm")), 2)


# wte, prelude, core_block, coda: Huginn, the retrofitted models, Parcae


def sections_of(config: dict) -> dict[str, int]:
    counts = {
        "prelude": "n_layers_in_prelude",
        "core_block": "n_layers_in_recurrent_block",
        "coda": "n_layers_in_coda",
    }
    return {section: config[name] for section, name in counts.items()}


def freqs_cis(head_dim: int, length: int, base: float) -> torch.Tensor:
    frequencies = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).float()
    return torch.stack([torch.cos(angles)[None, :, None, :], torch.sin(angles)[None, :, None, :]], dim=4)


def huginn(is_retrofitted: bool = False, is_olmo: bool = False, **changes) -> tuple[dict, dict]:
    d, heads = 24, 4
    config = {
        "architectures": ["RavenForCausalLM"],
        "model_type": "huginn_raven",
        "architecture_class_name": "RecurrentGPT",
        "block_class_name": "SandwichBlock",
        "norm_class_name": "RMSNorm_llama",
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "n_embd": d,
        "n_heads": heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": d // heads,
        "n_layers": 5,
        "block_size": 64,
        "vocab_size": 47,
        "padded_vocab_size": 47,
        "padding_multiple": 4096,
        "tie_embeddings": True,
        "tie_word_embeddings": True,
        "intermediate_size": 20,
        "bias": False,
        "norm_eps": 1e-6,
        "init_strategy": "takase",
        "init_orthogonal": False,
        "init_values": {"std": math.sqrt(2 / (5 * d)), "embed_scale": math.sqrt(d)},
        "state_init": "like-init",
        "injection_type": "linear",
        "n_layers_in_prelude": 1,
        "n_layers_in_recurrent_block": 2,
        "n_layers_in_coda": 2,
        "mean_recurrence": 3,
        "mean_backprop_depth": 2,
        "sampling_scheme": "poisson-lognormal-filling",
        "effective_expected_depth": 9,
        "qk_bias": True,
        "activation_checkpoint_impl": "per-iteration",
        "rope_base": 50000,
        "test_time_noise": 0,
        "test_time_noise_type": "fixed",
        "torch_dtype": "float32",
    }
    if is_retrofitted:
        config |= {
            "num_key_value_heads": 2,
            "qk_bias": False,
            "tie_embeddings": False,
            "norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_base": 500000.0,
            "rope_scaling": None,
            "max_position_embeddings": 64,
            "init_values": {"std": math.sqrt(2 / (5 * 5280)), "embed_scale": 1.0},
            "bos_token_id": 65504,
            "eos_token_id": 65505,
            "pad_token_id": 65509,
        }
    config |= changes
    hd, kv = config["head_dim"], config["num_key_value_heads"]
    shapes = {
        "transformer.wte.weight": (config["padded_vocab_size"], d),
        "transformer.adapter.weight": (d, 2 * d),
        "transformer.ln_f.weight": (d,),
    }
    for section, count in sections_of(config).items():
        for i in range(count):
            layer = f"transformer.{section}.{i}"
            shapes |= {f"{layer}.norm_{n}.weight": (d,) for n in range(1, 3 if is_retrofitted else 5)}
            shapes[f"{layer}.attn.Wqkv.weight"] = ((heads + 2 * kv) * hd, d)
            shapes[f"{layer}.attn.proj.weight"] = (d, d)
            shapes[f"{layer}.mlp.fc.weight"] = (2 * config["intermediate_size"], d)
            shapes[f"{layer}.mlp.proj.weight"] = (d, config["intermediate_size"])
            if is_olmo:
                shapes |= {f"{layer}.attn.q_norm.weight": (heads * hd,), f"{layer}.attn.k_norm.weight": (kv * hd,)}
            if config["qk_bias"]:
                shapes[f"{layer}.attn.qk_bias"] = (2, 1, heads, hd)
    if not config["tie_embeddings"]:
        shapes["lm_head.weight"] = shapes["transformer.wte.weight"]
    tensors = random_tensors(shapes, 3)
    if config["tie_embeddings"]:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    if not is_retrofitted:
        tensors["freqs_cis"] = freqs_cis(hd, config["block_size"], config["rope_base"])
    return config, tensors


def parcae(**changes) -> tuple[dict, dict]:
    d, heads = 48, 2
    config = {
        "_class_name": "ParcaeConfig",
        "name": "parcae-tiny",
        "hf_config": {"org": "SandyResearch", "name": "parcae-tiny"},
        "block_size": 64,
        "n_embd": d,
        "intermediate_size": 40,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 64,
        "padding_multiple": 64,
        "padded_vocab_size": 64,
        "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50000},
        "use_abacus": False,
        "randomize_positions_from": None,
        "block_class_name": "TransformerPreNormBlock",
        "norm_class_name": "RMSNorm",
        "attn_impl": "flash",
        "norm_eps": 1e-5,
        "mlp_class_name": "BaseMLP",
        "nonlin_name": "ReLU2",
        "bias": False,
        "qk_bias": False,
        "init_strategy": "scaled-zero",
        "init_orthogonal": True,
        "skip_initialization": False,
        "mup_model_scaling_factor": 1,
        "use_fused_head": "pytorch",
        "debias_attention": False,
        "center_attention": False,
        "clip_qkv": None,
        "qk_norm": True,
        "logit_softcap": None,
        "activation_checkpoint_impl": "per-iteration",
        "simple_ops": False,
        "strategy": "single",
        "injection_type": "diagonal",
        "n_layers_in_recurrent_block": 2,
        "n_layers_in_prelude": 1,
        "n_layers_in_coda": 1,
        "state_init": "like-init",
        "recurrent_embedding_dimension": d,
        "recurrent_intermediation_embedding_dimension": 40,
        "recurrent_num_attention_heads": None,
        "prelude_norm": True,
        "sampling_scheme": "poisson-truncated-full",
        "mean_recurrence": 3,
        "mean_backprop_depth": 2,
        "lockstep_n": False,
        "lockstep_k": False,
        "curriculum_target": "forward",
        "recurrent_iteration_method": "per-sequence",
        "tie_embeddings": True,
        "model_class_name": "Parcae",
        "_is_recurrent_block_config": False,
        **changes,
    }
    hd = d // heads
    kv, inner = config["num_key_value_heads"] * hd, config["intermediate_size"]
    gated = config["mlp_class_name"] == "GatedMLP"
    shapes = {"transformer.wte.weight": (config["padded_vocab_size"], d), "transformer.C.weight": (d, d)}
    shapes |= {"transformer.ln_f.weight": (d,), "transformer.ln_prelude.weight": (d,)}
    if config["injection_type"] == "diagonal":
        shapes |= {"transformer.adapter.A_log": (d,), "transformer.adapter.dt_bias": (d,)}
        shapes["transformer.adapter.B"] = (d, d)
    elif config["injection_type"] == "linear":
        shapes["transformer.adapter.adapter.weight"] = (d, 2 * d)
    layer_number, total = 0, sum(sections_of(config).values())
    for section, count in sections_of(config).items():
        for i in range(count):
            layer = f"transformer.{section}.{i}"
            shapes |= {f"{layer}.norm_{n}.weight": (d,) for n in (1, 2)}
            shapes |= {f"{layer}.attn.c_{part}.weight": (kv if part in "kv" else d, d) for part in "qkv"}
            shapes[f"{layer}.attn.c_proj.weight"] = (d, d)
            if layer_number % 2 == (total - 1) % 2:
                shapes[f"{layer}.attn.ve_gate.weight"] = (config["num_key_value_heads"], 32)
                shapes[f"value_embeds.{layer_number}.weight"] = (config["padded_vocab_size"], kv)
            shapes[f"{layer}.mlp.fc.weight"] = (2 * inner if gated else inner, d)
            shapes[f"{layer}.mlp.proj.weight"] = (d, inner)
            layer_number += 1
    tensors = random_tensors(shapes, 4)
    if config["tie_embeddings"]:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    tensors["freqs_cis"] = freqs_cis(hd, config["block_size"], config["rope_settings"]["rope_base"])
    return config, tensors


# What they compute, in float64


def rms(x, weight, eps):
    x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def angles(length: int, head_dim: int, theta: float):
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequencies


def turn_halves(x, theta: float):
    """x: [batch, length, heads, head_dim]."""
    angle = angles(x.shape[1], x.shape[-1], theta)[:, None]
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def turn_pairs(x, theta: float):
    """The same of neighbours, as a product of complex numbers."""
    angle = angles(x.shape[1], x.shape[-1], theta)[:, None]
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def attend(q, k, v):
    """Causal, [batch, length, heads, head_dim] each."""
    k, v = (states.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for states in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    length = q.shape[1]
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2)


def llama_logits(config: dict, tensors: dict, ids, num_loops: int, sandwich: bool, every_norm: bool = True):
    w = {name: tensor.double() for name, tensor in tensors.items()}
    eps, hd, theta = config["rms_norm_eps"], config["head_dim"], config["rope_theta"]

    def layer(x, i):
        def part(name, states):
            return states @ w[f"model.layers.{i}.{name}.weight"].T

        def norm(name, states):
            return rms(states, w[f"model.layers.{i}.{name}.weight"], eps)

        h = norm("input_layernorm", x)
        q, k, v = (part(f"self_attn.{name}_proj", h).unflatten(-1, (-1, hd)) for name in "qkv")
        branch = part("self_attn.o_proj", attend(turn_halves(q, theta), turn_halves(k, theta), v))
        x = x + (norm("input_layernorm_2", branch) if sandwich else branch)
        h = norm("post_attention_layernorm", x)
        branch = part("mlp.down_proj", silu(part("mlp.gate_proj", h)) * part("mlp.up_proj", h))
        return x + (norm("post_attention_layernorm_2", branch) if sandwich else branch)

    x, states = w["model.embed_tokens.weight"][ids], []
    for loop in range(num_loops):
        for i in range(config["num_hidden_layers"]):
            x = layer(x, i)
        if every_norm or loop == num_loops - 1:
            x = rms(x, w["model.norm.weight"], eps)
        states.append(x)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return x @ head.T, states


def ouro_logits(config, tensors, ids, num_loops=None):
    return llama_logits(config, tensors, ids, num_loops or config["total_ut_steps"], sandwich=True)[0]


def ouro_exit_loops(config, tensors, ids, threshold: float):
    """The loop that is read out, [batch, length] from 0: the first where the probability of an exit so far reaches the
    threshold, else the last; and the logits of each token there."""
    _, states = llama_logits(config, tensors, ids, config["total_ut_steps"], sandwich=True)
    gate, bias = (tensors[f"model.early_exit_gate.{part}"].double() for part in ("weight", "bias"))
    exits = torch.full(ids.shape, len(states) - 1)
    for loop in reversed(range(len(states) - 1)):
        stays = [1 - torch.sigmoid((state @ gate.T + bias)[..., 0]) for state in states[: loop + 1]]
        exits = torch.where(1 - math.prod(stays) >= threshold, loop, exits)
    chosen = torch.stack(states)[exits, torch.arange(ids.shape[0])[:, None], torch.arange(ids.shape[1])]
    return exits, chosen @ tensors["lm_head.weight"].double().T


def ouro_weighted_logits(config, tensors, ids):
    """Logits of all loops, each weighed with the probability that a token exits there; what is left is the last's."""
    _, states = llama_logits(config, tensors, ids, config["total_ut_steps"], sandwich=True)
    gate, bias = (tensors[f"model.early_exit_gate.{part}"].double() for part in ("weight", "bias"))
    stays, mixed = torch.ones(*ids.shape, 1, dtype=torch.double), 0
    for loop, state in enumerate(states):
        leaves = torch.sigmoid(state @ gate.T + bias) if loop < len(states) - 1 else torch.ones_like(stays)
        mixed = mixed + stays * leaves * (state @ tensors["lm_head.weight"].double().T)
        stays = stays * (1 - leaves)
    return mixed


def nanbeige_logits(config, tensors, ids):
    every = not config["skip_loop_final_norm"]
    return llama_logits(config, tensors, ids, config["num_loops"], sandwich=False, every_norm=every)[0]


def huginn_logits(config, tensors, ids, first_state=None):
    w = {name: tensor.double() for name, tensor in tensors.items()}
    eps, hd, heads = config["norm_eps"], config["head_dim"], config["n_heads"]
    retrofitted = "transformer.core_block.0.norm_3.weight" not in w
    turn = turn_halves if retrofitted else turn_pairs

    def layer(x, name):
        def norm(n, states):
            return rms(states, w[f"{name}.norm_{n}.weight"], eps)

        def attention(h):
            kv = config["num_key_value_heads"] * hd
            q, k, v = (h @ w[f"{name}.attn.Wqkv.weight"].T).split([heads * hd, kv, kv], -1)
            if f"{name}.attn.q_norm.weight" in w:
                q, k = (
                    rms(states, w[f"{name}.attn.{part}_norm.weight"], eps) for part, states in (("q", q), ("k", k))
                )
            q, k, v = (states.unflatten(-1, (-1, hd)) for states in (q, k, v))
            if config["qk_bias"]:
                q, k = q + w[f"{name}.attn.qk_bias"][0], k + w[f"{name}.attn.qk_bias"][1]
            return (
                attend(turn(q, config["rope_base"]), turn(k, config["rope_base"]), v) @ w[f"{name}.attn.proj.weight"].T
            )

        def mlp(h):
            gate, up = (h @ w[f"{name}.mlp.fc.weight"].T).chunk(2, -1)
            return (silu(gate) * up) @ w[f"{name}.mlp.proj.weight"].T

        if f"{name}.attn.q_norm.weight" in w:
            x = x + norm(1, attention(x))
            return x + norm(2, mlp(x))
        if retrofitted:
            x = x + attention(norm(1, x))
            return x + mlp(norm(2, x))
        x = norm(2, x + attention(norm(1, x)))
        return norm(4, x + mlp(norm(3, x)))

    counts = sections_of(config)
    e = w["transformer.wte.weight"][ids] * config["init_values"]["embed_scale"]
    for i in range(counts["prelude"]):
        e = layer(e, f"transformer.prelude.{i}")
    x = torch.zeros_like(e) if first_state is None else first_state.double()
    for _ in range(config["mean_recurrence"]):
        x = torch.cat([x, e], -1) @ w["transformer.adapter.weight"].T
        for i in range(counts["core_block"]):
            x = layer(x, f"transformer.core_block.{i}")
    if not retrofitted:
        x = rms(x, w["transformer.ln_f.weight"], eps)
    for i in range(counts["coda"]):
        x = layer(x, f"transformer.coda.{i}")
    return rms(x, w["transformer.ln_f.weight"], eps) @ w["lm_head.weight"].T


def parcae_logits(config, tensors, ids, first_state=None):
    w = {name: tensor.double() for name, tensor in tensors.items()}
    eps, heads, base = config["norm_eps"], config["num_attention_heads"], config["rope_settings"]["rope_base"]
    hd = config["n_embd"] // heads

    def layer(x, name, number):
        h = rms(x, w[f"{name}.norm_1.weight"], eps)
        q, k, v = ((h @ w[f"{name}.attn.c_{part}.weight"].T).unflatten(-1, (-1, hd)) for part in "qkv")
        if f"{name}.attn.ve_gate.weight" in w:
            gate = 2 * torch.sigmoid(h[..., :32] @ w[f"{name}.attn.ve_gate.weight"].T)
            v = v + gate[..., None] * w[f"value_embeds.{number}.weight"][ids].unflatten(-1, (-1, hd))
        q, k = turn_pairs(q, base), turn_pairs(k, base)
        if config["qk_norm"]:
            q, k = (rms(states, None, torch.finfo(torch.float32).eps) for states in (q, k))
        x = x + attend(q, k, v) @ w[f"{name}.attn.c_proj.weight"].T
        h = rms(x, w[f"{name}.norm_2.weight"], eps) @ w[f"{name}.mlp.fc.weight"].T
        if config["mlp_class_name"] == "GatedMLP":
            gate, up = h.chunk(2, -1)
            h = silu(gate) * up
        else:
            h = 0.5 * h.relu().pow(2)
        return x + h @ w[f"{name}.mlp.proj.weight"].T

    counts = sections_of(config)
    e = w["transformer.wte.weight"][ids]
    if config["init_strategy"] == "takase":
        e = e * math.sqrt(config["n_embd"])
    for i in range(counts["prelude"]):
        e = layer(e, f"transformer.prelude.{i}", i)
    e = rms(e, w["transformer.ln_prelude.weight"], eps)
    x = torch.zeros_like(e) if first_state is None else first_state.double()
    for _ in range(config["mean_recurrence"]):
        if config["injection_type"] == "diagonal":
            dt = softplus(w["transformer.adapter.dt_bias"])
            decay = torch.exp(-dt * torch.exp(w["transformer.adapter.A_log"]))
            x = decay * x + dt * (e @ w["transformer.adapter.B"].T)
        elif config["injection_type"] == "linear":
            x = torch.cat([x, e], -1) @ w["transformer.adapter.adapter.weight"].T
        else:
            x = x + e
        for i in range(counts["core_block"]):
            x = layer(x, f"transformer.core_block.{i}", counts["prelude"] + i)
    x = x @ w["transformer.C.weight"].T
    for i in range(counts["coda"]):
        number = counts["prelude"] + counts["core_block"] + i
        x = layer(x, f"transformer.coda.{i}", number)
    logits = rms(x, w["transformer.ln_f.weight"], eps) @ w["lm_head.weight"].T
    cap = config["logit_softcap"]
    return logits if cap is None else cap * torch.tanh(logits / cap)
