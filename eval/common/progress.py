"""A progress bar for work that takes more than a few seconds."""

from collections.abc import Iterable

from tqdm import tqdm

from looped_recipes.common.progress import progress_bar


SOON = 5  # seconds; shorter work shows no bar


def progress(items: Iterable | None, what: str, total: int | None = None) -> tqdm:
    """Iterate over the items with a bar that appears if they take long and disappears at the end."""
    return progress_bar(items, desc=what, total=total, delay=SOON, leave=False)
