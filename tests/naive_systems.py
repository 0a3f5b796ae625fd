"""The published systems, each written out from its own description in plain float64, without a look at the config.

`naive.py` follows the config field by field and so would share a wrong preset. Here nothing but sizes is asked of the
config: what a system does stands in its function. Each returns the logits after every loop and H after every loop.

Shapes: states are [batch, length, width]; `w` is a state dict of a causal LM in float64.
"""

import math

import torch


FP32_EPSILON = 2.0**-23


def rms(x, eps, weight=None):
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def rope(x, theta):
    """[batch, length, heads, size]: halves are rotated against each other."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None, None] * theta ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def attend(q, k, v, window=None):
    """Causal attention of [batch, length, heads, size], with fewer heads in k and v if they are shared."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", shares, v).flatten(2)


def heads(x, size):
    return x.unflatten(-1, (-1, size))


def fully_looped(system, config, w, ids, num_loops):
    """LT, LT_i, LT_ia, FLT, FLT_res. No norm has weights; heads are normed after rotation; MLP of relu^2."""
    size = config.head_dim

    def norm(x):
        return rms(x, FP32_EPSILON)

    def block(layer, x, queries):
        name = f"model.core.{layer}"
        slides = config.window_pattern is not None and layer < config.num_core_layers - 1
        slides = slides and config.window_pattern[layer % len(config.window_pattern)] == "S"
        source = norm(x)
        if config.kv_latent_size is not None:
            source = norm(source @ w[f"{name}.self_attn.kv_down_proj.weight"].T)
        q = heads(norm(queries) @ w[f"{name}.self_attn.q_proj.weight"].T, size)
        k = heads(source @ w[f"{name}.self_attn.k_proj.weight"].T, size)
        v = heads(source @ w[f"{name}.self_attn.v_proj.weight"].T, size)
        q, k = norm(rope(q, 10000.0)), norm(rope(k, 10000.0))
        window = config.max_position_embeddings // 4 if slides else None
        x = x + attend(q, k, v, window) @ w[f"{name}.self_attn.o_proj.weight"].T
        inner = (norm(x) @ w[f"{name}.mlp.up_proj.weight"].T).relu().square()
        return x + inner @ w[f"{name}.mlp.down_proj.weight"].T

    x0 = w["model.embed_tokens.weight"][ids]
    h, states, logits = None, [], []
    for _ in range(num_loops):
        x = norm(x0)
        if h is not None and system == "lt":
            x = h
        if h is not None and system == "lt_input":
            x = norm(x0 + h)
        for layer in range(config.num_core_layers):
            if h is not None and system == "flt_residual":
                x = norm(x + h)
            from_state = system == "flt" or (system == "lt_attention" and layer == 0)
            x = block(layer, x, h if h is not None and from_state else x)
        h = norm(x)
        states.append(x)
        logits.append(15 * torch.tanh(h @ w["lm_head.weight"].T / 15))
    return logits, states


def parcae(system, config, w, ids, num_loops, initial_state):
    """Pre-norm blocks with half of relu^2, gated value tables, a decay and a projected input in every loop."""
    size, eps = config.head_dim, 1e-5
    num_layers = config.num_prelude_layers + config.num_core_layers + config.num_coda_layers

    def block(name, layer, x):
        y = rms(x, eps, w[f"{name}.input_layernorm.weight"])
        q, k, v = (heads(y @ w[f"{name}.self_attn.{part}_proj.weight"].T, size) for part in "qkv")
        if layer % 2 == (num_layers - 1) % 2:
            gate = 2 * torch.sigmoid(y[..., :32] @ w[f"{name}.self_attn.value_gate.weight"].T)
            v = v + gate[..., None] * heads(w[f"model.value_embeds.{layer}.weight"][ids], size)
        q, k = rms(rope(q, 50000.0), FP32_EPSILON), rms(rope(k, 50000.0), FP32_EPSILON)
        x = x + attend(q, k, v) @ w[f"{name}.self_attn.o_proj.weight"].T
        inner = rms(x, eps, w[f"{name}.post_attention_layernorm.weight"]) @ w[f"{name}.mlp.up_proj.weight"].T
        return x + 0.5 * inner.relu().square() @ w[f"{name}.mlp.down_proj.weight"].T

    def section(name, first, x):
        for i in range(getattr(config, f"num_{name}_layers")):
            x = block(f"model.{name}.{i}", first + i, x)
        return x

    e = rms(section("prelude", 0, w["model.embed_tokens.weight"][ids]), eps, w["model.prelude_norm.weight"])
    step = torch.log1p(w["model.injection.dt_bias"].exp())
    decay = torch.exp(-step * w["model.injection.log_rate"].exp())
    h, states, logits = initial_state, [], []
    for _ in range(num_loops):
        x = decay * h + step * (e @ w["model.injection.input_proj.weight"].T)
        h = section("core", config.num_prelude_layers, x)
        states.append(h)
        y = section("coda", config.num_prelude_layers + config.num_core_layers, h @ w["model.coda_proj.weight"].T)
        logits.append(rms(y, eps, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T)
    return logits, states


def recurrent_depth(system, config, w, ids, num_loops, initial_state):
    """Huginn and RDM: norms after the residual sums, W [s; e] in every loop, the last norm before the coda too."""
    d, size, eps = config.hidden_size, config.head_dim, 1e-6

    def block(name, x):
        y = rms(x, eps, w[f"{name}.input_layernorm.weight"])
        q, k, v = (heads(y @ w[f"{name}.self_attn.{part}_proj.weight"].T, size) for part in "qkv")
        if system == "huginn":
            q = q + heads(w[f"{name}.self_attn.q_proj.bias"], size)
            k = k + heads(w[f"{name}.self_attn.k_proj.bias"], size)
        x = x + attend(rope(q, 50000.0), rope(k, 50000.0), v) @ w[f"{name}.self_attn.o_proj.weight"].T
        x = rms(x, eps, w[f"{name}.attention_output_norm.weight"])
        y = rms(x, eps, w[f"{name}.post_attention_layernorm.weight"])
        gate, up = (y @ w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T
        return rms(x, eps, w[f"{name}.mlp_output_norm.weight"])

    def section(name, x):
        for i in range(getattr(config, f"num_{name}_layers")):
            x = block(f"model.{name}.{i}", x)
        return x

    e = section("prelude", w["model.embed_tokens.weight"][ids] * math.sqrt(d))
    s, states, logits = initial_state, [], []
    for _ in range(num_loops):
        s = section("core", torch.cat([s, e], dim=-1) @ w["model.injection.proj.weight"].T)
        states.append(s)
        y = rms(section("coda", rms(s, eps, w["model.norm.weight"])), eps, w["model.norm.weight"])
        logits.append(y @ w["model.embed_tokens.weight"].T)
    return logits, states


def swiglu_block(w, name, x, eps, size, theta=None, scale=1.0, output_norms=False):
    y = rms(x, eps, w[f"{name}.input_layernorm.weight"])
    q, k, v = (heads(y @ w[f"{name}.self_attn.{part}_proj.weight"].T, size) for part in "qkv")
    if theta is not None:
        q, k = rope(q, theta), rope(k, theta)
    branch = attend(q, k, v) @ w[f"{name}.self_attn.o_proj.weight"].T
    if output_norms:
        branch = rms(branch, eps, w[f"{name}.attention_output_norm.weight"])
    x = x + scale * branch
    y = rms(x, eps, w[f"{name}.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    branch = (gate * torch.sigmoid(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T
    if output_norms:
        branch = rms(branch, eps, w[f"{name}.mlp_output_norm.weight"])
    return x + scale * branch


def ouro(system, config, w, ids, num_loops):
    """Norms around every branch; one norm makes the state that head and next loop read. In the readout paper's raw
    system the head, and nothing else, reads the last loop's state without it."""
    h, states, logits = w["model.embed_tokens.weight"][ids], [], []
    for k in range(1, num_loops + 1):
        for layer in range(config.num_core_layers):
            h = swiglu_block(w, f"model.core.{layer}", h, 1e-6, config.head_dim, 1e6, output_norms=True)
        states.append(h)
        is_raw = system == "readout_1b4_raw" and k >= config.num_loops
        h = rms(h, 1e-6, w["model.norm.weight"])
        logits.append((states[-1] if is_raw else h) @ w["lm_head.weight"].T)
    return logits, states


def residual_scaling(system, config, w, ids, num_loops):
    """Llama's block; branches times 1 / (N sqrt(L / 12)), with N of the trained depth."""
    scale = 1 / (config.num_loops * math.sqrt(config.num_core_layers / 12))
    h, states, logits = w["model.embed_tokens.weight"][ids], [], []
    for _ in range(num_loops):
        for layer in range(config.num_core_layers):
            h = swiglu_block(w, f"model.core.{layer}", h, 1e-6, config.head_dim, 10000.0, scale=scale)
        states.append(h)
        logits.append(rms(h, 1e-6, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T)
    return logits, states


def readout(system, config, w, ids, num_loops):
    """Learned positions, tied head; the rows differ in what the head reads and what passes between loops."""
    h = w["model.embed_tokens.weight"][ids] + w["model.embed_positions.weight"][: ids.shape[1]]
    states, logits = [], []
    for k in range(1, num_loops + 1):
        for layer in range(config.num_core_layers):
            h = swiglu_block(w, f"model.core.{layer}", h, 1e-6, config.head_dim)
        states.append(h)
        is_raw = system.endswith("_raw") or (system.endswith("_final_only") and k < config.num_loops)
        logits.append((h if is_raw else rms(h, 1e-6, w["model.norm.weight"])) @ w["model.embed_tokens.weight"].T)
        if system == "readout_inter_loop_norm":
            h = rms(h, 1e-6, w["model.inter_loop_norm.weight"])
        if system == "readout_damping":
            h = h * torch.sigmoid(w["model.damping.logit"])
    return logits, states


SYSTEMS = {
    **dict.fromkeys(["lt", "lt_input", "lt_attention", "flt", "flt_residual"], fully_looped),
    "parcae": parcae,
    **dict.fromkeys(["huginn", "rdm"], recurrent_depth),
    **dict.fromkeys(["ouro", "readout_1b4", "readout_1b4_raw"], ouro),
    "residual_scaling": residual_scaling,
    **dict.fromkeys(
        [
            "readout_terminal_rmsnorm",
            "readout_terminal_raw",
            "readout_per_loop_rmsnorm",
            "readout_per_loop_raw",
            "readout_per_loop_final_only",
            "readout_terminal_penalty",
            "readout_per_loop_penalty",
            "readout_exit_weighted",
            "readout_damping",
            "readout_inter_loop_norm",
        ],
        readout,
    ),
}
