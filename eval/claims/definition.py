"""The classes of the ledger: claims, figures, measurements and papers."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from looped_recipes.common.chart import Chart
from looped_recipes.common.intervals import over_seeds

from .rules import AGREES, BY_CONSTRUCTION, NOT_SEEN, UNMEASURED, UNREACHABLE, Estimate, Rule, verdict


@dataclass(frozen=True)
class Claim:
    where: str  # figure or table of the paper
    says: str
    number: str  # the compared number, in words
    size: str  # of our models and trainings, in words
    source: str  # path of the JSON in results/, without ".json"
    read: Callable[[dict], Estimate | None]
    rule: Rule
    by_construction: bool = False  # no model of this family could give another number, so agreement tells nothing
    without: str = ""  # why runs may not have the number
    absent: str = ""  # the same, where this shows that the effect is not there


@dataclass(frozen=True)
class Beyond:
    """A claim that is not measured, because two processor cores cannot measure it within hours."""

    where: str
    says: str
    why: str


LARGER = "ours are smaller than all of its models, and are compared with the smallest"
NO_CORE = "models of this size and training answer no task of CORE above chance"
NO_SIX_TASKS = "models of this size and training answer none of the six tasks above chance"


class Figure(NamedTuple):
    source: str
    draw: Callable[[dict], list[Chart]]  # charts of our numbers, and of the paper's where its text gives them


BETTER_THAN_FREQUENCIES = 0.1  # nats; a run has trained if its loss is this far below that of token frequencies
MADE_BY = ("command", "commit", "versions", "hardware")  # provenance in every JSON


class Setting(NamedTuple):
    folder: Path  # holds all measurements
    text: str  # `data.source` of trainings on text

    def of(self, name: str, seed: int) -> Path:
        return self.folder / name / f"seed_{seed}"


SIX_SEEDS = tuple(range(6))  # for claims that three seeds leave open: the interval of three is 2.4 times as wide


class Measurement(NamedTuple):
    """Commands that measure one seed, and a function that reads its numbers.

    commands: modules with arguments. They run one after the other, and each resumes where it stopped.
    read: returns None until the numbers of the seed are complete.
    """

    name: str
    commands: Callable[[Setting, int], list[list[str]]]
    read: Callable[[Path], dict | None]
    seeds: tuple[int, ...] = (0, 1, 2)
    beside: str | None = None  # another measurement; models are compared with its models of the same seeds


@dataclass(frozen=True)
class Paper:
    title: str  # of a paper, or of a group of our own claims
    measurements: list[Measurement] = field(default_factory=list)
    claims: list[Claim | Beyond] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    is_published: bool = True  # only claims of published papers are counted


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
        return NOT_SEEN if claim.absent else UNREACHABLE if claim.without else UNMEASURED
    found = verdict(claim.rule, estimate)
    return BY_CONSTRUCTION if claim.by_construction and found == AGREES else found


def loss_of(run: dict) -> float:
    """Return the final loss, infinite if the run collapsed."""
    return math.inf if run["loss"] is None else run["loss"]


def losses_by_name(content: dict) -> dict[str, float]:
    return {run["name"]: loss_of(run) for run in content["runs"]}


def each_seed(number: Callable[[dict], float | None]) -> Callable[[dict], Estimate | None]:
    """Return a function that estimates `number` over the measured seeds, as most claims do.

    The number is infinite where one of two compared runs collapsed. Seeds where it is None or NaN, for example because
    both runs collapsed, are left out.
    """

    def read(content: dict) -> Estimate | None:
        values = [number(found) for found in content["seeds"].values()]
        values = [value for value in values if value is not None and not math.isnan(value)]
        return over_seeds(values) if values else None

    return read
