"""Prepared data: a folder of memory-mapped token shards, the tokenizer, and a manifest that describes them.

The manifest is written last, when all parts exist: a folder without it is incomplete, and preparing again makes only
the parts that are missing.
"""

import contextlib
import dataclasses
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from looped_recipes.common.checksums import Damaged, check_folder, read_sealed, write_checksums
from looped_recipes.common.files import remove_leftovers, save_pretrained, sync, sync_all
from looped_recipes.common.folder_lock import exclusive
from looped_recipes.common.provenance import provenance
from looped_recipes.common.words import counted
from looped_recipes.settings.paths import expanded
from looped_recipes.settings.recipe import DataConfig, RecipeError

from .overlap import overlap
from .packing import PackedRows
from .part_files import (
    SPLITS,
    Document,
    HeldOut,
    PartMaker,
    damage,
    document_hash,
    fingerprint,
    is_blank,
    make_parts,
    write_facts,
    write_shard,
)
from .sources import Documents, Source, readable, training_source, validation_source
from .tokenizers import (
    TRAINERS,
    Encoder,
    TokensAsTheyAre,
    bytes_before_a_text,
    make_tokenizer,
    num_ids,
    start_id,
    token_bytes,
    tokenizer_hash,
    tokenizer_settings,
)
from .written import SETTINGS, Worker, check_written, is_written, parts_of_workers


__all__ = ["Prepared", "PackedRows", "open_prepared", "prepare"]

FORMAT = 1  # increased when the same settings give different shards
MANIFEST = "manifest.json"
WRITTEN = {"written": "by workers"}  # settings of a source that workers wrote as shards (written.py)
TOKENIZER = "tokenizer"


@dataclass
class Prepared:
    folder: Path
    manifest: dict
    tokenizer: PreTrainedTokenizerBase
    train: PackedRows
    validation: PackedRows
    token_bytes: torch.Tensor  # int64 [vocabulary], 0 for special tokens

    def told(self, max_documents: int | None) -> str:
        """Return a sentence on how much data there is."""
        of_train, of_validation = (self.manifest["counts"][split] for split in SPLITS)
        said = (
            f"training on {counted(of_train['documents'], 'document')} ({of_train['tokens']:,} tokens), validation on "
            f"{of_validation['documents']:,} ({of_validation['tokens']:,} tokens)"
        )
        return said if max_documents is None else f"{said}; at most data.max_documents={max_documents} are read"


def prepare(data: DataConfig, check: bool = True) -> Prepared:
    """Open the shards of these settings, after making all of them or those that are missing.

    check: verify checksums, which reads all shards; if several processes open them, one check is enough.
    """
    training, validation = training_source(data), validation_source(data)
    settings = _settings(data, training, validation)
    folder = expanded(data.source) if settings["source"] == WRITTEN else _folder(data, settings)
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_whole(folder):
            with exclusive(folder, _wait):
                if not _is_whole(folder):  # else another process has made them meanwhile
                    _say_why(folder, settings)
                    _build(folder, data, settings, training, validation)
    return open_prepared(folder, data, settings, check)


def open_prepared(folder: Path | str, data: DataConfig, settings: dict | None = None, check: bool = True) -> Prepared:
    """Open prepared data in `folder`, after checking that they are complete and match `data` (or `settings`)."""
    folder = Path(folder)
    if settings is None:
        settings = _settings(data, training_source(data), validation_source(data))
    manifest = _read_manifest(folder)
    _check_settings(folder, manifest["settings"], settings)
    for shard in (shard for split in SPLITS for shard in manifest["shards"][split]):
        damaged = damage(folder, shard if check else {"file": shard["file"], "size": shard["size"]})
        if damaged is not None:
            raise RecipeError(
                f"shard {folder / damaged}: it was cut, changed or replaced. Delete this file and prepare again: only "
                "it is made anew"
            )
    tokenizer = _open_tokenizer(folder)
    if manifest["tokenizer"]["sha256"] != tokenizer_hash(tokenizer):
        raise RecipeError(
            f"the shards in {folder} were made with another tokenizer than the one in {folder / TOKENIZER} (it was "
            "replaced): put the old one back, or delete the folder and prepare again"
        )
    tokenizer = _as_it_is_now(tokenizer, data)
    lengths = token_bytes(tokenizer)
    rows = {split: _rows(folder, manifest["shards"][split], data, tokenizer, lengths) for split in SPLITS}
    for split in SPLITS:
        if len(rows[split]) == 0:
            _refuse_empty(split, data, manifest)
        manifest["counts"][split]["rows"] = len(rows[split])
    if data.document_masking and data.token_field is not None:
        _refuse_unmarked(rows, data, tokenizer, manifest["counts"])
    return Prepared(folder, manifest, tokenizer, rows["train"], rows["validation"], lengths)


# Settings of the shards


def _settings(data: DataConfig, training: Source, validation: Source | None, written: bool = False) -> dict:
    """Return everything that decides the bytes of the shards, and nothing else.

    Concatenated documents are one stream for every row length and stride, so recipes that differ in these share it.
    """
    if written := written or is_written(data.source):
        check_written(data)
    settings = {
        "format": FORMAT,
        "source": WRITTEN if written else training.settings(),
        "validation": {"fraction": data.validation_fraction} if validation is None else validation.settings(),
        "tokenizer": tokenizer_settings(data),
        "packing": data.packing,
    }
    if data.packing == "best_fit":
        settings |= {"sequence_length": data.sequence_length, "cropped": data.cropped}
    if data.document_tokens != "both":
        settings["document_tokens"] = data.document_tokens
    return settings


def _folder(data: DataConfig, settings: dict) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "-", Path(data.source).name).strip("-")[:40] or "data"
    return expanded(data.cache_dir) / f"{name}-{fingerprint(settings)[:12]}"


def _say_why(folder: Path, settings: dict):
    """Say that data are prepared, and what has changed if they were prepared from files elsewhere or as they were."""
    print(f"preparing the data in {folder}", flush=True)
    for path in sorted(folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*/{MANIFEST}")):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecipeError):
            before = _read_manifest(path.parent)["settings"]
            if _without_files(before) == _without_files(settings) and before != settings:
                print(f"{path.parent} was prepared with these settings, but {_changed_files(before, settings)}")


def _without_files(settings: dict) -> dict:
    kept = {key: {**settings[key], "name": None, "files": None} for key in ("source", "validation")}
    return {**settings, **kept}


def _changed_files(before: dict, now: dict) -> str:
    """Say which files are others now."""
    said = []
    for key in ("source", "validation"):
        if before[key] != now[key]:
            was, name = before[key].get("name"), now[key].get("name")
            said.append(f"from {was}" if was != name else f"the size or time of a file of {name} has changed since")
    return ", ".join(said)


# Making shards


def _build(folder: Path, data: DataConfig, settings: dict, training: Source, validation: Source | None):
    if settings["source"] == WRITTEN:
        _check_settings(folder, read_sealed(folder / SETTINGS), settings)
        parts, tokenizer = parts_of_workers(folder), _open_tokenizer(folder)
        _write_manifest(folder, settings, tokenizer, _maker(folder, data, tokenizer, HeldOut(), None), parts)
        return
    remove_leftovers(folder)
    documents = training.load()
    unused = training.unused_splits() if validation is None else []
    if unused:
        print(
            f"{data.source!r} also holds {', '.join(unused)}, which is not read: validation is held out of "
            f"{data.split}; data.validation_split={unused[0]} would take it instead",
            flush=True,
        )
    validation_documents = None if validation is None else validation.load()
    held_out = HeldOut(fraction=data.validation_fraction)
    if data.joined_by is not None:
        held_out = HeldOut()
    elif validation is not None:
        hashes = frozenset(document_hash(text) for text in _texts(validation_documents, validation))
        held_out = HeldOut(hashes=hashes)

    training_texts = (text for text in _texts(documents, training) if text not in held_out)
    tokenizer = _tokenizer(folder, data, training_texts if data.joined_by is None else training.rows())
    maker = _maker(folder, data, tokenizer, held_out, "validation" if validation is None else None)
    parts = make_parts(maker, "part", documents, training, data.num_proc)
    if validation is not None:
        # every document of the validation source
        maker = dataclasses.replace(maker, held_out=HeldOut(fraction=1.0), held_out_split="validation")
        parts += make_parts(maker, "validation", validation_documents, validation, data.num_proc)
    _write_manifest(folder, settings, tokenizer, maker, parts, text_files=training.num_texts)


def _maker(folder: Path, data: DataConfig, tokenizer, held_out: HeldOut, held_out_split: str | None) -> PartMaker:
    return PartMaker(
        folder=folder,
        encode=encoder(data, tokenizer),
        held_out=held_out,
        held_out_split=held_out_split,
        row_length=data.sequence_length if data.packing == "best_fit" else None,
        keep_cropped=data.cropped == "keep",
        dtype="uint16" if num_ids(tokenizer) <= 2**16 else "uint32",
        tokenizer=tokenizer_hash(tokenizer),
    )


def encoder(data: DataConfig, tokenizer) -> Encoder | TokensAsTheyAre:
    if data.token_field is not None:
        return TokensAsTheyAre(tokenizer)
    return Encoder(tokenizer, data.document_tokens if data.joined_by is None else "none")


@contextlib.contextmanager
def shard_writer(data: DataConfig, rank: int, world_size: int) -> Iterator[Worker]:
    """Yield one of several workers that write their documents to the folder `data.source`, see written.py."""
    if data.tokenizer in TRAINERS:
        raise RecipeError(
            f"data.tokenizer={data.tokenizer!r} is trained on all documents, of which a worker sees its own alone: "
            "train one on some of them before, and name its folder"
        )
    folder = expanded(data.source)
    settings = _settings(data, training_source(data), None, written=True)
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder, _wait):
            if (folder / SETTINGS).exists():
                _check_settings(folder, read_sealed(folder / SETTINGS), settings)
            elif any(not path.name.startswith(".") for path in folder.iterdir()):
                raise RecipeError(f"{folder} holds something else: let data.source be an empty or a new folder")
            else:
                write_facts(folder / SETTINGS, settings)
            tokenizer = _tokenizer(folder, data, ())
    maker = _maker(folder, data, tokenizer, HeldOut(fraction=data.validation_fraction), "validation")
    worker = Worker(maker, rank, world_size)
    worker.tell(None)
    yield worker
    worker.end()


def _texts(documents: Documents, source: Source) -> Iterator[Document]:
    with readable(source):
        yield from (row["text"] for row in documents if not is_blank(row["text"]))


def _tokenizer(folder: Path, data: DataConfig, training_texts: Iterable[str]) -> PreTrainedTokenizerBase:
    path = folder / TOKENIZER
    if not path.exists():
        tokenizer = make_tokenizer(data, training_texts)
        temporary = path.with_name(f".saving-{TOKENIZER}")
        try:
            save_pretrained(tokenizer, temporary)
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        write_checksums(temporary)
        sync_all(temporary)
        os.replace(temporary, path)
        sync(folder)
    return _open_tokenizer(folder)


def _open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        check_folder(folder / TOKENIZER)
        return AutoTokenizer.from_pretrained(folder / TOKENIZER)
    except Damaged as error:
        reason = str(error).partition(": if you")[0]
    except Exception as error:  # the Rust library raises plain Exception
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    raise RecipeError(
        f"the tokenizer in {folder / TOKENIZER} can not be read ({reason}): put the old one back, or delete {folder} "
        "and prepare again"
    )


def _as_it_is_now(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the folder `data.tokenizer` if it gives the same tokens: what else it holds, such as a
    chat template, may have changed since the shards were made."""
    if data.tokenizer in TRAINERS or not expanded(data.tokenizer).exists():
        return tokenizer
    now = make_tokenizer(data, ())
    return now if tokenizer_hash(now) == tokenizer_hash(tokenizer) else tokenizer


def _write_manifest(
    folder: Path,
    settings: dict,
    tokenizer: PreTrainedTokenizerBase,
    maker: PartMaker,
    parts: list[str],
    text_files: int = 0,
):
    facts = [read_sealed(folder / f"{part}.json") for part in parts]
    counts = {
        split: {key: sum(fact["counts"][split][key] for fact in facts) for key in ("documents", "tokens", "bytes")}
        for split in SPLITS
    }
    shards: dict[str, list[dict]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        left = []
        for shard in (fact["shards"][split] for fact in facts if split in fact["shards"]):
            shards[split].append(shard)
            stream = np.load(folder / shard["file"], mmap_mode="r")
            begins = np.cumsum([shard["tokens"], *shard["left"]])
            left += [np.array(stream[begin:end]) for begin, end in zip(begins, begins[1:])]
        if left:
            shards[split].append(write_shard(folder / f"remainders.{split}.npy", *maker.pack(left)))
        counts[split]["packed_tokens"] = sum(shard["tokens"] for shard in shards[split])
    manifest = {
        "fingerprint": fingerprint(settings),
        "settings": settings,
        "tokenizer": {
            "sha256": tokenizer_hash(tokenizer),
            "vocab_size": num_ids(tokenizer),
            **{name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")},
        },
        "counts": counts,
        "overlapping_documents": sum(fact["overlapping_documents"] for fact in facts),
        "empty_documents": sum(fact.get("empty_documents", 0) for fact in facts),
        "text_files": text_files,
        "overlap": overlap(*(packed_tokens(folder, shards[split]) for split in ("validation", "train"))),
        "dtype": maker.dtype,
        "shards": shards,
        "made_by": provenance(),
    }
    write_facts(folder / MANIFEST, manifest)


def packed_tokens(folder: Path, shards: list[dict]) -> Iterator[np.ndarray]:
    return (np.load(folder / shard["file"], mmap_mode="r")[: shard["tokens"]] for shard in shards)


# Opening shards


def _read_manifest(folder: Path) -> dict:
    path = folder / MANIFEST
    if not path.exists():
        raise RecipeError(f"{folder} holds no {MANIFEST}: it was not prepared to the end; prepare it again")
    try:
        manifest = read_sealed(path)
        if fingerprint(manifest["settings"]) == manifest["fingerprint"]:
            return manifest
    except (ValueError, KeyError, TypeError):
        pass
    raise RecipeError(f"{path} is damaged: delete it and prepare again; shards that are whole are kept")


def _check_settings(folder: Path, found: dict, wanted: dict):
    before, now = _by_content(found), _by_content(wanted)
    different = [key for key in sorted({*found, *wanted}) if before.get(key) != now.get(key)]
    if different:
        listed = "; ".join(f"{key} was {found.get(key)}, is now {wanted.get(key)}" for key in different)
        raise RecipeError(
            f"the shards in {folder} were made with other settings: {listed}. Set data.cache_dir to another folder, "
            "or delete this one"
        )


def _by_content(settings: dict) -> dict:
    """Leave out where a tokenizer lies, if its checksum is there: shards are also read on other machines."""
    tokenizer = settings["tokenizer"]
    return {**settings, "tokenizer": {**tokenizer, "name": None} if "sha256" in tokenizer else tokenizer}


def _rows(folder: Path, shards: list[dict], data: DataConfig, tokenizer, lengths: torch.Tensor) -> PackedRows:
    return PackedRows(
        list(packed_tokens(folder, shards)),
        sequence_length=data.sequence_length,
        stride=data.stride or data.sequence_length,
        start=start_id(tokenizer),
        token_bytes=lengths,
        learn_start=learns_start(data, tokenizer),
        document_masking=data.document_masking,
        start_ends=data.document_tokens == "end",
        bytes_before_a_text=bytes_before_a_text(tokenizer, lengths),
    )


def learns_start(data: DataConfig, tokenizer) -> bool:
    """Return whether the token that begins documents is predicted: it is, unless it always follows an end token."""
    is_plain = data.document_tokens == "both" and data.token_field is None
    return not is_plain or start_id(tokenizer) == tokenizer.eos_token_id


def _refuse_empty(split: str, data: DataConfig, manifest: dict):
    counts, overlapping = manifest["counts"], manifest["overlapping_documents"]
    fewer = (
        f"{counts[split]['documents']} documents for {split} hold {counts[split]['tokens']} tokens, fewer than one "
        f"row: data.sequence_length={data.sequence_length} is longer than all of them; make it shorter"
    )
    if not counts[split]["documents"]:
        fewer = f"0 documents for {split}: equal ones count as one, and there are too few different ones; add others"
    if not any(of["documents"] for of in counts.values()) and not overlapping:
        raise RecipeError(f"the documents of {data.source!r} hold no text: all are empty")
    if split == "train":
        also = f" ({overlapping} more were left out because they are also in validation)" if overlapping else ""
        raise RecipeError(f"{fewer}, or give more text{also}")
    raise RecipeError(
        f"{fewer}, raise data.validation_fraction={data.validation_fraction} (for training there are "
        f"{counts['train']['documents']} documents), or name a data.validation_source"
    )


def _refuse_unmarked(rows: dict[str, PackedRows], data: DataConfig, tokenizer, counts: dict):
    """Refuse to mask several documents where no token says where one begins or ends: they would see each other."""
    mark, num_documents = start_id(tokenizer), sum(counts[split]["documents"] for split in SPLITS)
    if num_documents > 1 and not any((shard == mark).any() for split in SPLITS for shard in rows[split].shards):
        what = "ends" if data.document_tokens == "end" else "begins"
        raise RecipeError(
            f"data.document_masking needs token {mark} ({tokenizer.convert_ids_to_tokens(mark)!r}) where a document "
            f"{what}, but it is in none of the {num_documents} of {data.source!r}: data.document_tokens=end takes the "
            "token that ends documents (eos) instead of the one that begins them, and data.start_token names another"
        )


def _is_whole(folder: Path) -> bool:
    """Return whether all shards of the manifest exist; a damaged one is not made again but reported to the user."""
    if not (folder / MANIFEST).exists():
        return False
    shards = _read_manifest(folder)["shards"]
    return all((folder / shard["file"]).exists() for split in SPLITS for shard in shards[split])


# Writing


@contextlib.contextmanager
def _writable(folder: Path):
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RecipeError(
                f"no space left for {folder} ({error}); what is finished is kept. Free some space and run again, or "
                "set data.cache_dir to another disk"
            ) from error
        raise RecipeError(f"can not write {folder}: {error}; set data.cache_dir to a folder you may write") from error


def _wait(lock):
    print(f"another process is preparing {Path(lock.lock_file).parent}; waiting for it", flush=True)
    lock.acquire()
