from looped_recipes.common.command_line import run_command
from looped_recipes.demo.options import parse


def begin(arguments: list[str]):
    """Check the arguments and print a note before the libraries are imported, which takes seconds."""
    if parse(arguments).ask is None:
        print("five to fifteen minutes on two cores; stopped by Ctrl-C, the same command goes on", flush=True)


if __name__ == "__main__":
    run_command("looped_recipes.demo.command", begin)
