"""Tokenise, pack and write each part of a source by itself, in any order, in any process.

A part is complete when its `.json` exists, which is written last; every file appears whole or not at all. The content
of a part depends on the source alone, never on the number of processes or on where a preparation was stopped.
"""

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from accelerate.utils import patch_environment
from datasets import IterableDataset
from tqdm.auto import tqdm

from looped_recipes.common.checksums import checksum, difference, read_sealed, sealed
from looped_recipes.common.errors import CommandError
from looped_recipes.common.files import write_whole
from looped_recipes.common.orphans import end_with
from looped_recipes.settings.recipe import RecipeError
from looped_recipes.settings.yaml_files import shortly

from .packing import best_fit
from .sources import Documents, Source, readable
from .tokenizers import Encoder, TokensAsTheyAre, in_groups


Document = str | np.ndarray  # a text, or its tokens
SPLITS = ("train", "validation")
STREAMED_PART = 16_384  # documents
STREAMED_LENGTH = 2**27  # characters, or tokens, with which a part of fewer documents ends: books fit into memory
LARGEST_PART = 32_768  # documents; 100 billion tokens are then a few thousand shards, each a few seconds of work


@dataclass(frozen=True)
class HeldOut:
    """The documents held out of training, chosen by hash: equal documents are always on the same side."""

    fraction: float = 0.0  # of all documents; 1 is all of them
    hashes: frozenset[int] = frozenset()  # of the documents of a separate validation source

    def __contains__(self, document: Document) -> bool:
        number = document_hash(document)
        return number < self.fraction * 2**64 or number in self.hashes


def document_hash(document: Document) -> int:
    """Return a hash of 64 bits, the same for texts that differ only in white space."""
    if isinstance(document, str):
        content = " ".join(document.split()).encode()
    else:
        if document.dtype.kind not in "iu":  # a null makes them floats or objects
            numbers = document.astype(float)
            raise RecipeError(
                f"of {len(document)} token ids of a document {np.isnan(numbers).sum()} are null: "
                f"{shortly(numbers.tolist())}; give them ids, or leave the document out"
            )
        content = document.astype("<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def is_blank(document: Document | None) -> bool:
    return document is None or len(document) == 0 or (isinstance(document, str) and document.isspace())


@dataclass(frozen=True)
class PartMaker:
    """Makes one part from its documents: a shard of tokens for each split, and a .json that describes the shards."""

    folder: Path
    encode: Encoder | TokensAsTheyAre
    held_out: HeldOut
    held_out_split: str | None  # the split of held-out documents; None drops them: they are in validation already
    row_length: int | None  # for best-fit packing; None concatenates
    keep_cropped: bool  # best fit: the part that is cropped off is packed as another document
    dtype: str
    tokenizer: str  # hash of the tokenizer

    def is_made(self, part: str) -> bool:
        """Return whether the files of a part exist, are undamaged and were written with this tokenizer."""
        try:
            facts = read_sealed(self.folder / f"{part}.json")
            shards = facts["shards"].values()
            return facts["tokenizer"] == self.tokenizer and all(damage(self.folder, shard) is None for shard in shards)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def __call__(self, part: str, documents: Iterable[Document | None], **facts):
        of_splits: dict[str | None, list] = {split: [] for split in (*SPLITS, None)}
        num_empty = 0
        for document in documents:
            if is_blank(document):
                num_empty += 1
            else:
                of_splits[self.held_out_split if document in self.held_out else "train"].append(document)
        counts, shards = {}, {}
        for split in SPLITS:
            tokens = [np.array(ids, dtype=self.dtype) for ids in self.encode(of_splits[split])]
            counts[split] = {
                "documents": len(tokens),
                "tokens": sum(map(len, tokens)),
                "bytes": sum(map(self.encode.num_bytes, of_splits[split])),
            }
            if tokens:
                shards[split] = write_shard(self.folder / f"{part}.{split}.npy", *self.pack(tokens))
        facts |= {"counts": counts, "overlapping_documents": len(of_splits[None]), "empty_documents": num_empty}
        facts |= {"shards": shards, "tokenizer": self.tokenizer}
        write_facts(self.folder / f"{part}.json", facts)

    def pack(self, documents: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the packed tokens, and the documents left for rows that are made from the remainders of all parts."""
        if self.row_length is None:
            return documents, []
        return best_fit(documents, self.row_length, self.keep_cropped, num_starts=len(self.encode.starts))


def make_parts(maker: PartMaker, kind: str, documents: Documents, source: Source, num_proc: int | None) -> list[str]:
    """Make the parts of a source that do not exist yet, and return the names of all parts in order."""
    if isinstance(documents, IterableDataset):
        return _stream_parts(maker, kind, documents, source)
    size = min(LARGEST_PART, max(32, math.ceil(len(documents) / 64)))  # fixed by the source: parts never change
    parts = [f"{kind}-{number:05}" for number in range(math.ceil(len(documents) / size))]
    missing = [number for number, part in enumerate(parts) if not maker.is_made(part)]

    parent = os.getpid()

    def make(number: int):
        if os.getpid() != parent:
            end_with(parent)
        with readable(source):
            begin, end = number * size, min((number + 1) * size, len(documents))
            if source.token_field is None:
                texts = documents[begin:end]["text"]
            else:  # row by row: `datasets` makes no arrays of several rows if some are null
                texts = [row["text"] for row in documents.select(range(begin, end))]
        maker(parts[number], texts)

    if num_proc is None or num_proc < 2 or len(missing) < 2:  # the tokenizers library uses all cores by itself
        for number in tqdm(missing, desc=f"tokenise {source.name}", unit="part", disable=None):
            make(number)
    else:
        # processes that each use all cores get in each other's way, and threads do not survive a fork
        with patch_environment(TOKENIZERS_PARALLELISM="false"), _forked(min(num_proc, len(missing)), make) as pool:
            jobs = [pool.submit(_call_inherited, number) for number in missing]
            for job in tqdm(as_completed(jobs), f"tokenise {source.name}", len(jobs), unit="part", disable=None):
                job.result()
    return parts


@contextlib.contextmanager
def _forked(num_proc: int, function: Callable[[int], None]):
    """Yield a pool of processes that inherit `function`; if one is killed, the others end too."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise CommandError(
            f"data.num_proc={num_proc} forks processes, which this system does not support: leave it out; "
            "the tokenizer uses all cores by itself"
        )
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_proc, context, initializer=_inherit, initargs=(function,))
    try:
        yield pool
    except BrokenProcessPool:
        raise CommandError(
            "a process that made parts was killed, perhaps for its memory: what is made is kept, so prepare again, "
            f"with fewer than data.num_proc={num_proc} if it happens again"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _inherit(function: Callable[[int], None]):
    global _inherited
    _inherited = function


def _call_inherited(number: int):
    _inherited(number)


def _stream_parts(maker: PartMaker, kind: str, documents: IterableDataset, source: Source) -> list[str]:
    """Make parts of STREAMED_PART documents each from a stream, fewer if they are long. The state of the stream after
    a part is saved with the part, so that a resumed preparation does not read the stream from its beginning."""
    parts: list[str] = []
    groups = None
    length = STREAMED_LENGTH if maker.row_length is None else math.inf  # best fit packs other rows of other parts
    for number in tqdm(count(), desc=f"tokenise {source.name}", unit="part", disable=None):
        part = f"{kind}-{number:05}"
        if groups is None and maker.is_made(part):
            parts.append(part)
            continue
        if groups is None:
            if parts:
                documents.load_state_dict(read_sealed(maker.folder / f"{parts[-1]}.json")["stream"])
            groups = in_groups((row["text"] for row in documents), STREAMED_PART, length)
        with readable(source):
            texts = next(groups, None)
        if texts is None:
            return parts
        maker(part, texts, stream=documents.state_dict())
        parts.append(part)


def fingerprint(settings: dict) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def write_shard(path: Path, packed: list[np.ndarray], left: list[np.ndarray]) -> dict:
    """Write one array: the tokens of rows, then the documents left over. Return its entry for the manifest."""
    num_tokens = sum(map(len, packed))
    stream = np.concatenate([*packed, *left])
    write_whole(path, lambda file: save_array(file, stream))
    return {
        "file": path.name,
        "tokens": num_tokens,
        "size": path.stat().st_size,
        "checksum": checksum(path),
        "left": [len(one) for one in left],
    }


def damage(folder: Path, shard: dict) -> str | None:
    """Return how a shard differs from what was written; None if it does not."""
    return difference(folder / shard["file"], shard["size"], shard.get("checksum"))


def save_array(file, array: np.ndarray):
    """Save like np.save, but in two writes: on a full disk np.save raises an error that does not name the cause."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.data)


def write_facts(path: Path, facts: dict):
    write_whole(path, sealed(facts))
