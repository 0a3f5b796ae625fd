"""Whether the Hub can be asked for a model, found out by one try: where it cannot, its client tries for a minute."""

from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants, is_offline_mode


SECONDS = 10


def check_source(name: str):
    """name: of a folder, or of a repository."""
    if Path(name).is_dir() or is_offline_mode():
        return
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"there is no folder {name!r}, and repositories on the Hub have names like owner/name")
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:
        pass  # an answer
    except OSError as error:
        raise OSError(
            f"there is no folder {name!r}, and the Hub does not answer ({error}): check the name and the connection, "
            "or set HF_HUB_OFFLINE=1 for a model that was downloaded before"
        ) from error
