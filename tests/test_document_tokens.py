"""Special tokens of documents: at their beginning, their end, both or none, in both packings and in what is saved."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from looped_recipes.common.checksums import write_checksums
from looped_recipes.data import part_files as parts
from looped_recipes.data import shards
from looped_recipes.data.tokenizers import tokenizer_hash
from looped_recipes.settings.recipe import RecipeError, recipe_from_dict
from tests.helpers_data import WORDS, make_documents


MARKS = {"start": (["<s>"], []), "end": ([], ["</s>"]), "none": ([], []), "both": (["<s>"], ["</s>"])}


def marked_tokenizer(folder: Path, bos: str | None) -> str:
    """Words, and special tokens of which none but the end, and perhaps the start, has a role yet."""
    special = ["<s>", "</s>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS, *map(str, range(1000))])}
    backend = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("document_tokens", MARKS)
@pytest.mark.parametrize("start_token", ["<s>", None])
@pytest.mark.some(4)
def test_documents_have_the_tokens_that_are_asked_for(make_data, tmp_path, document_tokens, start_token):
    """In both splits, and in what is kept to read texts with later."""
    if document_tokens in ("end", "none"):
        start_token = None
    tokenizer = marked_tokenizer(tmp_path / "tokenizer", bos=None if start_token else "<s>")
    prepared = shards.prepare(make_data(tokenizer=tokenizer, document_tokens=document_tokens, start_token=start_token))
    before, after = MARKS[document_tokens]
    streams = {split: np.concatenate(getattr(prepared, split).shards) for split in ("train", "validation")}
    words = [word for stream in streams.values() for word in prepared.tokenizer.convert_ids_to_tokens(stream)]
    held_out = parts.HeldOut(fraction=0.1)
    documents = sorted(make_documents(300), key=lambda text: text in held_out)  # training first
    assert words == [word for text in documents for word in [*before, *text.split(), *after]]
    labels = prepared.train.batch([0, 1])["labels"]
    assert (labels == -100).any() == (document_tokens == "both")  # a lone token says that a document ends: learned

    reopened = AutoTokenizer.from_pretrained(prepared.folder / "tokenizer")
    as_it_was = document_tokens == "both" and start_token is None
    first = "loop" if as_it_was or document_tokens == "none" else reopened.bos_token
    assert reopened.convert_ids_to_tokens(reopened("loop")["input_ids"])[0] == first
    ends = {"start": "<s>", "end": "</s>", "none": "</s>", "both": "</s>"}
    assert reopened.eos_token == ends[document_tokens]
    assert (reopened.bos_token == reopened.eos_token) == (document_tokens in ("start", "end"))


@pytest.mark.parametrize("document_tokens", MARKS)
def test_best_fit_keeps_the_tokens_of_documents(make_data, tmp_path, document_tokens):
    """Every word of every document once; a piece that comes back begins as documents do."""
    tokenizer = marked_tokenizer(tmp_path / "tokenizer", bos="<s>")
    data = make_data(tokenizer=tokenizer, packing="best_fit", document_tokens=document_tokens, sequence_length=16)
    prepared = shards.prepare(data)
    batch = prepared.train.batch(range(len(prepared.train)))["input_ids"]
    words = prepared.tokenizer.convert_ids_to_tokens(batch.flatten().tolist())
    before, after = MARKS[document_tokens]
    assert not {"<s>", "</s>"} & {*words} - {*before, *after}
    texts = [text for text in make_documents(300) if text not in parts.HeldOut(fraction=0.1)]
    missing = Counter(word for text in texts for word in text.split())
    found = Counter(word for word in words if not word.startswith("<"))
    missing.subtract(found)
    if document_tokens in ("both", "end"):  # else the last word may be the one token that is not worth a piece
        assert sum(missing.values()) < 16 and min(missing.values()) >= 0
    assert (words.count("<s>") > len(texts) / 2) == bool(before)
    assert (words.count("</s>") > len(texts) / 2) == bool(after)
    assert batch[:, 0].eq(0).all() == bool(before)


def test_positions_begin_again_after_the_end_where_documents_have_no_start(make_data, tmp_path):
    tokenizer = marked_tokenizer(tmp_path / "tokenizer", bos="<s>")
    data = make_data(tokenizer=tokenizer, document_tokens="end", document_masking=True)
    batch = shards.prepare(data).train.batch([0, 1, 2])
    for tokens, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist()):
        expected, position = [], 0
        for token in tokens:
            expected.append(position)
            position = 0 if token == 1 else position + 1
        assert positions == expected


def test_documents_of_tokens_are_masked_by_the_token_that_they_have(make_data, tmp_path):
    """Those without a start token by their end; a token that none of them has is refused."""
    tokenizer = marked_tokenizer(tmp_path / "tokenizer", bos="<s>")
    lengths = [5 + 3 * i % 11 for i in range(200)]
    rows = [[10 + (i + j) % 900 for j in range(length)] for i, length in enumerate(lengths)]
    path = tmp_path / "tokens.parquet"
    Dataset.from_dict({"input_ids": [[*row, 1] for row in rows]}).to_parquet(path)
    masked = {"source": str(path), "token_field": "input_ids", "tokenizer": tokenizer, "document_masking": True}
    recipe_from_dict({"data": {**masked, "document_tokens": "end"}})
    with pytest.raises(RecipeError, match="document_tokens=end would have no effect with data.token_field"):
        recipe_from_dict({"data": {**masked, "document_masking": False, "document_tokens": "end"}})
    with pytest.raises(
        RecipeError, match=r"token 0 \('<s>'\) where .* begins, .* in none of the 200 .*data.document_tokens=end"
    ):
        shards.prepare(make_data(**masked))
    train = shards.prepare(make_data(**masked, document_tokens="end")).train
    batch = train.batch(range(len(train)))
    for tokens, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist()):
        assert positions == [(tokens[:i][::-1] + [1]).index(1) for i in range(len(tokens))]
    assert torch.equal(batch["labels"], batch["input_ids"])


def test_start_tokens_that_cannot_be(make_data, tmp_path):
    tokenizer = marked_tokenizer(tmp_path / "tokenizer", bos=None)
    with pytest.raises(RecipeError, match="'<begin>' is no token of .*its special tokens are </s>, <s>, <unk>"):
        shards.prepare(make_data(tokenizer=tokenizer, start_token="<begin>"))
    with pytest.raises(
        RecipeError, match="start_token=.* would have no effect with data.tokenizer=.*, which is trained"
    ):
        recipe_from_dict({"data": {"start_token": "<s>"}})


def test_tokenizers_in_data_of_before_gave_a_missing_bos_the_eos(make_data, tmp_path):
    """Such data stay in use, and the tokenizer is that of its folder, as it is."""
    folder = marked_tokenizer(tmp_path / "tokenizer", bos=None)
    data = make_data(tokenizer=folder)
    prepared = shards.prepare(data)
    before = AutoTokenizer.from_pretrained(folder, bos_token="</s>", pad_token="</s>")
    before.save_pretrained(prepared.folder / "tokenizer")
    write_checksums(prepared.folder / "tokenizer")
    assert tokenizer_hash(before) == prepared.manifest["tokenizer"]["sha256"]
    again = shards.prepare(data)
    assert again.folder == prepared.folder and again.tokenizer.bos_token is None is again.tokenizer.pad_token
    assert torch.equal(again.train.batch([0])["input_ids"], prepared.train.batch([0])["input_ids"])
