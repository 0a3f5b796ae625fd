"""Validation text that stands in the training text, against sets of tuples."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looped_recipes.data import overlap as module
from looped_recipes.data import shards
from looped_recipes.data.overlap import NGRAM, notes, overlap
from tests.helpers_data import make_documents, write_jsonl


def ngrams(shards) -> list[tuple]:
    return [tuple(shard[i : i + NGRAM]) for shard in shards for i in range(len(shard) - NGRAM + 1)]


STREAMS = st.lists(
    st.lists(st.integers(0, 1), max_size=70).map(lambda ids: np.array(ids, dtype=np.uint16)), max_size=3
)


@pytest.mark.parametrize("block", [3, 2**20])
@given(validation=STREAMS, training=STREAMS)
def test_counts_are_those_of_sets(block, validation, training):
    before, module.BLOCK = module.BLOCK, block
    try:
        found = overlap(validation, training)
    finally:
        module.BLOCK = before
    held_out, seen = ngrams(validation), set(ngrams(training))
    assert found["validation_ngrams"] == len(held_out)
    assert found["in_training"] == sum(one in seen for one in held_out)


def test_a_small_text_takes_little_memory():
    """A table that each preparation clears took nearly half of its time where the text is small."""
    validation, training = np.arange(2000, dtype=np.uint16), np.arange(1000, 9000, dtype=np.uint16)
    tracemalloc.start()
    found = overlap([validation], [training])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found["validation_ngrams"], found["in_training"]) == (2001 - NGRAM, 1001 - NGRAM)
    assert most < 2**20


def test_one_text_in_two_files_that_are_cut_elsewhere(make_data, tmp_path):
    """No document is equal, and yet most of validation stands in training."""
    text = "".join(f"{line}\n\n" for line in make_documents(900))
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "other.txt").write_text(text[1000:20_000])
    data = make_data(
        source=tmp_path / "train.txt", validation_source=str(tmp_path / "other.txt"), validation_fraction=0.01
    )
    prepared = shards.prepare(data)
    found = prepared.manifest["overlap"]
    assert prepared.manifest["overlapping_documents"] == 0
    assert found["in_training"] > 0.9 * found["validation_ngrams"] > 0
    assert f"({found['in_training']:,} of {found['validation_ngrams']:,})" in notes(prepared.manifest)[-1]
    apart = make_data(
        source=tmp_path / "train.txt",
        validation_source=str(write_jsonl(tmp_path / "v.jsonl", make_documents(50, seed=4))),
    )
    assert shards.prepare(apart).manifest["overlap"]["in_training"] == 0


def test_empty_documents_are_counted(make_data, tmp_path):
    rows = [{"text": text} for text in [*make_documents(80), None, "", " \n"]]
    (tmp_path / "gaps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = shards.prepare(make_data(source=tmp_path / "gaps.jsonl")).manifest
    assert manifest["empty_documents"] == 3
    assert sum(manifest["counts"][split]["documents"] for split in ("train", "validation")) == 80
    assert "0 documents of training that are also in validation, 3 empty ones" in notes(manifest)[0]
