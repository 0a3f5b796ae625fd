"""How every command reads its options and reports its errors."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable

import torch


TRACEBACK = "LOOPED_TRACEBACK"  # set to 1, an environment variable that shows where an error came from


class OneLineErrors(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


class Parser(OneLineErrors):
    """Options have hyphens; underscores are taken for them, and so are former names, `renamed`.

    The result has `command`, what was typed.
    """

    def __init__(self, module: str, description: str, renamed: dict[str, str] | None = None):
        super().__init__(
            prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.renamed = renamed or {}

    def add_subparsers(self, **kwargs):
        return super().add_subparsers(parser_class=OneLineErrors, **kwargs)

    def parse_args(self, arguments: list[str] | None = None, namespace=None) -> argparse.Namespace:
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        args = super().parse_args([self.canonical(argument) for argument in arguments], namespace)
        args.command = f"{self.prog} {shlex.join(arguments)}"
        check_device(getattr(args, "device", None))
        return args

    def canonical(self, argument: str) -> str:
        option = re.match(r"--[A-Za-z][\w-]*", argument)
        if option is None:
            return argument
        name = option[0].replace("_", "-")
        return self.renamed.get(name, name) + argument[option.end() :]


def check_device(name: str | None):
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} is not there ({reason}): leave the option out, or pass cpu") from None


def print_help(arguments: list[str], text: str, least: int = 1):
    """The help of a command that takes a recipe and section.key=value, and no options."""
    if len(arguments) < least or {"-h", "--help"} & set(arguments):
        print(text)
        raise SystemExit(0 if arguments else 2)


def parse_depths(num_loops) -> list[int]:
    """4, "1,2,8", "1+2+8", "1..8" or a list of these, as increasing depths."""
    depths = set()
    for part in num_loops if isinstance(num_loops, (list, tuple)) else re.split(r"[,+]", str(num_loops)):
        ends = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+))?\s*", str(part))
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(f"num_loops={num_loops} is no depth: write 4 or 1,2,4,8 or 1..8, each at least 1")
        depths.update(range(first, last + 1))
    return sorted(depths)


class Depths(argparse.Action):
    """The action of an option that takes several depths: 1 2 4, or 1,2,4, or 1..4."""

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            setattr(namespace, self.dest, parse_depths(",".join(values)))
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def names(text: str) -> list[str]:
    """The type of an option: names with commas between them."""
    return text.split(",")


def run_command(main: Callable, *errors: type[Exception]):
    """A command: an error that the user can mend is one line."""
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, *errors) as error:
        if os.environ.get(TRACEBACK):
            raise
        said = " ".join(str(error).split("\n")) if str(error) else "no further reason"
        raise SystemExit(f"{type(error).__name__}: {said}") from None
    raise SystemExit(status if isinstance(status, int) else 0)
