"""When a token in the pipeline of `speculation.py` proposes the next one: in closed form, from what was measured.

Measured are how often what a token says after k loops is what it says at full depth (of some tokens, read out after
every loop), and how long a pass over n tokens takes, as a line a + b n.
"""

import math
from collections import deque
from typing import NamedTuple


SURE = 3.0  # lead of the best token over the second, in logits, from which on a token proposes only once
FEWEST_RECORDS = 8
FEWEST_PLAIN = 2  # tokens of each row
MOST_RECORDS = 32
# a plan must take at most this part of the time without drafts. Not 1, because rows in step are faster than the fitted
# line says, and a batch ends with its slowest row
WORTHWHILE = 0.8
GROWTH = 1.002  # of the least seconds of passes of one size, per pass: they take longer as the text grows


class Plan(NamedTuple):
    """Proposals after `first` loops, and again after `second`, if any, where the first one was unsure; at most `ahead`
    tokens of a row in flight behind the one that is verified next."""

    first: int
    second: int | None
    ahead: int


class ProbeReading(NamedTuple):
    """What a token said after some loop: whether full depth agreed, and whether it was sure."""

    is_right: bool
    is_sure: bool


class PassSeconds:
    """Seconds of a pass as a line over its tokens, through the least of each number of tokens, which what else the
    machine does disturbs least."""

    def __init__(self):
        self.least: dict[int, float] = {}
        self.counts: dict[int, int] = {}

    def add(self, tokens: int, seconds: float):
        self.least[tokens] = min(self.least.get(tokens, seconds) * GROWTH, seconds)
        self.counts[tokens] = min(self.counts.get(tokens, 0) + 1, MOST_RECORDS)

    def line(self) -> tuple[float, float]:
        """a, b >= 0, by least squares. Before passes of two sizes were seen twice, as if all took the same time."""
        least, points = math.inf, []
        for tokens in sorted(self.least, reverse=True):
            if self.counts[tokens] > 1:
                least = min(least, self.least[tokens])  # one of fewer tokens takes no longer
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

    first: the depth that was asked for, or None. most_ahead: tokens. readout_cost: of the head, in tokens of a pass.
    has_graphs: without drafts a token is one graph, and takes less time than so many passes.
    """

    def __init__(
        self, num_loops: int, first: int | None, most_ahead: int, readout_cost: float, has_graphs: bool = False
    ):
        self.has_graphs = has_graphs
        self.num_loops, self.first, self.most_ahead, self.readout_cost = num_loops, first, most_ahead, readout_cost
        self.seconds = PassSeconds()
        self.plain = (0.0, 0)  # seconds in which rows in step said tokens, and how many
        self.records: deque[list[ProbeReading]] = deque(maxlen=MOST_RECORDS)  # of a token after 1, 2, ... loops
        self.plan: Plan | None = Plan(first or max(1, num_loops // 4), None, most_ahead)

    def add_passes(self, count: int, work: int, seconds: float, emitted: int):
        """`count` passes over so much work took so long. Several at once are those of rows in step, which then said so
        many tokens."""
        if count == 1 or not self.has_graphs:
            self.seconds.add(work, seconds / count)
        if count > 1:
            spent, tokens = self.plain
            self.plain = spent + seconds, tokens + emitted

    def choose_plan(self, rows: int):
        if len(self.records) >= FEWEST_RECORDS:
            self.plan = self.choose(rows)

    def needs_trial(self, rows: int) -> bool:
        """Whether how fast rows are without drafts is still to be seen: of several rows, the line of passes with many
        tokens is too high for those with few, of which drafts leave none."""
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
        """Why there is no plan."""
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
        """Seconds until each row has one more token.

        The next token starts for good after `first` loops, after `second`, or after all, with the probabilities p. So
        it comes p . (first, second, num_loops) passes later, but as `ahead` bounds what is in flight, not before
        num_loops / (ahead + 1). What was started in vain has run some loops until then.
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
        """That the first proposal is right and stays; that only the second is; and that there is a second."""
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
        """That tokens behind another one have run when it has run `loops`."""
        tokens = min(plan.ahead, (loops - 1) // plan.first)
        return tokens * loops - plan.first * tokens * (tokens + 1) // 2
