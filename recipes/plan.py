"""What a recipe would cost: `looped plan recipes/parcae/small.yaml [section.key=value ...]`.

Parameters, tokens, steps and operations by the papers' formulas, without data or weights; time and memory are
estimates: operations over an assumed part of what this processor can do, and what training keeps, by formula. Tables
of value embeddings count in the effective parameters and not in the operations, as the laws want it; where a model
has them, the other way is named beside it. For a `*.sweep.yaml`, one line per run. What a launch refuses without its
data is refused here: settings that do not go together, a warm-up longer than the run, an output_dir that can not be
written.

`--gpus 64` also says what the run asks of 64 GPUs: time, memory, communication, checkpoints and cost, each with
its formula (recipes/settings/cluster.py). What is assumed of them is changed by --peak, --mfu, --memory, --network,
--disk and --dollars.
"""

from looped_recipes.common.command_line import Parser, run_command, say_next, typed


ASSUMED = {  # assumptions on a cluster, by option
    "peak": "16-bit operations per second of one GPU; default: those of an H100",
    "mfu": "the part of them that training does",
    "memory": "bytes of one GPU",
    "network": "bytes per second of one GPU in each direction",
    "disk": "bytes per second of the folder that all see",
    "dollars": "of a GPU for an hour",
}


def parse(arguments: list[str] | None):
    parser = Parser("looped plan", __doc__)
    parser.add_argument("recipe", help="a YAML file, of a recipe or a sweep")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--gpus", type=int, help="what the run asks of this many")
    for name, meaning in ASSUMED.items():
        parser.add_argument(f"--{name}", type=float, help=meaning)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None):
    options = parse(arguments)
    from looped_recipes.settings.costs import cluster_of
    from looped_recipes.settings.recipe import RecipeError
    from looped_recipes.settings.sweep_files import is_sweep

    cluster = cluster_of(gpus=options.gpus, **{name: getattr(options, name) for name in ASSUMED})
    if not is_sweep(options.recipe):
        plan_recipe(options.recipe, options.overrides, cluster)
    elif cluster is None:
        plan_sweep(options.recipe, options.overrides)
    else:
        raise RecipeError(f"--gpus {cluster.gpus} plans one run, and {options.recipe} is a sweep: name a recipe")


def plan_recipe(path: str, overrides: list[str], cluster):
    """Print what one run costs, with its time and memory here, or on `cluster` if there is one."""
    from looped_recipes.settings.costs import on_cluster, plan
    from looped_recipes.settings.estimates import estimates
    from looped_recipes.settings.recipe import load_recipe

    recipe = load_recipe(path, overrides)
    costs = plan(recipe)
    here = estimates(recipe, costs.get("training FLOPs")) if cluster is None else {}
    for name, value in {**costs, **here}.items():
        print(f"{name:45} {show(value)}")
    if cluster is None:
        say_next(typed("looped pretrain", path, *overrides))
    else:
        for line in on_cluster(recipe, cluster):
            print(f"{line.what:32} {line.value:24} {line.formula}")


def plan_sweep(path: str, overrides: list[str]):
    """Print a line for each run of a sweep, and the sum of the runs that are trained."""
    from looped_recipes.engine.sweep_runs import load_sweep
    from looped_recipes.settings.costs import plan
    from looped_recipes.settings.estimates import UTILISATION, duration, own_rate

    total, runs = 0.0, load_sweep(path, overrides)
    for run in runs:
        if run.same_as is not None:
            print(f"{run.name:60} the same as {run.same_as}")
            continue
        costs = plan(run.recipe)
        total += costs.get("training FLOPs", 0.0)
        chosen = {key: costs[key] for key in ("parameters", "steps", "tokens", "training FLOPs") if key in costs}
        print(f"{run.name:60} " + "  ".join(f"{key} {show(value)}" for key, value in chosen.items()))
    rate, name = own_rate()
    time = f"{duration(total / rate / UTILISATION)} here, at {UTILISATION:.0%} of {name}"
    print(f"all {sum(run.same_as is None for run in runs)} runs: training FLOPs {show(total)}; {time}")
    say_next(typed("looped sweep", path, *overrides))


def show(value) -> str:
    if isinstance(value, (int, float)) and abs(value) >= (1e6 if isinstance(value, float) else 1e13):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


if __name__ == "__main__":
    run_command(main)
