"""Sources of documents: any `datasets` name, local files, or the text that comes with every Python.

Everything is read through `datasets` into one column `text`, which holds token ids if `token_field` is set. A document
is a row of the source, with two exceptions: of many plain text files each is one, and fewer are cut into pieces, so
that some can be held out; and in sources that hold one line per row, such as WikiText, `document_start` joins lines to
documents. With `joined_by` there are no documents: all rows are one text.
"""

import contextlib
import glob
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import fsspec
from datasets import (
    Dataset,
    DatasetBuilder,
    IterableDataset,
    Value,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from datasets.packaged_modules.parquet.parquet import Parquet
from fsspec.compression import available_compressions
from pyarrow import ArrowInvalid
from pyarrow.parquet import read_schema
from pyarrow.types import is_null
from tqdm import tqdm

from looped_recipes.common.hub import can_only_be_path
from looped_recipes.settings.paths import expanded, matching
from looped_recipes.settings.recipe import DataConfig, RecipeError
from looped_recipes.settings.yaml_files import shortly

from .embedded import embedded_documents, library_files
from .strict_json import is_text, strict_about_text
from .whole_zstd import read_whole_frames


Documents = Dataset | IterableDataset

BUILDERS = {
    ".txt": "text",
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
COMPRESSIONS = {".gz", ".zst", ".xz", ".bz2"}
BYTE_ORDER_MARK = "\ufeff"
# characters after which a text file is cut at the next blank line: one piece in a hundred is held out by default
TEXT_DOCUMENT = 4096
MANY_TEXTS = 1000  # of so many text files enough can be held out whole: they are documents as they are
LONGEST_TEXT = 2**20  # characters after which even these are cut, for the memory of tokenizers
LONGEST_REASON = 500  # characters
PARQUET_ROWS = 1000  # that are read at once
FRONT_MATTER = re.compile(r"\s*---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)  # the YAML that begins a README.md
WORD_END = re.compile(r"[^\W_](?=\s+\S)")  # a letter or digit before white space
SPACE_END = re.compile(r"\S\s+(?=\S)")  # white space before anything else
WIKITEXT = {"Salesforce/wikitext", "wikitext"}
WIKITEXT_ARTICLE = r"\s*= [^=].* =\s*$"  # " = Title = "; sections are " = = Section = = "


@dataclass(frozen=True)
class Source:
    name: str
    config: str | None
    split: str
    text_field: str
    streaming: bool
    max_documents: int | None
    document_start: str | None
    joined_by: str | None = None
    token_field: str | None = None
    training: str | None = None  # the source of training, for one of validation, whose texts are cut alike

    def settings(self) -> dict:
        """Return what decides the documents, without reading them; it changes when a file changes."""
        fields = {**vars(self), "document_start": self._document_start()}
        del fields["training"]
        if self.name == "embedded":
            sizes = [[name, path.stat().st_size] for name, path in library_files()]
            return {
                "name": self.name,
                "python": platform.python_version(),
                "files": _digest(sizes),
                "max_documents": self.max_documents,
                "document_start": self.document_start,
                "joined_by": self.joined_by,
            }
        if self.joined_by is not None:
            fields["cut"] = "behind words"
        files = local_files(self.name)
        if files is not None:
            fields["files"] = _digest_of_files(files)
            if self.num_texts:
                fields["text_size"] = self.text_size
            fields["name"] = str(expanded(self.name).absolute())
            if (said := said_of_splits(expanded(self.name))) is not None:
                fields["splits"] = _digest(said)
        return fields

    def load(self) -> Documents:
        """Return the documents, or the pieces of the joined text, as one column `text`, always in the same order."""
        with readable(self):
            documents = self._rows()
            if self._document_start() is not None:
                joined = {"rows": documents, "document_start": self._document_start()}
                documents = _kind(documents).from_generator(join_lines, gen_kwargs=joined)
            if self.joined_by is not None:
                joined = {"rows": documents, "joined_by": self.joined_by}
                # `datasets` keeps what comes out under the name of the function: other pieces need another name
                documents = _kind(documents).from_generator(join_and_cut, gen_kwargs=joined)
            if self.max_documents is not None:
                documents = documents.take(min(self.max_documents, _length(documents, self.max_documents)))
            if next(iter(documents), None) is None:
                raise RecipeError(f"{self.name!r} holds no documents: name a source that holds some")
            return documents

    def rows(self) -> Iterator[str]:
        """Yield the texts of the source unchanged, without empty ones, at most `max_documents`."""
        with readable(self):
            yield from islice(filter(None, (row["text"] for row in self._rows())), self.max_documents)

    def _rows(self) -> Documents:
        if self.name == "embedded":
            return Dataset.from_dict({"text": embedded_documents()})
        return self._rename(self._open())

    def _document_start(self) -> str | None:
        if self.joined_by is not None:
            return None
        return WIKITEXT_ARTICLE if self.document_start is None and self.name in WIKITEXT else self.document_start

    def _open(self) -> Documents:
        read_whole_frames()
        files = local_files(self.name)
        if files is not None and self.config is not None and not expanded(self.name).is_dir():
            raise RecipeError(f"data.source_config={self.config!r} would have no effect on files: leave it out")
        if files is None:
            return load_dataset(self.name, self.config, split=self.split, streaming=self.streaming)
        if is_saved(self.name):
            saved = load_from_disk(expanded(self.name))
            if isinstance(saved, Dataset):
                return saved
            refuse_unknown_splits([self.split], list(saved))
            return saved[self.split]
        reader = self._reader(files)
        refuse_unknown_splits(split_names(self.split), splits_of(reader))
        if isinstance(reader, Parquet):
            self.refuse_odd_columns(reader)
        of_texts = "" if self.token_field else strict_about_text(reader, self.text_field)
        # `datasets` caches on the disk by path and time of change, which a replaced file may share with the old one
        reader.config_id += f"{of_texts}-files-{_digest_of_files(files)[:16]}"
        reader._cache_dir = reader._output_dir = reader._build_cache_dir()
        documents = _read(reader, self.split, self.streaming)
        if _builder(self.name, files) == "text" and self.text_field == "text":
            size = {"size": self.text_size}
            documents = documents.map(_cut_texts, batched=True, batch_size=16, fn_kwargs=size)
        return documents

    @property
    def num_texts(self) -> int:
        """Return the number of plain text files; 0 if the source is of another kind."""
        return num_texts(self.name)

    @property
    def text_size(self) -> int:
        """Return the number of characters after which a text file is cut."""
        return LONGEST_TEXT if num_texts(self.training or self.name) >= MANY_TEXTS else TEXT_DOCUMENT

    def unused_splits(self) -> list[str]:
        """Return the splits of a folder that `split` leaves out."""
        if self.name == "embedded" or not expanded(self.name).is_dir():
            return []
        if is_saved(self.name):
            saved = load_from_disk(expanded(self.name))
            known = [] if isinstance(saved, Dataset) else list(saved)
        else:
            known = splits_of(self._reader(local_files(self.name)))
        return [] if self.split == "all" else [split for split in known if split not in split_names(self.split)]

    def _reader(self, files: list[Path]) -> DatasetBuilder:
        builder, options = _builder(self.name, files), {}
        if builder == "text":
            options = {"sample_by": "document"}
        elif builder == "parquet":
            options = {"batch_size": PARQUET_ROWS}  # by default as many as the first row group has, which may be none
            if self.column in (schema := read_schema(files[0])).names:
                if self.token_field or is_text(schema.field(self.column).type):
                    options["columns"] = [self.column]  # other columns may differ from file to file
        folder = expanded(self.name)
        if not folder.is_dir():
            data_files = [glob.escape(str(path.absolute())) for path in files]
            return load_dataset_builder(builder, data_files=data_files, **options)
        # `datasets` finds the splits in the names of the files, or in a README.md as on the hub; it also needs the
        # name of the folder, so the path is absolute (`.` has no name)
        reader = load_dataset_builder(os.path.abspath(folder), self.config, **options)
        refuse_left_out(self.name, files, reader)
        return reader

    @property
    def column(self) -> str:
        """Return the name of the column that holds the documents: their texts, or their tokens."""
        return self.text_field if self.token_field is None else self.token_field

    def _rename(self, documents: Documents) -> Documents:
        column = self.column
        columns = documents.column_names or list(next(iter(documents), {column: None}))
        field, wanted = ("text_field", "text") if self.token_field is None else ("token_field", "token ids")
        advice = f"rename the one that holds the {wanted}, or, in a recipe, set data.{field} to it"
        first = " in its first rows" if isinstance(documents, IterableDataset) else ""
        if column not in columns:
            listed = ", ".join(map(repr, columns))
            raise RecipeError(f"{self.name!r} has no column {column!r}; it has {listed}{first}: {advice}")
        feature = (documents.features or {}).get(column)
        if isinstance(feature, Value) and feature.dtype == "null":
            raise RecipeError(f"{self.name!r} holds no documents{first}: column {column!r} is empty; {advice}")
        if type(feature).__name__ == "Json" and field == "text_field":  # the type that `datasets` gives to mixed types
            self.refuse_mixed_types(documents)
        if feature is not None and not (is_text(feature) if field == "text_field" else is_tokens(feature)):
            also = "; data.token_field reads a column of token ids" if is_tokens(feature) else ""
            raise RecipeError(
                f"column {column!r} of {self.name!r} holds {feature}, not {wanted}; it has the columns "
                f"{', '.join(map(repr, columns))}: {advice}{also}"
            )
        documents = documents.select_columns([column])
        documents = documents if column == "text" else documents.rename_column(column, "text")
        # last, as a stream of datasets 4 turns arrays into objects where another step is behind it
        return documents if self.token_field is None else documents.with_format("numpy")

    def refuse_odd_columns(self, reader: Parquet):
        """Refuse a Parquet file without the column that others have, and one whose column is not text as theirs is:
        `datasets` would write its numbers and dates as text."""
        paths = {str(split): paths for split, paths in reader.config.data_files.items()}
        kinds = {}
        for path in (path for split in split_names(self.split) or paths for path in paths[split]):
            schema = read_schema(path)
            kinds[path] = schema.field(self.column).type if self.column in schema.names else None
        having = next((path for path, kind in kinds.items() if kind is not None), None)
        of_text = next((path for path, kind in kinds.items() if is_text(kind)), None)
        for path, kind in kinds.items():
            if kind is None and having:
                raise RecipeError(
                    f"{path!r} has no column {self.column!r}, which {having!r} has: add it, or leave this file out"
                )
            if of_text and not self.token_field and not is_text(kind) and not is_null(kind):
                raise RecipeError(
                    f"column {self.column!r} of {path!r} holds {kind}, not text as that of {of_text!r}: make it text, "
                    "or leave this file out"
                )

    def refuse_mixed_types(self, documents: Documents):
        """Refuse a column that mixes text and other values; the error names the first row that is not text."""
        texts, other = 0, None
        for number, row in enumerate(documents):
            value = row[self.column]
            texts += isinstance(value, str)
            if other is None and value is not None and not isinstance(value, str):
                other = number, value
        if texts and other is not None:
            raise RecipeError(
                f"row {other[0]} (from 0) of {self.name!r} holds {shortly(other[1])} in column "
                f"{self.column!r}, not text as {texts} other rows do: repair it or leave it out"
            )


def is_tokens(feature) -> bool:
    """Return whether a feature is a list of integers, of any list type of `datasets`."""
    inner = getattr(feature, "feature", None)
    return isinstance(inner, Value) and "int" in inner.dtype


def training_source(data: DataConfig) -> Source:
    return _source(data, data.source, data.source_config, data.split)


def validation_source(data: DataConfig) -> Source | None:
    """Return the separate source of validation; None if documents of the training source are held out instead."""
    if data.validation_source is None and data.validation_split is None:
        return None
    own = data.validation_source is not None
    config = None if own and data.validation_source != data.source else data.source_config
    return _source(data, data.validation_source or data.source, config, data.validation_split or "train")


def _source(data: DataConfig, name: str, config: str | None, split: str) -> Source:
    return Source(
        name=name,
        config=config,
        split=split,
        text_field=data.text_field,
        streaming=data.streaming,
        max_documents=data.max_documents,
        document_start=data.document_start,
        joined_by=data.joined_by,
        token_field=data.token_field,
        training=data.source,
    )


@contextlib.contextmanager
def readable(source: Source):
    """Turn every error of reading into one about the source: `datasets` and pyarrow raise many kinds of errors."""
    try:
        yield
    except RecipeError:
        raise
    except StopIteration as error:
        raise RecipeError(f"{source.name!r} holds no documents: name a source that holds some") from error
    except Exception as error:
        raise RecipeError(f"can not read {what_is_wrong(source, error)}") from error


def what_is_wrong(source: Source, error: Exception) -> str:
    files = [] if source.name == "embedded" else local_files(source.name)
    if files is None:
        advice = "it is no file here either; check the name, data.source_config, data.split and the connection"
        return f"{source.name!r}: {reason_of(error)}; {advice}"
    settings = " and data.source_config" if source.config is not None else ""
    for file in tqdm(files, "look for the damaged file", disable=None) if len(files) > 1 else []:
        own_error = why_unreadable(replace(source, name=str(file), config=None, split="train", streaming=True))
        if own_error is not None:
            return f"{str(file)!r}: {reason_of(own_error, file)}; repair this file or leave it out"
    reason = reason_of(error, files[0] if len(files) == 1 else None)
    return f"{source.name!r}: {reason}; check the file{'s' * (len(files) != 1)}{settings}"


def why_unreadable(source: Source) -> Exception | None:
    """Return the error that reading all rows of a source raises; None if there is none."""
    try:
        for _ in source._open():
            pass
    except Exception as error:
        return error


def where_broken(file: Path, reason: Exception) -> str:
    """Return the place of the first line that is not UTF-8 or no JSON, for the error message; empty if none is known:
    a first line that is no JSON may be a part of some."""
    by_kind = {"json": (ArrowInvalid, UnicodeDecodeError), "text": UnicodeDecodeError}
    if not isinstance(reason, by_kind.get(_builder_of(file), ())):
        return ""
    parse = bytes.decode if isinstance(reason, UnicodeDecodeError) else json.loads
    with fsspec.open(str(file), "rb", compression="infer") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                parse(line if line.strip() else b"0")
            except UnicodeDecodeError as error:
                return f" (line {number}, byte {error.start} of it)"
            except ValueError:
                return f" (line {number})" if number > 1 else ""
    return ""


def reason_of(error: Exception, file: Path | None = None) -> str:
    reason = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
    said = " ".join(str(reason).split())
    said = said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]}..."  # pyarrow quotes whole documents
    if file is not None and (place := where_broken(file, reason)):
        said = re.sub(r" in row \d+$", "", said) + place  # pyarrow counts rows from the beginning of a block
    return f"{type(reason).__name__}: {said}"


def local_files(name: str) -> list[Path] | None:
    """Return the data files that `name` stands for, sorted; None if it is a name on the hub."""
    path = expanded(name)
    try:
        if path.is_file():
            return [path]
    except OSError as error:
        raise RecipeError(f"can not read {shortly(name)}: {error.strerror}; name a file or a dataset") from None
    if path.is_dir():
        found = [
            file
            for file in path.rglob("*")
            if file.is_file() and _builder_of(file) and file.name not in METADATA and not is_hidden(file, path)
        ]
        if glob.has_magic(str(path.absolute())):
            raise RecipeError(f"the name of folder {name!r} holds one of []*?: rename it, or name its files")
        if not found:
            raise RecipeError(f"folder {name!r} holds no data files ({', '.join(BUILDERS)})")
        return sorted(found)
    if set(name) & set("*?"):
        found = [file for file in matching(path) if file.is_file()]
        if not found:
            raise RecipeError(f"no file matches {name!r} (looked from {Path.cwd()})")
        return sorted(found)
    if looks_like_path(name):
        raise RecipeError(f"there is no file or folder {name!r} (looked from {Path.cwd()})")
    if name in _PACKAGED_DATASETS_MODULES:  # it would read all files of the working directory, even pickles by pandas
        raise RecipeError(f"{name!r} is a format of `datasets`, not a dataset: name the files, or their folder")
    return None


def num_texts(name: str) -> int:
    files = None if name == "embedded" or is_saved(name) else local_files(name)
    return len(files) if files is not None and all(_builder_of(file) == "text" for file in files) else 0


def is_hidden(file: Path, folder: Path) -> bool:
    """Return whether `datasets` ignores a file of a folder, such as files left by editors, notebooks or macOS."""
    *folders, name = file.relative_to(folder).parts
    return name.startswith(".") or any(inner.startswith((".", "__")) for inner in folders)


def check_files(name: str):
    """Refuse files that do not exist, are empty or of an unknown kind, before any slow work."""
    if (files := local_files(name)) is not None:
        _builder(name, files)


def looks_like_path(name: str) -> bool:
    """Return whether a name is a path and not a name on the hub."""
    return can_only_be_path(name) or _builder_of(Path(name)) is not None


def refuse_left_out(name: str, files: list[Path], reader: DatasetBuilder):
    """Refuse files that would not be read: if some file names in a folder contain a split, `datasets` ignores the
    files whose names contain none."""
    if (expanded(name) / "README.md").exists():  # it assigns files to splits
        return
    taken = {os.path.realpath(path) for paths in (reader.config.data_files or {}).values() for path in paths}
    left = [path.name for path in files if os.path.realpath(path) not in taken]
    if taken and left:
        raise RecipeError(
            f"folder {name!r} holds {len(left)} files that are of no split, e.g. {left[0]!r}: put a split into their "
            "names (train, validation, test), or name the files with a pattern"
        )


def said_of_splits(folder: Path) -> str | None:
    """Return the text in which a folder assigns its files to splits for `datasets`; None if there is none."""
    readme, alone = folder / "README.md", folder / ".huggingface.yaml"
    said = ""
    if readme.is_file() and (front := FRONT_MATTER.match(readme.read_text(encoding="utf-8", errors="replace"))):
        said += front[1]
    if alone.is_file():
        said += f"\n{alone.read_text(encoding='utf-8', errors='replace')}"
    return said if re.search(r"^[\"']?(configs|dataset_info)\b", said, re.MULTILINE) else None


def is_saved(name: str) -> bool:
    """Return whether a folder was written by `save_to_disk` of `datasets`."""
    return any((expanded(name) / state).exists() for state in ("state.json", "dataset_dict.json"))


def splits_of(reader: DatasetBuilder) -> list[str]:
    return [str(split) for split in reader.config.data_files or {}]


def split_names(split: str) -> list[str]:
    """Return the names in a split expression of `datasets`: train and test in train[:10%]+test."""
    return [] if split == "all" else [part.partition("[")[0].strip() for part in split.split("+")]


def refuse_unknown_splits(asked: list[str], known: list[str]):
    for split in asked:
        if split not in known:
            listed = ", ".join(map(repr, known))
            raise RecipeError(f"there is no split {split!r}, only {listed}: set data.split or data.validation_split")


def _read(reader: DatasetBuilder, split: str, streaming: bool) -> Documents:
    if streaming:
        return reader.as_streaming_dataset(split=split)
    reader.download_and_prepare()
    return reader.as_dataset(split=split)


def _builder_of(path: Path) -> str | None:
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSIONS]
    return BUILDERS.get(suffixes[-1]) if suffixes else None


def _builder(name: str, files: list[Path]) -> str:
    kinds = sorted({_builder_of(path) or f"unknown ({path.name})" for path in files})
    if kinds[0].startswith("unknown") and len(files) == 1:
        raise RecipeError(
            f"{name!r} is of a kind that is not read; known are {', '.join(BUILDERS)} (pandas makes them of tables: "
            "read_csv(...).to_parquet(...))"
        )
    if len(kinds) > 1 or kinds[0].startswith("unknown"):
        raise RecipeError(
            f"{name!r} stands for files of kind {', '.join(kinds)}; name files of one kind, with a pattern such as "
            f"'folder/**/*.jsonl' (known are {', '.join(BUILDERS)})"
        )
    if not any(path.stat().st_size for path in files):
        raise RecipeError(f"{name!r} is empty: name a source that holds documents")
    of_zstd = [path.name for path in files if path.suffix == ".zst"]
    if of_zstd and "zstd" not in available_compressions():
        raise RecipeError(f"to read {of_zstd[0]!r} of {name!r} a package is missing: pip install zstandard")
    return kinds[0]


def _kind(documents: Documents) -> type:
    return IterableDataset if isinstance(documents, IterableDataset) else Dataset


def _length(documents: Documents, unknown: int) -> int:
    return unknown if isinstance(documents, IterableDataset) else len(documents)


def _digest(value) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _digest_of_files(files: list[Path]) -> str:
    stats = [(path, path.stat()) for path in files]
    return _digest([[str(path.absolute()), stat.st_size, stat.st_mtime_ns] for path, stat in stats])


def join_lines(rows: Iterable[dict], document_start: str) -> Iterator[dict]:
    """Join lines to documents; a document begins at a line that `document_start` matches."""
    begins = re.compile(document_start).match
    lines: list[str] = []
    for row in rows:
        line = row["text"] or ""
        if begins(line) and lines:
            yield {"text": "".join(lines)}
            lines = []
        lines.append(line if line.endswith("\n") else line + "\n")
    if lines:
        yield {"text": "".join(lines)}


def join_and_cut(rows: Iterable[dict], joined_by: str) -> Iterator[dict]:
    """Yield pieces of `joined_by.join(rows)` without empty rows, cut where white space follows a letter or digit.

    Tokenizers cut there too, whatever the white space is, so they find the same tokens as in the whole text. Where a
    long text has no such place, as in Chinese, it is cut behind white space, and some tokenizers find others there.
    """
    piece, searched = "", 0
    for line in filter(None, (row["text"] for row in rows)):
        piece += (joined_by if piece else "") + line
        if line.isspace():
            continue
        end = last_end(WORD_END, piece, searched)
        if not end and len(piece) > TEXT_DOCUMENT:
            end = last_end(SPACE_END, piece)
        if end:
            yield {"text": piece[:end]}
            piece = piece[end:]
        searched = len(piece.rstrip()) - 1
    if piece:
        yield {"text": piece}


def last_end(pattern: re.Pattern, text: str, begin: int = 0) -> int:
    """Return where the last match ends; 0 if there is none."""
    return max((match.end() for match in pattern.finditer(text, begin)), default=0)


def cut_at_blank_lines(text: str, size: int) -> list[str]:
    """Return pieces that join to `text`: cut at the first blank line after `size` characters, or at the first line end
    after 2 * size; a longer line is cut into parts of 2 * size."""
    pieces, piece, length = [], [], 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), 2 * size):
            piece.append(line[start : start + 2 * size])
            length += len(piece[-1])
            if length >= 2 * size or (length >= size and not line.strip()):
                pieces.append("".join(piece))
                piece, length = [], 0
    return pieces + ["".join(piece)] if piece else pieces


def _cut_texts(batch: dict, size: int) -> dict:
    texts = (text.removeprefix(BYTE_ORDER_MARK) for text in batch["text"])
    return {"text": [piece for text in texts for piece in cut_at_blank_lines(text, size)]}
