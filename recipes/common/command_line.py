"""Option parsing and error reports of all commands.

`--help` and wrong options are answered before slow imports: this file and the files with the options of commands
import neither torch nor modules that import it.
"""

import argparse
import difflib
import errno
import io
import os
import re
import shlex
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from .errors import CommandError


PROGRAM: str | None = None  # `looped NAME`, if that command started this process
# seconds that the other processes of a launch wait after an error: when one of them ends, the launcher kills the rest,
# which may include the process that is about to print the message
UNTIL_ENDED = 30
INTERRUPTED = 128 + 2  # exit status after Ctrl-C
TRACEBACK = "LOOPED_TRACEBACK"  # environment variable: if set to 1, errors are shown with their traceback


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return advice on an unknown name. Known names that begin with _ are internal and are not suggested."""
    known = [each for each in known if not each.startswith("_")]
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(known)}"


class OneLineErrors(argparse.ArgumentParser):
    def _check_value(self, action, value):  # argparse would list all choices
        if action.choices is not None and value not in action.choices:
            advice = did_you_mean(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"there is no {value!r}; {advice}")

    def format_help(self) -> str:
        for action in self._actions:
            tell_default(action)
        return super().format_help()

    def add_trust(self, help: str = "open a class of your own by the code beside its weights"):
        self.add_argument("--trust-remote-code", action="store_true", help=help)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


class Parser(OneLineErrors):
    """Parser of a command. Options have hyphens; underscores and former names (`renamed`) are accepted too.

    The result has the field `command`, the command line as typed, and after `add_device` an available `device`.
    """

    def __init__(self, program: str, description: str, renamed: dict[str, str] | None = None):
        super().__init__(prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.renamed = renamed or {}

    def add_argument(self, *args, **kwargs):
        if kwargs.get("nargs") == "*" and not args[0].startswith("-"):
            kwargs.setdefault("default", [])  # else argparse also reports this one as required if another is missing
        return super().add_argument(*args, **kwargs)

    def add_device(self):
        self.add_argument("--device", help="e.g. cpu, cuda or cuda:1; default: a GPU if there is one")

    def add_subparsers(self, **kwargs):
        return super().add_subparsers(parser_class=OneLineErrors, **kwargs)

    def parse_args(self, arguments: list[str] | None = None, namespace=None) -> argparse.Namespace:
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        parse = super().parse_args if self._subparsers else super().parse_intermixed_args
        args = parse([self.canonical(argument) for argument in arguments], namespace)
        args.command = f"{self.prog} {shlex.join(arguments)}"
        if hasattr(args, "device"):
            args.device = device_of(args.device)
        return args

    def canonical(self, argument: str) -> str:
        option = re.match(r"--[A-Za-z][\w-]*", argument)
        if option is None:
            return argument
        name = option[0].replace("_", "-")
        return self.renamed.get(name, name) + argument[option.end() :]


def tell_default(action: argparse.Action):
    """Append the default of an option to its help text, unless the text mentions a default."""
    default = action.default
    if default is None or isinstance(default, bool) or default in ("", [], ()):
        return
    if argparse.SUPPRESS in (default, action.help):
        return
    if "default" not in (action.help or ""):
        action.help = "; ".join(filter(None, [action.help, f"default: {as_typed(default).replace('%', '%%')}"]))


def as_typed(default) -> str:
    return " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)


def device_of(name: str | None) -> str:
    """Check that the named device exists and return it; without a name, a GPU if there is one, else the CPU. A GPU
    named by its number becomes torch's current device, on which timers and memory counters work."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
        if torch.device(name).type == "cuda" and torch.device(name).index is not None:
            torch.cuda.set_device(name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} is not there ({reason}): leave the option out, or pass cpu") from None
    return name


def print_help(arguments: list[str], text: str | Callable[[], str], least: int = 1):
    """Print the help of a command without options, whose arguments are a recipe and section.key=value, and exit, if
    --help is an argument or there are fewer than `least` arguments."""
    if len(arguments) < least or {"-h", "--help"} & set(arguments):
        print(text if isinstance(text, str) else text())
        raise SystemExit(0 if arguments else 2)


def say_result(found: str, *then: str):
    """Print the result at the end of a command, and commands that the user may run next."""
    print(f"\n{found}")
    say_next(*then)


def say_next(*commands: str):
    for command in commands:
        print(f"next: {command}")


def typed(command: str, *words) -> str:
    """Return a command line, with quotes around words that need them, such as paths with spaces, and ./ before paths
    that would be read as options."""
    words = [f"./{word}" if str(word).startswith("-") and os.path.lexists(word) else str(word) for word in words]
    return " ".join([command, *map(shlex.quote, words)])


def trust_of(args) -> list[str]:
    """Return the option of `add_trust`, for the next command, if this one has it."""
    return ["--trust-remote-code"] * args.trust_remote_code


def parse_depths(num_loops) -> list[int]:
    """Parse 4, "1,2,8", "1+2+8", "1..8" or a list of these into increasing depths."""
    depths = set()
    for part in num_loops if isinstance(num_loops, (list, tuple)) else re.split(r"[,+]", str(num_loops)):
        ends = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+))?\s*", str(part))
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(f"num_loops={num_loops} is no depth: write 4 or 1,2,4,8 or 1..8, each at least 1")
        depths.update(range(first, last + 1))
    return sorted(depths)


class Depths(argparse.Action):
    """Argparse action of an option with several depths: 1 2 4, or 1,2,4, or 1..4."""

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            setattr(namespace, self.dest, parse_depths(",".join(values)))
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def names(text: str) -> list[str]:
    """Argparse type: a list of names separated by commas."""
    return text.split(",")


def check_counts(args: argparse.Namespace, names: Iterable[str]):
    """Raise an error if one of these options is set to less than 1."""
    for name in names:
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def check_prompt(text: str):
    """Raise an error for bytes that are no UTF-8: Python reads them as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the prompt {os.fsencode(text)!r} is not UTF-8: convert it, for example by iconv") from None


def folder(text: str) -> Path:
    """Argparse type: a folder to write to. A file of that name is refused before the work, not after it."""
    path = Path(text)
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise argparse.ArgumentTypeError(f"{place} is a file: name a folder")
    return path


def run_command(main: Callable | str, parse: Callable | None = None):
    """Run a command and end the process with its status. An error that the user can fix is printed in one line.

    main: a function of the arguments, or the name of a module with a function `main`. The module is imported after
    `parse`, if set, has accepted the arguments.
    """
    end_on_signals()
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without × would end the command after its work
    try:
        if parse is not None:
            parse(sys.argv[1:])
        status = (import_module(main).main if isinstance(main, str) else main)(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()  # here an error, as of a full disk, is told in one line
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        said = told(error)
        if said is None or os.environ.get(TRACEBACK):
            raise
        if not speaks_for_all():
            time.sleep(UNTIL_ENDED)
            said = 1
        raise SystemExit(said) from None
    raise SystemExit(status if isinstance(status, int) else 0)


def run_package(package: str):
    """Run the command in a package with options.py, whose `parse` accepts the arguments, and command.py."""
    run_command(f"{package}.command", import_module(f"{package}.options").parse)


class LastingOutput(io.FileIO):
    """The file of a stream. When the reader of its pipe has gone, or its terminal is closed, it becomes the null
    device: a command, such as a training of days, does its work and ends with its own status."""

    def __init__(self, stream: io.TextIOWrapper):
        super().__init__(stream.fileno(), "w", closefd=False)
        self.stream = stream  # which would close the file when it is no longer used
        self.name = stream.name
        is_file = stat.S_ISREG(os.fstat(self.fileno()).st_mode)
        self.when_gone = (errno.EPIPE,) if is_file else (errno.EPIPE, errno.EIO)  # EIO of a disk is an error

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self.when_gone:
                raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        return len(data)


def lasting(stream):
    """Return the same stream on a `LastingOutput`, if it is on a file, pipe or terminal."""
    buffer = getattr(stream, "buffer", None)
    if type(getattr(buffer, "raw", buffer)) is not io.FileIO:  # closed, in memory, or on one already
        return stream
    stream.flush()
    file = LastingOutput(stream)
    return io.TextIOWrapper(
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def end_on_signals():
    """Turn SIGTERM and SIGHUP into an exception, so that a command can end its subprocesses and remove its temporary
    folders. nohup ignores SIGHUP, and so do its commands."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def told(error: Exception) -> str | None:
    """Return one line about an error that the user can fix; None for a bug in this program."""
    said = " ".join(str(error).split("\n")) if str(error) else "no further reason"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None  # None also of lazy imports
    if missing in sys.stdlib_module_names:
        return f"error: Python has no module {missing!r} on this system"
    if missing is not None and not missing.startswith(("modeling_looped", "looped_")):
        return f"error: {missing} is not installed: pip install 'modeling-looped[train,eval]'"
    if type(error).__name__ == "OutOfMemoryError":  # torch's class, for every type of device
        return f"error: {said.partition('. ')[0]}: use a smaller batch, or fewer and shorter rows"
    if isinstance(error, (ValueError, OSError, CommandError)) or isinstance(error, ImportError) and error.name is None:
        return f"error: {said}"
    return None


def speaks_for_all() -> bool:
    """Return whether this process of a launch prints the error. Before the processes are connected, all get the same
    error and rank 0 prints it; later, `peers.one_message` has chosen the process."""
    distributed = sys.modules.get("torch.distributed")
    knows_others = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return knows_others or os.environ.get("RANK", "0") == "0"
