"""What the authors' training codes save, converted: against their forward passes written out, in float64."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from looped_recipes.convert import main
from looped_recipes.engine.foreign_checkpoints import read_training_checkpoint
from modeling_looped import LoopedForCausalLM

from .helpers import random_ids, tiny_tokenizer
from .helpers_data import WORDS


WIDTH, LAYERS, VOCABULARY, LENGTH = 32, 3, 70, 12
IDS = random_ids(2, 9, VOCABULARY)


def drawn(*shape, generator, scale=0.2):
    return torch.randn(*shape, generator=generator, dtype=torch.double).mul(scale).float()


def rms(x, eps=2.0**-23):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def causal(scores, window=None):
    length = scores.shape[-1]
    apart = torch.arange(length)[:, None] - torch.arange(length)
    seen = (apart >= 0) & (apart < (length if window is None else window))
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


# Fully Looped Transformer


def fully_looped_checkpoint(folder, **fields) -> tuple[dict, dict]:
    said = {"model_type": "FLT", "K": 3, "sequence_len": LENGTH, "vocab_size": VOCABULARY, "n_layer": LAYERS}
    said |= {"n_head": 2, "n_kv_head": 2, "n_embd": WIDTH, "loss_type": "END", **fields}
    generator, head = torch.Generator().manual_seed(0), WIDTH // said["n_head"]
    rows = {"transformer.wte.weight": 128, "lm_head.weight": 128}  # filled up to a multiple of 64
    tensors = {name: drawn(count, WIDTH, generator=generator) for name, count in rows.items()}
    narrow = said["n_kv_head"] * head
    for i in range(LAYERS):
        shapes = {"attn.c_q": (WIDTH, WIDTH), "attn.c_proj": (WIDTH, WIDTH), "mlp.c_fc": (4 * WIDTH, WIDTH)}
        shapes |= {"mlp.c_proj": (WIDTH, 4 * WIDTH)}
        if said.get("attn_type") == "mla":
            rank = said["kv_lora_rank"]
            shapes |= {"attn.c_kv_down": (rank, WIDTH), "attn.c_k_up": (narrow, rank), "attn.c_v_up": (narrow, rank)}
        else:
            shapes |= {"attn.c_k": (narrow, WIDTH), "attn.c_v": (narrow, WIDTH)}
        for name, shape in shapes.items():
            tensors[f"transformer.h.{i}.{name}.weight"] = drawn(*shape, generator=generator)
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"].bfloat16()
    for step in (5, 120):  # the last of them counts
        saved = {f"_orig_mod.{name}": tensor if step == 120 else 0 * tensor for name, tensor in tensors.items()}
        torch.save(saved, folder / f"model_{step:06d}.pt")
        (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": said}))
    torch.save({}, folder / "model_000200.pt")  # whose settings were not written any more
    return said, {name: tensor.double() for name, tensor in tensors.items()}


def turned(x):
    """x1 cos + x2 sin, x2 cos - x1 sin: [batch, length, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] / 10000 ** (torch.arange(half) / half)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


def fully_looped_logits(said: dict, w: dict, ids):
    heads, system = said["n_head"], said["model_type"]

    def attention(i, query, x):
        def project(name, of):
            return (of @ w[f"transformer.h.{i}.attn.{name}.weight"].T).unflatten(-1, (-1, WIDTH // heads))

        if said.get("attn_type") == "mla":
            latent = rms(x @ w[f"transformer.h.{i}.attn.c_kv_down.weight"].T)
            k, v = project("c_k_up", latent), project("c_v_up", latent)
        else:
            k, v = project("c_k", x), project("c_v", x)
        q, k = rms(turned(project("c_q", query))), rms(turned(k))
        k, v = (part.repeat_interleave(heads // said["n_kv_head"], 2) for part in (k, v))
        pattern = said.get("window_pattern", "L")
        is_short = i < LAYERS - 1 and pattern[i % len(pattern)] == "S" and said.get("attn_type") != "mla"
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / (WIDTH // heads) ** 0.5
        mixed = torch.einsum("bhij,bjhd->bihd", causal(scores, LENGTH // 4 if is_short else None), v)
        return mixed.flatten(2) @ w[f"transformer.h.{i}.attn.c_proj.weight"].T

    def block(i, x, state):
        if state is not None and system == "FLT_res":
            x, state = rms(x + state), None
        x = x + attention(i, rms(x if state is None else state), rms(x))
        hidden = (rms(x) @ w[f"transformer.h.{i}.mlp.c_fc.weight"].T).relu().square()
        return x + hidden @ w[f"transformer.h.{i}.mlp.c_proj.weight"].T

    embedded, state = w["transformer.wte.weight"][ids], None
    for loop in range(said["K"]):
        x = rms(embedded)
        if loop and system == "LT":
            x = state
        if loop and system == "LT_i":
            x = rms(embedded + state)
        for i in range(LAYERS):
            reads = system in ("FLT", "FLT_res") or (system == "LT_ia" and i == 0)
            x = block(i, x, state if reads else None)
        state = rms(x)
    logits = state @ w["lm_head.weight"][: said["vocab_size"]].T
    return 15 * (logits / 15).tanh()


CASES = {
    **{system: {"model_type": system} for system in ("LT", "LT_i", "LT_ia", "FLT", "FLT_res")},
    "grouped": {"n_kv_head": 1},
    "latent": {"attn_type": "mla", "kv_lora_rank": 8, "model_type": "LT_i"},
    "windows": {"window_pattern": "SSL", "model_type": "LT"},
    "latent_with_windows": {"attn_type": "mla", "kv_lora_rank": 8, "window_pattern": "SSL"},  # which it leaves out
    "one_loop": {"K": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_fully_looped(name, tmp_path):
    said, tensors = fully_looped_checkpoint(tmp_path, **CASES[name])
    model, tokenizer = read_training_checkpoint(tmp_path)
    wanted = fully_looped_logits(said, tensors, IDS)
    assert wanted.abs().max() > 1 and tokenizer is None
    torch.testing.assert_close(model.double()(IDS).logits, wanted, rtol=1e-5, atol=1e-5)
    named = read_training_checkpoint(tmp_path / "model_000120.pt", num_loops=5).model.config
    assert named.num_loops == 5 and named.trained_num_loops == said["K"]
    with pytest.raises(ValueError, match="num_loops must be at least 1, got 0"):  # what is written would not open
        read_training_checkpoint(tmp_path, num_loops=0)


@pytest.mark.parametrize(
    ("system", "losses"),
    [  # of END, STEP and FEW; some systems always append the last state alone, or every state
        *((system, ("terminal", "per_loop", "last_third")) for system in ("LT", "FLT", "FLT_res")),
        *((system, ("terminal",) * 3) for system in ("LT_i", "LT_ia")),
        ("FLT_rl", ("per_loop",) * 3),
    ],
)
def test_losses_of_fully_looped(system, losses, tmp_path):
    for said, ours in zip(("END", "STEP", "FEW"), losses):
        fully_looped_checkpoint(tmp_path, model_type=system, loss_type=said)
        assert read_training_checkpoint(tmp_path).model.config.loop_loss == ours


# readout blind spot


def readout_checkpoint(file, supervision="terminal", **fields) -> tuple[dict, dict]:
    said = {"d_model": WIDTH, "num_heads": 2, "num_layers": LAYERS, "ff_multiplier": 4, "num_loops": 3}
    said |= {"inter_loop_norm": False, "use_decode_norm": True, "tie_weights": True, **fields}
    words = ["<pad>", "<bos>", "<eos>", "<unk>", " ", *WORDS, "!", "\n\n"]
    words += [f"word{i}" for i in range(VOCABULARY - len(words))]
    generator = torch.Generator().manual_seed(0)
    shapes = {"token_embedding": (VOCABULARY, WIDTH), "position_embedding": (LENGTH, WIDTH), "exit_gate": (1, WIDTH)}
    for i in range(LAYERS):
        shapes |= {f"layers.{i}.attn.qkv": (3 * WIDTH, WIDTH), f"layers.{i}.attn.out_proj": (WIDTH, WIDTH)}
        shapes |= {f"layers.{i}.ffn.{name}": (4 * WIDTH, WIDTH) for name in ("w1", "w3")}
        shapes |= {f"layers.{i}.ffn.w2": (WIDTH, 4 * WIDTH)}
        shapes |= {f"layers.{i}.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {name: (WIDTH,) for name in ("decode_norm", "loop_norm")}
    tensors = {f"{name}.weight": drawn(*shape, generator=generator, scale=0.4) for name, shape in shapes.items()}
    tensors |= {"exit_gate.bias": torch.tensor([0.3]), "raw_alpha": torch.tensor(1.5)}
    tensors["lm_head.weight"] = tensors["token_embedding.weight"]
    tokenizer = {"kind": "regex", "itos": words, "pattern": r"\s+|[A-Za-z0-9_]+|[^\w\s]"}
    config = {"model": said, "data": {"seq_len": LENGTH}, "supervision": {"mode": supervision}}
    torch.save({"model_state": tensors, "config": config, "tokenizer": tokenizer, "global_step": 7}, file)
    return said, {name: tensor.double() for name, tensor in tensors.items()}


def readout_logits(said: dict, w: dict, ids):
    """After every loop; and the probabilities of an exit there."""

    def norm(name, x):
        return rms(x, 1e-6) * w[f"{name}.weight"]

    x, found, exits, stays = (
        w["token_embedding.weight"][ids] + w["position_embedding.weight"][: ids.shape[1]],
        [],
        [],
        1,
    )
    for loop in range(said["num_loops"]):
        for i in range(LAYERS):
            layer = f"layers.{i}"
            qkv = norm(f"{layer}.attn_norm", x) @ w[f"{layer}.attn.qkv.weight"].T
            q, k, v = qkv.unflatten(-1, (3, 2, -1)).unbind(2)
            scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
            mixed = torch.einsum("bhij,bjhd->bihd", causal(scores), v).flatten(2)
            x = x + mixed @ w[f"{layer}.attn.out_proj.weight"].T
            normed = norm(f"{layer}.ffn_norm", x)
            hidden = F.silu(normed @ w[f"{layer}.ffn.w1.weight"].T) * (normed @ w[f"{layer}.ffn.w3.weight"].T)
            x = x + hidden @ w[f"{layer}.ffn.w2.weight"].T
        is_last = loop == said["num_loops"] - 1
        reads_normed = said["use_decode_norm"] and (is_last or not said.get("decode_norm_final_only"))
        found.append((norm("decode_norm", x) if reads_normed else x) @ w["token_embedding.weight"].T)
        leaves = torch.sigmoid(x @ w["exit_gate.weight"].T + w["exit_gate.bias"])[..., 0]
        exits.append(stays if is_last else stays * leaves)
        stays = stays * (1 - leaves)
        x = norm("loop_norm", x) if said["inter_loop_norm"] else x
        x = x * torch.sigmoid(w["raw_alpha"]) if said.get("use_spectral_damping") else x
    return torch.stack(found), torch.stack(exits, -1)


READOUTS = {
    "normed": {},
    "raw": {"use_decode_norm": False},
    "final_only": {"decode_norm_final_only": True},
    "inter_loop_norm": {"inter_loop_norm": True},
    "damping": {"use_spectral_damping": True},
    "exits": {"supervision": "adaptive"},
}


@pytest.mark.parametrize("name", READOUTS)
def test_readout(name, tmp_path):
    said, tensors = readout_checkpoint(tmp_path / "last.pt", **READOUTS[name])
    model = read_training_checkpoint(tmp_path).model.double()
    wanted, exits = readout_logits(said, tensors, IDS)
    outputs = model(IDS, output_loop_logits=True, output_exit_probabilities=name == "exits")
    torch.testing.assert_close(torch.stack(outputs.loop_logits), wanted, rtol=1e-7, atol=1e-7)
    assert model.config.loop_loss == {"exits": "exit_weighted"}.get(name, "terminal")
    if name == "exits":
        torch.testing.assert_close(outputs.exit_probabilities, exits, rtol=1e-7, atol=1e-7)


# the command


def test_the_command(tmp_path):
    readout_checkpoint(tmp_path / "last.pt", "per-step")
    main([str(tmp_path / "last.pt"), str(tmp_path / "ours")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    text = "loop depth!\n\nunheard"
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["loop", " ", "depth", "!", "\n\n", "<unk>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "loop depth!\n\n"
    model = LoopedForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.config.loop_loss == "per_loop" and model.config.eos_token_id == tokenizer.eos_token_id == 2
    assert torch.equal(model(IDS).logits, read_training_checkpoint(tmp_path).model(IDS).logits)

    (tmp_path / "flt").mkdir()
    fully_looped_checkpoint(tmp_path / "flt")
    tiny_tokenizer().save_pretrained(tmp_path / "words")
    main(
        [str(tmp_path / "flt"), str(tmp_path / "flt ours"), "--tokenizer", str(tmp_path / "words"), "--num-loops", "2"]
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "flt ours").encode("a b") == tiny_tokenizer().encode("a b")
    assert LoopedForCausalLM.from_pretrained(tmp_path / "flt ours").config.num_loops == 2


def test_what_cannot_be_converted_is_said(tmp_path):
    file = tmp_path / "last.pt"
    readout_checkpoint(file, decode_norm_type="alpha_readout")
    with pytest.raises(ValueError, match="decode_norm_type='alpha_readout', but only 'rmsnorm' can be converted"):
        read_training_checkpoint(file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="last.pt is damaged, or holds more than tensors and settings"):
        read_training_checkpoint(file)
    (tmp_path / "flt").mkdir()
    fully_looped_checkpoint(tmp_path / "flt", model_type="FLT_new")
    with pytest.raises(ValueError, match="model_type='FLT_new', known are LT, "):
        read_training_checkpoint(tmp_path / "flt")
    fully_looped_checkpoint(tmp_path / "flt")
    meta = tmp_path / "flt/meta_000120.json"
    meta.write_text(meta.read_text().replace('"n_layer": 3', '"n_layer": 2'))
    with pytest.raises(ValueError, match="do not agree on model.core.2"):
        read_training_checkpoint(tmp_path / "flt")


def test_checkpoints_of_other_codes_are_refused(tmp_path):
    """Such as nanochat's, from which that of the Fully Looped Transformer was made, and any that ends with .pt."""
    others = {"other.pt": {"state_dict": {}}, "a_list.pt": [1, 2]}
    for name, content in others.items():
        torch.save(content, tmp_path / name)
    tensors = {"of_one": "resid_lambdas", "of_another": "transformer.h.0.attn.ve_gate.weight"}
    for name, tensor in tensors.items():
        (tmp_path / name).mkdir()
        fully_looped_checkpoint(tmp_path / name)
        torch.save({tensor: torch.zeros(2)}, tmp_path / name / "model_000120.pt")
    settings = {"nanochat": ('"model_type": "FLT", ', ""), "new_loss": ("END", "NEW"), "cut": ('"FLT"', "")}
    for name, (old, new) in settings.items():
        (tmp_path / name).mkdir()
        fully_looped_checkpoint(tmp_path / name)
        meta = tmp_path / name / "meta_000120.json"
        meta.write_text(meta.read_text().replace(old, new))
    for name in (*others, *tensors, *settings):
        with pytest.raises(ValueError, match=f"{name} is not what the training code of .* saves .*: check it"):
            read_training_checkpoint(tmp_path / name)
