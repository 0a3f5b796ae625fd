"""The origin of a result: every written result contains the command, commit, versions and hardware that made it."""

import importlib.metadata
import json
import math
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

from . import command_line
from .files import write_whole
from .words import counted


PACKAGES = ("torch", "transformers", "accelerate", "lm_eval", "modeling-looped")
ROOT = Path(__file__).resolve().parents[2]  # root of the clone, also if the installed packages are links to it


def provenance(command: str | None = None) -> dict:
    """Return the origin of a result. command: the command line of the user; by default that of this process."""
    return {
        "command": command or own_command(),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
    }


def own_command() -> str:
    if command_line.PROGRAM:
        return f"{command_line.PROGRAM} {shlex.join(sys.argv[1:])}".strip()
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    return f"{program} {shlex.join(sys.argv[1:])}".strip()


@cache
def commit() -> str:
    """Return the commit of this code, with a plus sign if it was changed since; "unknown" for installed code."""
    if not (ROOT / ".git").exists():
        return "unknown"
    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> str:
    import torch
    from torch import distributed

    device = f"{platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')}"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    num_processes = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    return device if num_processes == 1 else f"{num_processes} processes, each with {device}"


def write_json(path: str | Path, result: dict, command: str | None = None, digits: int | None = None):
    """Write provenance and result as JSON, one line for each innermost entry. digits: significant digits of numbers;
    matrices get 4."""
    content = {**provenance(command), **result}
    write_whole(path, compact(finite(content if digits is None else rounded(content, digits))) + "\n")


def note_what_is_replaced(path: Path, command: str):
    """Print a note, before the work begins, if its result will replace the result of another command."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["command"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if before != command:
        print(f"note: {path}, of `{before}`, will be replaced; --output names another folder")


def finite(value):
    """Replace infinities and NaN, which JSON does not have, by None, and convert keys to text."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(value, digits: int = 6):
    """Round floats to `digits` significant digits, matrices to 4."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, 4 if isinstance(item, (list, tuple)) else digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def compact(result: dict) -> str:
    """Return JSON with one line for each entry that contains no further dicts."""
    if not any(isinstance(value, dict) for value in result.values()):
        return json.dumps(result, default=str)
    lines = [
        f"{json.dumps(key)}: {compact(value) if isinstance(value, dict) else json.dumps(value, default=str)}"
        for key, value in result.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}"
