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
`plot`, a PNG of the final validation loss against x (residual scaling, figure 5) and optima.json, the x with the
least loss of a curve and its interval. Settings that are neither x, curve nor panel, such as seeds, count as
replicas.
"""

from looped_recipes.common.command_line import print_help, run_command


def main(arguments: list[str]):
    print_help(arguments, __doc__)
    from looped_recipes.engine.sweeps import run_sweep

    run_sweep(arguments[0], arguments[1:])


if __name__ == "__main__":
    run_command(main)
