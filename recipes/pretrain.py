"""Pretrain a looped model: `looped pretrain smoke/flt.yaml [section.key=value ...]`.

    looped pretrain smoke/flt.yaml training.steps=100 data.source=my.txt
    accelerate launch -m looped_recipes.pretrain smoke/flt.yaml          on several processors

A recipe is a YAML file with what differs from the defaults below; those that come with this package are found by their
short names from any folder. The run is a function of the recipe alone: which tokens, depths and noise a step sees
depends on (seed, step, row of the global batch), so it resumes bit for bit after any interruption, and the number of
processes does not matter. Written to `training.output_dir`: recipe.yaml (resolved), metrics.jsonl, checkpoints/, and
final/ to load. SIGTERM, Ctrl-C and a closed terminal (SIGHUP, not under nohup) end it after the step it is at, with a
checkpoint; the exit status is then that of the signal (143, 130, 129), under `accelerate launch` of several
processes 1.
"""

from pathlib import Path

from looped_recipes.common.command_line import print_help, run_command, say_next, typed
from looped_recipes.settings.help import help_of_recipes


def main(arguments: list[str]) -> Path:
    print_help(arguments, lambda: help_of_recipes(__doc__, arguments))
    from looped_recipes.engine.optimizers import refuse_idle_rate
    from looped_recipes.engine.peers import one_message
    from looped_recipes.engine.training import Pretraining
    from looped_recipes.settings.recipe import load_recipe, refuse_another_place

    recipe = load_recipe(arguments[0], arguments[1:])
    refuse_another_place(arguments[0], recipe)
    with one_message():
        refuse_idle_rate(recipe, {override.partition("=")[0] for override in arguments[1:]})
        run = Pretraining(recipe)
        reached = run.train()
    if run.accelerator.is_main_process and reached != run.output:  # final/, not stopped early
        opened = [run.output, *["--trust-remote-code"] * (recipe.training.model_file is not None)]
        exits = [typed("looped halting", *opened)] if run.config.num_loops > 1 else []
        say_next(typed("looped chat", *opened), *exits, typed("looped report", run.output))
    return reached


if __name__ == "__main__":
    run_command(main)
