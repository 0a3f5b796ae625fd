"""What a recipe would cost: `python -m recipes.plan recipes/parcae/small.yaml [section.key=value ...]`.

Parameters, tokens, steps and operations by the papers' formulas, without data or weights. Tables of value embeddings
count in the effective parameters and not in the operations, as the laws want it; where a model has them, the other way
is named beside it. For a `*.sweep.yaml`, one line per run. What a launch refuses without its data is refused here:
settings that do not go together, a warm-up longer than the run, an output_dir that can not be written.
"""

from looped_recipes.common.command_line import print_help, run_command
from looped_recipes.common.flops import (
    cache_numbers_per_token,
    effective_parameters,
    forward_flops_per_token,
    sizes,
    training_flops_per_token,
)
from looped_recipes.settings.recipe import Recipe, UnknownEpoch, load_recipe
from looped_recipes.settings.run_checks import check_run
from looped_recipes.sweep import is_sweep, load_sweep


def plan(recipe: Recipe) -> dict:
    config = check_run(recipe)
    n = sizes(config)
    length = recipe.data.sequence_length
    depth, window = recipe.mean_depth(config), recipe.backprop_loops(config)
    per_token = training_flops_per_token(config, length, depth, window)
    result = {
        "parameters": n.total,
        "parameters without embedding": n.without_embedding,
        "effective parameters": round(effective_parameters(config, depth)),
        "mean depth": depth,
        "loops with gradients": depth if window is None else min(window, depth),
        "training FLOPs per token": per_token,
        "forward FLOPs per token": forward_flops_per_token(config, length, depth),
        "cache bytes per token, 16 bits": 2 * cache_numbers_per_token(config),
    }
    if n.value_tables:
        without, with_tables = (
            "effective parameters without value tables",
            "training FLOPs per token with value tables",
        )
        result[without] = round(effective_parameters(config, depth, value_tables=False))
        result[with_tables] = training_flops_per_token(config, length, depth, window, value_tables=True)
    try:
        steps = recipe.num_steps(n, per_token, recipe.data.expected_rows())
    except UnknownEpoch as error:
        return {**result, "steps": str(error)}
    tokens = steps * recipe.training.rows_per_step * length
    return {**result, "steps": steps, "tokens": tokens, "training FLOPs": tokens * per_token}


def show(value) -> str:
    if isinstance(value, (int, float)) and abs(value) >= (1e6 if isinstance(value, float) else 1e13):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def main(arguments: list[str]):
    print_help(arguments, __doc__)
    path, overrides = arguments[0], arguments[1:]
    if not is_sweep(path):
        for name, value in plan(load_recipe(path, overrides)).items():
            print(f"{name:45} {show(value)}")
        return
    total, runs = 0.0, load_sweep(path, overrides)
    for run in runs:
        if run.same_as is not None:
            print(f"{run.name:60} the same as {run.same_as}")
            continue
        costs = plan(run.recipe)
        total += costs.get("training FLOPs", 0.0)
        chosen = {key: costs[key] for key in ("parameters", "steps", "tokens", "training FLOPs") if key in costs}
        print(f"{run.name:60} " + "  ".join(f"{key} {show(value)}" for key, value in chosen.items()))
    print(f"all {sum(run.same_as is None for run in runs)} runs: training FLOPs {show(total)}")


if __name__ == "__main__":
    run_command(main)
