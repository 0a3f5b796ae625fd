"""Runs that differ only in their seed: the mean loss of every combination of the other settings, and what each setting
changes, in pairs of equal seeds."""

from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from .intervals import Estimate, over_seeds
from .words import counted


MOST = 3  # settings in the name of an axis


class Outcome(NamedTuple):
    """The end of a run."""

    name: str
    settings: dict[str, object]  # section.key: value, of those that decide a loss
    loss: float | None  # None: it diverged


class Axis(NamedTuple):
    name: str
    levels: list[str]


class Difference(NamedTuple):
    """A level of an axis compared with another level of it."""

    axis: str
    level: str
    other: str
    estimate: Estimate | None  # None: no two runs differ in this alone, or those that do have no seed in common
    used: int  # settings of the other axes that are averaged
    paired: int  # those that have both levels in some seed
    of: int  # those that have one of the levels

    @property
    def value(self) -> str:
        return "–" if self.estimate is None else in_words(self.estimate, "+.4f")

    @property
    def seeds(self) -> str:
        return "–" if self.estimate is None else str(self.estimate.seeds)

    @property
    def words(self) -> str:
        what, seeds = f"{self.axis}: {self.level} against {self.other}", counted(self.seeds, "seed")
        if self.estimate is None and self.paired:
            return f"{what}: {self.paired} of {counted(self.of, 'other setting')} have pairs, but of no common seed"
        if self.estimate is None:
            return f"{what}: no two runs of one seed differ in this alone"
        if self.used < self.of:
            what += f", in {self.used} of {counted(self.of, 'other setting')}"
        if self.estimate.low is None:
            return f"{what}: the loss changes by {self.value} in one seed, which has no interval"
        if self.estimate.low <= 0 <= self.estimate.high:
            return f"{what}: no difference that {seeds} tell (loss {self.value})"
        return f"{what}: the loss changes by {self.value} over {seeds}"


def in_words(estimate: Estimate, digits: str = ".4f") -> str:
    value = format(estimate.value, digits)
    return value if estimate.low is None else f"{value} [{estimate.low:{digits}}, {estimate.high:{digits}}]"


def settings_of(recipe: dict) -> dict[str, object]:
    """Return {section.key: value}, without the output folder."""
    found = {f"{part}.{key}": value for part, values in recipe.items() for key, value in (values or {}).items()}
    found.pop("training.output_dir", None)
    return found


def is_seed(key: str) -> bool:
    return key.endswith(".seed")


class Replicas:
    """Runs by their levels on each axis and by their seed.

    An axis is a setting in which runs differ; settings that always change together are one axis. Of runs with the same
    settings and seed, the first one counts.
    """

    def __init__(self, outcomes: Iterable[Outcome]):
        outcomes = list(outcomes)
        keys = dict.fromkeys(key for each in outcomes for key in each.settings)
        together: dict[tuple[int, ...], list[tuple[str, list[str]]]] = {}
        for key in keys:
            values = ["not set" if (value := each.settings.get(key)) is None else str(value) for each in outcomes]
            distinct = list(dict.fromkeys(values))
            if len(distinct) > 1 and not is_seed(key):
                together.setdefault(tuple(map(distinct.index, values)), []).append((key, distinct))
        self.axes = [axis_of(settings) for settings in together.values()]
        self.runs: dict[tuple[int, ...], dict[tuple, Outcome]] = {}  # levels: seed: run
        self.again: list[str] = []  # runs with the settings and the seed of an earlier one
        for place, outcome in zip(zip(*together) if together else [()] * len(outcomes), outcomes):
            seed = tuple(str(value) for key, value in sorted(outcome.settings.items()) if is_seed(key))
            first = self.runs.setdefault(place, {}).setdefault(seed, outcome)
            if first is not outcome:
                self.again.append(f"{outcome.name} (as {first.name})")

    @property
    def several(self) -> bool:
        """Whether a combination of settings has several seeds."""
        return any(len(of_seeds) > 1 for of_seeds in self.runs.values())

    def losses(self, place: tuple[int, ...]) -> dict[tuple, float]:
        return {seed: run.loss for seed, run in self.runs.get(place, {}).items() if run.loss is not None}

    @property
    def diverged(self) -> list[str]:
        return [run.name for of_seeds in self.runs.values() for run in of_seeds.values() if run.loss is None]

    def rows(self) -> list[list[str]]:
        """Return a row for each combination: its levels, seeds that ended, mean loss with interval, seeds that
        diverged."""
        rows = []
        for place, of_seeds in self.runs.items():
            losses = self.losses(place)
            mean = in_words(over_seeds(losses.values())) if losses else "–"
            levels = [axis.levels[level] for axis, level in zip(self.axes, place)]
            rows.append([*levels, str(len(losses)), mean, str(len(of_seeds) - len(losses))])
        return rows

    def differences(self) -> list[Difference]:
        """Compare each level of each axis with the first one that has a loss."""
        found = []
        for i in range(len(self.axes)):
            trained = sorted({place[i] for place in self.runs if self.losses(place)})
            found += [self.difference(i, level, trained[0]) for level in trained[1:]]
        return found

    def difference(self, i: int, level: int, other: int) -> Difference:
        """Compare two levels of the i-th axis, in pairs of runs with the same seed and the same other settings.

        The differences of a seed are averaged first, so that the interval is one over seeds. Every seed is averaged
        over the same other settings: over those with a pair of every seed or, if these are fewer pairs, over all that
        have pairs, in their common seeds.
        """
        places = dict.fromkeys((place[:i], place[i + 1 :]) for place in self.runs if place[i] in (level, other))
        pairs = []
        for before, after in places:
            here, there = (self.losses((*before, each, *after)) for each in (level, other))
            if both := {seed: here[seed] - there[seed] for seed in here if seed in there}:
                pairs.append(both)
        seeds, used = set().union(*pairs), []
        if pairs:
            used = [of_seeds for of_seeds in pairs if of_seeds.keys() == seeds]
            common = set.intersection(*map(set, pairs))
            if len(common) * len(pairs) > len(seeds) * len(used):
                seeds, used = common, pairs
        estimate = over_seeds(fmean(each[seed] for each in used) for seed in sorted(seeds)) if used else None
        axis = self.axes[i]
        counts = (len(used), len(pairs), len(places))
        return Difference(axis.name, axis.levels[level], axis.levels[other], estimate, *counts)

    def sentences(self) -> list[str]:
        """Say what each axis changes, and which runs are in no mean."""
        said = [difference.words for difference in self.differences()]
        if not self.axes and (losses := self.losses(())):
            said.append(f"Loss {in_words(over_seeds(losses.values()))} over {counted(len(losses), 'seed')}")
        if self.diverged:
            said.append(f"{counted(len(self.diverged), 'run')} diverged, in no mean: {', '.join(self.diverged)}")
        if self.again:
            said.append(f"Left out, with the settings and seed of an earlier run: {', '.join(self.again)}")
        return [f"{words}." for words in said]


def axis_of(settings: list[tuple[str, list[str]]]) -> Axis:
    keys, values = zip(*settings[:MOST])
    more = ", …" if len(settings) > MOST else ""
    return Axis(", ".join(keys) + more, [", ".join(level) + more for level in zip(*values)])
