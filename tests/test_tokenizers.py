"""Tokenizers trained here and brought along: how they cut, what they keep, what their tokens stand for."""

import json
import pickle
import re
import sys
import unicodedata
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    BigBirdTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    T5Tokenizer,
    XLMRobertaTokenizer,
)

from looped_recipes.data.tokenizers import (
    SPECIAL_TOKENS,
    Encoder,
    load_tokenizer,
    make_tokenizer,
    read_tokenizer,
    share_kept,
    token_bytes,
    tokenizer_hash,
    tokenizer_settings,
    train_bpe,
    train_symbols,
    train_word,
)
from looped_recipes.settings.recipe import DataConfig, RecipeError


TEXTS = [
    "the cat sat on the mat, the other cat didn't.\n",
    "def sit(on):\n    return on + 1234567\n",
    "naïve — ☃\n",
] * 3
BPE = train_bpe(TEXTS, 300)
WORD = train_word(TEXTS, 100)
BYTES = token_bytes(BPE)
AS_TEXT = Encoder(BPE, document_tokens="none")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("I'm 12345 years OLD'S", ["I", "'m", " ", "123", "45", " years", " OLD", "'S"]),
        ("don't  stop", ["don", "'t", " ", " stop"]),
        ("a == b;\n\n    return", ["a", " ==", " b", ";\n\n", "   ", " return"]),
        ("x \n \n y", ["x", " \n \n", " y"]),
        ("end   ", ["end", "   "]),
        ("(word)", ["(word", ")"]),
        ("über\tß", ["über", "\tß"]),
    ],
)
def test_bpe_cuts_as_gpt4_does(text, pieces):
    found = [text[begin:end] for _, (begin, end) in BPE.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


@given(st.text(max_size=60))
@example("<|eos|>")
def test_bpe_keeps_every_byte(text):
    (ids,) = AS_TEXT([text])
    assert BPE.decode(ids) == text
    assert BYTES[ids].sum() == len(text.encode())


@pytest.mark.parametrize(("limit", "sizes"), [(2**24, [128, 26]), (100, [15] * 10 + [3, 1])])
def test_long_documents_are_encoded_few_at_once(monkeypatch, limit, sizes):
    """The library keeps a hundred bytes for each token of the texts that it encodes at once."""
    monkeypatch.setattr("looped_recipes.data.tokenizers.ENCODED_CHARACTERS", limit)
    texts = ["one two"] * 150 + ["three " * 10, "four", "five " * 30, "six"]
    encoder, at_once = Encoder(BPE), []
    encode = encoder.tokenizer.encode_batch_fast
    encoder.tokenizer = SimpleNamespace(encode_batch_fast=lambda few, **how: at_once.append(few) or encode(few, **how))
    assert [BPE.decode(ids[1:-1]) for ids in encoder(texts)] == texts
    assert [len(few) for few in at_once] == sizes


@given(st.lists(st.sampled_from(["<|bos|>", "<|eos|>", "<|pad|>", "a", " ", "<"]), max_size=6).map("".join))
def test_no_document_can_forge_a_special_token(text):
    for tokenizer in (BPE, WORD):
        encoder = Encoder(tokenizer)
        for encode in (encoder, pickle.loads(pickle.dumps(encoder))):  # pickled: as processes receive it
            start, *ids, end = next(encode([text]))
            assert (start, end) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
            assert not {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)
            if tokenizer is BPE:
                assert BPE.decode(ids) == text


def pieces_tokenizer(model) -> PreTrainedTokenizerFast:
    """A tokenizer whose model has its special tokens among its own entries, as those of T5 and BERT have."""
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.add_tokens(["<own>"])  # it has an id behind those of the model
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.mark.parametrize("kind", ["unigram", "wordlevel", "wordpiece", "symbols"])
def test_text_that_spells_an_entry_of_the_vocabulary_is_no_special_token(kind):
    entries = ["<pad>", "<unk>", "</s>", "<s>", "the", "cat", *"abcdefghijklmnopqrstuvwxyz<>/"]
    entries += [f"##{one}" for one in entries[6:]]
    tokenizer = {
        "unigram": lambda: pieces_tokenizer(models.Unigram([(entry, -len(entry) / 9) for entry in entries], unk_id=1)),
        "wordlevel": lambda: pieces_tokenizer(
            models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token="<unk>")
        ),
        "wordpiece": lambda: pieces_tokenizer(
            models.WordPiece({entry: i for i, entry in enumerate(entries)}, unk_token="<unk>")
        ),
        "symbols": lambda: train_symbols(["the cat <|eos|> the cat <|bos|>"] * 3, 20),
    }[kind]()
    encoder = Encoder(tokenizer)
    forged = {"the", *tokenizer.all_special_tokens} - {tokenizer.unk_token}
    for encode in (encoder, pickle.loads(pickle.dumps(encoder))):
        for word in forged:
            start, *ids, end = next(encode([f"cat {word} cat"]))
            assert (start, end) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
            words = tokenizer.convert_ids_to_tokens(ids)
            assert (words[0], words[-1]) == ("cat", "cat") and len(words) > 2
            assert not {*words} & {"<s>", "</s>", "<pad>", *SPECIAL_TOKENS.values()}
            if kind in ("unigram", "wordpiece") and word != "the":
                assert "".join(words[1:-1]).replace("#", "") == word
            else:
                assert words[1] == (word if word == "the" else tokenizer.unk_token)
        texts = ["the cat", "cat the the", "unknown é <own> the"]  # as the tokenizer itself does
        expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
        assert [ids[1:-1] for ids in encode(texts)] == expected
        if kind != "symbols":
            assert tokenizer.convert_tokens_to_ids("<own>") in expected[-1]


def test_a_document_with_a_token_that_marks_documents_is_quoted():
    """Merges of BPE make the entry that is bos out of text: it can not be told from the mark."""
    letters = {letter: i for i, letter in enumerate("ab<s>")}
    vocabulary = {**letters, "<s": 5, "<s>": 6}
    backend = Tokenizer(models.BPE(vocabulary, [("<", "s"), ("<s", ">")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="b", pad_token="b")
    assert list(Encoder(tokenizer, "start")(["ab", "s>a"])) == [[6, 0, 1], [6, 3, 4, 0]]
    with pytest.raises(RecipeError, match="a document contains '<s>', .*6.*'bb<s>aa'. Leave such documents out"):
        list(Encoder(tokenizer, "start")(["ab", "bb<s>aa"]))


def test_vocabulary_has_the_size_asked_for_special_tokens_first():
    assert len(BPE) == 300
    assert [BPE.bos_token_id, BPE.eos_token_id, BPE.pad_token_id] == [0, 1, 2]
    assert BPE("x")["input_ids"][0] == BPE.bos_token_id


def test_bpe_learns_from_the_first_10000_characters_of_a_document():
    filler = "ab " * 3334  # 10,002 characters
    assert " zebra" in _words(train_bpe(["zebra zebra zebra " + filler], 400))
    assert " zebra" not in _words(train_bpe([filler + "zebra zebra zebra "], 400))


def test_training_stops_at_the_characters_asked_for():
    data = DataConfig(tokenizer="word", tokenizer_vocab_size=50, tokenizer_max_characters=10)
    seen = make_tokenizer(data, iter(["one one one", "two two two"]))
    assert "one" in seen.get_vocab() and "two" not in seen.get_vocab()
    long = ["ab " * 10_000, "zebra " * 10]  # the first counts as its 10,000 characters that are read
    data = DataConfig(tokenizer="bpe", tokenizer_vocab_size=300, tokenizer_max_characters=20_000)
    assert " zebra" in _words(make_tokenizer(data, iter(long)))


def test_training_twice_gives_the_same_tokenizer():
    assert tokenizer_hash(train_bpe(TEXTS, 300)) == tokenizer_hash(BPE)
    assert tokenizer_hash(train_bpe(TEXTS, 299)) != tokenizer_hash(BPE)
    assert tokenizer_hash(WORD) != tokenizer_hash(BPE)


# the readout paper's words: white space is kept


def words_of(text: str) -> list[str]:
    """As the paper's release cuts a text, character by character."""
    pieces, kind_before = [], None
    for character in text:
        if character.isspace():
            kind = "space"
        elif character == "_" or (character.isascii() and character.isalnum()):
            kind = "word"
        elif character.isalnum():  # a letter or digit that is in no token
            kind = None
        else:
            kind = "sign"
        if kind is not None and kind == kind_before != "sign":
            pieces[-1] += character
        elif kind is not None:
            pieces.append(character)
        kind_before = kind
    return pieces


def test_word_tokenizer_cuts_every_character_as_python_does():
    characters = map(chr, range(sys.maxunicode + 1))
    assigned = [character for character in characters if unicodedata.category(character) not in ("Cn", "Co", "Cs")]
    text = "".join(f"a{character}b" for character in assigned)
    assert [piece for piece, _ in WORD.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words_of(text)


@given(st.text(alphabet="ab_9 \n\t.-é½☃\u0301<", max_size=30))
def test_word_tokenizer_cuts_texts_as_the_release_does(text):
    assert [piece for piece, _ in WORD.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words_of(text)


def test_word_tokenizer_has_the_frequent_words_white_space_and_single_signs():
    texts = ["a cat, a dog,  a <unk>\n", "b cat; once b  dog\n"]
    counts = Counter(piece for text in texts for piece in words_of(text))
    ordered = sorted((piece for piece in counts if counts[piece] > 1), key=lambda piece: (-counts[piece], piece))
    assert ordered[:2] == [" ", "a"] and {"  ", "\n", ",", "b", "cat", "dog"} == set(ordered[2:])
    special = {"<unk>", "<|bos|>", "<|eos|>", "<|pad|>"}
    for size in range(5, 14):
        assert set(train_word(texts, size).get_vocab()) == special | set(ordered[: size - 4])


def test_word_tokenizer_gives_unknown_for_the_rest():
    tokenizer = train_word(["red green red green"], 20)
    space, known, unknown = tokenizer.convert_tokens_to_ids([" ", "red", "<unk>"])
    ids = next(Encoder(tokenizer, document_tokens="none")(["red blue <unk> blue-red"]))
    rest = [unknown, space, unknown, unknown, unknown, space, unknown, unknown]  # blue < unk > blue -
    assert ids == [known, space, *rest, known]
    assert token_bytes(tokenizer)[[unknown, known, space]].tolist() == [0, 3, 1]


def test_symbols_are_what_stands_between_white_space():
    tokenizer = train_symbols(["ab c; ab c;", "ab\tc;"], 20)
    assert set(tokenizer.get_vocab()) == {"<unk>", *SPECIAL_TOKENS.values(), "ab", "c;"}
    ids = tokenizer(" ab\n\nc; new ab")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|bos|>", "ab", "c;", "<unk>", "ab"]
    assert tokenizer.decode(ids[1:3]) == "ab c;"


@given(st.lists(st.sampled_from(TEXTS[:2]), min_size=1, max_size=3).map("".join))
def test_words_decode_to_the_text_where_all_are_known(text):
    tokenizer = train_word(TEXTS, 100)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
    assert token_bytes(tokenizer)[ids].sum() == len(text.encode())


def test_prompts_of_one_joined_text_begin_with_no_special_token(tmp_path):
    joined = DataConfig(tokenizer="word", tokenizer_vocab_size=50, validation_split="validation", joined_by="\n")
    make_tokenizer(joined, TEXTS).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("the cat")["input_ids"] == tokenizer("the cat", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokenizer("the cat")["input_ids"]) == "the cat"


@pytest.mark.parametrize("tokenizer", [BPE, WORD], ids=["bpe", "word"])
def test_saved_tokenizers_open_with_auto_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_hash(loaded) == tokenizer_hash(tokenizer)
    assert loaded(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert torch.equal(token_bytes(loaded), token_bytes(tokenizer))


def test_token_bytes_of_a_sentencepiece_like_tokenizer():
    vocabulary = {"<unk>": 0, "</s>": 1, "▁na": 2, "ï": 3, "ve": 4, "▁": 5}
    vocabulary |= {f"<0x{i:02X}>": 6 + i for i in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    lengths = token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"))
    assert lengths[:6].tolist() == [0, 0, 3, 2, 2, 1]
    assert lengths[6:].tolist() == [1] * 256


def test_words_of_bert_have_the_space_before_them():
    words = ["[UNK]", "[SEP]", "the", "cat", "##s", ".", "ü"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[SEP]", unk_token="[UNK]")
    lengths = token_bytes(tokenizer)
    assert lengths.tolist() == [0, 0, 4, 4, 1, 1, 3]
    text = "the cats. the ü"
    assert lengths[tokenizer(text).input_ids].sum() == len(" " + text) + 1
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_words_of_gpt_1_have_the_space_behind_them():
    """It writes </w> behind a word, which is no text."""
    vocabulary = {word: i for i, word in enumerate(["<end>", "c", "a", "t", "t</w>", "ca", "cat</w>", "a</w>"])}
    backend = Tokenizer(models.BPE(vocabulary, [("c", "a"), ("ca", "t</w>")], end_of_word_suffix="</w>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder("</w>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    lengths = token_bytes(tokenizer)
    assert lengths.tolist() == [0, 1, 1, 1, 2, 2, 4, 2]
    assert lengths[tokenizer("a cat").input_ids].sum() == len("a cat ")


def test_a_tokenizer_without_bos_begins_documents_with_its_eos(tmp_path):
    _foreign(tmp_path, eos_token="<end>")
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (None, "<end>", None)  # as it came
    assert list(Encoder(tokenizer)(["b a", "a"])) == [[0, 2, 1], [0, 1]]  # one token both ends and begins


def test_a_tokenizer_is_the_same_from_another_folder(tmp_path, monkeypatch):
    """Data were prepared anew for `looped halting` and others that were called from elsewhere."""
    _foreign(tmp_path / "words", eos_token="<end>")
    monkeypatch.chdir(tmp_path)
    names = ["words", "./words/", str(tmp_path / "words")]
    near, again, far = (tokenizer_settings(DataConfig(tokenizer=name)) for name in names)
    assert near == again == far


def test_the_code_of_a_published_model_is_not_asked_for(tmp_path, monkeypatch):
    _foreign(tmp_path, eos_token="<end>")
    code = {"AutoConfig": "configuration_ouro.OuroConfig"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ouro", "auto_map": code}))
    (tmp_path / "configuration_ouro.py").write_text("raise SystemExit")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(True) or "n")
    assert read_tokenizer(tmp_path).eos_token == "<end>"
    assert not asked


def test_what_a_tokenizer_gives_back():
    assert share_kept(WORD, ["the cat sat", "the"]) == 1
    assert share_kept(WORD, ["the cat 漢字"]) == 6 / 8
    assert share_kept(BPE, ["the cat 漢字 <|bos|>"]) == 1  # also a special token that the text spells


def test_prompts_keep_what_else_a_tokenizer_puts_before_them(tmp_path):
    brought = train_bpe(TEXTS, 300)
    tokens = [(token, brought.convert_tokens_to_ids(token)) for token in ("<|eos|>", "<|pad|>")]
    brought.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A <|eos|>", special_tokens=tokens
    )
    brought.save_pretrained(tmp_path)
    tokenizer = make_tokenizer(DataConfig(tokenizer=str(tmp_path)), ())
    assert tokenizer("the").tokens() == ["<|pad|>", "the"]


@pytest.mark.parametrize("bos", [True, False])
def test_prompts_do_not_end_with_the_eos_of_a_tokenizer_that_is_brought_along(bos, tmp_path):
    """They go on; what saves and opens the tokenizer keeps that."""
    vocab = {token: id for id, token in enumerate(["<unk>", "<s>", "</s>", "▁", "a"])}
    brought = LlamaTokenizer(vocab=vocab, merges=[], add_bos_token=bos, add_eos_token=True)
    brought.save_pretrained(tmp_path / "brought")
    assert brought("a").tokens() == ["<s>"] * bos + ["▁", "a", "</s>"]
    tokenizer = make_tokenizer(DataConfig(tokenizer=str(tmp_path / "brought")), ())
    tokenizer.save_pretrained(tmp_path / "saved")
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert each("a").tokens() == ["<s>"] * bos + ["▁", "a"]


PIECES = [(token, 0.0) for token in ["<pad>", "</s>", "<unk>", "<s>", "▁", "a", "b"]]
WORDS = {token: id for id, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}


@pytest.mark.parametrize("tokens", ["both", "start", "end", "none"])
@pytest.mark.parametrize(
    "brought",
    [
        lambda: T5Tokenizer(vocab=PIECES, extra_ids=0),
        lambda: XLMRobertaTokenizer(vocab=PIECES),
        lambda: BigBirdTokenizer(vocab=PIECES),  # [SEP] behind prompts, which is not its eos
        lambda: BertTokenizer(vocab=WORDS, eos_token="[SEP]"),
        lambda: LlamaTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4}, merges=[], add_bos_token=True),
    ],
    ids=["t5", "xlmr", "bigbird", "bert", "llama"],
)
def test_classes_of_their_own_write_no_other_prompts_when_they_are_opened_again(brought, tokens, tmp_path):
    brought().save_pretrained(tmp_path / "brought")
    tokenizer = make_tokenizer(DataConfig(tokenizer=str(tmp_path / "brought"), document_tokens=tokens), ())
    tokenizer.save_pretrained(tmp_path / "saved")
    opened = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert opened("a b") == tokenizer("a b") and opened("a").keys() == {"input_ids", "attention_mask"}
    assert opened.padding_side == brought().padding_side
    text = opened("a", add_special_tokens=False).tokens()
    begin = opened("a").tokens()[: -len(text)]
    assert opened("a").tokens() == [*begin, *text]
    if tokens != "both":
        assert begin == ([] if tokens == "none" else [tokenizer.bos_token])


def test_settings_of_the_tokenizer_decide_what_shards_are_shared(tmp_path):
    _foreign(tmp_path / "one", eos_token="<end>")
    _foreign(tmp_path / "two", eos_token="a")
    identities = [
        tokenizer_settings(data)
        for data in (
            DataConfig(),
            DataConfig(tokenizer="word"),
            DataConfig(tokenizer_vocab_size=999),
            DataConfig(tokenizer_max_characters=5),
            DataConfig(tokenizer=str(tmp_path / "one")),
            DataConfig(tokenizer=str(tmp_path / "two")),
        )
    ]
    assert all(identity not in identities[:i] for i, identity in enumerate(identities))


def test_tokenizers_that_can_not_be_used_are_refused_with_advice(tmp_path):
    _foreign(tmp_path / "silent")
    (tmp_path / "empty").mkdir()
    for name, message in [
        (tmp_path / "none", "there is no tokenizer folder .*none"),
        (tmp_path / "empty", "can not load tokenizer .*data.tokenizer"),
        (tmp_path / "silent", "neither a bos nor an eos token.*set its eos_token"),
        ("no-such-tokenizer", "can not load tokenizer 'no-such-tokenizer'"),
    ]:
        with pytest.raises(RecipeError, match=re.compile(message, re.DOTALL)):
            load_tokenizer(str(name))
    with pytest.raises(RecipeError, match="tokenizer_vocab_size=100 is too small.* 259"):
        make_tokenizer(DataConfig(tokenizer_vocab_size=100), TEXTS)


def _words(tokenizer) -> set[str]:
    return {tokenizer.decode([index]) for index in range(len(tokenizer))}


def _foreign(folder, **special):
    """A word tokenizer of three entries, saved in `folder`."""
    backend = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
