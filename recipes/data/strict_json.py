"""Read JSON and refuse anything but text in the column of texts, in every file and row; other columns may differ."""

import hashlib
import io
import re
from urllib.parse import quote, unquote

import pyarrow as pa
from datasets import DatasetBuilder, Value
from datasets.packaged_modules.json.json import Json
from datasets.utils.file_utils import xopen
from fsspec import AbstractFileSystem, register_implementation
from pyarrow.types import is_null

from .derived_file import DerivedFile


NULL_LINE = re.compile(rb"(?:^|\n)[ \t\r]*null(?![ \t\r]*[,\]}])")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLOCK = 2**24  # bytes


class StrictJson(Json):
    """`datasets` infers the type of a column from its first rows, and converts numbers and dates in later rows to
    text. Here such a column of texts is an error."""

    text_column = "text"

    def _generate_tables(self, base_files, files_iterables, *args, **kwargs):
        files_iterables = [map(FilesWithoutBlankLines.address, files) for files in files_iterables]
        yield from super()._generate_tables(base_files, files_iterables, *args, **kwargs)

    def _cast_table(self, pa_table, json_field_paths=()):
        name, known = self.text_column, (self.info.features or {}).get(self.text_column)
        of_texts = is_text(known)
        if name not in pa_table.column_names:
            return super()._cast_table(pa_table.select([]) if of_texts else pa_table, json_field_paths)
        kind = pa_table.schema.field(name).type
        if self.info.features and (known is None or known == Value("null") and not is_null(kind)):
            raise ValueError(f"column {name!r} holds {kind}, but nothing in the first rows: put a row with text first")
        if any(name in (path, *path) for path in json_field_paths):
            kind = "values of several kinds"
        elif is_text(kind) or is_null(kind):
            return super()._cast_table(pa_table.select([name]))
        if of_texts:
            raise ValueError(f"column {name!r} holds text first and {kind} further down; make all of it text")
        return super()._cast_table(pa_table, json_field_paths)


def is_text(kind) -> bool:
    """Return whether a type of pyarrow, or a feature of `datasets`, is text."""
    kind = kind.pa_type if isinstance(kind, Value) else kind
    kind = kind.value_type if isinstance(kind, pa.DictionaryType) else kind
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def strict_about_text(reader: DatasetBuilder, column: str) -> str:
    """Make a reader of JSON strict about `column`. Return what to add to its name in the cache on the disk, as other
    readers of these files need the other columns."""
    if not isinstance(reader, Json):
        return ""
    reader.__class__ = StrictJson
    reader.text_column = column
    return f"-texts-{hashlib.sha256(column.encode()).hexdigest()[:16]}"


class WithoutBlankLines(DerivedFile):
    """A file of JSON without its blank lines, which `datasets` does not take where other columns hold values of
    several kinds. Lines that begin with null are refused: pyarrow's parser crashes where a block begins with one."""

    def __init__(self, path: str):
        super().__init__(xopen(path, "rb"))
        self.path = path

    def more(self) -> bytes | None:
        block = self.file.read(BLOCK) + self.file.readline()
        if not block:
            return None
        block = block.removeprefix(BYTE_ORDER_MARK)
        if NULL_LINE.search(block):
            raise ValueError(f"{self.path} holds a line that begins with null; leave it out")
        return b"".join(filter(bytes.strip, block.splitlines(keepends=True)))


class FilesWithoutBlankLines(AbstractFileSystem):
    """Lets `datasets` open a file of lines as `WithoutBlankLines`."""

    protocol = "without-blank-lines"

    @classmethod
    def address(cls, file: str) -> str:
        return f"{cls.protocol}://{quote(file, safe='')}"

    def open(self, path, mode="rb", **kwargs):
        if "b" not in mode:  # one value of JSON, with the encoding of the dataset's card
            return xopen(unquote(path), mode, **self.storage_options)
        return io.BufferedReader(WithoutBlankLines(unquote(path)))


register_implementation(FilesWithoutBlankLines.protocol, FilesWithoutBlankLines)
