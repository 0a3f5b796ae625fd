from looped_eval.diagnose.command import main
from looped_recipes.common.command_line import run_command


if __name__ == "__main__":
    run_command(main)
