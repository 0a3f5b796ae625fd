"""Tokenizers: three that are trained on the training documents, and any fast tokenizer of the hub or a folder.

A document is `bos text eos`, or `eos text` if the tokenizer has no separate bos (one token then both ends a document
and begins the next). `data.document_tokens` omits one or both; the saved tokenizer then begins texts in the same way
as documents begin. With `data.joined_by` there are no documents, and neither of these tokens. Otherwise a tokenizer
that is brought along keeps the bos and pad that it has, or none: chat templates and trainers write its bos.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from looped_recipes.settings.paths import expanded
from looped_recipes.settings.recipe import DataConfig, RecipeError
from modeling_looped import LoopedConfig
from modeling_looped.formats.folder import read_json_config
from modeling_looped.formats.registry import is_published

from .sources import looks_like_path


SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
UNKNOWN = "<unk>"
NOT_A_CHARACTER = "\ufdd0"  # Unicode keeps it free for use within programs
DOCUMENT_CHARACTERS = 10_000  # read of each document, so that a few long ones do not decide the vocabulary (Parcae)
DEFAULT_CHARACTERS = 2_000_000_000  # read in total (Parcae)
WORD_MIN_FREQUENCY = 2
ENCODED_CHARACTERS = 2**24  # at once, or one longer document

# GPT-4's pattern that splits text before byte pairs are merged: merges never cross these pieces
GPT4_PIECES = (
    r"(?i:'s|'d|'m|'t|'ll|'ve|'re)",  # English endings
    r"[^\r\n\p{L}\p{N}]?\p{L}+",  # letters, with the one space or sign before them
    r"\p{N}{1,3}",  # digits in threes
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the line ends after them
    r"\s*[\r\n]+",  # line ends, with the space before them
    r"\s+(?!\S)",  # white space except its last character, which goes to the next word
    r"\s+",
)
# white space, words, and single other characters; letters and digits outside ASCII are in no token. Spelt out because
# Python's \s and \w, which the readout paper's release uses, differ from those of the tokenizers library
WORD_PIECES = (r"[\s\x1c-\x1f]+", r"[A-Za-z0-9_]+", r"[^\p{L}\p{N}_\s\x1c-\x1f]")


def train_bpe(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE as in Parcae's appendix R: no normalisation, every byte a token, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(GPT4_PIECES)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text[:DOCUMENT_CHARACTERS] for text in documents), trainer)
    return _finished(tokenizer)


def train_word(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the readout paper's tokenizer: frequent runs of white space, words and single signs; the rest is <unk>."""
    return _most_frequent(documents, vocab_size, word_pieces(), decoders.Fuse())


def word_pieces() -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex("|".join(WORD_PIECES)), behavior="removed", invert=True)


def train_symbols(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer for text made of symbols: tokens are the strings between white space, which is in no token."""
    return _most_frequent(documents, vocab_size, pre_tokenizers.WhitespaceSplit(), None)


def _most_frequent(documents: Iterable[str], vocab_size: int, pieces, decoder) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pieces
    if decoder is not None:  # else tokens are joined by spaces
        tokenizer.decoder = decoder
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size,
        min_frequency=WORD_MIN_FREQUENCY,
        special_tokens=[UNKNOWN, *SPECIAL_TOKENS.values()],
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return _finished(tokenizer, unk_token=UNKNOWN)


TRAINERS = {"bpe": train_bpe, "word": train_word, "symbols": train_symbols}


def make_tokenizer(data: DataConfig, documents: Iterable[str]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a recipe; `documents` are those of the training split."""
    if data.tokenizer not in TRAINERS:
        return mark_documents(load_tokenizer(data.tokenizer), data)
    limit = DEFAULT_CHARACTERS if data.tokenizer_max_characters is None else data.tokenizer_max_characters
    of_each = DOCUMENT_CHARACTERS if data.tokenizer == "bpe" else math.inf
    tokenizer = TRAINERS[data.tokenizer](_up_to(documents, limit, of_each), data.tokenizer_vocab_size)
    if data.joined_by is not None:  # prompts have no bos either
        _begin_prompts(tokenizer, [])
    if len(tokenizer) > data.tokenizer_vocab_size:
        raise RecipeError(
            f"data.tokenizer_vocab_size={data.tokenizer_vocab_size} is too small: special tokens and single bytes "
            f"alone are {len(tokenizer)}"
        )
    return mark_documents(tokenizer, data)


def mark_documents(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> PreTrainedTokenizerBase:
    """Set bos, eos and the beginning of prompts as in the documents: by `document_tokens` and `start_token`.

    If documents have only one special token, it is both bos and eos. So the saved tokenizer begins and ends texts as
    in training, when it is used to score or to generate.
    """
    if data.start_token is None and data.document_tokens == "both":
        _end_no_prompt(tokenizer)
        return tokenizer
    if data.start_token is not None:
        if data.start_token not in tokenizer.get_vocab():
            raise RecipeError(
                f"data.start_token={data.start_token!r} is no token of {data.tokenizer!r}; its special tokens are "
                f"{', '.join(sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}))}"
            )
        tokenizer.bos_token = data.start_token
    if data.document_tokens == "start":
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # which no document has
        tokenizer.bos_token = tokenizer.eos_token = tokenizer.bos_token or tokenizer.eos_token
    if data.document_tokens == "end":
        tokenizer.bos_token = tokenizer.eos_token
    _begin_prompts(tokenizer, [] if data.document_tokens == "none" else [tokenizer.bos_token])
    return tokenizer


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    if looks_like_path(name) and not expanded(name).exists():
        raise RecipeError(
            f"there is no tokenizer folder {name!r} (looked from {Path.cwd()}); set data.tokenizer to a folder, a "
            f"name on the hub, or one of {', '.join(TRAINERS)} to train one"
        )
    try:
        tokenizer = read_tokenizer(expanded(name) if expanded(name).exists() else name)
    except Exception as error:  # the hub, the folder and the file raise different kinds
        said = " ".join(str(error).split())
        raise RecipeError(
            f"can not load tokenizer {name!r}: {said}; set data.tokenizer to a folder that holds a tokenizer.json, a "
            f"name on the hub, or one of {', '.join(TRAINERS)} to train one"
        ) from error
    if not tokenizer.is_fast:
        raise RecipeError(f"tokenizer {name!r} has no fast version (tokenizer.json), which preparing data needs")
    if tokenizer.eos_token is None and tokenizer.bos_token is None:
        raise RecipeError(
            f"tokenizer {name!r} has neither a bos nor an eos token, so nothing separates documents: set its "
            "eos_token and save it anew"
        )
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.bos_token
    return tokenizer


def read_tokenizer(place: str | Path) -> PreTrainedTokenizerBase:
    """Open a tokenizer, also that of a published model: AutoTokenizer would open its config.json first, and ask
    whether to run the code that this names."""
    stored = read_json_config(place, {})
    known = {"config": LoopedConfig()} if stored is not None and is_published(stored) else {}
    return AutoTokenizer.from_pretrained(place, **known)


def start_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that begins documents: bos, or eos if the tokenizer has no bos."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def tokenizer_settings(data: DataConfig) -> dict:
    """Return what decides the tokenizer besides the documents, without training it; one in a folder is loaded."""
    start = {} if data.start_token is None else {"start_token": data.start_token}
    if data.tokenizer in TRAINERS:
        return {
            "name": data.tokenizer,
            "vocab_size": data.tokenizer_vocab_size,
            "max_characters": data.tokenizer_max_characters,
            **({"pieces": list(WORD_PIECES)} if data.tokenizer == "word" else {}),
        }
    if expanded(data.tokenizer).exists() or looks_like_path(data.tokenizer):
        name = str(expanded(data.tokenizer).absolute())
        return {"name": name, **start, "sha256": tokenizer_hash(load_tokenizer(data.tokenizer))}
    return {"name": data.tokenizer, **start}


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that is equal for tokenizers that give equal tokens, and unchanged by saving and loading."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["content"]: token["id"] for token in parts["added_tokens"]}
    decisive = [parts["model"], parts["normalizer"], parts["pre_tokenizer"], added]
    decisive += [start_id(tokenizer), tokenizer.eos_token_id]
    found = [token for token in parts["added_tokens"] if not token["special"]]  # special tokens are not
    decisive += [found] if found else []
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


class Encoder:
    """Turns documents into tokens. `<|bos|>` inside a text is encoded as text: no document can add a special token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, document_tokens: str = "both"):
        self.tokenizer = without_special_words(tokenizer)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        start, end = start_id(tokenizer), tokenizer.eos_token_id
        if document_tokens == "both" and start == end:
            document_tokens = "start"
        self.starts = [start] if document_tokens in ("both", "start") else []
        self.ends = [end] if document_tokens in ("both", "end") else []
        self.marks = {*self.starts, *self.ends}

    def __call__(self, texts: Iterable[str]) -> Iterator[list[int]]:
        # the library keeps many times a token's size for each token
        for chunk in in_groups(texts, 128, ENCODED_CHARACTERS):
            for text, encoding in zip(chunk, self.tokenizer.encode_batch_fast(chunk, add_special_tokens=False)):
                if not self.marks.isdisjoint(ids := encoding.ids):
                    self.refuse_forged(text, ids)
                yield [*self.starts, *ids, *self.ends]

    def refuse_forged(self, text: str, ids: list[int]):
        place = next(place for place, id in enumerate(ids) if id in self.marks)
        begin, end = self.tokenizer.encode(text, add_special_tokens=False).offsets[place]
        raise RecipeError(
            f"a document contains {text[begin:end]!r}, which the tokenizer turns into the token that begins or ends "
            f"documents ({ids[place]}): {text[max(0, begin - 40) : end + 40]!r}. Leave such documents out, or name "
            "another tokenizer"
        )

    def num_bytes(self, text: str) -> int:
        return len(text.encode())

    def __getstate__(self):  # encode_special_tokens is not part of the library's state
        return {**vars(self), "tokenizer": self.tokenizer.to_str()}

    def __setstate__(self, state):
        vars(self).update(state)
        self.tokenizer = Tokenizer.from_str(state["tokenizer"])
        self.tokenizer.encode_special_tokens = True


def without_special_words(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the library's tokenizer for texts. Models of words or pieces (not BPE) find all that is in their
    vocabulary, so special tokens have other names there; ids stay."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    model = parts["model"]
    special = {token["content"] for token in parts["added_tokens"] if token["special"]}
    special |= {tokenizer.bos_token, tokenizer.eos_token}
    special -= {tokenizer.unk_token, model.get("unk_token")}
    if model["type"] != "BPE":
        words = model["vocab"]  # with ids, or for Unigram with scores
        names = {token: NOT_A_CHARACTER + token for token in special.intersection(dict(words))}
        if isinstance(words, dict):
            model["vocab"] = {names.get(word, word): id for word, id in words.items()}
        else:
            model["vocab"] = [[names.get(word, word), score] for word, score in words]
        # an added token that is not in the vocabulary would get another id
        parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] not in names]
    return Tokenizer.from_str(json.dumps(parts))


class TokensAsTheyAre:
    """Used instead of an `Encoder` for documents that are tokenised already."""

    starts: list[int] = []

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.lengths = token_bytes(tokenizer).numpy()

    def __call__(self, documents: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        for ids in documents:
            for id in (ids.min(), ids.max()):
                if not 0 <= id < len(self.lengths):
                    raise RecipeError(
                        f"a document holds token {id}, but data.tokenizer has {len(self.lengths)}: name the tokenizer "
                        "that the tokens were made with"
                    )
            yield ids

    def num_bytes(self, ids: np.ndarray) -> int:
        return int(self.lengths[ids].sum())


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id + 1: more than the number of tokens where ids are left out."""
    return max(tokenizer.get_vocab().values()) + 1


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the number of UTF-8 bytes of each token, int64 [largest id + 1]; special tokens have 0.

    Text that a word tokenizer drops or does not know is in no token (`share_kept`). A space that a tokenizer adds
    before a text is in the text's first token (`bytes_before_a_text`).
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    kinds = json.dumps([parts["pre_tokenizer"], parts["decoder"]], ensure_ascii=False)
    decoder = tokenizer.backend_tokenizer.decoder
    added = {token["id"]: token for token in parts["added_tokens"]}
    special = {token["id"] for token in added.values() if token["special"]} | set(tokenizer.all_special_ids)
    lengths = torch.zeros(num_ids(tokenizer), dtype=torch.int64)
    for token, index in tokenizer.get_vocab().items():
        if index in special:
            continue
        if index in added:
            lengths[index] = len(token.encode())
        elif '"ByteLevel"' in kinds:  # one character for every byte
            lengths[index] = len(token)
        elif '"ByteFallback"' in kinds and len(token) == 6 and token.startswith("<0x"):
            lengths[index] = 1
        elif '"WordPiece"' in kinds or '"BPEDecoder"' in kinds:  # with the space that the decoder writes between words
            once, twice = (len(decoder.decode(tokens).encode()) for tokens in ([token], [token, token]))
            lengths[index] = twice - once
        else:
            lengths[index] = len((token.replace("▁", " ") if "▁" in kinds else token).encode())
    return lengths


def share_kept(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> float:
    """Return which part of the characters of some texts a tokenizer gives back, white space aside: less than 1 if it
    drops text or does not know it."""
    kept = total = 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        known = [token for token in ids if token != tokenizer.unk_token_id]
        given, asked = (Counter("".join(each.split())) for each in (tokenizer.decode(known), text))
        kept, total = kept + (given & asked).total(), total + asked.total()
    return kept / total if total else 1.0


def bytes_before_a_text(tokenizer: PreTrainedTokenizerBase, lengths: torch.Tensor) -> int:
    """Return the bytes of a text's first token that are not in the text: 1 for tokenizers that add a space before
    every text, else 0. lengths: the tokenizer's `token_bytes`."""
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return max(0, int(lengths[ids].sum()) - len("a"))


def _finished(tokenizer: Tokenizer, **special) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL_TOKENS, **special
    )
    _begin_prompts(tokenizer, [tokenizer.bos_token])
    return tokenizer


def _end_no_prompt(tokenizer: PreTrainedTokenizerBase):
    """Take what a tokenizer that is brought along writes behind prompts (an eos, `[SEP]`) away: they are to go on."""
    of_template = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    if 0 in of_template and of_template[-1]:
        _begin_prompts(tokenizer, tokenizer("a").tokens()[: of_template.index(0)])


def _begin_prompts(tokenizer: PreTrainedTokenizerBase, tokens: list[str]):
    """Make prompts begin with these tokens; with add_special_tokens=False they always begin without them."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[*tokens, "$A"],
        pair=[*tokens, "$A", *tokens, "$B"],
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens],
    )
    # when they are opened, classes such as T5's write their own tokens around prompts, and so do the settings below
    tokenizer.__class__ = PreTrainedTokenizerFast
    tokenizer.model_input_names = PreTrainedTokenizerFast.model_input_names  # without BERT's token_type_ids
    tokenizer.init_kwargs["padding_side"] = tokenizer.padding_side  # Llama's class pads left
    for name in ("add_bos_token", "add_eos_token"):
        tokenizer.init_kwargs.pop(name, None)


def in_groups(documents: Iterable, largest: int, length: float) -> Iterator[list]:
    """Yield lists of `largest` documents, or fewer where these have `length` characters or tokens already."""
    group, sum_lengths = [], 0
    for document in documents:
        group.append(document)
        sum_lengths += 0 if document is None else len(document)
        if len(group) == largest or sum_lengths >= length:
            yield group
            group, sum_lengths = [], 0
    if group:
        yield group


def _up_to(documents: Iterable[str], num_characters: int, of_each: float) -> Iterator[str]:
    """Yield the first documents, until they have `num_characters` characters; of each, `of_each` count at most."""
    for text in documents:
        if num_characters <= 0:
            return
        yield text
        num_characters -= min(len(text), of_each)
