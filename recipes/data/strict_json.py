"""JSON whose column of texts holds texts only, in every file and to the end."""

from datasets import DatasetBuilder, Value
from datasets.packaged_modules.json.json import Json
from pyarrow.types import is_large_string, is_null, is_string


class StrictJson(Json):
    """`datasets` decides by the first rows that a column is text, and writes later numbers and dates as it likes."""

    text_column = "text"

    def _cast_table(self, pa_table, json_field_paths=()):
        name = self.text_column
        known = (self.info.features or {}).get(name)
        if isinstance(known, Value) and "string" in known.dtype and name in pa_table.column_names:
            kind = pa_table.schema.field(name).type
            if any(name in (path, *path) for path in json_field_paths):
                kind = "values of several kinds"
            elif is_string(kind) or is_large_string(kind) or is_null(kind):
                return super()._cast_table(pa_table, json_field_paths)
            raise ValueError(f"column {name!r} holds text first and {kind} further down; make all of it text")
        return super()._cast_table(pa_table, json_field_paths)


def strict_about_text(reader: DatasetBuilder, column: str) -> DatasetBuilder:
    if isinstance(reader, Json):
        reader.__class__ = StrictJson
        reader.text_column = column
    return reader
