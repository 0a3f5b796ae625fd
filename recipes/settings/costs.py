"""The costs of a recipe: parameters, tokens and operations by the papers' formulas."""

import math

from looped_recipes.common.flops import (
    cache_numbers_per_token,
    effective_parameters,
    forward_flops_per_token,
    sizes,
)
from looped_recipes.settings.cluster import Cluster, Line, cluster_plan
from looped_recipes.settings.operations import Operations, UnknownEpoch
from looped_recipes.settings.recipe import Recipe, RecipeError
from looped_recipes.settings.run_checks import check_run


def plan(recipe: Recipe) -> dict:
    config = check_run(recipe)
    n = sizes(config)
    length = recipe.data.sequence_length
    window, operations = recipe.backprop_loops(config), Operations(recipe, config)
    depth = operations.mean_depth
    table = "embedding and tied head" if config.tie_word_embeddings else "token embedding"
    result = {
        "parameters": n.total,
        f"parameters without {table}": n.without_embedding,
        "effective parameters": round(effective_parameters(config, depth)),
        "mean depth": depth,
        "loops with gradients, at the mean depth": depth if window is None else min(window, depth),
        "training FLOPs per token": operations.per_token(),
        "forward FLOPs per token": forward_flops_per_token(config, length, depth),
        "cache bytes per token, 16 bits": 2 * cache_numbers_per_token(config),
    }
    if n.value_tables:
        without, with_tables = (
            "effective parameters without value tables",
            "training FLOPs per token with value tables",
        )
        result[without] = round(effective_parameters(config, depth, value_tables=False))
        result[with_tables] = operations.per_token(value_tables=True)
    if recipe.start is not None and not recipe.start_is_here:
        result["assumed"] = f"{recipe.start} is not here, so its sizes are those that the recipe says"
    try:
        steps = operations.num_steps(recipe.data.expected_rows())
    except UnknownEpoch:
        return {**result, "steps": "an epoch is as long as the data are: say it in data.expected_tokens"}
    tokens = steps * operations.tokens_per_step
    return {**result, "steps": steps, "tokens": tokens, "training FLOPs": operations.of_run(steps)}


def on_cluster(recipe: Recipe, cluster: Cluster) -> list[Line]:
    costs, rows = plan(recipe), recipe.training.rows_per_step
    if "training FLOPs" not in costs:
        raise RecipeError(f"how long the run is, is not known: {costs['steps']}")
    if rows % cluster.gpus:
        raise RecipeError(f"training.rows_per_step={rows} is not a multiple of --gpus {cluster.gpus}; change one")
    return cluster_plan(cluster, recipe, costs["training FLOPs"], costs["steps"])


def cluster_of(**said: float | None) -> Cluster | None:
    """Return the cluster of the options, None without any. said: its fields; None keeps the assumed value."""
    known = {name: value for name, value in said.items() if value is not None}
    for name, value in known.items():
        if "gpus" not in known:
            raise RecipeError(f"--{name} {value:g} has no effect by itself: say how many GPUs with --gpus")
        if not (value > 0 or (name == "dollars" and value == 0)):
            raise RecipeError(f"--{name} must be above 0, got {value:g}")
    if known.get("mfu", 0) > 1:
        raise RecipeError(f"--mfu {known['mfu']:g} is more than all operations: write 40 % as 0.4")
    if 0 < known.get("memory", math.inf) < 2**30:
        raise RecipeError(f"--memory {known['memory']:g} is less than a GiB: say it in bytes, 80e9 for 80 GB")
    return Cluster(**known) if known else None
