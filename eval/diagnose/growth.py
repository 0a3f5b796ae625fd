"""How the state and its updates grow with the number of loops (On the Residual Scaling of Looped Transformers).

Models of this family are made from a config at several N and trained for a few steps on fixed random tokens, as in the
paper's section 5.1. They are pre-norm by default; theorems.py has the models of the theorems, without norms. Residual
scaling: eps = 1 for "none", 1/sqrt N for "sqrt", 1/N for "linear", 1/(N sqrt L) for "factored", with L in units of the
config's residual_reference_layers. "looped" applies L layers N times; "unshared" is a stack of N independent copies of
the same L layers.
"""

import copy
import math
from typing import NamedTuple

import torch

from looped_eval.common.hooks import depth_of, last_state, own_randomness, trace, training_loss
from looped_eval.common.progress import progress
from looped_recipes.common.measures import increment_products, power_law, residual_norms, token_rms
from modeling_looped import LoopedConfig, LoopedForCausalLM


# loops that are all alike and only add to the state
PLAIN_LOOPS = {"injection": ("none",), "inter_loop_norm": ("none",), "loop_damping": (False,)}
PLAIN_LOOPS |= {"loop_change_gate": (False,), "loop_embedding": ("none",)}
PLAIN_LOOPS |= {"loop_lora_rank": (None,), "loop_norms": (False,)}
FOR_UNSHARED = {**PLAIN_LOOPS, "num_prelude_layers": (0,), "num_coda_layers": (0,), "value_embeddings": (False,)}
# other schemes start branches at zero, or divide them by the depth; a normed first state hides them until N is large
FOR_THEORY = {**PLAIN_LOOPS, "block_norm": ("pre",), "init_scheme": ("normal", "torch"), "prelude_norm": (False,)}
RULES = ("none", "sqrt", "linear", "factored")
LOOPS = (1, 2, 4, 8, 16, 32, 64)
# exponents of N in theorems 1 to 3 and appendix 7.1; updates: eta eps N
NORM_THEORY = {
    "looped": {"none": 1.0, "sqrt": 0.5, "linear": 0.0, "factored": 0.0},
    "unshared": {"none": 0.5, "sqrt": 0.0, "linear": None},  # None: R falls to that of h_0
}
UPDATE_THEORY = {"none": 1.0, "sqrt": 0.5, "linear": 0.0, "factored": 0.0}


def with_fields(config: LoopedConfig, **fields) -> LoopedConfig:
    """Return a copy of the config with other fields, for a new model whose trained depth is its num_loops."""
    config = copy.deepcopy(config)
    for name, value in {"trained_num_loops": None, **fields}.items():
        setattr(config, name, value)
    config.validate()
    return config


def looped(config: LoopedConfig, num_loops: int, rule: str) -> LoopedConfig:
    return with_fields(config, num_loops=num_loops, residual_scaling=rule)


def field_outside(config: LoopedConfig, wanted: dict[str, tuple]) -> str | None:
    """Return the first field that has none of the wanted values, with its value and those, or None."""
    for name, values in wanted.items():
        if getattr(config, name) not in values:
            return f"{name}={getattr(config, name)!r}: it needs {' or '.join(map(repr, values))}"
    return None


def why_not_unshared(config: LoopedConfig) -> str | None:
    """Return why this config has no unshared stack, or None. A stack of independent layers is a model of this family
    only if loops pass on nothing but the state."""
    found = field_outside(config, FOR_UNSHARED)
    return None if found is None else f"no unshared stack beside a model with {found}"


def why_no_theory(config: LoopedConfig) -> str | None:
    """Return why theorems 1 and 2 say nothing of this config, or None. In them each loop adds eps f(h) to the state,
    with branches whose size does not depend on N."""
    found = field_outside(config, FOR_THEORY)
    return None if found is None else f"no theory for a model with {found}"


def unshared(config: LoopedConfig, num_copies: int, rule: str) -> LoopedConfig:
    """Return a config of `num_copies` independent copies of the core, run once, with the rule's eps at that depth."""
    eps = looped(config, num_copies, rule).residual_factor(num_copies)
    return with_fields(
        config,
        num_loops=1,
        num_core_layers=config.num_core_layers * num_copies,
        residual_scaling="linear",  # eps / 1
        residual_scale=eps,
    )


ARRANGEMENTS = {"looped": looped, "unshared": unshared}


def check_sweep(loops, rules, seeds: int, steps: int):
    if len(loops) < 3 or len(set(loops)) < len(loops):
        raise ValueError(f"a slope over N needs at least 3 different depths, got loops={list(loops)}")
    if min(loops) < 1 or seeds < 1 or steps < 0:
        raise ValueError(
            f"depths and seeds must be at least 1 and steps at least 0, got loops={list(loops)}, seeds={seeds}, "
            f"steps={steps}"
        )
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown or not rules:
        raise ValueError(f"rules must be among {', '.join(RULES)}, got {list(rules)}")


def random_tokens(config: LoopedConfig, rows: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)  # the same tokens on every device
    ids = torch.randint(config.vocab_size, (rows, length), generator=generator, device="cpu")
    return ids.to(torch.get_default_device())


def built(config: LoopedConfig, seed: int) -> LoopedForCausalLM:
    with own_randomness(seed):
        return LoopedForCausalLM(config)


def optimizer_of(model, lr: float, correct_for_depth: bool):
    groups = model.parameter_groups(lr=lr, weight_decay=0.1, correct_for_depth=correct_for_depth)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def train_steps(model, ids: torch.Tensor, steps: int, lr: float):
    """Yield h_N on the same tokens before every step and after the last; all rules have one rate, as in the paper."""
    optimizer = optimizer_of(model.train(), lr, correct_for_depth=False)
    for step in range(steps + 1):
        with torch.enable_grad(), last_state(model) as state:
            loss = training_loss(model, {"input_ids": ids})
        yield state[0].detach()
        if step < steps:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


class EarlyTraining(NamedTuple):
    """Effect of the first optimizer steps on h_N of one model."""

    norms: list[float]  # R before every step and after the last
    updates: list[float]  # RMS change of h_N by every step


_known: dict[tuple, EarlyTraining] = {}  # residual_norm and update_size read the same trainings


def early_training(config: LoopedConfig, seed: int, steps: int, lr: float, num_tokens: int) -> EarlyTraining:
    key = (config.to_json_string(use_diff=False), seed, steps, lr, num_tokens)
    if key not in _known:
        norms, updates, before = [], [], None
        ids = random_tokens(config, 1, num_tokens, seed)
        with own_randomness(seed):
            for state in train_steps(built(config, seed), ids, steps, lr):
                norms += residual_norms([state])
                if before is not None:
                    updates.append((state - before).square().mean().sqrt().item())
                before = state
        _known[key] = EarlyTraining(norms, updates)
    return _known[key]


def mean_curves(
    config: LoopedConfig, arrangement: str, rule: str, name: str, *, loops, seeds: int, **training
) -> list[list[float]]:
    """Return [steps][loops], averaged over seeds. name: field of EarlyTraining; training: steps, lr and num_tokens."""
    curves = []
    for num_loops in progress(loops, "depths"):
        stack = ARRANGEMENTS[arrangement](config, num_loops, rule)
        runs = [getattr(early_training(stack, seed, **training), name) for seed in range(seeds)]
        curves.append(torch.tensor(runs, dtype=torch.float64).mean(0).tolist())
    return [list(step) for step in zip(*curves)]


def slopes(loops, curves, theory: float | None) -> dict:
    """Fit exponents of N at the first and last step, over all N and over the deeper half, where h_0 matters least."""
    deep = max(3, (len(loops) + 1) // 2)
    return {
        "theory": theory,
        "first_step": power_law(loops, curves[0]),
        "last_step": power_law(loops, curves[-1]),
        "first_step_deep": power_law(loops[-deep:], curves[0][-deep:]),
        "last_step_deep": power_law(loops[-deep:], curves[-1][-deep:]),
    }


def residual_norm(
    config: LoopedConfig,
    *,
    loops: list[int] = LOOPS,
    rules: list[str] = RULES,
    seeds: int = 10,
    steps: int = 10,
    lr: float = 1e-4,
    num_tokens: int = 128,
) -> dict:
    """R = ||h_N|| / sqrt d over N in the first optimizer steps (figure 2; workshop, figure 1), and its slope.

    Theorem 1: with shared weights R grows as eps N, hence with exponents 1, 1/2, 0 of N for eps = 1, 1/sqrt N, 1/N.
    Appendix 7.1: with independent weights it grows as eps sqrt N: 1/2 and 0 for the first two; for the third it falls.
    """
    check_sweep(loops, rules, seeds, steps)
    loops, reason = sorted(loops), why_not_unshared(config)
    how = {"loops": loops, "steps": steps, "seeds": seeds, "lr": lr, "num_tokens": num_tokens}
    no_theory = why_no_theory(config)
    result = {**how, "no_theory": no_theory, "residual_reference_layers": config.residual_reference_layers}
    for arrangement in ["looped"] if reason else ["looped", "unshared"]:
        theory, found = NORM_THEORY[arrangement], {}
        for rule in rules:
            if rule in theory:
                curves = mean_curves(config, arrangement, rule, "norms", **how)
                exponent = None if no_theory else theory[rule]
                found[rule] = {"R": curves, "slope": slopes(loops, curves, exponent)}
        result[arrangement] = found
    return {**result, "no_unshared": reason} if reason else result


def update_size(
    config: LoopedConfig,
    *,
    loops: list[int] = LOOPS,
    rules: list[str] = RULES,
    seeds: int = 10,
    steps: int = 10,
    lr: float = 1e-4,
    num_tokens: int = 128,
) -> dict:
    """RMS change of h_N by each optimizer step over N at one learning rate (figures 4 and 9).

    Theorem 2: ||Delta h_N|| / sqrt d = O(eta eps N), hence exponents 1, 1/2, 0 of N. The exponent of eta eps N itself
    is fitted over the rules for which eta eps N varies with N; in theory it is 1.
    """
    check_sweep(loops, rules, seeds, steps)
    if steps < 1:
        raise ValueError(f"the size of an update needs at least 1 step, got {steps}")
    loops, no_theory = sorted(loops), why_no_theory(config)
    how = {"loops": loops, "steps": steps, "seeds": seeds, "lr": lr, "num_tokens": num_tokens}
    result = {**how, "no_theory": no_theory, "residual_reference_layers": config.residual_reference_layers}
    result["looped"] = {}
    scale, change = [], []
    for rule in rules:
        curves = mean_curves(config, "looped", rule, "updates", **how)
        largest = max(max(step) / min(step) if min(step) > 0 else math.inf for step in curves)
        result["looped"][rule] = {
            "update": curves,
            "slope": slopes(loops, curves, None if no_theory else UPDATE_THEORY[rule]),
            "largest_over_smallest": largest,
        }
        if UPDATE_THEORY[rule]:
            scale += [lr * looped(config, n, rule).residual_factor(n) * n for n in loops]
            change += curves[0]
    if scale:
        result["exponent_of_eta_eps_N"] = {"theory": None if no_theory else 1.0, **power_law(scale, change)}
    return result


def increments(states, eps: float) -> dict:
    """Return cosines and energies of the increments of a trajectory h_0..h_N.

    Workshop, equation 2: H_N = ||h_N||^2 / d = H_0 + 2/d sum <h_0, d_i> + 1/d sum_ij <d_i, d_j>, d_i = eps r_i.
    """
    cosines, products = increment_products(states)
    first, last = states[0], states[-1]
    off = cosines[~torch.eye(len(cosines), dtype=torch.bool)]
    energy = {
        "H_0": token_rms(first).square().mean().item(),
        "linear": 2 * (first * (last - first)).mean(-1).mean().item(),
        "quadratic": products.sum().item(),
        "quadratic_diagonal": products.trace().item(),
        "H_N": token_rms(last).square().mean().item(),
    }
    return {
        "cosine": cosines.tolist(),
        "product": products.tolist(),
        "eps": eps,
        "energy": energy,
        "off_diagonal": {"min": off.min().item(), "mean": off.mean().item(), "max": off.max().item()},
    }


def increments_of_stack(
    config: LoopedConfig, arrangement: str, num_loops: int, steps: int, lr: float, num_tokens: int
):
    """Return the increments of each pass through the L layers, shared or not, after `steps` optimizer steps."""
    stack = ARRANGEMENTS[arrangement](config, num_loops, "none")
    model, ids = built(stack, 0), random_tokens(config, 1, num_tokens, 0)
    with own_randomness():
        for _ in train_steps(model, ids, steps, lr):
            pass
    seen = trace(model, {"input_ids": ids}, stack.num_loops)
    every = config.num_core_layers  # layers of a pass in an unshared stack
    states = seen.trajectory if arrangement == "looped" else seen.stages[0][::every]
    return increments(states, 1.0)


def loop_cosine(
    model,
    batch: dict,
    *,
    num_loops: int | None = None,
    copies: int = 16,
    steps: int = 10,
    lr: float = 1e-4,
    num_tokens: int = 128,
) -> dict:
    """Cosines between the increments of different loops (figures 3, 6, 8; workshop, figure 2).

    "model": this model over `num_loops` (figures 6 and 8: after training). "looped" and "unshared": fresh models of
    its config without residual scaling, with `copies` passes of shared layers or as many independent copies, after
    `steps` optimizer steps (figure 3); copies = 0 leaves them out. Shared weights give dense positive cosines,
    independent weights do not; `energy` is R^2 and its parts.
    """
    depth = depth_of(model, batch, num_loops)
    if depth < 2 or copies == 1 or copies < 0:
        raise ValueError(
            f"cosines between loops need at least 2 of them, got num_loops={depth} and copies={copies} (0: none)"
        )
    config = model.config
    eps = model.model.residual_factor(depth)
    result = {"num_loops": depth, "copies": copies, "steps": steps}
    result["model"] = increments(trace(model, batch, depth).trajectory, eps)
    if not copies:
        return result
    result["looped"] = increments_of_stack(config, "looped", copies, steps, lr, num_tokens)
    reason = why_not_unshared(config)
    if reason:
        return {**result, "no_unshared": reason}
    return {**result, "unshared": increments_of_stack(config, "unshared", copies, steps, lr, num_tokens)}
