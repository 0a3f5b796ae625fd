from looped_recipes.common.command_line import run_command

from .options import show_help


if __name__ == "__main__":
    run_command("looped_eval.harness.command", show_help)
