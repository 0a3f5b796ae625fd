"""What a recipe would cost: `python -m recipes.plan recipes/parcae/small.yaml [section.key=value ...]`.

Parameters, tokens, steps and operations by the papers' formulas, without data or weights. Tables of value embeddings
count in the effective parameters and not in the operations, as the laws want it; where a model has them, the other way
is named beside it. For a `*.sweep.yaml`, one line per run. What a launch refuses without its data is refused here:
settings that do not go together, a warm-up longer than the run, an output_dir that can not be written.

`--gpus 64` also says what the run asks of so many GPUs: time, memory, communication, checkpoints and cost, each with
its formula (recipes/common/cluster.py). What is assumed of them is changed by --peak, --mfu, --memory, --network,
--disk and --dollars.
"""

from dataclasses import fields

from looped_recipes.common.cluster import Cluster, Line, cluster_plan
from looped_recipes.common.command_line import OneLineErrors, print_help, run_command
from looped_recipes.common.flops import effective_parameters, forward_flops_per_token, sizes, training_flops_per_token
from looped_recipes.settings.recipe import Recipe, RecipeError, UnknownEpoch, load_recipe
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


def on_cluster(recipe: Recipe, cluster: Cluster) -> list[Line]:
    costs, config, training = plan(recipe), recipe.model_config(), recipe.training
    if "training FLOPs" not in costs:
        raise RecipeError(f"how long the run is, is not known: {costs['steps']}")
    if training.rows_per_step % cluster.gpus:
        raise RecipeError(
            f"training.rows_per_step={training.rows_per_step} is not a multiple of --gpus {cluster.gpus}; change one"
        )
    outside = config.num_prelude_layers + config.num_coda_layers
    return cluster_plan(
        cluster,
        config,
        sizes(config),
        costs["training FLOPs"],
        costs["steps"],
        training.rows_per_step,
        training.micro_batch_size,
        recipe.data.sequence_length,
        outside + config.num_core_layers * costs["loops with gradients"],
        training.save_every,
        recipe.optimizer.name != "adamw",
    )


def cluster_of(options: list[str]) -> Cluster | None:
    parser = OneLineErrors("python -m recipes.plan")
    parser.add_argument("--gpus", type=int, required=True)
    for field in fields(Cluster)[1:]:
        parser.add_argument(f"--{field.name}", type=float, default=field.default)
    return Cluster(**vars(parser.parse_args(options))) if options else None


def main(arguments: list[str]):
    print_help(arguments, __doc__)
    first_option = next((i for i, argument in enumerate(arguments) if argument.startswith("--")), len(arguments))
    cluster = cluster_of(arguments[first_option:])
    path, *overrides = arguments[:first_option]
    if cluster and is_sweep(path):
        raise RecipeError(f"--gpus {cluster.gpus} plans one run, and {path} is a sweep: name a recipe")
    if not is_sweep(path):
        recipe = load_recipe(path, overrides)
        for name, value in plan(recipe).items():
            print(f"{name:45} {show(value)}")
        for line in on_cluster(recipe, cluster) if cluster else ():
            print(f"{line.what:32} {line.value:24} {line.formula}")
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
