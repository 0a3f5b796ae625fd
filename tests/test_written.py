"""Shards that workers of another pipeline write hold what `prepare` makes of the same documents."""

import json
import shutil

import numpy as np
import pytest

from looped_recipes.data.shards import packed_tokens, prepare, shard_writer
from looped_recipes.settings.recipe import DataConfig, RecipeError

from .helpers import save_other_tokenizer, tiny_tokenizer


TEXTS = [f"text {n} says " + "very much " * (n % 7) + f"of {n * n}" for n in range(120)]
WORKERS = 3


@pytest.fixture
def data(tmp_path) -> DataConfig:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    settings = {"tokenizer": str(tmp_path / "tokenizer"), "sequence_length": 16, "validation_fraction": 0.2}
    return DataConfig(source=str(tmp_path / "shards"), cache_dir=str(tmp_path / "cache"), **settings)


def share(rank: int) -> list[str]:
    return TEXTS[rank::WORKERS]


def write(data: DataConfig, rank: int, until: int | None = None):
    with shard_writer(data, rank, WORKERS) as worker:
        for number, text in enumerate(share(rank)):
            if number == until:
                raise KeyboardInterrupt
            worker.add(text)


def documents_of(prepared) -> list[tuple[int, ...]]:
    """Tokens of training, sorted: two ways to cut the same documents into parts give them in another order."""
    tokens = np.concatenate(list(packed_tokens(prepared.folder, prepared.manifest["shards"]["train"])))
    begins = np.flatnonzero(tokens == prepared.tokenizer.bos_token_id)
    return sorted(tuple(document.tolist()) for document in np.split(tokens, begins[1:]))


def test_they_hold_what_prepare_makes_of_the_same(data, tmp_path):
    for rank in range(WORKERS):
        write(data, rank)
    written = prepare(data)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    data.source = str(tmp_path / "texts.jsonl")
    made = prepare(data)
    assert written.manifest["counts"] == made.manifest["counts"]
    assert written.manifest["counts"]["validation"]["documents"] > 0
    assert documents_of(written) == documents_of(made)
    assert len(documents_of(made)) == made.manifest["counts"]["train"]["documents"]


def test_workers_and_training_have_their_tokenizer_in_places_of_their_own(data, tmp_path):
    write(data, 0)
    shutil.move(tmp_path / "tokenizer", tmp_path / "moved")
    data.tokenizer = str(tmp_path / "moved")
    for rank in (1, 2):
        write(data, rank)
    assert prepare(data).folder == tmp_path / "shards"
    shutil.move(tmp_path / "moved", tmp_path / "elsewhere")
    data.tokenizer = str(tmp_path / "elsewhere")
    assert prepare(data).folder == tmp_path / "shards"
    save_other_tokenizer(tmp_path / "other")
    data.tokenizer = str(tmp_path / "other")
    with pytest.raises(RecipeError, match="tokenizer was {'name': '.*moved', .*is now {'name': '.*other'"):
        prepare(data)


def test_a_worker_that_was_stopped_goes_on(data, tmp_path, monkeypatch):
    monkeypatch.setattr("looped_recipes.data.written.STREAMED_PART", 10)
    for rank in (0, 2):
        write(data, rank)
    with pytest.raises(RecipeError, match=r"of the 3 workers .* 1 have not ended: \[1\]; run them again"):
        prepare(data)
    with pytest.raises(KeyboardInterrupt):
        write(data, 1, until=25)
    with pytest.raises(RecipeError, match=r"1 have not ended: \[1\]"):
        prepare(data)
    made = tmp_path / "shards" / "part-00001-00001.train.npy"
    before = made.stat().st_mtime_ns
    write(data, 1)
    assert made.stat().st_mtime_ns == before  # what was whole is kept
    assert prepare(data).manifest["counts"]["train"]["documents"] > 80


def test_a_worker_without_documents(data, monkeypatch):
    monkeypatch.setattr("tests.test_written.share", lambda rank: TEXTS if rank == 0 else [])
    for rank in range(WORKERS):
        write(data, rank)
    counts = prepare(data).manifest["counts"]
    assert sum(counts[split]["documents"] for split in counts) == len(TEXTS)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer": "bpe"}, "data.tokenizer='bpe' is trained on all documents"),
        ({"max_documents": 5}, "data.max_documents=5 does not go with shards that workers write"),
        ({"validation_source": "other.jsonl"}, "held out by data.validation_fraction"),
    ],
)
def test_what_they_cannot_have(data, changes, message):
    vars(data).update(changes)
    with pytest.raises(RecipeError, match=message):
        write(data, 0)


def test_workers_and_training_agree(data, tmp_path):
    write(data, 0)
    data.sequence_length = 32
    data.packing = "best_fit"
    with pytest.raises(RecipeError, match="were made with other settings.*packing"):
        write(data, 1)
    with pytest.raises(RecipeError, match="were made with other settings.*packing"):
        prepare(data)


def test_runs_of_other_numbers_of_workers_do_not_mix(data):
    for rank in range(WORKERS):
        write(data, rank)
    with shard_writer(data, 3, 4) as worker:
        worker.add("one more")
    with pytest.raises(RecipeError, match=r"runs of \[3, 4\] workers"):
        prepare(data)


def test_no_worker_has_begun(data, tmp_path):
    write(data, 0)
    (tmp_path / "shards" / "worker-00000.json").unlink()
    with pytest.raises(RecipeError, match="no worker has written to"):
        prepare(data)


def test_what_a_pipeline_raises_is_its_own(data):
    with pytest.raises(OSError, match="of the crawl"), shard_writer(data, 0, WORKERS):
        raise OSError("of the crawl")


def test_a_folder_that_holds_something_else(data, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "mine.txt").write_text("not theirs")
    with pytest.raises(RecipeError, match="holds something else"):
        write(data, 0)


@pytest.mark.slow
def test_a_pipeline_of_datatrove(data, tmp_path):
    pytest.importorskip("datatrove")
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor

    from looped_recipes.data.datatrove import LoopedShards

    settings = {
        name: getattr(data, name) for name in ("source", "tokenizer", "sequence_length", "validation_fraction")
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps({"data": settings}))

    def read(_, rank: int, world_size: int):
        for number, text in enumerate(TEXTS[rank::world_size]):
            yield Document(text=text, id=f"{rank}/{number}")

    pipeline = [read, LoopedShards(tmp_path / "recipe.yaml")]
    LocalPipelineExecutor(pipeline, tasks=WORKERS, logging_dir=str(tmp_path / "logs")).run()
    found = documents_of(prepare(data))
    data.source = str(tmp_path / "by_hand")
    for rank in range(WORKERS):
        write(data, rank)
    assert found == documents_of(prepare(data))
