"""The command `looped`: training and evaluation from any folder."""

import runpy
import sys
from importlib.metadata import version

from looped_recipes.common import command_line
from looped_recipes.common.commands import COMMANDS, GROUPS


def overview() -> str:
    """Return the list of commands. A group begins at its first command and ends before the next group."""
    lines = ["usage: looped COMMAND [options]"]
    for name, (_, about) in COMMANDS.items():
        lines += ["", GROUPS[name]] if name in GROUPS else []
        lines.append(f"  {name:14} {about}")
    return "\n".join([*lines, "", "looped COMMAND --help explains one."])


def main():
    command_line.run_command(start)


def start(arguments: list[str]):
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return
    if arguments[0] in ("-V", "--version"):
        print(version("modeling-looped"))
        return
    name, *rest = arguments
    if name not in COMMANDS:
        advice = command_line.did_you_mean(name, COMMANDS)
        raise SystemExit(f"looped: there is no command {name!r}; {advice}")
    command_line.PROGRAM = f"looped {name}"
    sys.argv = [command_line.PROGRAM, *rest]
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
