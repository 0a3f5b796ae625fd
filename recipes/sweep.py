"""Many runs from one file: `looped sweep recipes/residual_scaling/transfer.sweep.yaml [key=value ...]`.

    recipe: 12_layers.yaml            # what every run starts from
    set: {training.max_loss: 4.0}     # what every run changes
    grid: {model.num_loops: [1, 2]}   # one run per combination (a list of grids: of each of them),
    runs: [{name: a, depth.per: batch}]  # or one per entry; both may name another recipe for some runs
    plot: {x: optimizer.lr, curve: model.num_loops, panel: [...]}

Runs that are done are not run again, and what two runs have in common is trained once: eps = 1/sqrt(N) and 1/N are
the same model at N = 1. A run diverges when its loss is no longer a number, which stops it, or when it ends above
training.max_loss; it is recorded and left out of the plot. On several GPUs: `accelerate launch -m
looped_recipes.sweep ...`. Results: runs/<sweep>/results.jsonl, one line per run with its last metrics, and, with
`plot`, an SVG of the final validation loss against x (residual scaling, figure 5) and optima.json, the x with the
least loss of a curve and its interval. Settings that are neither x, curve nor panel, such as seeds, count as
replicas. Where runs differ in training.seed alone, the last lines say what every other setting changes, in pairs of
equal seeds and with an interval over seeds; `looped report runs/<sweep>` has the tables.

`--runner slurm` submits the runs that are missing as an array of jobs, waits for them and does the rest here. Settings
of the jobs are those of submitit: slurm.partition=gpu slurm.time=600 (minutes) slurm.gpus_per_node=1
slurm.array_parallelism=16; several processes for each run: slurm.ntasks_per_node=4 slurm.gpus_per_node=4.
"""

from looped_recipes.common.command_line import Parser, run_command


RUNNERS = ("local", "slurm")
SLURM = "slurm."  # prefix of the jobs' settings among the overrides


def main(arguments: list[str] | None = None):
    parser = Parser("looped sweep", __doc__)
    parser.add_argument("sweep", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--runner", choices=RUNNERS, default="local", help="where runs are trained; default: local")
    options = parser.parse_args(arguments)
    overrides = [each for each in options.overrides if not each.startswith(SLURM)]
    run_sweep(options.sweep, overrides, jobs_of(options))


def jobs_of(options) -> dict | None:
    """Return the settings of the jobs that train the runs; None if this process trains them."""
    from looped_recipes.settings.recipe import RecipeError, split_override

    own = [each for each in options.overrides if each.startswith(SLURM)]
    if options.runner == "slurm":
        return {key.removeprefix(SLURM): value for key, value in map(split_override, own)}
    if own:
        raise RecipeError(f"{own[0]} would have no effect: add --runner slurm, or leave it out")
    return None


def run_sweep(path: str, overrides: list[str], jobs: dict | None):
    """Check the runs of a sweep, and only then import what trains them, which takes seconds. jobs: see jobs_of."""
    from looped_recipes.engine.sweep_runs import checked_sweep

    sweep, runs = checked_sweep(path, overrides)
    if jobs is not None:
        from looped_recipes.engine.sweep_jobs import train_on_slurm

        train_on_slurm(runs, jobs)
    from looped_recipes.engine.sweeps import train_all

    train_all(sweep, runs)


if __name__ == "__main__":
    run_command(main)
