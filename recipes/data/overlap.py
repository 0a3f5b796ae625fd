"""Measure how much of the validation text also occurs in the training text, by n-grams of tokens.

Preparing data removes training documents that equal a validation document. This finds what documents share in part,
such as quotations, near copies, and one text that is in two files but cut at different places.
"""

from collections.abc import Iterable, Iterator

import numpy as np


DOUBLINGS = 4
NGRAM = 2**DOUBLINGS  # tokens, about a dozen words
MOST_TOKENS = 2**22  # validation tokens that are looked up; an evaluation reads fewer
BLOCK = 2**20  # tokens at a time
FILTER_BITS = 27  # leading bits of a hash, at most: they index a table of up to 128 MiB that saves most lookups
FACTOR = 0x9E3779B97F4A7C15  # odd
WORD = 2**64 - 1


def overlap(validation: Iterable[np.ndarray], training: Iterable[np.ndarray]) -> dict[str, int]:
    """Count the n-grams of the validation tokens, and those of them that also occur in the training tokens."""
    hashes = np.concatenate([ngram_hashes(block) for block in blocks(first(validation, MOST_TOKENS))] or [EMPTY])
    known, counts = np.unique(hashes, return_counts=True)
    found = np.zeros(len(known), dtype=bool)
    bits = min(FILTER_BITS, len(known).bit_length() + 5)  # at least 32 places for each
    unread = np.uint64(64 - bits)
    maybe = np.zeros(2**bits, dtype=bool)
    maybe[known >> unread] = True
    for block in blocks(training) if len(known) else ():
        seen = ngram_hashes(block)
        seen = seen[maybe[seen >> unread]]
        places = np.searchsorted(known, seen).clip(max=len(known) - 1)
        found[places[known[places] == seen]] = True
    return {"ngram": NGRAM, "validation_ngrams": len(hashes), "in_training": int(counts[found].sum())}


EMPTY = np.zeros(0, dtype=np.uint64)


def ngram_hashes(tokens: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of every n-gram, uint64 [len(tokens) - n + 1]; equal n-grams have equal hashes.

    The hash of 2m tokens is a constant times that of the first m, plus that of the last m; uint64 arithmetic wraps.
    """
    if len(tokens) < NGRAM:
        return EMPTY
    hashes, factor = _mix(tokens.astype(np.uint64)), FACTOR
    for doubling in range(DOUBLINGS):
        half = 2**doubling
        hashes = hashes[:-half] * np.uint64(factor) + hashes[half:]
        factor = factor * factor & WORD
    return _mix(hashes)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ x >> np.uint64(31)) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ x >> np.uint64(29)


def blocks(shards: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield pieces of the shards that together hold every n-gram of each shard once."""
    for shard in shards:
        for start in range(0, len(shard), BLOCK):
            yield np.asarray(shard[start : start + BLOCK + NGRAM - 1])


def first(shards: Iterable[np.ndarray], count: int) -> Iterator[np.ndarray]:
    for shard in shards:
        if count <= 0:
            return
        yield shard[:count]
        count -= len(shard)


def notes(manifest: dict) -> list[str]:
    """Return lines on the documents that a preparation left out, and on the text that both splits share."""
    said = []
    equal, empty = manifest["overlapping_documents"], manifest.get("empty_documents", 0)
    if equal or empty:
        said.append(f"left out: {equal:,} documents of training that are also in validation, {empty:,} empty ones")
    shared = manifest.get("overlap")
    if shared is not None and shared["validation_ngrams"]:
        part, whole = shared["in_training"], shared["validation_ngrams"]
        said.append(
            f"{part / whole:.2%} of the {shared['ngram']}-grams of validation tokens also stand in the training text "
            f"({part:,} of {whole:,})"
        )
    return said
