"""Read JSON and refuse anything but text in the column of texts, in every file and row; other columns may differ."""

import hashlib
import re
from collections.abc import Iterable, Iterator

from datasets import DatasetBuilder, Value
from datasets.packaged_modules.json.json import Json
from datasets.utils.file_utils import xopen
from pyarrow import DataType
from pyarrow.types import is_large_string, is_null, is_string


NULL_LINE = re.compile(rb"(?:^(?:\xef\xbb\xbf)?|\n)[ \t\r]*null(?![ \t\r]*[,\]}])")
BLOCK = 2**24  # bytes
LONGEST = 2**10  # bytes at the end of a block that are searched together with the next block


class StrictJson(Json):
    """`datasets` infers the type of a column from its first rows, and converts numbers and dates in later rows to
    text. Here such a column of texts is an error."""

    text_column = "text"

    def _generate_tables(self, base_files, files_iterables, *args, **kwargs):
        files_iterables = [without_null_lines(files) for files in files_iterables]
        yield from super()._generate_tables(base_files, files_iterables, *args, **kwargs)

    def _cast_table(self, pa_table, json_field_paths=()):
        name, known = self.text_column, (self.info.features or {}).get(self.text_column)
        of_texts = isinstance(known, Value) and "string" in known.dtype
        if name not in pa_table.column_names:
            return super()._cast_table(pa_table.select([]) if of_texts else pa_table, json_field_paths)
        kind = pa_table.schema.field(name).type
        if any(name in (path, *path) for path in json_field_paths):
            kind = "values of several kinds"
        elif is_text(kind) or is_null(kind):
            return super()._cast_table(pa_table.select([name]))
        if of_texts:
            raise ValueError(f"column {name!r} holds text first and {kind} further down; make all of it text")
        return super()._cast_table(pa_table, json_field_paths)


def is_text(kind: DataType) -> bool:
    return is_string(kind) or is_large_string(kind)


def strict_about_text(reader: DatasetBuilder, column: str) -> str:
    """Make a reader of JSON strict about `column`. Return what to add to its name in the cache on the disk, as other
    readers of these files need the other columns."""
    if not isinstance(reader, Json):
        return ""
    reader.__class__ = StrictJson
    reader.text_column = column
    return f"-texts-{hashlib.sha256(column.encode()).hexdigest()[:16]}"


def without_null_lines(files: Iterable[str]) -> Iterator[str]:
    """Yield `files`, each checked before it is read: pyarrow's parser crashes where a block begins with null."""
    for file in files:
        with xopen(file, "rb") as stream:
            end = b""
            while block := stream.read(BLOCK):
                if NULL_LINE.search(end + block):
                    raise ValueError(f"{file} holds a line that begins with null; leave it out")
                end = b"\n" + block[-LONGEST:].partition(b"\n")[2] if b"\n" in block[-LONGEST:] else b"\0"
        yield file
