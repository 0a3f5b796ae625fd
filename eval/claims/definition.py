"""What a claim, a figure, a measurement and a paper are."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from looped_recipes.common.chart import Chart

from .rules import AGREES, BY_CONSTRUCTION, UNMEASURED, UNREACHABLE, Estimate, Rule, over_seeds, verdict


@dataclass(frozen=True)
class Claim:
    where: str  # figure or table
    says: str
    number: str  # what is compared, in words
    size: str  # of ours
    source: str  # JSON in results/, without its ending
    read: Callable[[dict], Estimate | None]
    rule: Rule
    by_construction: bool = False  # no model of this family could give another number, so agreement tells nothing
    without: str = ""  # what it means where the runs have no such number


@dataclass(frozen=True)
class Beyond:
    """A claim without a number: two processor cores do not reach it in hours."""

    where: str
    says: str
    why: str


class Figure(NamedTuple):
    source: str
    draw: Callable[[dict], list[Chart]]  # ours, and the paper's where its text gives numbers


BETTER_THAN_FREQUENCIES = 0.1  # nats below the loss of the tokens' frequencies, from which on a run counts as trained
MADE_BY = ("command", "commit", "versions", "hardware")  # what every JSON tells of itself


class Setting(NamedTuple):
    folder: Path  # of all measurements
    text: str  # data.source of the trainings on text

    def of(self, name: str, seed: int) -> Path:
        return self.folder / name / f"seed_{seed}"


SIX_SEEDS = tuple(range(6))  # where three leave claims open: their interval is 2.4 times as wide as that of six


class Measurement(NamedTuple):
    """What is measured for a seed: modules with their arguments, run one after the other, which go on where they
    stopped; and how its numbers are read, which is None as long as they are not whole."""

    name: str
    commands: Callable[[Setting, int], list[list[str]]]
    read: Callable[[Path], dict | None]
    seeds: tuple[int, ...] = (0, 1, 2)
    beside: str | None = None  # the measurement that has the models of the same seeds to which its own are compared


@dataclass(frozen=True)
class Paper:
    title: str  # of a paper, or of claims of our own
    measurements: list[Measurement] = field(default_factory=list)
    claims: list[Claim | Beyond] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    is_published: bool = True  # whose claims are counted


class Row(NamedTuple):
    paper: Paper
    claim: Claim | Beyond
    verdict: str
    estimate: Estimate | None = None
    command: str = ""
    commit: str = ""


def load(results: Path, source: str) -> dict | None:
    path = results / f"{source}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if (beside := content.get("beside")) is not None:
        with_others = load(path.parent, beside) or {**content, "seeds": {}}
        if text_of(content) != text_of(with_others):
            raise ValueError(
                f"{path} is compared to {beside}.json, but was measured on another text: `{content['command']}`, "
                f"`{with_others['command']}`. Measure one of them again"
            )
        others = with_others["seeds"]
        content["seeds"] = {
            seed: {"runs": others[seed]["runs"] + its["runs"], "probes": others[seed]["probes"] | its["probes"]}
            for seed, its in content["seeds"].items()
            if seed in others
        }
    return content


def text_of(content: dict) -> str:
    return content["command"].partition(" --text ")[2]


def row(paper: Paper, claim: Claim | Beyond, results: Path) -> Row:
    if isinstance(claim, Beyond):
        return Row(paper, claim, UNREACHABLE)
    content = load(results, claim.source)
    if content is None:
        return Row(paper, claim, UNMEASURED)
    estimate = claim.read(content)
    return Row(paper, claim, judged(claim, estimate), estimate, content["command"], content["commit"])


def judged(claim: Claim, estimate: Estimate | None) -> str:
    if estimate is None:
        return UNREACHABLE if claim.without else UNMEASURED
    found = verdict(claim.rule, estimate)
    return BY_CONSTRUCTION if claim.by_construction and found == AGREES else found


def loss_of(run: dict) -> float:
    """At its end; infinite where the run collapsed."""
    return math.inf if run["loss"] is None else run["loss"]


def losses_by_name(content: dict) -> dict[str, float]:
    return {run["name"]: loss_of(run) for run in content["runs"]}


def each_seed(number: Callable[[dict], float | None]) -> Callable[[dict], Estimate | None]:
    """How most claims are read: a number of every seed that was measured, infinite where one of two runs collapsed;
    None, or not a number, of a seed that has no such number, as where both did."""

    def read(content: dict) -> Estimate | None:
        values = [number(found) for found in content["seeds"].values()]
        values = [value for value in values if value is not None and not math.isnan(value)]
        return over_seeds(values) if values else None

    return read
