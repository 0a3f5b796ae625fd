"""The rows of all claims, as Markdown and as a page."""

from collections import Counter
from pathlib import Path

from looped_eval.common.page import Charts, Finding, Folded, Section, Table, Text, in_markdown, to_html
from looped_recipes.common.files import write_whole

from .definition import Beyond, Paper, Row, load, row
from .rules import AGREES, DISAGREES, OPEN, UNMEASURED, UNREACHABLE, VERDICTS, WEAKER


HEAD = ["where", "what it says", "the number compared", "our size", "the paper's", "ours", "verdict"]
HOW = (
    "Every number has Student's interval of 95 % over seeds, a point where all seeds give the same, and a rule "
    "that its claim states compares the whole of it with the paper's number. An exponent agrees where the "
    "interval lies within the band that is given. A difference agrees where the interval lies above 0 and reaches "
    "half of the paper's size; it is weaker where it does not reach that, and disagrees where it holds 0 and not "
    "half of the paper's size. Open: the interval does not decide, or there is one seed."
)
WORDS = {WEAKER: "weaker", DISAGREES: "disagree", OPEN: "open", UNMEASURED: "not measured", UNREACHABLE: UNREACHABLE}


def ledger(papers: list[Paper], results: Path) -> list[Row]:
    return [row(paper.title, claim, results) for paper in papers for claim in paper.claims]


def said(rows: list[Row]) -> str:
    counts = Counter(one.verdict for one in rows)
    measured = sum(count for verdict, count in counts.items() if verdict not in (UNMEASURED, UNREACHABLE))
    parts = [f"{counts[verdict]} {words}" for verdict, words in WORDS.items() if counts[verdict]]
    return f"{counts[AGREES]} of {measured} claims that were measured agree; " + ", ".join(parts) + "."


def summary(rows: list[Row]) -> Table:
    """A line for each paper."""
    counts = {title: Counter(one.verdict for one in rows if one.paper == title) for title in titles(rows)}
    lines = [[title, *(str(found[verdict] or "") for verdict in VERDICTS)] for title, found in counts.items()]
    return Table(["", *VERDICTS], lines)


def in_short(rows: list[Row]) -> str:
    """A line for each paper."""
    return "\n".join(f"- {title}: {of_paper([one for one in rows if one.paper == title])}" for title in titles(rows))


def of_paper(rows: list[Row]) -> str:
    """What was measured of one paper, in a sentence."""
    measured = [one for one in rows if one.estimate]
    parts = [f"{sum(one.verdict == AGREES for one in measured)} of {len(measured)} agree"]
    for verdict in (WEAKER, DISAGREES, OPEN):
        where = [one.claim.where for one in measured if one.verdict == verdict]
        parts += [f"{len(where)} {WORDS[verdict]} ({', '.join(dict.fromkeys(where))})"] if where else []
    return "; ".join(parts)


def titles(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(one.paper for one in rows))


def cells(one: Row) -> list[str]:
    claim = one.claim
    if isinstance(claim, Beyond):
        return [claim.where, claim.says, "", claim.why, "", "", one.verdict]
    ours = one.estimate.words if one.estimate else ""
    return [claim.where, claim.says, claim.number, claim.size, claim.rule.words, ours, one.verdict]


def sources(rows: list[Row]) -> Table:
    """Which command and commit made the numbers of a row."""
    found: dict[tuple[str, str, str], int] = {}
    for one in rows:
        if one.estimate and not isinstance(one.claim, Beyond):
            key = (f"{one.claim.source}.json", one.command, one.commit)
            found[key] = max(found.get(key, 0), one.estimate.seeds)
    lines = [[path, command, commit, str(seeds)] for (path, command, commit), seeds in found.items()]
    return Table(["numbers", "command", "commit", "seeds"], lines)


def markdown(rows: list[Row]) -> str:
    parts = ["# The papers' claims, measured again", f"**{said(rows)}**", in_short(rows), in_markdown(HOW)]
    parts.append("Made by `looped claims`; the page with the curves is [claims/index.html](claims/index.html).")
    for title in titles(rows):
        own = [one for one in rows if one.paper == title]
        parts += [f"## {title}", Table(HEAD, [cells(one) for one in own]).markdown()]
        made = sources(own)
        parts += [made.markdown()] if made.rows else []
    return "\n\n".join(parts) + "\n"


def sections(papers: list[Paper], rows: list[Row], results: Path) -> list[Section]:
    found = [Section("Summary", [summary(rows), Text(HOW)])]
    for paper in papers:
        own = [one for one in rows if one.paper == paper.title]
        drawn = [(figure, load(results, figure.source)) for figure in paper.figures]
        charts = [chart for figure, content in drawn if content is not None for chart in figure.draw(content)]
        table = Table(HEAD, [cells(one) for one in own], wordy=True)
        made = Folded("Commands and commits", sources(own))
        found.append(Section(paper.title, [Finding(f"{of_paper(own)}."), Charts(charts), table, made]))
    return found


def write_ledger(papers: list[Paper], rows: list[Row], results: Path) -> list[Path]:
    """CLAIMS.md, and a page with the curves."""
    page = to_html("The papers' claims, measured again", sections(papers, rows, results), [said(rows)])
    written = {results / "CLAIMS.md": markdown(rows), results / "claims" / "index.html": page}
    for path, content in written.items():
        write_whole(path, content)
    return list(written)
