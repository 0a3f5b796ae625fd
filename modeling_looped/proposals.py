"""Chooses when a token in the pipeline of `speculation.py` proposes the next one: in closed form, from measurements.

These are: how often the readout after k loops agrees with full depth (of some tokens, read out after every loop), and
how long a pass over n tokens takes, as a line a + b n.
"""

import math
from collections import deque
from typing import NamedTuple


SURE = 3.0  # from this lead of the best token over the second, in logits, a token proposes only once
FEWEST_RECORDS = 8
FEWEST_PLAIN = 2  # tokens of each row that are timed without drafts
MOST_RECORDS = 32
# a plan must take less than this part of the time without drafts. Not 1, because rows at one loop are faster than the
# fitted line says, and a batch ends with its slowest row
WORTHWHILE = 0.8
GROWTH = 1.002  # factor on the least seconds of a size at each of its passes: they take longer as the text grows


class Plan(NamedTuple):
    """Propose after `first` loops, and again after `second` loops (unless None) if the first proposal was unsure. At
    most `ahead` tokens of a row are in flight behind the one that is verified next."""

    first: int
    second: int | None
    ahead: int


class ProbeReading(NamedTuple):
    """Readout of a token after some loop: whether full depth agreed with it, and whether it was sure."""

    is_right: bool
    is_sure: bool


class PassSeconds:
    """Fits the seconds of a pass as a + b * tokens. For each number of tokens the fastest pass counts, because other
    load on the machine only slows passes down."""

    def __init__(self):
        self.least: dict[int, float] = {}
        self.counts: dict[int, int] = {}

    def add(self, tokens: int, seconds: float):
        self.least[tokens] = min(self.least.get(tokens, seconds) * GROWTH, seconds)
        self.counts[tokens] = min(self.counts.get(tokens, 0) + 1, MOST_RECORDS)

    def line(self) -> tuple[float, float]:
        """Return a, b >= 0 by least squares. Until passes of two sizes were each seen twice, b is 0."""
        least, points = math.inf, []
        for tokens in sorted(self.least, reverse=True):
            if self.counts[tokens] > 1:
                least = min(least, self.least[tokens])  # a pass over fewer tokens takes no longer
                points.append((tokens, least, self.counts[tokens]))
        if not points:
            return 1.0, 0.0
        weight = sum(count for _, _, count in points)
        x = sum(count * tokens for tokens, _, count in points) / weight
        y = sum(count * seconds for _, seconds, count in points) / weight
        spread = sum(count * (tokens - x) ** 2 for tokens, _, count in points)
        if spread == 0:
            return y, 0.0
        slope = sum(count * (tokens - x) * seconds for tokens, seconds, count in points) / spread
        slope = min(slope, y / x)
        return y - slope * x, slope


class Planner:
    """Chooses the plan of least time per token, or none where that is not worthwhile.

    first: `draft_loops` of the call, None for "auto". most_ahead: the largest `ahead` of a plan. readout_cost: cost of
    the head, in units of one token in one pass. has_graphs: without drafts a token is one graph, faster than its
    `num_loops` passes would be.
    """

    def __init__(
        self, num_loops: int, first: int | None, most_ahead: int, readout_cost: float, has_graphs: bool = False
    ):
        self.has_graphs = has_graphs
        self.num_loops, self.first, self.most_ahead, self.readout_cost = num_loops, first, most_ahead, readout_cost
        self.seconds = PassSeconds()
        self.plain = (0.0, 0)  # seconds spent on tokens without drafts, and how many tokens
        self.records: deque[list[ProbeReading]] = deque(maxlen=MOST_RECORDS)  # per token: after 1, 2, ... loops
        self.plan: Plan | None = Plan(first or max(1, num_loops // 4), None, most_ahead)

    def add_passes(self, count: int, work: int, seconds: float, emitted: int):
        """Record that `count` passes, each over `work` tokens, took `seconds`. Several passes at once are one token of
        all rows without drafts; they emitted `emitted` tokens."""
        if count == 1 or not self.has_graphs:
            self.seconds.add(work, seconds / count)
        if count > 1:
            spent, tokens = self.plain
            self.plain = spent + seconds, tokens + emitted

    def choose_plan(self, rows: int):
        if len(self.records) >= FEWEST_RECORDS:
            self.plan = self.choose(rows)

    def needs_trial(self, rows: int) -> bool:
        """Return whether decoding without drafts is still to be timed. With several rows, drafts leave no passes of
        few tokens to measure, and the line through passes of many tokens is too high for few."""
        return self.tries_plain(rows) and self.plain[1] < FEWEST_PLAIN * rows

    def tries_plain(self, rows: int) -> bool:
        return rows > 1 or self.has_graphs

    def choose(self, rows: int) -> Plan | None:
        if self.needs_trial(rows):
            return None
        line, best = self.seconds.line(), None
        least = WORTHWHILE * self.plain_time(line, rows)
        for first in range(1, self.num_loops) if self.first is None else [self.first]:
            for second in [None, *range(first + 1, self.num_loops)]:
                probabilities = self.probabilities(first, second)
                for ahead in range(1, min(self.most_ahead, (self.num_loops - 1) // first) + 1):
                    plan = Plan(first, second, ahead)
                    if (time := self.time(plan, probabilities, line, rows)) < least:
                        least, best = time, plan
        return best

    def reason(self, rows: int) -> str:
        """Return why there is no plan."""
        rates = [sum(of_loop.is_right for of_loop in column) / len(column) for column in zip(*self.records)]
        per_pass, per_token = self.seconds.line()
        at_work = "1 row" if rows == 1 else f"{rows} rows"
        return (
            f"after 1, 2, ... loops {', '.join(f'{rate:.2f}' for rate in rates)} of the tokens are those of full "
            f"depth; with {at_work} at work a pass takes {1e3 * per_pass:.2f} ms and {1e3 * per_token:.3f} ms more "
            "per token"
        )

    def plain_time(self, line: tuple[float, float], rows: int) -> float:
        seconds, tokens = self.plain
        if self.tries_plain(rows) and tokens:
            return rows * seconds / tokens
        per_pass, per_token = line
        return per_pass * self.num_loops + per_token * rows * (self.num_loops + self.readout_cost)

    def time(self, plan: Plan, probabilities: tuple[float, ...], line: tuple[float, float], rows: int) -> float:
        """Return the expected seconds until each row has one more token.

        The right next token starts after `first` loops, after `second`, or after all, with the probabilities p. So it
        comes p . (first, second, num_loops) passes later, where `first` is at least num_loops / (ahead + 1), because
        `ahead` limits the tokens in flight. Tokens that were started wrongly have run some loops until then.
        """
        first, second, ahead = plan
        right_first, right_second, rereads = probabilities
        per_pass, per_token = line
        wrong = 1 - right_first - right_second
        passes = right_first * max(first, self.num_loops / (ahead + 1)) + wrong * self.num_loops
        loops = self.num_loops + wrong * self.loops_in_vain(self.num_loops, plan)
        if second is not None:
            passes += right_second * second
            loops += right_second * self.loops_in_vain(second, plan)
        readouts = 1 + (1 + rereads) * loops / self.num_loops
        return per_pass * passes + per_token * rows * (loops + self.readout_cost * readouts)

    def probabilities(self, first: int, second: int | None) -> tuple[float, float, float]:
        """Return the probabilities that the first proposal is right and kept, that only the second one is right, and
        that a token is read a second time."""
        right_first = right_second = rereads = 0
        for readings in self.records:
            reading = readings[first - 1]
            if second is None or reading.is_sure:
                right_first += reading.is_right
                continue
            rereads += 1
            if readings[second - 1].is_right:
                right_first, right_second = right_first + reading.is_right, right_second + (not reading.is_right)
        return right_first / len(self.records), right_second / len(self.records), rereads / len(self.records)

    def loops_in_vain(self, loops: int, plan: Plan) -> int:
        """Return the wasted loops: those run by the tokens behind a token whose proposal is rejected after `loops`."""
        tokens = min(plan.ahead, (loops - 1) // plan.first)
        return tokens * loops - plan.first * tokens * (tokens + 1) // 2
