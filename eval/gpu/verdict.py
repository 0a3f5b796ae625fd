"""The verdict: aims that were met or missed, and pieces that did not run, as a sentence, one JSON and one page."""

from collections.abc import Container
from typing import NamedTuple

from looped_eval.common.page import Folded, Heading, Section, Table, Text, numbers, to_html
from looped_recipes.common.files import write_whole
from looped_recipes.common.provenance import write_json

from .ledger import Ledger
from .pieces import NAMES, PIECES, Aim, Piece, Setting


class Judged(NamedTuple):
    piece: str
    measurement: str
    aim: Aim
    value: float

    @property
    def is_met(self) -> bool:
        return self.aim.is_met(self.value)


class Verdict(NamedTuple):
    judged: list[Judged]
    failed: list[str]  # measurements that failed, and pieces that failed before any measurement
    not_run: list[str]  # pieces with missing measurements

    @property
    def is_whole(self) -> bool:
        """Whether everything was run and every aim was met."""
        return not (self.failed or self.not_run) and all(one.is_met for one in self.judged)

    @property
    def sentence(self) -> str:
        short = [f"{one.aim.what} ({one.measurement}: {one.value:.4g})" for one in self.judged if not one.is_met]
        parts = [f"{len(self.judged) - len(short)} of {len(self.judged)} aims were met"]
        parts += [f"fell short: {'; '.join(short)}"] if short else []
        parts += [f"broke: {', '.join(self.failed)}"] if self.failed else []
        parts += [f"not run to the end: {', '.join(self.not_run)}"] if self.not_run else []
        return ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def verdict(ledger: Ledger, asked: Container[str] = NAMES) -> Verdict:
    """Judge all measurements. Pieces that have not run yet are listed only if they are in `asked`."""
    judged, failed, not_run = [], [], []
    for piece in PIECES:
        results, ended = ledger.results(piece.name), ledger.ended(piece.name)
        for name, result in results.items():
            if "broke" in result:
                failed.append(f"{piece.name}/{name}")
                continue
            numbers = ((aim, result.get(aim.number)) for aim in piece.aims)
            judged += [Judged(piece.name, name, aim, value) for aim, value in numbers if value is not None]
        if ended is not None and ended.how == "failed" and not any(one.startswith(f"{piece.name}/") for one in failed):
            failed.append(piece.name)
        elif piece.name in asked and (ended is None or ended.how.startswith("stopped")):
            not_run.append(piece.name)
    return Verdict(judged, failed, not_run)


def write_page(setting: Setting, ledger: Ledger, command: str):
    """Write check.json and index.html."""
    said = verdict(ledger)
    pieces = {piece.name: of_piece(piece, ledger) for piece in PIECES}
    aims = {f"{one.piece}/{one.measurement}: {one.aim.words}": [one.value, one.is_met] for one in said.judged}
    content = {"verdict": said.sentence, "tiny": setting.tiny, "aims": aims, "pieces": pieces}
    write_json(setting.out / "check.json", content, command)
    write_whole(
        setting.out / "index.html", to_html("Looped on a GPU", sections(setting, ledger, said), [said.sentence])
    )


def of_piece(piece: Piece, ledger: Ledger) -> dict:
    ended = ledger.ended(piece.name)
    state = ended._asdict() if ended else {"how": "not run"}
    return {"what": piece.what, **state, "results": ledger.results(piece.name)}


def sections(setting: Setting, ledger: Ledger, said: Verdict) -> list[Section]:
    tiny = [Text("These are sizes for a CPU: they prove the code, and their numbers tell nothing.")] * setting.tiny
    first = Section("Aims", tiny)
    if said.judged:
        rows = [
            [
                one.aim.words,
                f"{one.piece}, {one.measurement}",
                f"{one.value:.4g}",
                "met" if one.is_met else "fell short",
            ]
            for one in said.judged
        ]
        first.blocks.append(Table(["aim", "measured", "value", ""], rows))
    return [*([first] if first.blocks else []), *(of_one(piece, ledger) for piece in PIECES)]


def of_one(piece: Piece, ledger: Ledger) -> Section:
    ended, results = ledger.ended(piece.name), ledger.results(piece.name)
    state = "not run" if ended is None else f"{ended.how} after {ended.seconds:.0f} s. {ended.said}"
    section = Section(piece.name.replace("_", " "), [Text(f"{piece.what}; {state}")])
    for name, result in results.items():
        table = numbers(result)
        section.blocks += [Heading(name), table] if len(table.rows) < 12 else [Folded(name, table)]
        said = result.get("said")
        section.blocks += [Folded("what was said", "\n".join(said))] if said else []
    return section
