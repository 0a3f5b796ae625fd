"""The model family written out a second time, for comparison: plain loops in float64, straight from the formulas.

Nothing is shared with the package but the names of config fields and weights. No caches, masks, rows of different
depths or half precision: a loop is a `for`, a head is an index, and a token attends to a list of positions.

Shapes: states are [batch, length, hidden]; `weights` is a state dict of a causal LM in float64.
"""

import math

import torch


FP32_EPSILON = 2.0**-23  # of the parameter-free norm of queries and keys
GATE_CHANNELS = 32  # of the normed input that a value gate reads


def linear(weights: dict, name: str, x, bias: bool = False):
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if bias else y


def rms_norm(x, eps: float, weight=None):
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def norm(config, weights: dict, name: str, x):
    """A norm over the hidden channels, with a weight unless the config says that norms have none."""
    return weighted_norm(config, weights, name, x) if config.norm_affine else rms_norm(x, config.rms_norm_eps)


def weighted_norm(config, weights: dict, name: str, x):
    return rms_norm(x, config.rms_norm_eps, weights[f"{name}.weight"] + config.norm_offset)


def layer_norm(config, weights: dict, name: str, x):
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    return y * weights[f"{name}.weight"] + weights[f"{name}.bias"] if config.norm_affine else y


def activation(name: str, x):
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "relu2":
        return torch.where(x > 0, x * x, torch.zeros_like(x))
    if name == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    raise NotImplementedError(name)


def rotate(theta: float, x):
    """RoPE on one head, [batch, length, head_dim]: channel i and i + d/2 are a complex number, turned by pos * f_i."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=x.dtype)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


class DoubleRotary(torch.nn.Module):
    """The rotary table in float64; transformers' own, in float32 whatever the model, has a test of its own."""

    rope_type = "default"

    def __init__(self, config, theta: float | None = None):
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self.frequencies = (theta or config.rope_parameters["rope_theta"]) ** -exponents

    def forward(self, x, position_ids):
        angles = position_ids[..., None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def double_rotary(config) -> torch.nn.Module:
    """In place of `rotary_emb`: one, or one by layer type."""
    by_type = {kind: value for kind, value in config.rope_parameters.items() if isinstance(value, dict)}
    if not by_type:
        return DoubleRotary(config)
    tables = {kind: DoubleRotary(config, parameters["rope_theta"]) for kind, parameters in by_type.items()}
    return torch.nn.ModuleDict(tables)


def attend(config, query, key, value, window: int | None):
    """One head: position i sees positions i - window + 1 to i."""
    scale = 1 / math.sqrt(query.shape[-1]) if config.attention_scale is None else config.attention_scale
    cap = config.attention_softcap
    outputs = []
    for i in range(query.shape[1]):
        first = 0 if window is None else max(0, i - window + 1)
        keys, values = key[:, first : i + 1], value[:, first : i + 1]
        scores = (keys @ query[:, i, :, None]).squeeze(-1) * scale  # [batch, seen]
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        exponentials = torch.exp(scores - scores.max(-1, keepdim=True).values)
        shares = exponentials / exponentials.sum(-1, keepdim=True)
        outputs.append((shares[:, None, :] @ values).squeeze(1))
    return torch.stack(outputs, dim=1)


def has_keys(config, t: int) -> bool:
    """Whether loop t computes keys and values; other loops read those of the last one that did."""
    most = config.num_key_value_loops or math.inf
    return t % config.key_value_interval == 0 and t // config.key_value_interval < most


def attention(config, weights, name: str, keys_from, queries_from, window: int | None, value_table, theta, kept: dict):
    """kept: by layer and head, keys and values to read in place of new ones; new ones are put there."""
    d = config.head_dim
    source = keys_from
    if config.kv_latent_size is not None:
        source = rms_norm(linear(weights, f"{name}.kv_down_proj", keys_from), config.rms_norm_eps)
    q = linear(weights, f"{name}.q_proj", queries_from, bias=config.attention_bias != "none")
    k = linear(weights, f"{name}.k_proj", source, bias=config.attention_bias != "none")
    v = linear(weights, f"{name}.v_proj", source, bias=config.attention_bias in ("qkv", "qkvo"))
    if config.qk_norm == "all_heads":
        q, k = weighted_norm(config, weights, f"{name}.q_norm", q), weighted_norm(config, weights, f"{name}.k_norm", k)
    heads = []
    for head in range(q.shape[-1] // d):
        shared = head // (config.num_attention_heads // config.num_key_value_heads)
        query = q[..., head * d : (head + 1) * d]
        key, value = (x[..., shared * d : (shared + 1) * d] for x in (k, v))
        if value_table is not None:
            gates = 2 * torch.sigmoid(linear(weights, f"{name}.value_gate", keys_from[..., :GATE_CHANNELS]))
            value = value + gates[..., shared, None] * value_table[..., shared * d : (shared + 1) * d]
        if config.qk_norm == "learned":
            query = weighted_norm(config, weights, f"{name}.q_norm", query)
            key = weighted_norm(config, weights, f"{name}.k_norm", key)
        if theta is not None:
            query, key = rotate(theta, query), rotate(theta, key)
        if config.qk_norm == "free":
            query, key = rms_norm(query, FP32_EPSILON), rms_norm(key, FP32_EPSILON)
        key, value = kept.setdefault((name, head), (key, value))
        heads.append(attend(config, query, key, value, window))
    return linear(weights, f"{name}.o_proj", torch.cat(heads, dim=-1), bias=config.attention_bias == "qkvo")


def mlp(config, weights: dict, name: str, x):
    up = linear(weights, f"{name}.up_proj", x, config.mlp_bias)
    if config.mlp_gated:
        inner = activation(config.hidden_act, linear(weights, f"{name}.gate_proj", x, config.mlp_bias)) * up
    else:
        inner = activation(config.hidden_act, up)
    return linear(weights, f"{name}.down_proj", config.mlp_activation_scale * inner, config.mlp_bias)


def block(config, weights: dict, name: str, layer: int, x, eps: float, ids, queries_from=None, time=None, kept=None):
    """`layer` counts the unique layers of prelude, core and coda; `queries_from` is normed as `x` is. time: of which
    the factors on what the branches read and add are made. kept: as in `attention`."""
    kept = {} if kept is None else kept
    factors = [1.0] * 4
    if time is not None:
        made = linear(weights, f"{name}.modulation.proj", activation("silu", time), bias=True)
        factors = (1 + made).chunk(4, dim=-1)
    num_layers = config.num_prelude_layers + config.num_core_layers + config.num_coda_layers
    window, pattern = None, config.window_pattern
    if pattern is not None and (layer < num_layers - 1 or len(pattern) == num_layers):
        if pattern[layer % len(pattern)] == "S":
            window = config.sliding_window
    theta = None
    if config.position_embedding == "rope":
        of_type = config.rope_parameters.get("full_attention" if window is None else "sliding_attention")
        theta = (of_type or config.rope_parameters)["rope_theta"]
        if config.rope_pattern is not None and config.rope_pattern[layer % len(config.rope_pattern)] == "N":
            theta = None
    value_table = None
    if config.value_embeddings and layer % 2 == (num_layers - 1) % 2:
        value_table = weights[f"model.value_embeds.{layer}.weight"][ids]

    def attention_branch(x):
        normed = factors[2] * input_norm("input_layernorm", x)
        queries = normed if queries_from is None else factors[2] * input_norm("input_layernorm", queries_from)
        return attention(config, weights, f"{name}.self_attn", normed, queries, window, value_table, theta, kept)

    def mlp_branch(x):
        return mlp(config, weights, f"{name}.mlp", factors[3] * input_norm("post_attention_layernorm", x))

    def input_norm(of_branch, x):
        return x if config.block_norm == "post" else norm(config, weights, f"{name}.{of_branch}", x)

    branches = (attention_branch, "attention_output_norm"), (mlp_branch, "mlp_output_norm")
    for (branch, norm_name), gate in zip(branches, factors):
        if config.block_norm == "pre":
            x = x + eps * gate * branch(x)
        elif config.block_norm in ("post", "branch_sandwich"):
            x = x + eps * gate * norm(config, weights, f"{name}.{norm_name}", branch(x))
        else:
            x = norm(config, weights, f"{name}.{norm_name}", x + eps * gate * branch(x))
    return x


def residual_factor(config, num_loops: int) -> float:
    num_layers = config.num_prelude_layers + config.num_core_layers + config.num_coda_layers
    scale, depth = config.residual_scale, num_layers / config.residual_reference_layers
    return {
        "none": 1.0,
        "sqrt": scale / math.sqrt(num_loops),
        "linear": scale / num_loops,
        "factored": scale / (num_loops * math.sqrt(depth)),
    }[config.residual_scaling]


def sinusoids(point: float, size: int):
    """Cosines, then sines, of a point at frequencies 10000^(-i / half); an odd size ends in 0."""
    half = size // 2
    angles = [point * 10000.0 ** (-i / half) for i in range(half)]
    values = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles] + [0.0] * (size % 2)
    return torch.tensor(values, dtype=torch.float64)


def time_embedding(weights: dict, t: int, depth: int):
    """Two MLPs, of t / K and of 1 / K."""
    total = 0
    for part, point in (("time", t / depth), ("step", 1 / depth)):
        name = f"model.loop_embedding.{part}"
        inner = activation("silu", linear(weights, f"{name}_in", sinusoids(point, 256), bias=True))
        total = total + linear(weights, f"{name}_out", inner, bias=True)
    return total


def loop_embedding(config, weights: dict, t: int, depth: int):
    if config.loop_embedding == "learned":
        return weights["model.loop_embedding.weight"][min(t, len(weights["model.loop_embedding.weight"]) - 1)]
    if config.loop_embedding == "sinusoidal":
        return sinusoids(t, config.core_hidden_size or config.hidden_size)
    return time_embedding(weights, t, depth) if config.loop_embedding == "time" else 0.0


def weights_at(config, weights: dict, t: int) -> dict:
    """The weights of loop t: what it has of its own is merged into what all share."""
    merged = dict(weights)
    for name, stack in weights.items():
        own = min(t, len(stack) - 1) if stack.ndim else None
        if not name.startswith("model.core."):
            continue
        if ".loop_deltas." in name:
            layer, part = name.replace("loop_deltas.", "").replace("_delta.", ".").rsplit(".", 1)
            if part == "a":
                merged[f"{layer}.weight"] = weights[f"{layer}.weight"] + weights[f"{name[:-1]}b"][own] @ stack[own]
            if part == "bias":
                merged[f"{layer}.bias"] = weights[f"{layer}.bias"] + stack[own]
        elif config.loop_norms and name.endswith("norm.weight"):
            merged[name] = stack[own]
    return merged


def one_loop(config, weights: dict, state, embedded, t: int, eps: float, ids, depth: int = 1, kept=None):
    """H_{t+1} from h_t and e. depth: loops of the run, which only an embedding of the time reads. kept: keys and
    values of earlier loops."""
    kept = {} if kept is None else kept
    if has_keys(config, t):
        kept.clear()
    weights = weights_at(config, weights, t)
    x, restarts = state, config.injection in ("residual_all", "attention_first", "attention_all")
    if config.injection == "add":
        x = state + embedded
    elif config.injection == "concat":
        x = linear(weights, "model.injection.proj", torch.cat([state, embedded], dim=-1))
    elif config.injection == "diagonal":
        step = torch.log1p(torch.exp(weights["model.injection.dt_bias"]))
        rate = -torch.exp(weights["model.injection.log_rate"])
        x = torch.exp(step * rate) * state + step * linear(weights, "model.injection.input_proj", embedded)
    elif restarts:
        x = embedded
    if config.injection_norm and not restarts:
        x = norm(config, weights, "model.injection.norm", x)
    x = x + loop_embedding(config, weights, t, depth)
    time = time_embedding(weights, t, depth) if config.loop_embedding == "modulation" else None
    for layer in range(config.num_core_layers):
        queries_from = None
        if t > 0 and config.injection == "residual_all":
            x = x + state
            if config.injection_norm:
                x = norm(config, weights, "model.injection.norm", x)
        if t > 0 and (config.injection == "attention_all" or (config.injection == "attention_first" and layer == 0)):
            queries_from = state
        unique = config.num_prelude_layers + layer
        x = block(config, weights, f"model.core.{layer}", unique, x, eps, ids, queries_from, time, kept)
    if config.loop_change_gate and t > 0:
        g = weights["model.change_gate.factor"]
        x = (1 - g) * state + g * x
    return x


def readout_norm(config, weights: dict, x):
    if config.readout_norm == "layernorm":
        return layer_norm(config, weights, "model.norm", x)
    normed = norm(config, weights, "model.norm", x)
    if config.readout_norm == "taper":
        gate, linear = weights["model.norm.gate"], weights["model.norm.scale"] * x
        if config.norm_affine:
            linear = linear * weights["model.norm.linear_weight"]
        return gate * normed + (1 - gate) * linear
    return normed


def alpha_readout(config, weights: dict, x, depth: int):
    """The direction of x at the scale s_ref^(1 - alpha) s^alpha."""
    loop = min(depth, config.num_readout_alphas) - 1
    alpha = config.readout_alpha
    if config.readout_alpha_learned:
        alpha = 1 / (1 + torch.exp(-weights["model.alpha_readout.logit"][loop]))
    scale, reference = (
        x.pow(2).mean(-1, keepdim=True).sqrt(),
        torch.exp(weights["model.alpha_readout.log_scale"][loop]),
    )
    return reference ** (1 - alpha) * scale**alpha * x / scale


def read(config, weights: dict, x, depth: int):
    """What the head reads at loop `depth`."""
    kind, trained = config.readout_norm, depth >= config.num_loops
    if kind == "none" or (kind == "final_only" and not trained) or (kind == "final_raw" and trained):
        return x
    if kind == "alpha" or (kind == "final_alpha" and trained):
        return alpha_readout(config, weights, x, depth)
    return readout_norm(config, weights, x)


def between_loops(config, weights: dict, state):
    if config.inter_loop_norm == "own":
        state = norm(config, weights, "model.inter_loop_norm", state)
    elif config.inter_loop_norm == "shared":
        state = readout_norm(config, weights, state)
    if config.loop_damping:
        state = state / (1 + torch.exp(-weights["model.damping.logit"]))
    return state


def logits_of(config, weights: dict, state, depth: int, ids):
    """Logits from H of loop `depth`."""
    x = state
    if config.coda_input == "norm":
        x = readout_norm(config, weights, x)
    elif config.coda_input == "linear":
        x = linear(weights, "model.coda_proj", x)
    for layer in range(config.num_coda_layers):
        unique = config.num_prelude_layers + config.num_core_layers + layer
        x = block(config, weights, f"model.coda.{layer}", unique, x, residual_factor(config, 1), ids)
    logits = linear(weights, "lm_head", read(config, weights, x, depth))
    cap = config.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def exit_distribution(config, weights: dict, states: list):
    """p_t = lambda_t prod_{j<t} (1 - lambda_j), the last loop taking what is left: [batch, length, loops]."""
    probabilities, left = [], 1.0
    for state in states[:-1]:
        x = readout_norm(config, weights, state) if config.exit_gate == "normed" else state
        gate = 1 / (1 + torch.exp(-linear(weights, "exit_gate", x, bias=True).squeeze(-1)))
        probabilities.append(left * gate)
        left = left * (1 - gate)
    return torch.stack([*probabilities, left * torch.ones(states[0].shape[:2], dtype=states[0].dtype)], dim=-1)


def forward(config, weights: dict, ids, num_loops: int | None = None, initial_state=None):
    """H_1 .. H_K, the logits of every depth, and the exit distribution (None without a gate)."""
    depth = config.num_loops if num_loops is None else num_loops
    x = config.embedding_scale * weights["model.embed_tokens.weight"][ids]
    if config.position_embedding == "learned":
        x = x + weights["model.embed_positions.weight"][: ids.shape[1]]
    for layer in range(config.num_prelude_layers):
        x = block(config, weights, f"model.prelude.{layer}", layer, x, residual_factor(config, 1), ids)
    embedded = norm(config, weights, "model.prelude_norm", x) if config.prelude_norm else x

    state = embedded
    if config.state_init != "embedding":
        state = torch.zeros(*ids.shape, config.core_hidden_size or config.hidden_size, dtype=embedded.dtype)
    if initial_state is not None:
        assert config.state_init == "normal"
        state = initial_state
    eps = residual_factor(config, depth if config.residual_depth == "run" else config.num_loops)
    states, kept = [], {}
    for t in range(depth):
        states.append(one_loop(config, weights, state, embedded, t, eps, ids, depth, kept))
        state = between_loops(config, weights, states[-1])
    logits = [logits_of(config, weights, state, k, ids) for k, state in enumerate(states, start=1)]
    return states, logits, None if config.exit_gate == "none" else exit_distribution(config, weights, states)
