"""Files that appear whole or not at all, whatever stops the writing."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


LEFTOVERS = ("*.tmp", ".saving-*", ".deleting-*")  # of writers that were killed


def write_whole(path: str | Path, content: bytes | str | Callable[[BinaryIO], object]):
    """Write bytes, text, or what a function writes, with its folders; on the disk when this returns."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file, such as one in it")
    check_writable(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # of this process: another one may write the same
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
    sync(path.parent)  # the names of its files are on the disk, too


def nearest_existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def is_foreign(folder: Path) -> bool:
    """Whether something lies there that is not a saved model."""
    is_there = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    return is_there and not (folder / "config.json").exists()


def check_writable(folder: Path):
    """Before hours of work, too."""
    there = nearest_existing(folder.absolute())
    if there.is_dir() and not os.access(there, os.W_OK):
        raise PermissionError(
            f"{there} can not be written to: make it writable, or name another place, with --output where the command "
            "has that"
        )


def save_tokenizer(tokenizer, folder: Path):
    """Save a tokenizer. An error of the disk, which the Rust library raises as a plain Exception, becomes OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error


def lines_of(path: str | Path) -> Iterator[str]:
    """The lines of a file of JSON: `str.splitlines` would part them at U+2028, U+0085 and others inside of texts."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield line.rstrip("\n")


def append_line(path: str | Path, line: str):
    """One more line, on the disk when this returns."""
    with open(path, "a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def sync_all(folder: str | Path):
    """Everything in a folder is on the disk, whoever wrote it."""
    for inner, _, names in os.walk(folder):
        for name in names:
            sync(Path(inner) / name)
        sync(inner)


def sync(path: str | Path):
    """A file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str | Path):
    """Remove a file, a folder or a link. The target of a link stays: parts of runs may lie on other disks."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: str | Path):
    """What killed writers left in a folder that nobody else writes to now."""
    for leftover in [path for pattern in LEFTOVERS for path in Path(folder).glob(pattern)]:
        remove(leftover)
