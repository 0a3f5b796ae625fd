"""Where the best learning rate lies over N and depth (On the Residual Scaling of Looped Transformers, figure 5)."""

import math

import torch
from transformers import get_wsd_schedule

from looped_eval.common.hooks import check_batch, inputs_of, losses_of_targets, own_randomness, training_loss
from looped_eval.common.progress import progress
from looped_recipes.common.optimum import optimum, shifts
from modeling_looped import LoopedConfig
from modeling_looped.evaluating import evaluating

from .growth import RULES, built, looped, optimizer_of, with_fields


def trained_loss(
    config,
    batch: dict,
    lr: float,
    steps: int,
    rows_per_step: int,
    seed: int,
    max_loss: float | None = None,
    correct_for_depth: bool = True,
) -> float | None:
    """Train on all rows but the last quarter; return the loss on that quarter, None if the run diverged.

    The rate rises during the first tenth of the steps and falls to zero during the last fifth.
    """
    model = built(config, seed).train()
    held_out = max(1, len(batch["input_ids"]) // 4)
    train, valid = ({k: t[s] for k, t in batch.items()} for s in (slice(-held_out), slice(-held_out, None)))
    optimizer = optimizer_of(model, lr, correct_for_depth)
    schedule = get_wsd_schedule(optimizer, steps // 10, steps // 5, steps, decay_type="linear")
    for step in range(steps):
        chosen = torch.arange(step * rows_per_step, (step + 1) * rows_per_step) % len(train["input_ids"])
        rows = {key: tensor[chosen] for key, tensor in train.items()}
        with torch.enable_grad(), own_randomness(seed * steps + step):
            loss = training_loss(model, rows)
        if not math.isfinite(loss.item()):
            return None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with evaluating(model), torch.no_grad():
        loss = losses_of_targets(model(**inputs_of(valid), use_cache=False).logits, valid).mean().item()
    return loss if loss < (max_loss or 1.1 * math.log(config.vocab_size)) else None


def check_grid(batch: dict, loops, rates, rules, layers, steps: int, seeds: int, max_loss):
    check_batch(batch)
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
    correct_for_depth: bool = True,
) -> dict:
    """The best learning rate over N, and over depth L (figure 5): under eps = 1/N it does not move with N.

    There is one short AdamW run for every rule, L, N, rate and seed, with the rates per block of `parameter_groups`;
    without `correct_for_depth` all parameters have the same rate, also under "factored". A run that ends above
    `max_loss`, by default 1.1 times the loss of a uniform guess, counts as diverged and is left out. The optimum is
    fitted, with an interval; shifts are in octaves, over N from the smallest N and over L from the smallest L.
    """
    rules, layers = rules or [config.residual_scaling], layers or [config.num_core_layers]
    check_grid(batch, loops, rates, rules, layers, steps, seeds, max_loss)
    rates, loops, layers = sorted(rates), sorted(loops), sorted(layers)
    result = {"rates": rates, "loops": loops, "steps": steps, "seeds": seeds, "panels": []}
    result["residual_reference_layers"] = config.residual_reference_layers
    for rule in rules:
        for num_layers in layers:
            panel = {"rule": rule, "layers": num_layers, "curves": {}}
            for num_loops in progress(loops, "depths"):
                sized = with_fields(looped(config, num_loops, rule), num_core_layers=num_layers)
                runs = [
                    [
                        trained_loss(sized, batch, rate, steps, rows_per_step, seed, max_loss, correct_for_depth)
                        for seed in range(seeds)
                    ]
                    for rate in rates
                ]
                panel["curves"][str(num_loops)] = {
                    "loss": [None if None in of_rate else sum(of_rate) / seeds for of_rate in runs],
                    "loss_of_seeds": runs,
                    "optimum": optimum(rates, runs),
                }
            panel["shift_over_loops"] = shifts({n: curve["optimum"] for n, curve in panel["curves"].items()})
            result["panels"].append(panel)
    if len(layers) > 1:
        result["shift_over_layers"] = {rule: shifts_over_layers(result["panels"], rule, loops) for rule in rules}
    return result


def shifts_over_layers(panels: list[dict], rule: str, loops: list[int]) -> dict:
    """Return {N: {L: shift of the optimum from the first L}}."""
    of_rule = [panel for panel in panels if panel["rule"] == rule]
    return {
        str(n): shifts({str(panel["layers"]): panel["curves"][str(n)]["optimum"] for panel in of_rule}) for n in loops
    }
