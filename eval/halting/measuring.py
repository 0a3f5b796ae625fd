"""Thresholds for what was asked, and what exits at them cost and save on another slice of text."""

import itertools
from dataclasses import replace
from functools import partial

import torch

from looped_eval.common.progress import progress
from looped_eval.common.timing import least_seconds
from looped_recipes.common.flops import attention_flops, forward_flops_per_token, sizes
from looped_recipes.common.ratios import standard_error
from modeling_looped.exit_criteria import ExitRule

from .calibration import Units, calibrate, calibrate_loops, exit_loops, least_loops, mean_perplexity, perplexity_at
from .scoring import at_depth, inputs_and_targets, with_sequence_exits, with_token_exits


def learned_targets(rows: torch.Tensor, unlearned: int | None) -> torch.Tensor:
    """Return which targets, [sequences, length], the model has learned to predict: all but the token `unlearned`."""
    targets = inputs_and_targets(rows)[1]
    return torch.ones_like(targets, dtype=torch.bool) if unlearned is None else targets != unlearned


def flops_per_token(config, length: int, mean_loops: float, mean_readouts: float) -> float:
    n = sizes(config)
    readout = 2 * (n.coda + n.head) + attention_flops(config, "coda", length)
    return forward_flops_per_token(config, length, mean_loops) + (mean_readouts - 1) * readout


def predicted_speedup(config, args, mean_loops: float, mean_readouts: float = 1.0) -> float:
    """Return how many times the FLOPs of full depth are those of so many loops and readouts a token."""
    taken = flops_per_token(config, args.length, mean_loops, mean_readouts)
    return flops_per_token(config, args.length, args.num_loops, 1) / taken


def mean_readouts(rule: ExitRule, loops: torch.Tensor, num_loops: int) -> float:
    """Return how often a unit ran coda and head, averaged over units: at each check before its last loop, and once
    after it. loops: number of loops of each unit."""
    if rule.criterion.needs != "logits":
        return 1.0
    scores = [rule.scores_at(loop) for loop in range(1, num_loops)]
    before = torch.tensor([0, *scores]).cumsum(0)  # checks before a loop
    return (before[loops.cpu() - 1] + 1).double().mean().item()


def rules_of(units: Units, names: list[str], budgets: list[float], args, config) -> list[tuple[dict, ExitRule]]:
    """Return, for each criterion that has one, the rule that is calibrated for what was asked, {"budget": 0.01} or
    {"wanted_loops": 2}."""
    asked = [{"budget": budget} for budget in budgets] + [{"wanted_loops": mean} for mean in args.mean_loops]
    rules = []
    for name, aim in itertools.product(names, asked):
        find, value = (calibrate, aim["budget"]) if "budget" in aim else (calibrate_loops, aim["wanted_loops"])
        threshold = find(name, units, value, args.min_loops)
        if threshold is not None:
            rules.append((aim, ExitRule(name, threshold, args.min_loops).checked(config, args.num_loops)))
    return rules


def out_of_reach(units: Units, names: list[str], unit: str, args) -> list[str]:
    """Name the criteria of which no threshold has as few loops as --mean-loops says."""
    least = {name: least_loops(name, units, args.min_loops) for name in names}
    return [
        f"at {mean:g} mean loops of {unit} {name} is left out: the least that a threshold reaches is {least[name]:.4g}"
        for name, mean in itertools.product(names, args.mean_loops)
        if calibrate_loops(name, units, mean, args.min_loops) is None
    ]


def result_row(aim: dict, rule, units: Units, scored, learned, full, config, args) -> dict:
    """Return a row of results. aim: what the rule was calibrated for; units: calibration slice; scored: other slice,
    of which `learned` targets count; full: its losses at full depth, [sequences, tokens]."""
    per_sequence = scored.loops.ndim == 1
    loops, found = scored.loops if per_sequence else scored.loops[learned], mean_perplexity(scored.losses[learned])
    loops_before = exit_loops(rule, units.scores[rule.name])
    calibrated = perplexity_at(loops_before, units.losses)
    of_calibration = {} if "budget" in aim else {"calibrated_loops": loops_before.double().mean().item()}

    def speedup(loops: torch.Tensor) -> float:
        readouts = mean_readouts(replace(rule, per_sequence=per_sequence), loops, args.num_loops)
        return predicted_speedup(config, args, loops.double().mean().item(), readouts)

    ratio = found / mean_perplexity(full[learned])
    changes = (scored.losses - full).double().where(learned, 0).sum(-1)
    return {
        "criterion": rule.name,
        **aim,
        "threshold": rule.threshold,
        **of_calibration,
        "calibrated_ratio": calibrated / mean_perplexity(units.losses[-1]),
        "calibrated_speedup": speedup(loops_before),
        "perplexity": found,
        "ratio": ratio,
        "ratio_error": ratio * standard_error(changes, learned.sum(-1)).item(),
        "mean_loops": loops.double().mean().item(),
        "predicted_speedup": speedup(loops),
    }


def sequence_level(model, calibration: dict[str, Units], rows: torch.Tensor, names: list[str], args) -> tuple:
    """Measure fixed depths and sequences that exit, all timed in turns; return the rows of a table for each, and the
    losses at full depth. calibration: the slice as "sequences" and as "tokens"."""
    depths, size = range(1, args.num_loops + 1), args.batch_size
    rules = rules_of(calibration["sequences"], names, args.budget, args, model.config)
    runs = {k: partial(at_depth, model, num_loops=k, batch_size=size) for k in depths}
    for rule in {rule for _, rule in rules}:  # budgets may share a threshold
        runs[rule] = partial(with_sequence_exits, model, rule=rule, num_loops=args.num_loops, batch_size=size)
    warm_ups = [partial(run, rows[:size]) for run in runs.values()]
    seconds, scored = least_seconds({k: partial(run, rows) for k, run in runs.items()}, args.repeats, warm_ups)
    tokens, full = rows[:, 1:].numel(), seconds[args.num_loops]
    learned, losses = learned_targets(rows, args.unlearned), scored[args.num_loops].losses
    fixed, before = [], [mean_perplexity(of_depth) for of_depth in calibration["tokens"].losses]
    for k in depths:
        found = mean_perplexity(scored[k].losses[learned])
        row = {"loops": k, "calibrated_ratio": before[k - 1] / before[-1], "perplexity": found}
        row["ratio"] = found / mean_perplexity(losses[learned])
        row["predicted_speedup"] = predicted_speedup(model.config, args, k)
        fixed.append({**row, "speedup": full / seconds[k], "tokens_per_second": tokens / seconds[k]})
    halting = []
    for aim, rule in rules:
        row = result_row(aim, rule, calibration["sequences"], scored[rule], learned, losses, model.config, args)
        speed = {"measured_speedup": full / seconds[rule], "tokens_per_second": tokens / seconds[rule]}
        halting.append(row | speed)
    return fixed, halting, losses


def token_level(
    model, calibration: Units, rows: torch.Tensor, names: list[str], full: torch.Tensor, args
) -> list[dict]:
    """Measure tokens that exit, for the first budget only, as in --write, and for all of --mean-loops.
    full: losses without exits."""
    found, learned = [], learned_targets(rows, args.unlearned)
    rules = rules_of(calibration, names, args.budget[:1], args, model.config)
    for aim, rule in progress(rules, "tokens that exit"):
        scored = with_token_exits(model, rows, rule, args.num_loops, args.batch_size)
        found.append(result_row(aim, rule, calibration, scored, learned, full, model.config, args))
    return found
