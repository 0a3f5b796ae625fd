"""Checksums of files, to detect files that a disk has changed since they were written.

XXH3, 64 bits, as 16 hexadecimal digits: it detects accidents, not forgeries. Measured on one core: 0.14 s for a GB in
memory; otherwise the time to read it from the disk.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from .files import write_whole


LIST = "checksums.json"  # in the same folder as the files
SEAL = "checksum"  # key, in a JSON object, of the object's checksum
# files of a saved model that users edit
SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
UNCHECKED = (".py", ".md")  # code and the model card: listed, but a model is also taken with others
BLOCK = 2**20


class Damaged(ValueError):
    """A file differs from what was written."""


def checksum(path: str | Path) -> str:
    import xxhash  # not there where models are only opened and converted

    digest, block = xxhash.xxh3_64(), memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def difference(path: Path, size: int, expected: str | None) -> str | None:
    """Describe how a file differs from what was written; None if it does not. size, expected: its size and checksum
    when written; expected is None if no checksum was stored."""
    try:
        found = path.stat().st_size
        if found != size:
            return f"{path.name} has {found} bytes, but {size} were written"
        if expected is not None and (digest := checksum(path)) != expected:
            return f"{path.name} has the checksum {digest}, but {expected} was written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can not be read ({error})"
    return None


# JSON objects that contain their checksum


def sealed(content: dict) -> str:
    """Return `content` as JSON, with its checksum added."""
    content = json.loads(json.dumps(content, default=str))
    return json.dumps({**content, SEAL: seal_of(content)}, indent=1)


def read_sealed(path: str | Path) -> dict:
    """Read an object and check and remove its checksum. Raise ValueError or OSError if the file is damaged."""
    content = json.loads(Path(path).read_text())
    if not isinstance(content, dict):
        raise Damaged(f"{path} holds no object")
    if content.pop(SEAL, None) != seal_of(content):
        raise Damaged(f"{path} has another checksum than was written")
    return content


def seal_of(content: dict) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


# Folders with a list of checksums


def names_in(folder: Path) -> set[str]:
    """Return the names, relative to a folder, of all files and folders in it, at any depth."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def write_checksums(folder: str | Path, names: Iterable[str] | None = None):
    """Write the list of checksums of these files, by default all in the folder and in folders in it."""
    if names is None:
        names = sorted(names_in(Path(folder)))
    files = {name: checksum(Path(folder) / name) for name in names if name != LIST and (Path(folder) / name).is_file()}
    sizes = {name: (Path(folder) / name).stat().st_size for name in files}
    write_whole(Path(folder) / LIST, sealed({"files": sizes, "checksums": files}))


def renew_checksum(folder: str | Path, name: str):
    """Update the checksum of a file that was changed on purpose. Without a list in the folder, do nothing."""
    folder = Path(folder)
    if (folder / LIST).is_file():
        listed = read_sealed(folder / LIST)
        listed["files"][name] = (folder / name).stat().st_size
        listed["checksums"][name] = checksum(folder / name)
        write_whole(folder / LIST, sealed(listed))


def listed_in(folder: Path) -> dict[str, tuple[int, str]]:
    """Return {name: (size, checksum)} of the files in the list of a folder. Raise Damaged if the list is damaged."""
    try:
        listed = read_sealed(folder / LIST)
        return {name: (size, listed["checksums"][name]) for name, size in listed["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{LIST} is damaged ({error})") from error


def change_of(path: Path) -> str | None:
    """Describe how a file differs from its entry in the list of its folder; None if it does not, or is not listed."""
    if not (path.parent / LIST).is_file():
        return None
    try:
        found = listed_in(path.parent).get(path.name)
    except Damaged as error:
        return str(error)
    return difference(path, *found) if found else None


def changes_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each listed file that differs from what was saved, and a description."""
    for name, saved in listed_in(folder).items():
        changed = difference(folder / name, *saved)
        if changed is not None:
            yield name, changed


def change_of_folder(folder: Path) -> str | None:
    """Describe how a folder differs from what was saved there, also in what was added; None if it does not."""
    if not (folder / LIST).is_file():
        return f"it has no {LIST}"
    try:
        listed = listed_in(folder).keys()
    except Damaged as error:
        return str(error)
    folders = {parent.as_posix() for name in listed for parent in PurePosixPath(name).parents}
    added = names_in(folder) - listed - folders - {LIST}
    return f"{min(added)} was added" if added else next((changed for _, changed in changes_of(folder)), None)


def is_edit(folder: Path, name: str) -> bool:
    """Return whether a changed file of a folder is there and one that users edit."""
    return (folder / name).is_file() and (name in SETTINGS or Path(name).suffix in UNCHECKED)


def check_readable(path: Path):
    try:
        open(path, "rb").close()
    except PermissionError as error:
        raise PermissionError(f"{path} can not be read ({error.strerror}): make it readable") from None
    except OSError:  # `difference` tells it
        pass


def check_folder(folder: str | Path):
    """Raise an error if a file differs from what was saved. For settings, which users edit, only log a warning; code
    and the model card are not checked.

    A folder without a list is not checked. transformers does not read the list, so `from_pretrained` alone does not
    notice damage that leaves a file readable.
    """
    folder = Path(folder)
    if not (folder / LIST).is_file():
        return
    check_readable(folder / LIST)
    advice = f"if you changed it on purpose, remove {folder / LIST}, else save or copy that folder again"
    try:
        listed = listed_in(folder)
    except Damaged as error:
        raise Damaged(f"{folder}/{error}: {advice}") from error
    for name in (name for name in listed if Path(name).suffix not in UNCHECKED):
        check_readable(folder / name)
        changed = difference(folder / name, *listed[name])
        if changed is None:
            continue
        if is_edit(folder, name):
            logging.getLogger(__name__).warning("%s: %s; %s", folder, changed, advice)
        else:
            raise Damaged(f"{folder}: {changed}: {advice}")
