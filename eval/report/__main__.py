from recipes.common.command_line import run_command

from .command import main


if __name__ == "__main__":
    run_command(main)
