"""How the state, the loss and the gradients of one model change over loops.

Every measure takes a causal LM and a batch, as hooks.py describes it, and returns a dict of numbers.
Norms are Euclidean and averaged over tokens, as in the papers; R is ||h|| / sqrt d.
"""

import copy
import math

import torch

from looped_eval.common.hooks import (
    check_batch,
    depth_of,
    final_loss,
    hooks,
    inputs_of,
    labels_of,
    of_counted,
    own_randomness,
    rewritten_states,
    trace,
    training_loss,
)
from looped_recipes.common.measures import (
    gradient_norm,
    largest_eigenvalue,
    linear_maps,
    mean_norm,
    oscillation,
    residual_norms,
    spectral_norm,
    token_rms,
)
from looped_recipes.common.token_losses import perplexity
from modeling_looped.evaluating import evaluating
from modeling_looped.tensors import at_least_fp32


OFF = 1e-3  # distance of a twin state, relative to the norm of the state


def norm_trajectory(model, batch: dict, *, num_loops: int | None = None) -> dict:
    """||h_t|| from the state before the first loop to H_K (residual scaling, figure 7; Fully Looped, figures 2 and 6).

    Fully Looped, figure 2, shows one loop over training steps; a run's metrics.jsonl has these norms over steps,
    computed by the same function.
    """
    trajectory = trace(model, batch, depth_of(model, batch, num_loops)).trajectory
    norms = [mean_norm(state) for state in trajectory]
    return {
        "loop": list(range(len(norms))),
        "norm": norms,
        "R": residual_norms(trajectory),
        "growth": norms[-1] / norms[1],
        "trained_loops": model.trained_depth,
    }


def losses_at_every_depth(model, batch: dict, depth: int) -> list[float]:
    """Return the cross-entropy after loops 1..depth, from one pass, or from one pass per depth if the first loops of a
    deeper pass are not a shallower pass."""
    with evaluating(model), torch.no_grad():
        if model.config.reads_run_depth:
            return [final_loss(model, batch, k) for k in range(1, depth + 1)]
        outputs = model(
            **inputs_of(batch),
            labels=labels_of(batch),
            num_loops=depth,
            output_loop_losses=True,
            output_logits=False,
            use_cache=False,
        )
        return outputs.loop_losses.tolist()


def depth_curve(model, batch: dict, *, num_loops: int | None = None) -> dict:
    """Loss at every depth, and what an early exit costs (readout tables 5, 11 and 14, figures 1 and 7; Fully Looped,
    figure 5; Parcae, figure 7).

    exit_gap = CE(1) - CE(N) at the trained depth N, or at `num_loops` if that is less. norm_before, norm_after: norms
    of the state before and after the norm or damping between loops; the last loop has no norm_after. num_loops: by
    default twice the trained depth.
    """
    depth = depth_of(model, batch, 2 * model.trained_depth if num_loops is None else num_loops)
    losses = losses_at_every_depth(model, batch, depth)
    seen = trace(model, batch, depth)
    at = min(depth, model.trained_depth)
    norms = [mean_norm(state) for state in seen.states]
    return {
        "loop": list(range(1, depth + 1)),
        "ce": losses,
        "ppl": [perplexity(loss) for loss in losses],
        "norm_before": norms,
        "norm_after": [mean_norm(state) for state in seen.entering[1:]],
        "trained_loops": model.trained_depth,
        "exit_gap": losses[0] - losses[at - 1],
        "final_norm": norms[at - 1],
        "best_loop": 1 + min(range(depth), key=losses.__getitem__),
    }


def expansion(matrix: torch.Tensor, states: torch.Tensor) -> float:
    """Return ||M x|| / ||x||, averaged over tokens; a vector is the diagonal of M."""
    moved = states * matrix if matrix.ndim == 1 else states @ matrix.T
    return (token_rms(moved) / token_rms(states).clamp(min=1e-30)).mean().item()


def spectral(model, batch: dict, *, num_loops: int | None = None) -> dict:
    """The linear maps of a loop, h -> A h + B e and C h (Parcae, table 1, figures 3, 18 and 19).

    A: spectral radius and norm. A is a diagonal for a diagonal injection (radius: its largest entry), the half of W
    that multiplies the state for concat, and the identity for addition. B: norm. C: the map into the coda, if there is
    one. Expansions are measured on the states that occur: ||A h_t|| / ||h_t|| over the loops, ||C H_K|| / ||H_K||.
    """
    base, depth = model.model, depth_of(model, batch, num_loops)
    maps = linear_maps(base.injection)
    if maps is None:
        raise ValueError(
            f"no linear map meets the state of a model with injection={model.config.injection!r}, as far as is known: "
            f"its module is {type(base.injection).__name__}, and spectral needs injection 'diagonal', 'concat' or "
            "'add', unchanged"
        )
    state, inputs = maps
    entering = trace(model, batch, depth).entering
    result = {
        "injection": model.config.injection,
        "A": {"spectral_radius": largest_eigenvalue(state), "spectral_norm": spectral_norm(state)},
        "B": {"spectral_norm": spectral_norm(inputs)},
    }
    matrix = state.to(entering[0].dtype)
    result["A"]["expansion"] = [expansion(matrix, h) if h.any() else None for h in entering]  # h_0 may be zeros
    if base.coda_proj is not None:
        seen = []
        watch = base.coda_proj.register_forward_pre_hook(lambda _, a: seen.append(of_counted(a[0], batch)))
        with hooks(watch), evaluating(model), torch.no_grad():
            base(**inputs_of(batch), num_loops=depth, use_cache=False)
        weight = base.coda_proj.weight.detach()
        result["C"] = {"spectral_norm": spectral_norm(at_least_fp32(weight)), "expansion": expansion(weight, seen[-1])}
    return result


def state_dynamics(model, batch: dict, *, num_loops: int | None = None) -> dict:
    """||h_T|| and ||h_T - h_{T-1}|| over T, and the norm at every stage of every loop (Parcae, figures 11, 20 to 22).

    Stages of a loop: its input, after the injection, after each layer, and after the gate on its change if there is
    one. Prelude: the embedding, after each prelude layer, and e, the input of the loops. num_loops: by default 24 or
    the trained depth, whichever is more.
    """
    depth = depth_of(model, batch, max(24, model.trained_depth) if num_loops is None else num_loops)
    seen = trace(model, batch, depth)
    trajectory = seen.trajectory
    layers = len(model.model.prelude)
    prelude = ["embedding", *(f"prelude_{i}" for i in range(layers))] if layers else []
    stages = ["start", "injected", *(f"core_{i}" for i in range(len(model.model.core)))]
    stages += [] if model.model.change_gate is None else ["gated"]
    per_loop = [[mean_norm(h) for h in (start, *loop)] for start, loop in zip(seen.entering, seen.stages)]
    return {
        "loop": list(range(1, depth + 1)),
        "state_norm": [mean_norm(state) for state in trajectory[1:]],
        "change": [mean_norm(after - before) for before, after in zip(trajectory, trajectory[1:])],
        "stages": stages,
        "stage_norms": per_loop,  # [loops][stages]
        "prelude": dict(zip([*prelude, "input"], [mean_norm(state) for state in seen.embedded])),
    }


def sensitivity(model, batch: dict, *, num_loops: int | None = None) -> dict:
    """What each loop multiplies a small change of the state by, over all tokens of a row: below 1, loops forget it.

    Each row has a twin, whose state is changed by a thousandth after the first loop. After every loop the difference
    is measured and rescaled to a thousandth, so that it turns into the direction of largest growth. exponent: the mean
    logarithm of the growth in the later half. num_loops: by default 24 or the trained depth, whichever is more.
    """
    depth = depth_of(model, batch, max(24, model.trained_depth) if num_loops is None else num_loops)
    if depth < 2:
        raise ValueError(f"what a loop does to a change of the state needs num_loops of at least 2, got {depth}")
    generator, growth, before = torch.Generator().manual_seed(0), [], None

    def compare(loop: int, state: torch.Tensor) -> torch.Tensor:
        nonlocal before
        if state.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(f"a thousandth of a state is lost in {state.dtype}: open the model in torch.float32")
        one, other = state.chunk(2)
        difference = other - one
        size = row_norm(difference)
        lost = size == 0  # the difference has vanished
        if before is None:  # first loop: no difference was added yet; twins may differ by rounding in some tokens
            lost = torch.ones_like(lost)
        else:
            growth.append((size / before).log().mean().exp().item())
        drawn = torch.randn(one.shape, generator=generator).to(one)
        difference = torch.where(lost, drawn / row_norm(drawn), difference / size)
        before = OFF * row_norm(one)
        return torch.cat([one, one + before * difference])

    twins = {key: torch.cat([tensor, tensor]) for key, tensor in inputs_of(batch).items()}
    with rewritten_states(model, compare), evaluating(model), torch.no_grad():
        model.model(**twins, num_loops=depth, use_cache=False)
    later = [math.log(factor) if factor else -math.inf for factor in growth[len(growth) // 2 :]]
    return {
        "loop": list(range(2, depth + 1)),
        "growth": growth,
        "exponent": sum(later) / len(later),
        "trained_loops": model.trained_depth,
    }


def row_norm(state: torch.Tensor) -> torch.Tensor:
    return state.flatten(1).norm(dim=1)[:, None, None]


def default_blocks(model) -> list[str]:
    """Name the head, the first and middle MLP, the middle attention, and a trainable injection (FLT, figure 7)."""
    first, middle = 0, len(model.model.core) // 2
    names = ["lm_head", f"model.core.{first}.mlp", f"model.core.{middle}.mlp", f"model.core.{middle}.self_attn"]
    if any(True for _ in model.model.injection.parameters()):
        names.append("model.injection")
    return list(dict.fromkeys(names))


def named_blocks(model, blocks: list[str] | None) -> dict[str, torch.nn.Module]:
    known = dict(model.named_modules())
    unknown = [name for name in blocks or [] if name not in known]
    if unknown:
        raise ValueError(
            f"this model has no block {unknown[0]!r}; blocks are named as in model.named_modules(), e.g. "
            f"{', '.join(default_blocks(model))}"
        )
    return {name: known[name] for name in blocks or default_blocks(model)}


def gradient_norms(
    model, batch: dict, *, blocks: list[str] | None = None, steps: int = 20, lr: float = 1e-4, rows_per_step: int = 1
) -> dict:
    """Gradient norms of named blocks before clipping, and how much they oscillate (Fully Looped, figures 2 and 7).

    A copy of the model takes AdamW steps on the rows of the batch in turn. oscillation: the standard deviation of
    log(g_{t+1} / g_t). The metrics.jsonl of a run has the norms during training, for every layer of the core.
    """
    check_batch(batch)
    if steps < 3 or not 1 <= rows_per_step <= len(batch["input_ids"]):
        raise ValueError(
            f"oscillation needs at least 3 steps and 1 to {len(batch['input_ids'])} rows per step, got "
            f"steps={steps} and rows_per_step={rows_per_step}"
        )
    named_blocks(model, blocks)  # checks the names before copying
    model = copy.deepcopy(model).train()
    watched = named_blocks(model, blocks)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=lr), lr=lr, betas=(0.9, 0.95))
    norms, losses = {name: [] for name in watched}, []
    for step in range(steps):
        chosen = torch.arange(step * rows_per_step, (step + 1) * rows_per_step) % len(batch["input_ids"])
        rows = {key: tensor[chosen] for key, tensor in batch.items()}
        with torch.enable_grad(), own_randomness(step):
            loss = training_loss(model, rows)
        loss.backward()
        losses.append(loss.item())
        for name, module in watched.items():
            norms[name].append(gradient_norm(module))
        optimizer.step()
        optimizer.zero_grad()
    result = {"step": list(range(steps)), "loss": losses, "lr": lr, "blocks": {}}
    for name, series in norms.items():
        if None in series:
            why = "no gradient reached this block: it is frozen, or a replaced method runs the model, not its copy"
            result["blocks"][name] = {"norm": series, "mean": None, "max": None, "oscillation": None, "why": why}
            continue
        result["blocks"][name] = {"norm": series, "mean": sum(series) / steps, "max": max(series)}
        try:
            result["blocks"][name]["oscillation"] = oscillation(series)
        except ValueError as reason:
            result["blocks"][name] |= {"oscillation": None, "why": str(reason)}
    return result
