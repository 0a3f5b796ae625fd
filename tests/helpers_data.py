"""Documents to tokenize and pack."""

import json
import random
from pathlib import Path

from looped_recipes.data.packing import PackedRows


WORDS = "loop depth state norm exit gate cache slot token head row part step mean noise core".split()


def make_documents(num: int, seed: int = 0, longest: int = 40) -> list[str]:
    """Different texts of a few words, each with a number of its own."""
    draw = random.Random(seed)
    return [f"{i} {' '.join(draw.choices(WORDS, k=draw.randint(1, longest)))} {seed}" for i in range(num)]


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(documents)))
    return path


def plain_rows(*shape, **settings) -> PackedRows:
    """Return rows of one stream, in which no start token is a target."""
    return PackedRows(*shape, **{"learn_start": False, "document_masking": False, "start_ends": False, **settings})
