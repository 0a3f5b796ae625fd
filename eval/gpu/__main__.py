from looped_eval.gpu.command import main
from looped_recipes.common.command_line import run_command


if __name__ == "__main__":
    run_command(main)
