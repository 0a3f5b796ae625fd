"""Resolve the name of a model: a folder, a training run of this code or of a paper's code, or a repository on the Hub,
if the Hub is reachable."""

from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants, is_offline_mode


SECONDS = 10


def model_inside(target: str) -> str:
    """Return the saved model of a training run, if `target` is the folder of a run; else `target`, which may be a name
    on the Hub."""
    path = Path(target)
    is_run = not (path / "config.json").is_file() and (path / "final" / "config.json").is_file()
    return str(path / "final") if is_run else target


def is_training_checkpoint(source: str | Path) -> bool:
    return file_of_readout(source) is not None or files_of_fully_looped(source) is not None


def file_of_readout(source: str | Path) -> Path | None:
    path = Path(source)
    found = path if path.suffix == ".pt" else path / "last.pt"
    return found if found.is_file() and not found.name.startswith("model_") else None


def files_of_fully_looped(source: str | Path) -> tuple[Path, Path] | None:
    """Return the files with the tensors and the settings of the newest step; None if there are none."""
    path = Path(source)
    steps = [path] if path.suffix == ".pt" else sorted(path.glob("model_*.pt"))
    for step in reversed(steps):
        meta = step.with_name(step.name.replace("model_", "meta_")).with_suffix(".json")
        if step.name.startswith("model_") and step.is_file() and meta.is_file():
            return step, meta
    return None


def can_only_be_path(name: str) -> bool:
    """Return whether no repository on the Hub has such a name: there it is `name` or `owner/name`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def check_source(name: str):
    """Raise an error if there is neither a folder `name` nor a reachable Hub. The Hub is tried only once: its client
    would keep trying for a minute."""
    if Path(name).is_dir() or is_offline_mode():
        return
    if "/" not in name or can_only_be_path(name):
        raise ValueError(f"there is no folder {name!r}, and repositories on the Hub have names like owner/name")
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:
        pass  # the Hub has answered
    except OSError as error:
        raise OSError(
            f"there is no folder {name!r}, and the Hub does not answer ({error}): check the name and the connection, "
            "or set HF_HUB_OFFLINE=1 for a model that was downloaded before"
        ) from error
