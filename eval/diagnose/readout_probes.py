"""How readouts depend on the scale of the state (Dense Supervision Is Not Enough: The Readout Blind Spot).

Every measure takes a causal LM and a batch, as hooks.py describes it, and returns a dict of numbers.
"""

import torch

from looped_eval.common.hooks import (
    before_targets,
    depth_of,
    final_loss,
    inputs_of,
    losses_of_targets,
    of_counted,
    rewritten_states,
    trace,
)
from looped_recipes.common.measures import distribution, mean_norm, radial_fraction, token_rms, update_parts
from modeling_looped.evaluating import evaluating
from modeling_looped.exit_criteria import entropy_of, logit_margin


SETTLED = 10  # table 12 averages from this loop on
TOKENS_READ = 256  # whose logits are in memory in float64 at a time


def entropy_and_margin(logits: torch.Tensor) -> tuple[float, float]:
    """Return the entropy of the predicted distribution and the top logit minus the second, averaged over tokens."""
    entropies, margins = [], []
    for part in logits.flatten(0, -2).split(TOKENS_READ):
        exact = part.double()
        entropies.append(entropy_of(exact))
        margins.append(logit_margin(exact, {})[0])
    return torch.cat(entropies).mean().item(), torch.cat(margins).mean().item()


def radial_gradient(model, batch: dict, *, num_loops: int | None = None) -> dict:
    """How much of the readout's gradient points along the state (tables 3 and 6).

    L_k is the cross-entropy of the readout after loop k, as a function of H_k alone; later loops and their losses are
    left out. With g = dL_k / dH_k,

        r_k = mean over tokens of |<g, H_k>| / (||g|| ||H_k||),    g_k = <g, H_k> over all tokens = dL_k / dlog ||H_k||

    Lemma 1: both are 0 for a readout that does not depend on scale, up to the norm's epsilon, O(eps / s^2).
    """
    depth = depth_of(model, batch, num_loops)
    result = {"loop": list(range(1, depth + 1)), "r": [], "g": [], "norm": [], "entropy": [], "margin": [], "ce": []}
    for k in result["loop"]:
        leaf = None

        def cut(loop, state):
            nonlocal leaf
            leaf = state.detach().requires_grad_()  # finally that of the last loop
            return leaf

        with evaluating(model), rewritten_states(model, cut), torch.enable_grad():
            logits = model(**inputs_of(batch), num_loops=k, use_cache=False).logits
            loss = losses_of_targets(logits, batch).mean()
            (gradient,) = torch.autograd.grad(loss, leaf)
        entropy, margin = entropy_and_margin(before_targets(logits.detach()[:, :-1], batch))
        counted = (of_counted(values, batch) for values in (gradient, leaf.detach()))
        result["r"].append(radial_fraction(*counted).mean().item())
        result["g"].append((gradient.double() * leaf.detach().double()).sum().item())
        result["norm"].append(mean_norm(of_counted(leaf.detach(), batch)))
        result["entropy"].append(entropy)
        result["margin"].append(margin)
        result["ce"].append(loss.item())
    return {**result, "final_r": result["r"][-1], "final_g": result["g"][-1]}


def scale_sweep(
    model,
    batch: dict,
    *,
    alphas: list[float] = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0),
    num_loops: int | None = None,
) -> dict:
    """Cross-entropy of the final readout of alpha * H_K (figures 5 and 6): flat where scale is not seen."""
    depth = depth_of(model, batch, num_loops)
    bad = [alpha for alpha in alphas if not 0 < alpha < float("inf")]
    if bad or not len(alphas):
        raise ValueError(f"alphas must be positive and finite, and at least one, got {list(alphas)}")
    losses = []
    for alpha in alphas:
        with evaluating(model), rewritten_states(model, lambda k, h, a=alpha: h * a if k == depth else h):
            losses.append(final_loss(model, batch, depth))
    return {"alpha": list(alphas), "ce": losses, "ce_range": max(losses) - min(losses)}


def freeze_scale():
    """Return a rewrite that keeps the RMS of every token after loop 1: H_k * s_1 / s_k."""
    first = None

    def rewrite(loop, state):
        nonlocal first
        if loop == 1:
            first = token_rms(state)
            return state
        return (state * (first / token_rms(state))[..., None]).to(state.dtype)

    return rewrite


def remove_radial():
    """Return a rewrite that adds, after loop 1, only updates across the state: H_{k+1} = H_k + b_perp(H_k)."""
    before = None

    def rewrite(loop, state):
        nonlocal before
        before = state if loop == 1 else before + update_parts(before, state)["across"].to(state.dtype)
        return before

    return rewrite


def radial_clamp(model, batch: dict, *, num_loops: int | None = None) -> dict:
    """What the growth of scale is worth to the prediction (table 4).

    Loop 1 is not changed. After later loops the scale is kept ("freeze") or the radial part of each update is removed
    ("remove_radial"), before readout and recurrence. delta_ce and norm_ratio compare the cross-entropy and the norm of
    H_K with those of the unchanged pass.
    """
    depth = depth_of(model, batch, num_loops)
    if depth < 2:
        raise ValueError(f"a clamp holds what later loops do to loop 1, so num_loops must be at least 2, got {depth}")
    result = {"num_loops": depth}
    for name, clamp in (("unclamped", None), ("freeze", freeze_scale()), ("remove_radial", remove_radial())):
        norm = None

        def rewrite(loop, state, clamp=clamp):
            nonlocal norm
            state = state if clamp is None else clamp(loop, state)
            norm = mean_norm(of_counted(state, batch))
            return state

        with evaluating(model), rewritten_states(model, rewrite):
            result[name] = {"ce": final_loss(model, batch, depth)}
        result[name]["norm"] = norm
        result[name]["norm_ratio"] = norm / result["unclamped"]["norm"]
        result[name]["delta_ce"] = result[name]["ce"] - result["unclamped"]["ce"]
    return result


def lemma_2_premises(config) -> list[str]:
    """Return the settings in which this model differs from the pre-norm residual loop of lemma 2."""
    wanted = {"injection": "none", "block_norm": "pre", "inter_loop_norm": "none", "loop_damping": False}
    wanted["loop_change_gate"] = False
    return [f"{name}={getattr(config, name)!r}" for name, value in wanted.items() if getattr(config, name) != value]


def update_decomposition(model, batch: dict, *, num_loops: int = 30) -> dict:
    """The update of every loop along and across the state, and what lemma 2 makes of it (figure 3, table 12).

    With H_k = s_k u_k, b_k = H_{k+1} - H_k = a_rad u_k + b_perp and s large,

        s_{k+1} = s_k + a_rad + O(1 / s_k),    |u_{k+1} - u_k|_rms s_k = |b_perp|_rms + O(1 / s_k)

    Averages over tokens at every loop, a_rad_size of |a_rad|; the table averages loops k >= 10.
    """
    depth = depth_of(model, batch, num_loops)
    if depth <= SETTLED:
        raise ValueError(f"the table averages loops from {SETTLED} on: num_loops must be above {SETTLED}, got {depth}")
    states = trace(model, batch, depth).states
    names = ("scale", "a_rad", "a_rad_size", "b_perp", "b", "turn_times_scale")
    result = {"loop": list(range(1, depth)), **{name: [] for name in names}}
    for before, after in zip(states, states[1:]):
        parts = update_parts(before, after)
        for name in names:
            result[name].append(parts[name].mean().item())
    result["final_scale"] = token_rms(states[-1]).mean().item()
    result["predicted_next_scale"] = [s + a for s, a in zip(result["scale"], result["a_rad"])]
    settled = [i for i, k in enumerate(result["loop"]) if k >= SETTLED]
    table = {name: sum(result[name][i] for i in settled) / len(settled) for name in names[1:-1]}
    increments = [b - a for a, b in zip(result["scale"], result["scale"][1:] + [result["final_scale"]])]
    table["measured_increment"] = sum(increments[i] for i in settled) / len(settled)
    table["b_over_a_rad"] = table["b"] / abs(table["a_rad"]) if table["a_rad"] else None
    return {**result, "table": table, "not_as_in_lemma_2": lemma_2_premises(model.config)}


def token_norms(model, batch: dict, classes: dict | None = None, *, num_loops: int | None = None) -> dict:
    """||H_K|| of single tokens: mean, median, p99, max, std, of all and by what the token is (table 10)."""
    depth = depth_of(model, batch, num_loops)
    state = trace(model, batch, depth).states[-1]
    norms = token_rms(state) * state.shape[-1] ** 0.5
    result = {"num_loops": depth, "tokens": norms.numel(), **distribution(norms)}
    if classes is not None:
        ids = of_counted(batch["input_ids"], batch)
        of_classes = {name: norms[is_member[ids]] for name, is_member in classes.items()}
        result["classes"] = {
            name: {"tokens": n.numel(), **distribution(n)} for name, n in of_classes.items() if n.numel()
        }
    return result


def token_classes(tokenizer, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return bool [vocabulary] for white space, words (with a letter or digit), punctuation and special tokens."""
    classes = {name: torch.zeros(vocab_size, dtype=torch.bool) for name in ("white_space", "words", "punctuation")}
    classes["special"] = torch.ones(vocab_size, dtype=torch.bool)
    for index in set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):
        text = tokenizer.decode([index])
        kind = "white_space" if text.isspace() else "words" if any(map(str.isalnum, text)) else "punctuation"
        classes[kind][index], classes["special"][index] = True, False
    return classes


def exit_weighted(model, batch: dict, *, num_loops: int | None = None) -> dict:
    """Cross-entropy of the logits averaged over loops with the exit probabilities (table 6, Ouro's label path).

    ce_at_depth has it at every depth (table 8, figure 7), where the last loop takes the probability that is left.
    expected_ce is the mean of the loops' cross-entropies with the same weights, last_ce that of the last loop.
    """
    if model.exit_gate is None:
        raise ValueError("exit-weighted logits need an exit gate, but this model has exit_gate='none'")
    depth = depth_of(model, batch, num_loops)
    with evaluating(model), torch.no_grad():
        outputs = model(
            **inputs_of(batch),
            num_loops=depth,
            output_logits=False,
            output_loop_readout_states=True,
            output_exit_probabilities=True,
            use_cache=False,
        )
        weights = outputs.exit_probabilities  # [batch, length, loops]
        mixed, left, losses, at_depth = 0, torch.ones_like(weights[..., :1]), [], []
        for k, state in enumerate(outputs.loop_readout_states):
            logits = model.logits_after_loop(state, k)
            losses.append(losses_of_targets(logits, batch))
            at_depth.append(losses_of_targets(mixed + left * logits, batch).mean().item())
            mixed, left = mixed + weights[..., k, None] * logits, left - weights[..., k, None]
    losses = torch.stack(losses, -1)
    weights, mixed = (before_targets(values[:, :-1], batch) for values in (weights, mixed))
    entropy, margin = entropy_and_margin(mixed)
    return {
        "num_loops": depth,
        "ce": at_depth[-1],
        "entropy": entropy,
        "margin": margin,
        "expected_ce": (losses * weights).sum(-1).mean().item(),
        "last_ce": losses[..., -1].mean().item(),
        "loop": list(range(1, depth + 1)),
        "exit": weights.flatten(0, -2).mean(0).tolist(),
        "ce_at_depth": at_depth,
    }


def future_signal(model, batch: dict, *, num_loops: int | None = None, horizon: int | None = None) -> dict:
    """What the losses of later loops say of a loop's scale (equation 4).

    signal[k, t] = dL_{k+t} / dlog s_k, where the states of all tokens after loop k are scaled together and later loops
    run on them; size[k, t] is the sum over tokens of the absolute derivatives by the log s of each token. t = 0 is the
    readout after loop k; horizon: the largest t, by default up to the last loop. According to the estimate
    size <= C t / s_k, so C is at least

        constant[k, t] = size[k, t] s_k / t,    t >= 1
    """
    depth = depth_of(model, batch, num_loops)
    factors, scale = [], []

    def grow(_, state):
        scale.append(token_rms(of_counted(state.detach(), batch)).mean().item())
        factors.append(torch.zeros(state.shape[:-1], dtype=state.dtype, device=state.device, requires_grad=True))
        return state * factors[-1].exp()[..., None]

    how = {"num_loops": depth, "output_loop_readout_states": True, "output_logits": False, "use_cache": False}
    with evaluating(model), rewritten_states(model, grow), torch.enable_grad():
        states = model(**inputs_of(batch), **how).loop_readout_states

    def loss_after(loop: int) -> torch.Tensor:  # the logits of one loop at a time
        with evaluating(model), torch.enable_grad():
            return losses_of_targets(model.logits_after_loop(states[loop], loop), batch).mean()

    result = {"loop": list(range(1, depth + 1)), "scale": scale}
    result |= {name: [[] for _ in states] for name in ("signal", "size", "constant")}
    for last in range(depth):
        first = 0 if horizon is None else max(0, last - horizon)
        gradients = torch.autograd.grad(loss_after(last), factors[first : last + 1], retain_graph=True)
        for k, gradient in enumerate(gradients, start=first):
            size = gradient.double().abs().sum().item()
            result["signal"][k].append(gradient.double().sum().item())
            result["size"][k].append(size)
            if last > k:
                result["constant"][k].append(size * scale[k] / (last - k))
    result["largest_immediate"] = max(sizes[0] for sizes in result["size"])
    result["largest_future"] = max((size for sizes in result["size"] for size in sizes[1:]), default=None)
    result["largest_constant"] = max((value for values in result["constant"] for value in values), default=None)
    return result
