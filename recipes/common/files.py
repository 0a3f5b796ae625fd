"""Write files completely or not at all, even if the writing is interrupted."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


ON_WINDOWS = os.name == "nt"
LEFTOVERS = (".saving-*", ".deleting-*")  # left by writers that were killed


def write_whole(path: str | Path, content: bytes | str | Callable[[BinaryIO], object]):
    """Write bytes, text, or the output of a function to a file, and make missing folders. The data are on the disk
    when this returns."""
    path = Path(path)
    check_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".saving-{path.name}.{os.getpid()}")  # another process may write the same file
    try:
        with open(partial, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync(path.parent)  # puts the file's name on the disk, too


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def is_foreign(folder: Path) -> bool:
    """Return whether the path exists and is neither an empty folder nor a saved model of this package."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        return json.loads((folder / "config.json").read_text())["model_type"] != "looped"
    except (OSError, ValueError, KeyError, TypeError):
        return True


def check_writable(folder: Path, where: str = "with --output where the command has that"):
    """Raise an error if a folder is not writable; also called before hours of work. where: how to name another."""
    there = nearest_existing(folder.absolute())
    if there.is_dir() and not os.access(there, os.W_OK):
        raise PermissionError(f"{there} can not be written to: make it writable, or name another place, {where}")


def check_file(path: Path):
    """Raise an error if a file can not be written at this path."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file, such as one in it")
    check_writable(path.parent)


def save_pretrained(saved, folder: Path):
    """Save a model or a tokenizer. An error of the disk becomes OSError: the Rust libraries of safetensors and of
    tokenizers raise errors of their own, or a plain Exception."""
    try:
        saved.save_pretrained(folder)
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error


def lines_of(path: str | Path) -> Iterator[str]:
    """Yield the lines of a JSON lines file. `str.splitlines` would also split at U+2028, U+0085 and other characters
    inside texts."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield line.rstrip("\n")


def append_line(path: str | Path, line: str):
    """Append a line to a file, also behind one that was cut off. It is on the disk when this returns."""
    with open(path, "a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        is_cut = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * is_cut + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def sync_all(folder: str | Path):
    """Force all content of a folder to the disk, whichever library wrote it."""
    for inner, _, names in os.walk(folder):
        for name in names:
            sync(Path(inner) / name)
        sync(inner)


def sync(path: str | Path):
    """Force a file's content, or the names in a folder, to the disk. Windows keeps names itself, and forces only what
    is open for writing."""
    if ON_WINDOWS and os.path.isdir(path):
        return
    descriptor = os.open(path, os.O_RDWR if ON_WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str | Path):
    """Remove a file, a folder or a link. The target of a link is kept: parts of runs may be on other disks."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: str | Path):
    """Remove files left by killed writers from a folder to which no other process writes now."""
    for leftover in [path for pattern in LEFTOVERS for path in Path(folder).glob(pattern)]:
        remove(leftover)
