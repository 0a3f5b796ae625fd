"""The results so far, one line of JSON each, written to disk as soon as they are known."""

import json
from pathlib import Path
from typing import NamedTuple

from looped_recipes.common.files import append_line, lines_of
from looped_recipes.common.provenance import finite, rounded


class Ended(NamedTuple):
    how: str  # "done", "failed", or a phrase that begins with "stopped"
    seconds: float
    said: str = ""  # last lines of its log, if it failed


class Ledger:
    def __init__(self, folder: Path):
        self.path = folder / "measured.jsonl"

    def write(self, piece: str, **content):
        append_line(self.path, json.dumps({"piece": piece, **finite(rounded(content))}, default=str))

    def write_result(self, piece: str, name: str, result: dict):
        self.write(piece, name=name, result=result)

    def write_end(self, piece: str, ended: Ended):
        self.write(piece, ended=ended._asdict())

    def lines(self) -> list[dict]:
        """Return all lines; a line that was cut off is skipped."""
        if not self.path.exists():
            return []
        found = []
        for line in lines_of(self.path):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def results(self, piece: str) -> dict[str, dict]:
        """Return the newest result of each measurement of a piece."""
        return {line["name"]: line["result"] for line in self.lines() if line["piece"] == piece and "name" in line}

    def measured(self, piece: str) -> set[str]:
        """Return the names of measurements that succeeded and need no second try."""
        return {name for name, result in self.results(piece).items() if "broke" not in result}

    def ended(self, piece: str) -> Ended | None:
        ends = [line["ended"] for line in self.lines() if line["piece"] == piece and "ended" in line]
        return Ended(**ends[-1]) if ends else None
