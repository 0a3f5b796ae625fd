"""Data of the recipes: sources, packing, shards that survive what happens to them, and the order of the rows."""

import dataclasses
import errno
import functools
import gzip
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import string
import time
from collections import Counter
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from fsspec.compression import compr
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.parquet import read_schema
from pyarrow.parquet import write_table as write_parquet
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from looped_recipes import prepare
from looped_recipes.common.errors import CommandError
from looped_recipes.data import part_files as parts
from looped_recipes.data import shards, sources
from looped_recipes.data.embedded import embedded_documents
from looped_recipes.data.packing import best_fit, document_positions
from looped_recipes.data.shards import open_prepared
from looped_recipes.data.shuffle import rows_of_step
from looped_recipes.data.sources import readable
from looped_recipes.data.tokenizers import GPT4_PIECES, WORD_PIECES
from looped_recipes.data.whole_zstd import OF_FSSPEC
from looped_recipes.engine.validation import validate
from looped_recipes.settings.recipe import DataConfig, RecipeError
from tests.helpers import quick_and_slow, tiny_model, tiny_tokenizer
from tests.helpers_data import WORDS, make_documents, plain_rows, write_jsonl


START, END = 0, 1
GPT2_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def texts_of(prepared, split: str) -> list[str]:
    """Documents of a concatenated split, decoded from its shards."""
    stream = np.concatenate(getattr(prepared, split).shards).tolist()
    tokenizer = prepared.tokenizer
    assert stream[0] == tokenizer.bos_token_id
    documents = []
    for token in stream:
        if token == tokenizer.bos_token_id:
            documents.append([])
        documents[-1].append(token)
    assert all(document[-1] == tokenizer.eos_token_id for document in documents)
    return [tokenizer.decode(document[1:-1]) for document in documents]


def contents(folder: Path) -> dict:
    """All files, but for the bookmarks that streams leave with their parts, and checksums of those."""
    files = {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    for name in [name for name in files if name.startswith("part-") and name.endswith(".json")]:
        facts = json.loads(files[name])
        files[name] = {key: value for key, value in facts.items() if key not in ("stream", "checksum")}
    return files


def in_process(function, *arguments) -> int:
    """Exit code of `function` in a process of its own."""
    process = start_process(function, *arguments)
    process.join()
    return process.exitcode


def start_process(function, *arguments):
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


# Order of the rows


@given(st.integers(0, 2**70), st.integers(1, 70), st.integers(1, 30))
def test_every_epoch_sees_every_row_once(seed, num_rows, rows_per_step):
    steps = math.ceil(3 * num_rows / rows_per_step)
    seen = [row for step in range(steps) for row in rows_of_step(seed, step, rows_per_step, num_rows)]
    for epoch in range(3):
        assert sorted(seen[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_order_depends_on_seed_and_step_alone():
    forward = [rows_of_step(3, step, 8, 100) for step in range(40)]
    backward = [rows_of_step(3, step, 8, 100) for step in reversed(range(40))]
    assert forward == backward[::-1]
    assert forward[0] != rows_of_step(4, 0, 8, 100)
    # the same rows whatever the size of a step: changing it in the middle of an epoch loses and repeats nothing
    assert sum(forward, []) == [row for step in range(20) for row in rows_of_step(3, step, 16, 100)]


@pytest.mark.parametrize("num_rows", [2, 5, 16, 100])
def test_orders_are_uniform_over_epochs(num_rows):
    """Where row 0 and its neighbour stand: within 5 standard deviations of uniform and independent."""
    epochs = 3000
    orders = np.array(rows_of_step(1, 0, epochs * num_rows, num_rows)).reshape(epochs, num_rows)
    counts = np.stack([np.bincount(column, minlength=num_rows) for column in orders.T])
    deviation = math.sqrt(epochs * (1 / num_rows) * (1 - 1 / num_rows))
    assert np.abs(counts - epochs / num_rows).max() < 5 * deviation
    ascending = (np.diff(orders, axis=1) > 0).mean()
    assert abs(ascending - 0.5) < 5 * math.sqrt(0.25 / (epochs * (num_rows - 1)))


def test_order_needs_no_table():
    """A hundred million million rows: nothing that grows with their number could be made."""
    rows = rows_of_step(0, 10**9, 256, 10**14)
    assert len(set(rows)) == 256 and 0 <= min(rows) and max(rows) < 10**14
    assert max(rows) > 0.9e14 and min(rows) < 0.1e14


def test_order_refuses_no_rows():
    with pytest.raises(ValueError, match="num_rows=0"):
        rows_of_step(0, 0, 8, 0)


# Packing


def naive_best_fit(sizes: list[int], length: int, keep: bool) -> list[list[int]]:
    """Sizes of the pieces of every row, from the rule as it is written."""
    pool, rows = list(sizes), []
    while sum(pool) >= length:
        pieces = []
        while sum(pieces) < length:
            space = length - sum(pieces)
            fitting = [size for size in pool if size <= space]
            if fitting:
                pieces.append(max(fitting))
                pool.remove(max(fitting))
            else:
                shortest = min(pool)
                pool.remove(shortest)
                pieces.append(space)
                if keep and shortest - space > 1:
                    pool.append(1 + shortest - space)
        rows.append(pieces)
    return rows


@given(st.lists(st.integers(3, 40), max_size=30), st.integers(4, 24), st.booleans())
def test_best_fit_takes_the_largest_that_fits_else_crops_the_shortest(sizes, length, keep):
    values = iter(range(2, 10**6))
    documents = [np.array([START, *(next(values) for _ in range(size - 2)), END]) for size in sizes]
    rows, left = best_fit(documents, length, keep, num_starts=1)

    assert all(len(row) == length and row[0] == START for row in rows)  # no padding; aligned
    assert sum(map(len, left)) < length
    pieces = [piece for row in rows for piece in np.split(row, np.flatnonzero(row == START)[1:])]
    found, at = [], 0
    for expected in naive_best_fit(sizes, length, keep):
        found.append([len(piece) for piece in pieces[at : at + len(expected)]])
        assert found[-1] == expected
        at += len(expected)
    assert len(found) == len(rows)

    words = Counter(token for piece in [*pieces, *left] for token in piece.tolist() if token > END)
    if keep:  # every token of every document, once
        assert words == Counter(token for document in documents for token in document.tolist() if token > END)
    else:  # every piece is the beginning of a document of its own
        beginnings = {document[1]: document for document in documents}
        pieces = [piece for piece in pieces if len(piece) > 1]
        assert all(np.array_equal(piece, beginnings[piece[1]][: len(piece)]) for piece in pieces)
        assert max(words.values(), default=1) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_positions_begin_again_at_every_document(tokens):
    expected, position = [], 0
    for i, token in enumerate(tokens):
        position = 0 if token == START or i == 0 else position + 1
        expected.append(position)
    assert document_positions(np.array([tokens]), START, after=False).tolist() == [expected]


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 6), st.integers(1, 9))
def test_rows_are_windows_of_the_stream_across_shards(sizes, length, stride):
    stream = np.arange(2, 2 + sum(sizes), dtype=np.uint16)
    shards = np.split(stream, np.cumsum(sizes)[:-1]) if sizes else []
    rows = plain_rows(shards, length, stride, START, token_bytes=torch.ones(100, dtype=torch.int64))
    expected = [stream[i : i + length].tolist() for i in range(0, len(stream) - length + 1, stride)]
    assert len(rows) == len(expected)
    if expected:
        batch = rows.batch(range(len(rows)))
        assert batch["input_ids"].tolist() == expected and batch["input_ids"].dtype == torch.int64
        assert "position_ids" not in batch
    with pytest.raises(IndexError):
        rows.batch([len(expected)])


def test_start_tokens_are_learned_only_where_they_also_end_a_document():
    stream = np.array([0, 5, 1, 0, 7, 8])
    lengths = torch.tensor([0, 0, 0, 0, 0, 3, 0, 4, 5])
    apart = plain_rows([stream], 6, 6, START, lengths).batch([0])
    assert apart["labels"].tolist() == [[-100, 5, 1, -100, 7, 8]]
    both = plain_rows([stream], 6, 6, START, lengths, learn_start=True)
    assert both.batch([0])["labels"].tolist() == [stream.tolist()]
    # bytes of the target of each position: what comes next, nothing for special tokens and at the end
    assert both.num_bytes(both.batch([0, 0])["labels"]).tolist() == [[3, 0, 0, 4, 5, 0]] * 2


def test_masked_documents_are_what_they_are_alone():
    """Logits of packed documents equal those of each by itself; without position_ids they do not."""
    model = tiny_model()
    pieces = [[5, 6, 7], [START, 9, 8, 7, 6], [START, 11], [START, 12, 13, 14, 15, 16]]
    stream = np.concatenate(pieces)
    rows = plain_rows([stream, stream[::-1]], 16, 16, START, torch.ones(99), document_masking=True)
    batch = rows.batch([0, 1])
    with torch.no_grad():
        packed = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        mixed = model(batch["input_ids"], use_cache=False).logits[0]
        alone = torch.cat([model(torch.tensor([piece]), use_cache=False).logits[0] for piece in pieces])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    assert (mixed[3:] - alone[3:]).abs().min(0).values.max() > 1e-3


# Prepared data


def test_concatenation_keeps_every_document_in_order(make_data):
    prepared = shards.prepare(make_data(stride=7, document_masking=True))
    documents = make_documents(300)
    train, validation = texts_of(prepared, "train"), texts_of(prepared, "validation")
    assert train == [text for text in documents if text not in set(validation)]
    assert validation == [text for text in documents if text not in set(train)]
    assert 10 < len(validation) < 60  # of 300 at a tenth

    stream = np.concatenate(prepared.train.shards)
    rows = prepared.train
    assert len(rows) == (len(stream) - 32) // 7 + 1
    batch = rows.batch([0, 11, len(rows) - 1])
    assert batch["input_ids"].tolist() == [stream[7 * i : 7 * i + 32].tolist() for i in (0, 11, len(rows) - 1)]
    assert batch["position_ids"].tolist() == [
        document_positions(row[None], prepared.tokenizer.bos_token_id, after=False)[0].tolist()
        for row in batch["input_ids"].numpy()
    ]


def test_manifest_counts_what_is_there(make_data):
    prepared = shards.prepare(make_data())
    for split in ("train", "validation"):
        texts, counts = texts_of(prepared, split), prepared.manifest["counts"][split]
        rows = getattr(prepared, split)
        stream = torch.from_numpy(np.concatenate(rows.shards).astype(np.int64))
        assert counts["documents"] == len(texts)
        assert counts["bytes"] == sum(len(text.encode()) for text in texts) == prepared.token_bytes[stream].sum()
        assert counts["tokens"] == counts["packed_tokens"] == len(stream)
        assert counts["rows"] == len(rows) == len(stream) // 32
    assert prepared.manifest["tokenizer"]["vocab_size"] == len(prepared.tokenizer) == len(prepared.token_bytes) == 320
    documents, held_out = (len(texts_of(prepared, split)) for split in ("train", "validation"))
    assert prepared.told(None).startswith(f"training on {documents} documents (")
    assert f"validation on {held_out} (" in prepared.told(300) and prepared.told(300).endswith(
        "; at most data.max_documents=300 are read"
    )


def test_bytes_of_targets_are_those_of_the_text_they_spell(make_data):
    rows = shards.prepare(make_data())
    tokenizer, rows = rows.tokenizer, rows.train
    batch = rows.batch([3, 1])
    num_bytes = rows.num_bytes(batch["labels"])
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    for row, lengths in zip(batch["input_ids"].tolist(), num_bytes.tolist()):
        expected = [0 if token in special else len(tokenizer.decode([token]).encode()) for token in row[1:]]
        assert lengths == [*expected, 0]


@pytest.mark.parametrize("tokens", ["both", "start", "end"])
def test_bits_per_byte_leave_out_the_spaces_that_a_tokenizer_adds_before_texts(make_data, tmp_path, tokens):
    """As that of Llama 2; in short texts they are many of the bytes."""
    pieces = ["<s>", "</s>", "▁", *string.ascii_lowercase, *string.digits]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    prepared = shards.prepare(make_data(tokenizer=str(tmp_path), document_tokens=tokens))
    rows, counts = prepared.validation.of_length(prepared.validation.num_tokens), prepared.manifest["counts"]
    labels = rows.batch([0])["labels"]
    first = tokens == "end"  # no token is before the first one: it is no target
    before_texts = rows.bytes_before_texts(labels, rows.num_bytes(labels))
    assert before_texts.item() == counts["validation"]["documents"] - first
    num_bytes = (rows.num_bytes(labels).sum() - before_texts.sum()).item()
    assert num_bytes == counts["validation"]["bytes"]

    guessing = tiny_model(vocab_size=64, max_position_embeddings=rows.sequence_length)
    torch.nn.init.zeros_(guessing.lm_head.weight)  # 6 bits for every token
    how = {"training": SimpleNamespace(micro_batch_size=1, compile=False)}
    recipe = SimpleNamespace(evaluation=SimpleNamespace(rows=1, loops=[1]), **how)
    logged = validate(Accelerator(cpu=True), guessing, guessing.config, recipe, rows)
    bits = 6 * (rows.num_bytes(labels) > 0).sum().item() / num_bytes
    assert logged["validation/bits_per_byte_at_1"] == pytest.approx(bits, rel=1e-6)


def test_validation_without_a_token_to_predict_is_no_divergence():
    rows = plain_rows([np.full(8, START)], 4, 4, START, torch.ones(64))
    how = {"training": SimpleNamespace(micro_batch_size=1, compile=False)}
    recipe = SimpleNamespace(evaluation=SimpleNamespace(rows=2, loops=[1]), **how)
    model = tiny_model(vocab_size=64)
    with pytest.raises(RecipeError, match="none of the 2 rows of validation has a token to predict"):
        validate(Accelerator(cpu=True), model, model.config, recipe, rows)


@pytest.mark.parametrize("cropped", ["keep", "drop"])
def test_best_fit_wastes_no_token_on_padding(make_data, cropped):
    prepared = shards.prepare(make_data(packing="best_fit", cropped=cropped))
    tokenizer = prepared.tokenizer
    for split in ("train", "validation"):
        rows, counts = getattr(prepared, split), prepared.manifest["counts"][split]
        batch = rows.batch(range(len(rows)))["input_ids"]
        assert batch.shape == (counts["rows"], 32)
        assert (batch[:, 0] == tokenizer.bos_token_id).all()
        assert not (batch == tokenizer.pad_token_id).any()
        if cropped == "keep":  # but for less than a row at the very end, all tokens are in rows
            assert batch.numel() > counts["tokens"] - 32
        else:
            documents = make_documents(300)
            pieces = [tokenizer.decode(piece, skip_special_tokens=True) for piece in _documents_of(batch, tokenizer)]
            assert all(any(text.startswith(piece) for text in documents) for piece in pieces)
            assert sum(tokenizer.eos_token_id in piece for piece in _documents_of(batch, tokenizer)) > 5


def _documents_of(batch, tokenizer) -> list[list[int]]:
    pieces = []
    for token in batch.flatten().tolist():
        if token == tokenizer.bos_token_id:
            pieces.append([])
        pieces[-1].append(token)
    return pieces


@pytest.mark.parametrize("packing", quick_and_slow(["concatenate", "best_fit"], "best_fit"))
def test_number_of_processes_changes_no_byte(make_data, tmp_path, packing):
    found = []
    source = write_jsonl(tmp_path / "many.jsonl", make_documents(1000, longest=10))
    for num_proc in (None, 3):
        data = make_data(source=source, packing=packing, num_proc=num_proc)
        prepared = shards.prepare(data)
        assert len(prepared.manifest["shards"]["train"]) > 3
        found.append(contents(prepared.folder))
        shutil.rmtree(data.cache_dir)
    assert found[0] == found[1]


def test_processes_that_train_see_their_own_rows_of_the_same_step(make_data):
    rows = shards.prepare(make_data()).train
    step = rows_of_step(seed=1, step=5, rows_per_step=12, num_rows=len(rows))
    whole = rows.batch(step)["input_ids"]
    for world in (1, 2, 3, 4):
        shares = [step[rank * 12 // world : (rank + 1) * 12 // world] for rank in range(world)]
        assert torch.equal(torch.cat([rows.batch(share)["input_ids"] for share in shares]), whole)
        assert len(set(sum(shares, []))) == 12


def test_recipes_of_other_lengths_share_concatenated_shards(make_data):
    folders = {shards.prepare(make_data(**change)).folder for change in ({}, {"sequence_length": 16, "stride": 4})}
    assert len(folders) == 1
    for change in ({"packing": "best_fit"}, {"validation_fraction": 0.2}, {"max_documents": 200}):
        folders.add(shards.prepare(make_data(**change)).folder)
    assert len(folders) == 4


def test_second_preparation_reads_no_source(make_data, monkeypatch):
    first = shards.prepare(make_data())
    monkeypatch.setattr(sources.Source, "load", lambda self: pytest.fail("the source was read again"))
    assert shards.prepare(make_data()).manifest == first.manifest


def test_a_changed_file_is_prepared_anew(make_data):
    data = make_data()
    first = shards.prepare(data)
    write_jsonl(Path(data.source), make_documents(100, seed=5))
    second = shards.prepare(data)
    assert second.folder != first.folder
    assert all(text.endswith(" 5") for text in texts_of(second, "train"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_a_file_that_is_replaced_under_the_same_time_is_read_anew(tmp_path, kind):
    """As `cp -p` and archives replace it."""
    path = tmp_path / f"a.{kind}"
    for texts in (make_documents(20, seed=1), make_documents(30, seed=2)):
        if kind == "txt":
            path.write_text("".join(texts))
            texts = ["".join(texts)]
        else:
            rows = datasets.Dataset.from_dict({"text": texts})
            rows.to_json(path) if kind == "jsonl" else rows.to_parquet(path)
        os.utime(path, (1, 1))
        assert load(path) == texts


# Validation


def test_equal_documents_are_on_one_side(make_data, tmp_path):
    documents = make_documents(200) * 2 + [f"  {text.replace(' ', '  ')}\n" for text in make_documents(200)]
    prepared = shards.prepare(make_data(source=write_jsonl(tmp_path / "twice.jsonl", documents)))
    sides = [{" ".join(text.split()) for text in texts_of(prepared, split)} for split in ("train", "validation")]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(make_documents(200))


def test_documents_of_a_validation_source_are_taken_out_of_training(make_data, tmp_path):
    own = write_jsonl(tmp_path / "own.jsonl", make_documents(300)[10:40] + make_documents(30, seed=9))
    prepared = shards.prepare(make_data(validation_source=str(own)))
    assert texts_of(prepared, "validation") == make_documents(300)[10:40] + make_documents(30, seed=9)
    assert texts_of(prepared, "train") == make_documents(300)[:10] + make_documents(300)[40:]
    assert prepared.manifest["overlapping_documents"] == 30


def test_splits_of_a_folder(make_data, tmp_path):
    write_jsonl(tmp_path / "splits" / "train.jsonl", make_documents(90, seed=1))
    write_jsonl(tmp_path / "splits" / "validation.jsonl", make_documents(40, seed=2))
    prepared = shards.prepare(make_data(source=tmp_path / "splits", validation_split="validation"))
    assert texts_of(prepared, "train") == make_documents(90, seed=1)
    assert texts_of(prepared, "validation") == make_documents(40, seed=2)


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_files_that_change_their_splits_are_prepared_anew(make_data, tmp_path, name):
    """What a README.md says beside the splits changes nothing."""
    folder = tmp_path / "hub"
    texts = {"a": make_documents(90, seed=1), "b": make_documents(40, seed=2)}
    for file, documents in texts.items():
        write_jsonl(folder / "data" / f"{file}.jsonl", documents)
    data = make_data(source=folder, validation_split="validation")
    plain = sources.training_source(data).settings()
    (folder / "README.md").write_text("---\nlicense: mit\n---\nTexts.\n")
    assert sources.training_source(data).settings() == plain
    for train, validation in (("a", "b"), ("b", "a")):
        files = {"train": train, "validation": validation}
        paths = [{"split": split, "path": f"data/{file}.jsonl"} for split, file in files.items()]
        said = f"configs: {json.dumps([{'config_name': 'default', 'data_files': paths}])}\n"
        (folder / name).write_text(f"---\n{said}---\nTexts.\n" if name == "README.md" else said)
        prepared = shards.prepare(data)
        for split, file in files.items():
            assert texts_of(prepared, split) == texts[file]
    before = prepared.folder
    (folder / "README.md").write_text((folder / "README.md").read_text().replace("Texts.", "Other words."))
    assert shards.prepare(data).folder == before


@pytest.mark.parametrize("saved", [False, True])
def test_a_split_that_is_not_read_is_said(make_data, tmp_path, capsys, saved):
    splits = {"train": make_documents(90, seed=1), "validation": make_documents(40, seed=2)}
    if saved:
        rows = {split: datasets.Dataset.from_dict({"text": texts}) for split, texts in splits.items()}
        datasets.DatasetDict(rows).save_to_disk(tmp_path / "splits")
    else:
        for split, texts in splits.items():
            write_jsonl(tmp_path / "splits" / f"{split}.jsonl", texts)
    prepared = shards.prepare(make_data(source=tmp_path / "splits"))
    assert {*texts_of(prepared, "train"), *texts_of(prepared, "validation")} == set(splits["train"])
    said = "splits' also holds validation, which is not read: "
    printed = capsys.readouterr().out
    assert said in printed and "data.validation_split=validation" in printed
    shards.prepare(make_data(source=tmp_path / "splits", validation_split="validation"))
    assert "not read" not in capsys.readouterr().out


def test_word_tokenizer_does_not_know_words_of_validation_only(make_data, tmp_path):
    own = write_jsonl(tmp_path / "own.jsonl", ["loop xylophone xylophone depth " * 20])
    prepared = shards.prepare(make_data(validation_source=str(own), tokenizer="word", tokenizer_vocab_size=2000))
    tokenizer = prepared.tokenizer
    assert "xylophone" not in tokenizer.get_vocab()
    ids = prepared.validation.tokens(0)[1:17]
    loop, depth, space = tokenizer.convert_tokens_to_ids(["loop", "depth", " "])
    assert ids[::2].tolist() == [loop, tokenizer.unk_token_id, tokenizer.unk_token_id, depth] * 2
    assert set(ids[1::2].tolist()) == {space}


def test_word_tokenizer_is_fitted_without_the_documents_that_are_held_out(make_data, tmp_path):
    documents = [f"own{i} own{i} loop depth loop depth" for i in range(200)]
    source = write_jsonl(tmp_path / "own.jsonl", documents)
    prepared = shards.prepare(make_data(source=source, tokenizer="word", tokenizer_vocab_size=2000))
    held_out = prepared.manifest["counts"]["validation"]["documents"]
    assert held_out > 5
    assert sum(f"own{i}" in prepared.tokenizer.get_vocab() for i in range(200)) == 200 - held_out
    unknown = prepared.tokenizer.unk_token_id
    assert (np.concatenate(prepared.validation.shards) == unknown).sum() == 2 * held_out
    assert (np.concatenate(prepared.train.shards) == unknown).sum() == 0


# What can happen to a preparation


def die_in_the_third_shard(data: DataConfig):
    """kill -9 with half of a shard on disk."""
    whole, written = parts.save_array, []

    def half(file, array):
        written.append(file)
        whole(file, array[: len(array) // 2] if len(written) == 3 else array)
        if len(written) == 3:
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    parts.save_array = half
    shards.prepare(data)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.covering
@pytest.mark.some(1)
def test_killed_preparation_goes_on_and_gives_the_same_shards(make_data, monkeypatch, packing, streaming):
    monkeypatch.setattr(parts, "STREAMED_PART", 32)
    data = make_data(packing=packing, streaming=streaming)
    unbroken = contents(shards.prepare(data).folder)
    shutil.rmtree(data.cache_dir)

    assert in_process(die_in_the_third_shard, data) == -signal.SIGKILL
    (folder,) = Path(data.cache_dir).iterdir()
    assert any(folder.glob(".saving-*")) and (folder / "part-00000.json").exists()
    with pytest.raises(RecipeError, match="not prepared to the end"):
        open_prepared(folder, data)

    kept = (folder / "part-00000.train.npy").stat().st_mtime_ns
    assert contents(shards.prepare(data).folder) == unbroken
    assert (folder / "part-00000.train.npy").stat().st_mtime_ns == kept


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_a_stream_of_long_documents_has_more_parts_and_the_same_rows(make_data, monkeypatch, packing):
    """Also where the first part was made without a limit on its length, as before there was one."""
    data, limit = make_data(packing=packing, streaming=True), 5000
    monkeypatch.setattr(parts, "STREAMED_PART", 100)

    def rows() -> list[np.ndarray]:
        prepared = shards.prepare(data)
        return [np.concatenate(split.shards) for split in (prepared.train, prepared.validation)]

    unlimited = rows()
    (folder,) = Path(data.cache_dir).iterdir()
    monkeypatch.setattr(parts, "STREAMED_LENGTH", limit)
    for kept in ("part-00000.*", "none"):
        for path in folder.iterdir():
            if path.is_file() and not path.match(kept):
                path.unlink()
        assert all(map(np.array_equal, rows(), unlimited))
    made = [json.loads(path.read_text())["counts"].values() for path in sorted(folder.glob("part-*.json"))]
    sizes = [sum(of_split["bytes"] for of_split in of_part) for of_part in made]
    if packing == "concatenate":
        longest = max(map(len, make_documents(300)))
        assert len(sizes) > 5 and all(limit <= size < limit + longest for size in sizes[:-1])
    else:  # other parts would have other rows
        assert len(sizes) == 3


def test_parts_of_another_tokenizer_are_made_anew(make_data, tmp_path):
    maker = shards._maker(tmp_path, make_data(), tiny_tokenizer(), parts.HeldOut(), None)
    maker("part", ["a b", "c"])
    assert maker.is_made("part")
    assert not dataclasses.replace(maker, tokenizer="other").is_made("part")


def test_ids_of_more_than_16_bits_are_kept(make_data, tmp_path, monkeypatch):
    for size, dtype in ((2**16, "uint16"), (2**16 + 1, "uint32")):
        monkeypatch.setattr(shards, "num_ids", lambda _, size=size: size)
        assert shards._maker(tmp_path, make_data(), tiny_tokenizer(), parts.HeldOut(), None).dtype == dtype


def kill_after_some_parts(data: DataConfig, who: str):
    """kill -9 of a process that makes parts, or of the one that waits for all."""
    make, parent = parts.PartMaker.__call__, os.getpid()

    def killing(self, part, *arguments, **facts):
        if part == "part-00007":
            os.kill(parent if who == "parent" else os.getpid(), signal.SIGKILL)
            time.sleep(60)  # until it sees that its parent is gone
        return make(self, part, *arguments, **facts)

    parts.PartMaker.__call__ = killing
    with pytest.raises(CommandError, match="a process that made parts was killed.*fewer than data.num_proc=2"):
        shards.prepare(data)


def test_a_system_that_can_not_fork_says_so(make_data, monkeypatch):
    monkeypatch.setattr(parts.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(CommandError, match="data.num_proc=2 forks processes, which this system does not support"):
        shards.prepare(make_data(num_proc=2))


@pytest.mark.parametrize("who", ["worker", "parent"])
@pytest.mark.some(1)
def test_killed_processes_leave_parts_that_are_kept(make_data, tmp_path, who):
    source = write_jsonl(tmp_path / "many.jsonl", make_documents(600, longest=10))
    unbroken = contents(shards.prepare(make_data(source=source)).folder)
    data = make_data(source=source, num_proc=2)
    shutil.rmtree(data.cache_dir)
    assert in_process(kill_after_some_parts, data, who) == (0 if who == "worker" else -signal.SIGKILL)
    (folder,) = Path(data.cache_dir).iterdir()
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("part-*.json")}
    assert kept and not (folder / "part-00007.json").exists()
    assert contents(shards.prepare(data).folder) == unbroken
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def prepare_and_count(data: DataConfig, path: Path):
    """Append a line for every part that this process makes."""
    make = parts.PartMaker.__call__

    def counted(self, part, *arguments, **facts):
        with open(path, "a") as file:
            file.write(part + "\n")
        return make(self, part, *arguments, **facts)

    parts.PartMaker.__call__ = counted
    shards.prepare(data)


def test_a_preparation_says_what_has_changed_since_the_last(make_data, tmp_path, capsys):
    data = make_data(tokenizer="word")
    first = shards.prepare(data).folder
    assert capsys.readouterr().out == f"preparing the data in {first}\n"
    os.utime(data.source, (1, 1))
    touched = shards.prepare(data).folder
    said = f"preparing the data in {touched}\n{first} was prepared with these settings, but "
    assert capsys.readouterr().out == f"{said}the size or time of a file of {data.source} has changed since\n"
    (tmp_path / "other").mkdir()
    shutil.copy(data.source, tmp_path / "other")
    copied = dataclasses.replace(data, source=str(tmp_path / "other" / Path(data.source).name))
    shards.prepare(copied)
    assert f"{first} was prepared with these settings, but from {data.source}\n" in capsys.readouterr().out
    shards.prepare(dataclasses.replace(copied, document_tokens="end"))
    assert "was prepared" not in capsys.readouterr().out
    shards.prepare(data)
    assert capsys.readouterr().out == ""


def test_two_processes_at_once_prepare_once(make_data, tmp_path):
    data, log = make_data(), tmp_path / "made.txt"
    processes = [start_process(prepare_and_count, data, log) for _ in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    made = log.read_text().split()
    assert len(made) == len(set(made)) > 3
    assert texts_of(shards.prepare(data), "train")


def test_full_disk_is_an_error_that_keeps_what_is_done(make_data, monkeypatch):
    data = make_data()
    unbroken = contents(shards.prepare(data).folder)
    shutil.rmtree(data.cache_dir)

    def save(file, array, whole=parts.save_array, written=[]):  # noqa: B006
        written.append(file)
        if len(written) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(file, array)

    with monkeypatch.context() as patched:
        patched.setattr(parts, "save_array", save)
        with pytest.raises(RecipeError, match="no space left for .*what is finished is kept.*data.cache_dir"):
            shards.prepare(data)
    (folder,) = Path(data.cache_dir).iterdir()
    assert not any(folder.glob(".saving-*"))
    kept = (folder / "part-00001.train.npy").stat().st_mtime_ns
    assert contents(shards.prepare(data).folder) == unbroken
    assert (folder / "part-00001.train.npy").stat().st_mtime_ns == kept


def test_full_disk_while_the_tokenizer_is_saved(make_data, monkeypatch):
    def save(self, folder):
        Path(folder).mkdir()
        Path(folder, "half").write_text("half")
        raise Exception("No space left on device (os error 28)")  # as the tokenizers library says it

    data = make_data()
    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerFast, "save_pretrained", save)
        with pytest.raises(RecipeError, match="no space left for "):
            shards.prepare(data)
    (folder,) = Path(data.cache_dir).iterdir()
    assert not any(folder.glob("*tokenizer*"))
    assert len(shards.prepare(data).train)


def test_cache_dir_that_can_not_be_written(make_data, tmp_path):
    data = make_data()
    Path(data.cache_dir).write_text("a file where the folder should be")
    with pytest.raises(RecipeError, match="can not write .*set data.cache_dir"):
        shards.prepare(data)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.some(1)
def test_cut_shard_is_named_and_made_anew_once_it_is_deleted(make_data, packing):
    data = make_data(packing=packing)
    folder = shards.prepare(data).folder
    unbroken = contents(folder)
    for entry in json.loads((folder / "manifest.json").read_text())["shards"]["train"][1:]:
        shard = folder / entry["file"]
        shard.write_bytes(shard.read_bytes()[:-2])
        message = f"{shard} has {entry['size'] - 2} bytes, but {entry['size']} were written"
        with pytest.raises(RecipeError, match=re.escape(message)):
            shards.prepare(data)
        shard.unlink()
        assert contents(shards.prepare(data).folder) == unbroken


def test_shards_of_another_tokenizer_are_refused(make_data):
    data = make_data()
    prepared = shards.prepare(data)
    other = shards.prepare(make_data(tokenizer_vocab_size=300))
    assert other.folder != prepared.folder
    shutil.rmtree(prepared.folder / "tokenizer")
    shutil.copytree(other.folder / "tokenizer", prepared.folder / "tokenizer")
    with pytest.raises(RecipeError, match="made with another tokenizer.*prepare again"):
        shards.prepare(data)


def test_shards_of_other_settings_are_refused(make_data):
    data, other = make_data(), make_data(validation_fraction=0.2)
    folder = shards.prepare(data).folder
    with pytest.raises(RecipeError, match=r"other settings: validation was .*0\.1.*is now .*0\.2"):
        open_prepared(folder, other)
    assert len(open_prepared(folder, data).train)


def test_damaged_manifest_is_refused_and_shards_kept(make_data):
    data = make_data()
    folder = shards.prepare(data).folder
    unbroken = contents(folder)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:-40])
    with pytest.raises(RecipeError, match="manifest.json is damaged: delete it"):
        shards.prepare(data)
    manifest.unlink()
    kept = (folder / "part-00000.train.npy").stat().st_mtime_ns
    assert contents(shards.prepare(data).folder) == unbroken
    assert (folder / "part-00000.train.npy").stat().st_mtime_ns == kept


# Sources


def load(name, **fields) -> list[str]:
    data = DataConfig(source=str(name), **fields)
    return [row["text"] for row in sources.training_source(data).load()]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "txt", "jsonl.gz", "saved", "hub", "glob", "folder"])
def test_documents_of_every_kind_of_source(tmp_path, kind, streaming):
    texts = make_documents(20)
    name, fields = tmp_path / f"file.{kind}", {}
    rows = datasets.Dataset.from_dict({"id": list(range(20)), "text": texts})
    if kind == "jsonl":
        write_jsonl(name, texts)
    elif kind == "json":
        name.write_text(json.dumps([{"text": text} for text in texts]))
    elif kind == "parquet":
        rows.to_parquet(name)
    elif kind == "txt":  # a file is a document
        texts = ["one\n\ntwo\n"]
        name.write_text(texts[0])
    elif kind == "jsonl.gz":
        rows.to_json(name, compression="gzip")
    elif kind == "saved":
        datasets.DatasetDict({"train": rows, "other": rows.take(1)}).save_to_disk(name)
    elif kind == "hub":  # as it lies on the hub: a card that names configurations and splits
        for config, split, part in [
            ("small", "train", texts),
            ("small", "rest", texts[:3]),
            ("big", "train", texts[:5]),
        ]:
            write_jsonl(name / config / f"{split}.jsonl", part, field="content")
        card = ["---", "configs:"]
        for config, splits in {"small": ["train", "rest"], "big": ["train"]}.items():
            card += [f"- config_name: {config}", "  data_files:"]
            card += [f"  - {{split: {split}, path: {config}/{split}.jsonl}}" for split in splits]
        (name / "README.md").write_text("\n".join([*card, "---", ""]))
        texts, fields = texts[:3], {"source_config": "small", "split": "rest", "text_field": "content"}
    elif kind == "glob":
        for i in range(4):
            write_jsonl(tmp_path / "deep" / str(i) / "part.jsonl", texts[5 * i : 5 * i + 5])
        name = tmp_path / "deep" / "**" / "*.jsonl"
    elif kind == "folder":
        texts = texts[:3]
        for i, text in enumerate(texts):
            (name / str(i)).mkdir(parents=True)
            (name / str(i) / "document.txt").write_text(text)
    assert load(name, streaming=streaming, **fields) == texts
    assert load(name, streaming=streaming, max_documents=1, **fields) == texts[:1]


@given(st.text(alphabet="ab \n\r", max_size=80), st.integers(1, 12))
def test_a_long_text_is_cut_at_blank_lines(text, size):
    pieces = sources.cut_at_blank_lines(text, size)
    assert "".join(pieces) == text
    assert all(piece and len(piece) < 4 * size for piece in pieces)
    # none is cut before its time, nor elsewhere than after a blank line unless it is too long
    for piece in pieces[:-1]:
        assert len(piece) >= size
        assert len(piece) >= 2 * size or not piece.splitlines()[-1].strip()


def test_a_long_text_file_gives_documents_to_hold_out(make_data, tmp_path):
    paragraphs = [f"{text}\n\n" for text in make_documents(6000)]
    (tmp_path / "book.txt").write_text("".join(paragraphs))
    documents = load(tmp_path / "book.txt")
    assert "".join(documents) == "".join(paragraphs)
    assert len(documents) > 20 and max(map(len, documents)) < 17_000
    prepared = shards.prepare(make_data(source=tmp_path / "book.txt", validation_fraction=0.2))
    assert len(prepared.validation)


def test_many_text_files_are_documents_as_the_same_texts_are_in_jsonl(make_data, tmp_path, monkeypatch):
    """Few are cut: of three files a hundredth can not be held out. `prepare` says what became of them."""
    texts = [f"{'w00' * 1400}\n\n{text}\n" for text in make_documents(20)]
    write_jsonl(tmp_path / "texts.jsonl", texts)
    (tmp_path / "texts").mkdir()
    made = functools.partial(make_data, tokenizer="word")
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(text)
    few = shards.prepare(made(source=tmp_path / "texts"))
    said = "20 text files were cut into 40 documents, at blank lines after 4,096 characters, and held out of training "
    assert prepare.describe(few).startswith(said + "piece by piece; 1,000 files or more stay whole\n")

    monkeypatch.setattr(sources, "MANY_TEXTS", 20)
    many = shards.prepare(made(source=tmp_path / "texts"))
    rows = shards.prepare(made(source=tmp_path / "texts.jsonl"))
    assert len(texts_of(many, "validation")) > 1
    for split in ("train", "validation"):
        assert texts_of(many, split) == texts_of(rows, split)
    assert many.folder != few.folder
    assert "text files" not in prepare.describe(many) + prepare.describe(rows)
    assert load(tmp_path / "texts", streaming=True) == texts

    own = shards.prepare(made(source=tmp_path / "texts", validation_source=str(tmp_path / "texts" / "07.txt")))
    assert own.manifest["overlapping_documents"] == 1 and own.manifest["counts"]["validation"]["documents"] == 1


def test_wikitext_lines_are_joined_to_articles(monkeypatch):
    """As the hub has it: one line a row, empty ones too."""
    first = [" = First = \n", "", " Text of it . \n", " = = Section = = \n", "", " a = b = c \n"]
    second = [" = Second Title = \n", "", " More . \n"]
    asked = []

    def hub(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        return datasets.Dataset.from_dict({"text": ["", *first, *second]})

    monkeypatch.setattr(sources, "load_dataset", hub)
    articles = load("Salesforce/wikitext", source_config="wikitext-103-raw-v1")
    assert articles == ["\n", "".join(line or "\n" for line in first), "".join(line or "\n" for line in second)]
    assert asked == [("Salesforce/wikitext", "wikitext-103-raw-v1", "train", False)]
    assert load("other/lines", document_start=" = Second") == ["\n" + articles[1], articles[2]]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_are_joined_are_one_text(make_data, tmp_path, streaming):
    """As the readout paper reads WikiText: empty rows left out, nothing between the others but a blank line. Rows that
    training and validation share stay in both, and the vocabulary is that of the rows, not of the joined text."""
    lines = [" = First = \n", "", " Text of it . \n", " = = Section = = \n", "", " \n", "\n", "a = b", "d", " e\t\n"]
    sides = {"train": lines * 12, "validation": ["  ", "\n", *lines, *lines[1:], "xylophone"] * 3}
    for split, texts in sides.items():
        write_jsonl(tmp_path / "lines" / f"{split}.jsonl", texts)
    fields = {"validation_split": "validation", "joined_by": "\n\n", "tokenizer": "word", "streaming": streaming}
    prepared = shards.prepare(make_data(source=tmp_path / "lines", sequence_length=16, stride=8, **fields))
    known = set(prepared.tokenizer.get_vocab())
    assert {" ", " \n", "\t\n", "Section", "="} <= known and not {" \n\n\n ", "xylophone"} & known
    for split, texts in sides.items():
        whole = "\n\n".join(filter(None, texts))
        pieces = re.findall(r"\s+|[A-Za-z0-9_]+|[^\w\s]", whole)
        stream = np.concatenate(getattr(prepared, split).shards)
        expected = [piece if piece in known else "<unk>" for piece in pieces]
        assert prepared.tokenizer.convert_ids_to_tokens(stream.tolist()) == expected
        rows = getattr(prepared, split)
        assert len(rows) == (len(pieces) - 16) // 8 + 1
        assert rows.batch([0, 1])["labels"].tolist() == [stream[:16].tolist(), stream[8:24].tolist()]
    assert prepared.manifest["overlapping_documents"] == 0


@pytest.mark.parametrize(
    "pattern", [GPT2_PIECES, "|".join(GPT4_PIECES), "|".join(WORD_PIECES)], ids="gpt2 gpt4 word".split()
)
@given(st.lists(st.text("ab1.'_é汉 \n\t", max_size=6), max_size=8), st.sampled_from([" ", "\n", "\n\n", " \n"]))
def test_tokenizers_cut_joined_rows_as_they_cut_the_whole_text(pattern, rows, joined_by):
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated").pre_tokenize_str
    whole = joined_by.join(filter(None, rows))
    pieces = [piece["text"] for piece in sources.join_and_cut([{"text": row} for row in rows], joined_by)]
    assert "".join(pieces) == whole and (len(pieces) < 2 or all(map(str.strip, pieces)))
    assert [part for piece in pieces for part, _ in cut(piece)] == [part for part, _ in cut(whole)]


def test_joined_rows_without_spaces_between_words_are_cut_all_the_same():
    rows = [{"text": "汉字。" * 20}] * 1000
    pieces = [piece["text"] for piece in sources.join_and_cut(rows, "\n")]
    assert "".join(pieces) == "\n".join(row["text"] for row in rows)
    assert max(map(len, pieces)) < sources.TEXT_DOCUMENT + 100 and all(piece[-1] == "\n" for piece in pieces[:-1])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_documents_that_are_tokens_already(make_data, tmp_path, kind, streaming):
    """They are taken as they are, whatever their lengths; an empty row is none."""
    of_texts = shards.prepare(make_data())
    documents = [[*map(int, document)] for document in split_documents(of_texts)]
    source = tmp_path / f"tokens.{kind}"
    rows = datasets.Dataset.from_dict({"number": range(len(documents) + 2), "input_ids": [*documents, [], None]})
    rows.to_parquet(source) if kind == "parquet" else rows.to_json(source)
    data = make_data(
        source=source, token_field="input_ids", tokenizer=str(of_texts.folder / "tokenizer"), streaming=streaming
    )
    prepared = shards.prepare(data)
    assert sorted(map(tuple, split_documents(prepared))) == sorted(map(tuple, documents))
    assert len(prepared.validation.shards[0]) > 0 and prepared.manifest["empty_documents"] == 2
    for key in ("documents", "tokens", "bytes"):  # bytes as the tokenizer spells them
        assert sum(prepared.manifest["counts"][split][key] for split in parts.SPLITS) == sum(
            of_texts.manifest["counts"][split][key] for split in parts.SPLITS
        )
    starts = prepared.train.batch([0, 1])
    assert torch.equal(starts["labels"], starts["input_ids"])  # what begins a document is learned with the rest
    assert shards.prepare(data).folder == prepared.folder


def split_documents(prepared) -> list[list[int]]:
    stream = np.concatenate([*prepared.train.shards, *prepared.validation.shards])
    return [list(document) for document in np.split(stream, np.flatnonzero(stream == START)[1:])]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_null_is_an_empty_document_and_no_token(make_data, tmp_path, streaming):
    tokenizer = str(shards.prepare(make_data()).folder / "tokenizer")
    documents = [[0, 9 + i % 200, 10 + i // 200, 1] for i in range(300)]
    source = tmp_path / "ids.parquet"
    data = make_data(source=source, token_field="ids", tokenizer=tokenizer, streaming=streaming)
    datasets.Dataset.from_dict({"ids": [None, *documents[:50], None, *documents[50:]]}).to_parquet(source)
    prepared = shards.prepare(data)
    assert sorted(split_documents(prepared)) == sorted(documents) and prepared.manifest["empty_documents"] == 2
    datasets.Dataset.from_dict({"ids": [*documents, [0, 5, None, 1]]}).to_parquet(source)
    message = r"of 4 token ids of a document 1 are null: \[0.0, 5.0, nan, 1.0\]"
    if streaming and datasets.__version__.startswith("4."):  # some of its streams refuse the null themselves
        message += "|can not read .*Float value nan"
    with pytest.raises(RecipeError, match=message):
        shards.prepare(data)


def test_tokens_whose_ids_are_not_all_in_use(make_data, tmp_path):
    """The largest id counts, not how many tokens there are."""
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "far": 70_000, **{word: 10 + i for i, word in enumerate(WORDS)}}
    backend = Tokenizer(models.WordLevel(vocabulary, "a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = [f"{text} far" for text in make_documents(300)]
    data = make_data(source=write_jsonl(tmp_path / "far.jsonl", texts), tokenizer=str(tmp_path / "tokenizer"))
    prepared = shards.prepare(data)
    stream = np.concatenate([*prepared.train.shards, *prepared.validation.shards])
    assert (stream == 70_000).sum() == 300
    assert len(prepared.token_bytes) == prepared.manifest["tokenizer"]["vocab_size"] == 70_001
    assert prepared.token_bytes[70_000] == 3
    rows = datasets.Dataset.from_dict({"ids": [[0, 70_000, 12, 1] * 5] * 30 + [[0, 13, 14, 1] * 5] * 30})
    rows.to_parquet(tmp_path / "ids.parquet")
    of_ids = make_data(source=tmp_path / "ids.parquet", token_field="ids", tokenizer=data.tokenizer)
    with pytest.raises(
        RecipeError, match="0 documents for validation"
    ):  # ids were taken; equal documents stay together
        shards.prepare(of_ids)


def test_columns_that_are_no_tokens_are_refused(make_data, tmp_path):
    tokenizer = str(shards.prepare(make_data()).folder / "tokenizer")
    source = tmp_path / "tokens.parquet"
    datasets.Dataset.from_dict({"input_ids": [[5, 400]] * 40, "text": ["a"] * 40}).to_parquet(source)
    for fields, message in (
        (
            {"token_field": "ids"},
            "no column 'ids'; it has .*: rename the one that holds the token ids, or, .* set data.token_field",
        ),
        ({"token_field": "text"}, "holds Value.*, not token ids"),
        ({"text_field": "input_ids"}, "not text; .*data.token_field reads a column of token ids"),
        ({"token_field": "input_ids"}, "a document holds token 400, but data.tokenizer has 320"),
    ):
        with pytest.raises(RecipeError, match=message):
            shards.prepare(make_data(source=source, tokenizer=tokenizer, **fields))


def test_fineweb_edu_is_asked_for_by_name_and_streamed(monkeypatch, make_data):
    """Columns that are not text are left where they are; only as many documents as asked for are read."""
    read = []

    def rows():
        for i, text in enumerate(make_documents(1000)):
            read.append(i)
            yield {"text": text, "id": str(i), "score": 3.5}

    def hub(name, config, split, streaming):
        assert (name, config, split, streaming) == ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True)
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(sources, "load_dataset", hub)
    data = make_data(
        source="HuggingFaceFW/fineweb-edu", source_config="sample-10BT", streaming=True, max_documents=150
    )
    prepared = shards.prepare(data)
    assert texts_of(prepared, "train") + texts_of(prepared, "validation") != []
    assert sorted(texts_of(prepared, "train") + texts_of(prepared, "validation")) == sorted(make_documents(1000)[:150])
    assert max(read) < 300


def test_embedded_documents_are_what_python_says_of_itself():
    documents = embedded_documents()
    assert documents == embedded_documents()
    joined = "\n".join(documents)
    assert Path(json.__file__).read_text() in documents
    assert '"""Test' not in documents[0] and 'The "assert" statement' in documents[0]
    assert "Return the arc cosine" in joined and " object at 0x" not in "\n".join(documents[:100])
    assert sum(map(len, documents)) > 5e6


def test_command_prepares_the_embedded_documents(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"data: {{max_documents: 85, tokenizer_vocab_size: 400, cache_dir: {tmp_path / 'shards'}}}\n")
    prepare.main([str(recipe), "data.sequence_length=64", "data.validation_fraction=0.1"])
    *_, folder, header, train, validation, vocabulary, _, found, then = capsys.readouterr().out.strip().splitlines()
    assert found == "The data are ready." and then.startswith(
        f"next: looped pretrain {recipe} data.sequence_length=64"
    )
    manifest = json.loads(Path(folder, "manifest.json").read_text())
    numbers = [int(number.replace(",", "")) for number in train.split()[1:]]
    assert numbers[:3] == [manifest["counts"]["train"][key] for key in ("documents", "tokens", "bytes")]
    assert header.split()[-1] == "rows" and numbers[3] == numbers[1] // 64
    assert AutoTokenizer.from_pretrained(Path(folder, "tokenizer")).vocab_size == 400
    with pytest.raises(RecipeError, match="no file or folder 'nothing.txt'"):
        prepare.main([str(recipe), "data.source=nothing.txt"])


# Bad input


def test_bad_sources_are_named_with_advice(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.jsonl").write_text('{"text": null}\n')
    (tmp_path / "numbers.jsonl").write_text('{"text": 3, "body": "words"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "void").mkdir()
    write_jsonl(tmp_path / "both" / "a.jsonl", ["a"])
    (tmp_path / "both" / "b.txt").write_text("b")
    write_jsonl(tmp_path / "good.jsonl", ["a"])
    for name, fields, message in [
        ("nothing.jsonl", {}, "there is no file or folder .*nothing.jsonl"),
        ("*.parquet", {}, r"no file matches .*\*.parquet"),
        ("empty.jsonl", {}, "empty.jsonl' is empty"),
        ("empty.txt", {}, "empty.txt' is empty: name a source that holds documents"),
        ("blank.jsonl", {}, "holds no documents"),
        ("numbers.jsonl", {}, "'text' .* holds .*int64.* columns 'text', 'body'.*data.text_field"),
        ("broken.jsonl", {}, "can not read .*broken.jsonl.*(JSON parse error|Expected object or value)"),
        ("void", {}, "void' holds no data files"),
        ("both", {}, "files of kind json, text; name files of one kind"),
        ("good.jsonl", {"text_field": "content"}, "no column 'content'; it has 'id', 'text'.*data.text_field"),
        ("good.jsonl", {"split": "test"}, "there is no split 'test', only 'train': set data.split"),
    ]:
        for streaming in (False, True):
            with pytest.raises(RecipeError, match=re.compile(message, re.DOTALL)):
                load(tmp_path / name, streaming=streaming, **fields)
    with pytest.raises(RecipeError, match="can not read 'no/such'.*no file here either"):
        load("no/such")
    for name in ("pandas", "json"):
        with pytest.raises(RecipeError, match=f"'{name}' is a format of `datasets`, not a dataset: name the files"):
            load(name)


def test_the_package_that_reads_zstd_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "available_compressions", lambda: [None, "gzip"])
    (tmp_path / "a.jsonl.zst").write_bytes(b"not looked at")
    with pytest.raises(RecipeError, match="to read 'a.jsonl.zst' of .* pip install zstandard"):
        load(tmp_path)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json"])
def test_a_file_of_zstd_is_read_to_its_end(tmp_path, monkeypatch, kind, streaming):
    """Also where it has several frames, empty ones and such without text among them; one that was cut is refused. How
    fsspec reads them changes when they are read, and not by an import alone."""
    monkeypatch.setitem(compr, "zstd", OF_FSSPEC)
    zstandard = pytest.importorskip("zstandard")
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefghij ", k=900)) for _ in range(600)]  # more than a block of compressed bytes
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    listed = json.dumps([{"text": text} for text in texts])
    raw = {"txt": "\n\n".join(texts), "jsonl": lines, "json": listed}[kind].encode()
    compress = zstandard.ZstdCompressor().compress
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"other"
    frames = [skipped, compress(raw[:1000]), compress(b""), compress(raw[1000:-7]), skipped, compress(raw[-7:])]
    path = tmp_path / f"a.{kind}.zst"
    path.write_bytes(b"".join(frames))
    read = load(path, streaming=streaming)
    assert "".join(read) == raw.decode() if kind == "txt" else read == texts
    whole = compress(raw)
    for size in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RecipeError, match=f"can not read '{path}': .*ends within a frame of zstd"):
            source = sources.training_source(DataConfig(source=str(path), streaming=streaming))
            with readable(source):
                list(source.load())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("kind", "damaged", "reason"),
    [
        ("jsonl", b'{"text": "a"}\n{"text": "ab', "(JSON parse error|decoding 'string')"),
        ("jsonl", b'{"text": "caf\xe9"}\n', "(UnicodeDecodeError|in UTF-8)"),
        ("txt", b"caf\xe9\n", "UnicodeDecodeError"),
        ("parquet", b"PAR1", "ArrowInvalid"),
    ],
)
@pytest.mark.some(4)
def test_a_damaged_file_of_many_is_named(tmp_path, kind, damaged, reason, streaming):
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
    write = {"jsonl": rows.to_json, "txt": lambda path: path.write_text("a\n"), "parquet": rows.to_parquet}[kind]
    for i in range(4):
        write(tmp_path / f"{i}.{kind}")
    (tmp_path / f"2.{kind}").write_bytes(damaged)
    for name in (tmp_path, tmp_path / f"*.{kind}"):
        source = sources.training_source(DataConfig(source=str(name), streaming=streaming))
        with pytest.raises(RecipeError, match=rf"can not read '{tmp_path}/2.{kind}': .*{reason}") as error:
            with readable(source):
                list(source.load())
        assert str(error.value).endswith("; repair this file or leave it out")


@pytest.mark.parametrize("streaming", [False, True])
def test_brackets_in_names_are_names(tmp_path, monkeypatch, streaming):
    for name in ("a[1]", "a1", "b*", "bb", "c d?", "größer"):
        write_jsonl(tmp_path / f"{name}.jsonl", [name])
    for name in ("a[1]", "b*", "c d?", "größer"):
        assert load(tmp_path / f"{name}.jsonl", streaming=streaming) == [name]
    for folder in ("in [1]", "in 1", "in *"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "x.jsonl", [folder])
    for folder in ("in [1]", "in *"):  # names that are relative to such a folder
        monkeypatch.chdir(tmp_path / folder)
        assert load("x.jsonl", streaming=streaming) == load("?.jsonl", streaming=streaming) == [folder]
    with pytest.raises(RecipeError, match=r"no file or folder .*a\[1-9\].jsonl"):
        load(tmp_path / "a[1-9].jsonl")
    assert load(tmp_path / "[ab]*.jsonl".replace("[ab]", ""), streaming=streaming)[0] == "a1"


def test_a_long_reason_is_said_in_part(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(RecipeError, match=r"can not read .*: ValueError: x{500}\.\.\.; check"):
        with readable(sources.training_source(DataConfig(source=str(tmp_path / "a.jsonl")))):
            raise ValueError("x" * 5000)


def test_values_further_down_that_are_no_texts_are_refused(tmp_path):
    """`datasets` would write a date, a number or a mixture as it likes; a null at the beginning stops its parser."""
    for content in (
        '{"text": "2020-01-01"}',
        '{"text": 3}',
        '{"text": 3}\n{"text": "a"}',
        '{"text": {"a": 1}}',
        "null",
    ):
        write_jsonl(tmp_path / content[-8:-4] / "1.jsonl", ["a", "b"])
        (tmp_path / content[-8:-4] / "2.jsonl").write_text(content + "\n")
        with pytest.raises(RecipeError, match="holds text first and|begins with null"):
            load(tmp_path / content[-8:-4])


def test_files_of_a_folder_that_are_of_no_split_are_named(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ["a"])
    write_jsonl(tmp_path / "more.jsonl", ["b"])
    with pytest.raises(RecipeError, match="1 files that are of no split, e.g. 'more.jsonl'"):
        load(tmp_path)


def test_hidden_files_of_a_folder_are_no_data(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    write_jsonl(tmp_path / ".shards" / "part-00000.json", ["b"])
    write_jsonl(tmp_path / "__old" / "a.jsonl", ["c"])
    (tmp_path / "._a.jsonl").write_bytes(b"\0\5\x16\7 of a Mac")
    (tmp_path / ".notes.txt").write_text("d")
    assert load(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["a.jsonl", "*.jsonl", "inner"])
def test_a_source_is_the_same_from_another_folder(name, tmp_path, monkeypatch):
    """Its shards were prepared anew for `looped halting` and others that were called from elsewhere."""
    for path in ("a.jsonl", "inner/b.jsonl"):
        write_jsonl(tmp_path / path, ["a"])
    monkeypatch.chdir(tmp_path)
    near = sources.training_source(DataConfig(source=name)).settings()
    assert near == sources.training_source(DataConfig(source=str(tmp_path / name))).settings()


def test_the_folder_where_one_is_can_be_a_source(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "inner").mkdir()
    for folder, name in ((tmp_path, "."), (tmp_path / "inner", "..")):
        monkeypatch.chdir(folder)
        assert load(name) == ["a"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_other_columns_may_differ(tmp_path, kind, streaming):
    """From file to file, and from row to row; who reads the files otherwise finds all columns."""
    others = [{"meta": {"x": 1}}, {"meta": {"y": "s"}, "id": 3}, {"url": None}]
    for i, other in enumerate(others):
        rows = [{"text": f"{i}a", "body": f"{i}c"} | other, {"text": f"{i}b"} | other]
        if kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"{i}.parquet")
        else:
            (tmp_path / f"{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(tmp_path, streaming=streaming) == ["0a", "0b", "1a", "1b", "2a", "2b"]
    bodies = load(tmp_path, streaming=streaming, text_field="body")
    assert list(filter(None, bodies)) == ["0c", "1c", "2c"]
    one_file = str(tmp_path / f"0.{kind}")
    assert load(one_file, streaming=streaming) == ["0a", "0b"]
    plain = datasets.load_dataset("json" if kind == "jsonl" else kind, data_files=one_file, split="train")
    assert {"text", "body", "meta"} <= set(plain.column_names)


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_parquet_files_are_texts_in_all_or_refused(tmp_path, streaming):
    """Of any type of text, null where a file holds none; `datasets` writes numbers and dates as texts."""
    rows = {"text": pa.array(["d"]), "large": pa.array(["e"], pa.large_string()), "null": pa.array([None], pa.null())}
    rows |= {"words": pa.array(["f"]).dictionary_encode(), "empty": pa.array([], pa.string())}
    for name, column in rows.items():
        write_parquet(pa.table({"text": column}), tmp_path / f"{name}.parquet")
    assert load(tmp_path, streaming=streaming) == ["e", None, "d", "f"]  # in the order of the names
    others = {"numbers": [1, 2], "a_date": [date(2020, 1, 1)], "bytes": [b"words"], "lists": [["a"]]}
    for name, column in others.items():
        odd = tmp_path / f"{name}.parquet"
        write_parquet(pa.table({"text": column}), odd)
        said = f"'text' of '{odd}' holds {read_schema(odd).field(0).type}, not text as that of '{tmp_path}/"
        with pytest.raises(RecipeError, match=re.escape(said)):
            load(tmp_path, streaming=streaming)
        odd.unlink()
    write_parquet(pa.table({"body": ["words"]}), tmp_path / "other.parquet")
    with pytest.raises(RecipeError, match=f"'{tmp_path}/other.parquet' has no column 'text', which '{tmp_path}/"):
        load(tmp_path, streaming=streaming)


def test_parquet_files_of_other_splits_may_have_other_columns(tmp_path):
    write_parquet(pa.table({"text": ["a"]}), tmp_path / "train.parquet")
    write_parquet(pa.table({"question": ["b"]}), tmp_path / "test.parquet")
    assert load(tmp_path, streaming=True) == ["a"]


def test_a_damaged_parquet_file_has_no_lines(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(pa.table({"text": ["words"]}), path, compression="none")
    path.write_bytes(path.read_bytes().replace(b"words", b"w\xffrds"))
    with pytest.raises(RecipeError, match="can't decode byte 0xff in position 1: invalid start byte; check the file"):
        load(path)


def test_a_row_without_text_among_others_is_named(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"text": "a"}\n' * 3 + '{"text": 5}\n' + '{"text": "a"}\n')
    with pytest.raises(
        RecipeError, match="row 3 .from 0. of .*mixed.jsonl' holds 5 in column 'text', not text as 4 oth"
    ):
        load(path)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_the_line_that_is_not_utf8_is_named(tmp_path, ending):
    path = tmp_path / f"latin.txt{ending}"
    with (gzip.open if ending else open)(path, "wb") as file:
        file.write(b"plain\n" * 30 + b"caf\xe9\n")
    with pytest.raises(RecipeError, match="UnicodeDecodeError: .*line 31, byte 3 of it"):
        with readable(source := sources.training_source(DataConfig(source=str(path)))):
            list(source.load())


@pytest.mark.parametrize("streaming", [False, True])
def test_blank_lines_are_no_rows(tmp_path, streaming):
    """Also where other columns hold values of several kinds, which `datasets` writes anew line by line."""
    path = tmp_path / "blank.jsonl"
    others = [{"x": 1}, "s", [1], [{"x": 1}, {"x": "s"}]]
    lines = [json.dumps({"text": text, "meta": other}) for text, other in zip("abcd", others)]
    text = "\n".join(["", lines[0], " \t", *lines[1:3], "\r", lines[3], "", ""])
    for mark in ("", "\ufeff"):
        path.write_text(mark + text, encoding="utf-8")
        assert load(path, streaming=streaming) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("streaming", [False, True])
def test_json_of_another_encoding_is_read_as_the_card_says(tmp_path, streaming):
    card = "configs:\n- config_name: default\n  data_files: a.json\n  field: data\n  encoding: latin-1\n"
    (tmp_path / "README.md").write_text(f"---\n{card}---\n")
    (tmp_path / "a.json").write_text('{"data": [{"text": "é"}, {"text": "b"}]}', encoding="latin-1")
    assert load(tmp_path, streaming=streaming) == ["é", "b"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("other", [{}, {"text": None}], ids=str)
def test_texts_that_only_begin_further_down_are_refused(tmp_path, monkeypatch, other, streaming):
    """Types are those of the first block of a file."""
    small = functools.partial(sources.load_dataset_builder, chunksize=1000)
    monkeypatch.setattr(sources, "load_dataset_builder", small)
    rows = [{"id": 1} | other] * 200 + [{"id": 1, "text": "a"}] * 100
    (tmp_path / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RecipeError, match="(column 'text'|no documents).* in (its|the) first rows"):
        load(tmp_path / "late.jsonl", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_line_that_is_no_json_is_named(tmp_path, streaming):
    """Blank lines count, and pyarrow's count of rows, which begins anew with each of its blocks, is not told."""
    path = tmp_path / "long.jsonl"
    lines = ["", *(json.dumps({"text": f"{i} " * 300}) for i in range(2000)), '{"text": "a"', '{"text": "b"}']
    path.write_text("\n".join(lines))
    with pytest.raises(RecipeError, match=r"Missing a comma .* member\. \(line 2002\); check the file"):
        load(path, streaming=streaming)


def test_a_file_without_the_column_has_no_documents(tmp_path):
    (tmp_path / "0.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "1.jsonl").write_text('{"words": "b"}\n')
    assert list(filter(None, load(tmp_path))) == ["a"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwords")
    assert load(tmp_path / "a.txt") == ["words"]


def test_too_little_text_is_refused_with_advice(make_data, tmp_path):
    with pytest.raises(RecipeError, match="documents for train hold .*sequence_length=100000 is longer than all"):
        shards.prepare(make_data(sequence_length=100_000))
    few = write_jsonl(tmp_path / "few.jsonl", make_documents(30))
    with pytest.raises(RecipeError, match="too few different ones; add others, raise data.validation_fraction=0.0001"):
        shards.prepare(make_data(source=few, validation_fraction=0.0001))
    with pytest.raises(RecipeError, match="0 documents for train: .*30 more were left out.*also in validation"):
        shards.prepare(make_data(source=few, validation_source=str(few)))


def test_missing_tokenizer_folder_is_refused_before_anything_is_read(make_data, monkeypatch):
    monkeypatch.setattr(sources.Source, "load", lambda self: pytest.fail("the source was read"))
    with pytest.raises(RecipeError, match="there is no tokenizer folder './missing'"):
        shards.prepare(make_data(tokenizer="./missing"))


def test_edits_of_a_tokenizer_that_was_brought_along(make_data, tmp_path):
    """A token that is found in texts from now on gives other shards; a chat template is taken along with the old."""
    folder = tmp_path / "tokenizer"
    tokenizer = shards.prepare(make_data()).tokenizer
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    tokenizer.chat_template = "old"
    tokenizer.save_pretrained(folder)
    texts = [f"<tool> {text}" for text in make_documents(300)]
    data = make_data(source=write_jsonl(tmp_path / "tool.jsonl", texts), tokenizer=str(folder))

    def tools(prepared) -> int:
        stream = np.concatenate([*prepared.train.shards, *prepared.validation.shards])
        return int((stream == prepared.tokenizer.convert_tokens_to_ids("<tool>")).sum())

    as_text = shards.prepare(data)
    assert (tools(as_text), as_text.tokenizer.chat_template) == (0, "old")
    (folder / "chat_template.jinja").write_text("new")
    with_template = shards.prepare(data)
    assert with_template.folder == as_text.folder and with_template.tokenizer.chat_template == "new"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        said = json.loads((folder / file).read_text())
        for token in said.get("added_tokens", []):
            token["special"] &= token["content"] != "<tool>"
        for key in ("additional_special_tokens", "extra_special_tokens"):
            said.pop(key, None)
        (folder / file).write_text(json.dumps(said))
    found = shards.prepare(data)
    assert found.folder != as_text.folder and tools(found) == 300


def test_data_for_a_tokenizer_that_was_brought_along(make_data, tmp_path):
    """A tokenizer without bos: its eos stands between documents, and is learned. It is saved as it came."""
    backend = Tokenizer(
        models.WordLevel({"<end>": 0, "<unk>": 1} | {word: i + 2 for i, word in enumerate(WORDS)}, "<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prepared = shards.prepare(make_data(tokenizer=str(tmp_path / "tokenizer")))
    batch = prepared.train.batch([0, 1])
    assert torch.equal(batch["labels"], batch["input_ids"]) and (batch["labels"] == 0).any()
    first = tokenizer(make_documents(300)[0])["input_ids"]
    assert batch["input_ids"][0, : len(first) + 2].tolist() == [0, *first, 0]
    assert prepared.tokenizer.special_tokens_map == tokenizer.special_tokens_map and tokenizer.bos_token is None
    assert prepared.manifest["dtype"] == "uint16"
