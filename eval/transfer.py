"""Where the best learning rate lies over N and depth (On the Residual Scaling of Looped Transformers, figure 5)."""

import math

import torch
from transformers import get_wsd_schedule

from modeling_looped import LoopedConfig

from .hooks import evaluating, own_randomness, token_losses
from .theory import RULES, built, looped, optimizer_of, with_fields


def optimum(rates: list[float], losses: list[float | None]) -> dict:
    """The rate with the least loss: the vertex of the parabola in log rate through the best and its neighbours."""
    points = [(math.log2(rate), loss) for rate, loss in sorted(zip(rates, losses)) if loss is not None]
    if len(points) < 3:
        return {"lr": None, "why": f"only {len(points)} of {len(rates)} learning rates trained, and 3 are needed"}
    best = min(range(len(points)), key=lambda i: points[i][1])
    if best in (0, len(points) - 1):
        edge = "lowest" if best == 0 else "highest"
        why = f"the {edge} rate that trained is the best: widen the grid"
        return {"lr": None, "why": why, "best": 2 ** points[best][0]}
    (x0, y0), (x1, y1), (x2, y2) = points[best - 1 : best + 2]
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    vertex = (x0 + x1) / 2 - left * (x2 - x0) / 2 / (right - left)  # where the slope, linear between midpoints, is 0
    return {"lr": 2**vertex, "best": 2**x1, "loss": y1}


def trained_loss(
    config, batch: dict, lr: float, steps: int, rows_per_step: int, seed: int, max_loss: float | None = None
) -> float | None:
    """Validation loss on the last quarter of the rows after training on the others; None if the run diverged.

    The rate rises during the first tenth of the steps and falls to zero during the last fifth.
    """
    model = built(config, seed).train()
    held_out = max(1, len(batch["input_ids"]) // 4)
    train, valid = ({k: t[s] for k, t in batch.items()} for s in (slice(-held_out), slice(-held_out, None)))
    optimizer = optimizer_of(model, lr)
    schedule = get_wsd_schedule(optimizer, steps // 10, steps // 5, steps, decay_type="linear")
    for step in range(steps):
        chosen = torch.arange(step * rows_per_step, (step + 1) * rows_per_step) % len(train["input_ids"])
        rows = {key: tensor[chosen] for key, tensor in train.items()}
        with torch.enable_grad(), own_randomness(seed * steps + step):
            loss = model(**rows, labels=rows["input_ids"], output_logits=False, use_cache=False).loss
        if not math.isfinite(loss.item()):
            return None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with evaluating(model), torch.no_grad():
        loss = token_losses(model(**valid, use_cache=False).logits, valid["input_ids"]).mean().item()
    return loss if loss < (max_loss or 1.1 * math.log(config.vocab_size)) else None


def shifts(rates: dict[str, float | None]) -> dict[str, float | None]:
    """log2 of each optimum over the first."""
    first = next(iter(rates.values()))
    return {name: math.log2(rate / first) if rate and first else None for name, rate in rates.items()}


def check_grid(batch: dict, loops, rates, rules, layers, steps: int, seeds: int, max_loss):
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        raise ValueError(f"rules must be among {', '.join(RULES)}, got {unknown[0]!r}")
    if len(rates) < 3 or min(rates) <= 0:
        raise ValueError(f"an optimum needs at least 3 positive learning rates, got {list(rates)}")
    if min((*loops, *layers, steps, seeds), default=0) < 1:
        raise ValueError(
            "loops, layers, steps and seeds must be at least 1, got "
            f"{list(loops)}, {list(layers)}, {steps} and {seeds}"
        )
    if max_loss is not None and not max_loss > 0:
        raise ValueError(f"max_loss must be positive, or left out, got {max_loss}")
    if len(batch["input_ids"]) < 2:
        raise ValueError("a quarter of the rows is held out, so there must be at least 2 of them; got 1")


def lr_transfer(
    config: LoopedConfig,
    batch: dict,
    *,
    loops: list[int] = (1, 2, 4, 8),
    rates: list[float] = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    rules: list[str] | None = None,
    layers: list[int] | None = None,
    steps: int = 60,
    rows_per_step: int = 4,
    seeds: int = 1,
    max_loss: float | None = None,
) -> dict:
    """The best learning rate over N, and over depth L (figure 5): under eps = 1/N it does not move with N.

    One short AdamW run for every rule, L, N and rate, with the rates per block that `parameter_groups` gives.
    The optimum is interpolated; its shift is in octaves from the smallest N. A run that ends above `max_loss`, by
    default a tenth above the loss of guessing evenly, has diverged and is left out.
    """
    rules, layers = rules or [config.residual_scaling], layers or [config.num_core_layers]
    check_grid(batch, loops, rates, rules, layers, steps, seeds, max_loss)
    rates, loops = sorted(rates), sorted(loops)
    result = {"rates": rates, "loops": loops, "steps": steps, "seeds": seeds, "panels": []}
    for rule in rules:
        for num_layers in layers:
            panel = {"rule": rule, "layers": num_layers, "curves": {}}
            for num_loops in loops:
                sized = with_fields(looped(config, num_loops, rule), num_core_layers=num_layers)
                losses = []
                for rate in rates:
                    runs = [
                        trained_loss(sized, batch, rate, steps, rows_per_step, seed, max_loss) for seed in range(seeds)
                    ]
                    losses.append(None if None in runs else sum(runs) / seeds)
                panel["curves"][str(num_loops)] = {"loss": losses, "optimum": optimum(rates, losses)}
            panel["shift_in_octaves"] = shifts({n: curve["optimum"]["lr"] for n, curve in panel["curves"].items()})
            result["panels"].append(panel)
    return result
