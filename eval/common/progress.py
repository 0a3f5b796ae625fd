"""A bar on what takes more than a few seconds."""

from collections.abc import Iterable

from tqdm import tqdm

from looped_recipes.common.progress import progress_bar


SOON = 5  # seconds: what is done by then shows no bar


def progress(items: Iterable | None, what: str, total: int | None = None) -> tqdm:
    """The items, with a bar that comes when they take long and goes when they are done."""
    return progress_bar(items, desc=what, total=total, delay=SOON, leave=False)
