"""Shards that the workers of another pipeline write where documents are made, each worker a share of them.

A recipe whose `data.source` is the folder gives the tokenizer, the packing and the held-out fraction. Each worker
writes parts as `looped prepare` makes them (part_files.py), and at the end a list of these parts; when all workers
have ended, preparing writes the manifest. A worker that was killed runs again and keeps its complete parts; it must
then see the same documents again.
"""

import re
from pathlib import Path

from looped_recipes.common.checksums import read_sealed
from looped_recipes.settings.paths import expanded
from looped_recipes.settings.recipe import DataConfig, RecipeError

from .part_files import STREAMED_PART, PartMaker, write_facts


SETTINGS = "written_by_workers.json"  # settings that are the same for all workers
WORKER = re.compile(r"worker-(\d+)\.json")


def is_written(source: str) -> bool:
    """Return whether `source` is a folder to which workers write shards, or have written them."""
    try:
        return (expanded(source) / SETTINGS).is_file()
    except OSError:  # not a valid file name
        return False


def check_written(data: DataConfig):
    """Refuse settings that do not go with shards written by workers."""
    reasons = {
        "validation_source": "documents are held out by data.validation_fraction",
        "validation_split": "documents are held out by data.validation_fraction",
        "joined_by": "the documents lie at several workers",
        "max_documents": "the pipeline says which documents there are",
        "document_start": "the pipeline says where documents begin",
        "token_field": "they tokenise texts",
    }
    for name, reason in reasons.items():
        if (value := getattr(data, name)) is not None:
            raise RecipeError(f"data.{name}={value!r} does not go with shards that workers write: {reason}")


class Worker:
    """Writes the documents of one of several workers, in the order in which they arrive."""

    def __init__(self, maker: PartMaker, rank: int, world_size: int):
        self.maker, self.rank, self.world_size = maker, rank, world_size
        self.texts: list[str] = []
        self.parts: list[str] = []

    def add(self, text: str):
        self.texts.append(text)
        if len(self.texts) == STREAMED_PART:
            self.write()

    def write(self):
        part = f"part-{self.rank:05}-{len(self.parts):05}"
        if not self.maker.is_made(part):
            self.maker(part, self.texts)
        self.parts.append(part)
        self.texts = []

    def end(self):
        if self.texts:
            self.write()
        self.tell(self.parts)

    def tell(self, parts: list[str] | None):
        """Write a file with the names of this worker's parts; None while it has not ended."""
        told = {"parts": parts, "world_size": self.world_size}
        write_facts(self.maker.folder / f"worker-{self.rank:05}.json", told)


def parts_of_workers(folder: Path) -> list[str]:
    """Return the parts of all workers, in order; refuse if a worker has not ended."""
    told = {}
    for path in sorted(folder.iterdir()):
        if match := WORKER.fullmatch(path.name):
            told[int(match[1])] = read_sealed(path)
    sizes = {each["world_size"] for each in told.values()}
    if not sizes:
        raise RecipeError(f"no worker has written to {folder} yet")
    if len(sizes) > 1:
        raise RecipeError(
            f"{folder} was written by runs of {sorted(sizes)} workers: write one of them to a new folder"
        )
    (world_size,) = sizes
    missing = [rank for rank in range(world_size) if told.get(rank, {}).get("parts") is None]
    if missing:
        raise RecipeError(
            f"of the {world_size} workers that write to {folder}, {len(missing)} have not ended: {missing[:8]}"
            f"{'...' if len(missing) > 8 else ''}; run them again, what they have written is kept"
        )
    return [part for rank in range(world_size) for part in told[rank]["parts"]]
