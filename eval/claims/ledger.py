"""Write the rows of all claims as Markdown and as a page."""

from collections import Counter
from pathlib import Path

from looped_eval.common.page import Charts, Finding, Folded, Section, Table, Text, in_markdown, to_html
from looped_recipes.common.files import write_whole
from looped_recipes.common.words import counted

from .definition import Beyond, Paper, Row, load, row
from .rules import (
    AGREES,
    COUNTED,
    DISAGREES,
    NOT_SEEN,
    OPEN,
    SIGN,
    STRONGER,
    UNMEASURED,
    UNREACHABLE,
    VERDICTS,
    WEAKER,
)


HEAD = ["where", "what it says", "the number compared", "our size", "the paper's", "ours", "seeds or runs", "verdict"]
HOW = (
    "Every number has an interval of 95 %: Student's over seeds, a point where all seeds give the same, that of "
    "Clopper and Pearson for a share of runs, or that of a fit where its row says so. A rule that its claim states "
    "compares the whole of it with the paper's number. A number with a band, as 1 ± 0.15, agrees where the interval "
    "lies within the band, and is weaker where it has the sign and less of the size. A difference agrees where the "
    "interval lies between half and twice of the paper's size (where it is a log10, orders of magnitude are halved "
    "and doubled), or above 0 where the paper gives no size; it is stronger where the interval lies above that, "
    "weaker where it lies between 0 and that; the sign agrees where the interval lies above 0 and only overlaps that;"
    " not seen where it holds 0 and not half of the paper's size, or where no run has what the claim is about; it "
    "disagrees where the interval lies below 0. A bound, which is ours where the paper's number stands beside it, "
    "agrees where the interval lies on the side that its words name, at most or at least. Open: the interval does not "
    "decide, or there is one seed. Rows that one measurement gives share its runs: they are no independent evidence. "
    "By construction: no model of this kind could give another number; it is not counted. Where three seeds left "
    "claims open, some have six; their intervals are then a little too narrow, since seeds were added by what was "
    "seen."
)
WORDS = {
    SIGN: "in sign alone",
    WEAKER: "weaker",
    STRONGER: "stronger",
    NOT_SEEN: "not seen",
    DISAGREES: "disagree",
    OPEN: "open",
    UNMEASURED: "not measured",
    UNREACHABLE: UNREACHABLE,
}


def ledger(papers: list[Paper], results: Path) -> list[Row]:
    return [row(paper, claim, results) for paper in papers for claim in paper.claims]


def said(rows: list[Row]) -> str:
    """Count the verdicts on the claims of published papers, in a sentence."""
    counts = Counter(one.verdict for one in rows if one.paper.is_published)
    measured = sum(counts[verdict] for verdict in COUNTED)
    parts = [f"{counts[verdict]} {words}" for verdict, words in WORDS.items() if counts[verdict]]
    agree = f"{counts[AGREES]} of {measured} claims that were measured agree"
    return "; ".join([agree, ", ".join(parts)] if parts else [agree]) + "."


def of_each_paper(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for one in rows:
        found.setdefault(one.paper.title, []).append(one)
    return found


def covered(rows: list[Row]) -> str:
    """Say whose claims are in the ledger, in a sentence."""
    titles = [title for title, own in of_each_paper(rows).items() if own[0].paper.is_published]
    quoted = ", ".join(f'"{title}"' for title in titles)
    return (
        f"It covers {counted(len(titles), 'paper')}: {quoted}. What the papers of Huginn and Ouro claim is not in it."
    )


def summary(rows: list[Row]) -> Table:
    """Return the counts of verdicts, one line per paper."""
    counts = {title: Counter(one.verdict for one in own) for title, own in of_each_paper(rows).items()}
    lines = [[title, *(str(found[verdict] or "") for verdict in VERDICTS)] for title, found in counts.items()]
    return Table(["", *VERDICTS], lines)


def in_short(rows: list[Row]) -> str:
    """Return a Markdown list with one line per paper."""
    return "\n".join(f"- {title}: {of_paper(own)}" for title, own in of_each_paper(rows).items())


def of_paper(rows: list[Row]) -> str:
    """Summarise the measured claims of one paper in a sentence."""
    measured = [one for one in rows if one.verdict in COUNTED]
    parts = [f"{sum(one.verdict == AGREES for one in measured)} of {len(measured)} agree"]
    for verdict in COUNTED[1:]:
        where = [one.claim.where for one in measured if one.verdict == verdict]
        parts += [f"{len(where)} {WORDS[verdict]} ({'; '.join(dict.fromkeys(where))})"] if where else []
    return "; ".join(parts)


def cells(one: Row) -> list[str]:
    claim = one.claim
    if isinstance(claim, Beyond):
        return [claim.where, claim.says, "", claim.why, "", "", "", one.verdict]
    ours = [one.estimate.words, str(one.estimate.seeds)] if one.estimate else [claim.absent or claim.without, ""]
    return [claim.where, claim.says, claim.number, claim.size, claim.rule.words, *ours, one.verdict]


def sources(rows: list[Row]) -> Table:
    """Return the commands and commits that made the numbers of the rows."""
    found = {
        (f"{one.claim.source}.json", one.command, one.commit): None
        for one in rows
        if one.command and not isinstance(one.claim, Beyond)
    }
    return Table(["numbers", "command", "commit"], [list(each) for each in found])


def markdown(rows: list[Row]) -> str:
    parts = [
        "# The papers' claims, measured again",
        f"**{said(rows)}**",
        covered(rows),
        in_short(rows),
        in_markdown(HOW),
    ]
    parts.append("Made by `looped claims`; the page with the curves is [claims/index.html](claims/index.html).")
    for title, own in of_each_paper(rows).items():
        parts += [f"## {title}", Table(HEAD, [cells(one) for one in own]).markdown()]
        made = sources(own)
        parts += [made.markdown()] if made.rows else []
    return "\n\n".join(parts) + "\n"


def sections(papers: list[Paper], rows: list[Row], results: Path) -> list[Section]:
    found = [Section("Summary", [Text(covered(rows)), summary(rows), Text(HOW)])]
    for paper in papers:
        own = [one for one in rows if one.paper.title == paper.title]
        drawn = [(figure, load(results, figure.source)) for figure in paper.figures]
        charts = [chart for figure, content in drawn if content is not None for chart in figure.draw(content)]
        table = Table(HEAD, [cells(one) for one in own], wordy=True)
        made = Folded("Commands and commits", sources(own))
        found.append(Section(paper.title, [Finding(f"{of_paper(own)}."), Charts(charts), table, made]))
    return found


def write_ledger(papers: list[Paper], rows: list[Row], results: Path) -> list[Path]:
    """Write CLAIMS.md and a page with the curves."""
    page = to_html("The papers' claims, measured again", sections(papers, rows, results), [said(rows)])
    written = {results / "CLAIMS.md": markdown(rows), results / "claims" / "index.html": page}
    for path, content in written.items():
        write_whole(path, content)
    return list(written)
