from looped_recipes.common.command_line import run_command

from .options import parse


if __name__ == "__main__":
    run_command("looped_eval.claims.command", parse)
