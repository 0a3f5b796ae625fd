"""What a recipe would cost: parameters, tokens and operations by the papers' formulas."""

from looped_recipes.common.flops import (
    cache_numbers_per_token,
    effective_parameters,
    forward_flops_per_token,
    sizes,
    training_flops_per_token,
)
from looped_recipes.settings.recipe import Recipe, UnknownEpoch
from looped_recipes.settings.run_checks import check_run


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
