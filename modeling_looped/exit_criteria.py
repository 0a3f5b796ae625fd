"""Exit criteria, which decide when a token stops looping before the last loop, and the rule that `generate` applies.

A criterion gives every token a score after a loop; the token exits where the score passes the threshold. Criteria are
pure functions: they return what they need at the next reading (entropy, logits), and receive it there as an argument;
at a token's first reading they receive nothing, or the values of `INITIAL`. To add one, write a function here, and
add its line to `CRITERIA`, its name to `ExitCriterion`, and what it remembers to `INITIAL`.

    criterion          score of loop k                               exits if   published threshold
    logit_margin       top-1 minus top-2 logit                       above      to be calibrated (readout paper)
    max_prob           probability of the most probable token        above      -
    entropy            entropy of the next token                     below      -
    entropy_diff       |entropy_k - entropy_k-1|                     below      1e-3 (Huginn's code)
    kl                 KL(p_k-1 || p_k)                              below      1e-3 (Huginn's code; its paper 5e-4)
    minp_kl            the same, where tokens less than a tenth as   below      1e-5 (Huginn's code)
                       likely as the best one have p = 1 / V
    latent_diff        ||H_k - H_k-1|| / ||H_k||                     below      0.03 (Huginn's code)
    cosine             1 - cos(H_k, H_k-1)                           below      1e-3 (Huginn's code)
    argmax_stability   consecutive repeats of the best token         above      5 (Huginn's code)
    gate               probability of an exit up to loop k           above      1, which is never reached (Ouro)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.linalg import vector_norm

from .depth import check_count
from .tensors import as_float64, at_least_fp32


MIN_P = 0.1


Memory = dict[str, torch.Tensor]
Score = tuple[torch.Tensor, Memory]

# value of each remembered quantity before the first reading: no first reading then looks converged
INITIAL = {"entropy": math.inf, "log_p": math.inf, "last_state": math.inf, "best": -1, "count": 0, "stay": 1.0}


def remembered(memory: Memory, name: str) -> torch.Tensor | float:
    return memory.get(name, INITIAL[name])


def logit_margin(logits: torch.Tensor, memory: Memory) -> Score:
    best, second = at_least_fp32(logits).topk(2, dim=-1).values.unbind(-1)
    return best - second, {}


def max_prob(logits: torch.Tensor, memory: Memory) -> Score:
    logits = at_least_fp32(logits)
    return (logits.amax(-1) - logits.logsumexp(-1)).exp(), {}


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    log_p = at_least_fp32(logits).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def entropy(logits: torch.Tensor, memory: Memory) -> Score:
    return entropy_of(logits), {}


def entropy_diff(logits: torch.Tensor, memory: Memory) -> Score:
    now = entropy_of(logits)
    return (now - remembered(memory, "entropy")).abs(), {"entropy": now}


def divergence(now: torch.Tensor, memory: Memory) -> Score:
    past = torch.as_tensor(remembered(memory, "log_p"))
    return (past.exp() * (past - now)).sum(-1), {"log_p": now}


def kl(logits: torch.Tensor, memory: Memory) -> Score:
    return divergence(at_least_fp32(logits).log_softmax(-1), memory)


def minp_kl(logits: torch.Tensor, memory: Memory) -> Score:
    p = at_least_fp32(logits).softmax(-1)
    p = torch.where(p < MIN_P * p.amax(-1, keepdim=True), 1 / p.shape[-1], p)
    return divergence((p / p.sum(-1, keepdim=True)).log(), memory)


def latent_diff(state: torch.Tensor, memory: Memory) -> Score:
    now = at_least_fp32(state)
    change = vector_norm(now - remembered(memory, "last_state"), dim=-1)
    # padding may have states of 0, for which 0 / 0 would never be below a threshold
    return torch.where(change == 0, 0.0, change / vector_norm(now, dim=-1)), {"last_state": now}


def cosine(state: torch.Tensor, memory: Memory) -> Score:
    now = at_least_fp32(state)
    past = remembered(memory, "last_state")
    past = past if torch.is_tensor(past) else torch.full_like(now, past)
    norms = vector_norm(now, dim=-1) * vector_norm(past, dim=-1)
    score = (1 - (now * past).sum(-1) / norms).clamp(min=0)
    score = torch.where((now == past).all(-1), 0.0, score)  # also of states of 0, as in `latent_diff`
    return torch.where(norms.isfinite(), score, math.inf), {"last_state": now}


def argmax_stability(logits: torch.Tensor, memory: Memory) -> Score:
    best = logits.argmax(-1)
    count = torch.where(best == remembered(memory, "best"), remembered(memory, "count") + 1, 0)
    return count, {"best": best, "count": count}


def gate(gate_logit: torch.Tensor, memory: Memory) -> Score:
    """Return 1 - prod_j (1 - lambda_j), in float64: in half precision sigmoid(6.25) is 1."""
    stay = remembered(memory, "stay") * torch.sigmoid(-as_float64(gate_logit))
    return 1 - stay, {"stay": stay}


class Criterion(NamedTuple):
    score: Callable[[torch.Tensor, Memory], Score]
    # input of `score`: "logits", [..., vocabulary]; "state", H, [..., hidden]; or "gate", the gate's logit, [...]
    needs: Literal["logits", "state", "gate"]
    exits_above: bool
    default: float | None = None
    every_loop: bool = False  # reads every loop, also loops at which nothing may exit
    remembers: tuple[str, ...] = ()  # names of the values of past readings that it compares with
    counts_readings: bool = False  # the score counts readings, so `threshold` readings come before the first check
    least: float = 0.0  # the lowest possible score
    looks_back: int = 1  # over so many readings, if it remembers any; they come before the first check

    def after_loop(self, model, state: torch.Tensor, logits: Callable[[], torch.Tensor], memory: Memory) -> Score:
        """Return the score of the state H after a loop, and what to remember. model: the causal LM; logits: computes
        the logits of H, called only if the criterion needs them."""
        seen = logits() if self.needs == "logits" else state if self.needs == "state" else model.gate(state)
        return self.score(seen, memory)

    def read(self, model, state: torch.Tensor, logits: Callable[[], torch.Tensor], memory: Memory) -> Score:
        """Return what `after_loop` does, also that of a subclass; refuse memories that decoding would not keep."""
        score, memory = self.after_loop(model, state, logits, memory)
        if undeclared := memory.keys() - set(self.remembers):
            name = getattr(self.score, "__name__", type(self).__name__)
            raise ValueError(
                f"{name} returns {', '.join(sorted(undeclared))} to be remembered, but its Criterion has "
                f"remembers={self.remembers}: name it there"
            )
        return score, memory


ExitCriterion = Literal[
    "logit_margin",
    "max_prob",
    "entropy",
    "entropy_diff",
    "kl",
    "minp_kl",
    "latent_diff",
    "cosine",
    "argmax_stability",
    "gate",
]
CRITERIA = {
    "logit_margin": Criterion(logit_margin, "logits", exits_above=True),
    "max_prob": Criterion(max_prob, "logits", exits_above=True),
    "entropy": Criterion(entropy, "logits", exits_above=False),
    "entropy_diff": Criterion(entropy_diff, "logits", exits_above=False, default=1e-3, remembers=("entropy",)),
    "kl": Criterion(kl, "logits", exits_above=False, default=1e-3, remembers=("log_p",)),
    "minp_kl": Criterion(minp_kl, "logits", exits_above=False, default=1e-5, remembers=("log_p",)),
    "latent_diff": Criterion(latent_diff, "state", exits_above=False, default=0.03, remembers=("last_state",)),
    "cosine": Criterion(cosine, "state", exits_above=False, default=1e-3, remembers=("last_state",)),
    "argmax_stability": Criterion(
        argmax_stability,
        "logits",
        exits_above=True,
        default=5,
        remembers=("best", "count"),
        counts_readings=True,
    ),
    "gate": Criterion(gate, "gate", exits_above=True, default=1.0, every_loop=True, remembers=("stay",)),
}


ExitSelection = Literal["stop", "after", "weighted"]


@dataclass(frozen=True)
class ExitRule:
    """A criterion with its threshold: decides which loops are read, and which tokens or sequences exit.

    name: of a criterion in `CRITERIA`. threshold: a number; None means the published one of the criterion, if any.
    min_loops, interval: check after `min_loops` loops and after every n-th loop from there on.
    per_sequence: whole sequences exit, by the mean score of their tokens.
    selection: "stop": loops end at the exit. "after": all loops run, and the one to read out is chosen afterwards.
        "weighted": all loops run and are read out, each weighted by the probability of an exit there.
    read_interval: for rows that decode independently: every n-th check is read back.
    """

    name: str
    threshold: Any = None
    min_loops: int = 1
    interval: int = 1
    per_sequence: bool = False
    selection: ExitSelection = "stop"
    read_interval: int = 1

    def __post_init__(self):
        if not isinstance(self.name, str) or self.name not in CRITERIA:
            raise ValueError(f"exit_criterion={self.name!r} is not known: choose one of {', '.join(CRITERIA)}")
        if self.threshold is None:
            object.__setattr__(self, "threshold", self.criterion.default)

    @property
    def criterion(self) -> Criterion:
        return CRITERIA[self.name]

    def scores_at(self, depth: int) -> bool:
        """Return whether the criterion reads the state after `depth` loops."""
        if self.criterion.every_loop:
            return True
        warm_up = 0  # readings that the first check needs before it, to compare with
        if self.criterion.counts_readings:  # the mean of a row's counts needs whole counts, from the first loop on
            warm_up = math.inf if self.per_sequence else max(0, self.threshold)
        elif self.criterion.remembers:
            warm_up = self.criterion.looks_back
        first = self.min_loops - (warm_up + 1) * self.interval  # readings begin after this loop
        return depth > first and (depth - self.min_loops) % self.interval == 0

    def checks_at(self, depth: int) -> bool:
        return depth >= self.min_loops and (depth - self.min_loops) % self.interval == 0

    def is_fetched_at(self, depth: int) -> bool:
        """Return whether the host fetches the results after this loop: at every read_interval-th check."""
        return self.checks_at(depth) and ((depth - self.min_loops) // self.interval + 1) % self.read_interval == 0

    def exits(self, score: torch.Tensor) -> torch.Tensor:
        if self.per_sequence:
            score = as_float64(score).mean(-1)
        if self.name == "gate" and self.threshold == 1:  # only rounding reaches 1
            return torch.zeros_like(score, dtype=torch.bool)
        return score >= self.threshold if self.criterion.exits_above else score <= self.threshold

    def read(self, depth: int, model, state: torch.Tensor, logits: Callable[[], torch.Tensor], memory: Memory):
        """Return which tokens or rows pass the check after `depth` loops (None: no check), and what to remember."""
        if not self.scores_at(depth):
            return None, memory
        score, memory = self.criterion.read(model, state, logits, memory)
        return (self.exits(score) if self.checks_at(depth) else None), memory

    def checked(self, config, num_loops: int | None = None) -> "ExitRule":
        """Return this rule if it fits the model and a pass of `num_loops` (by default the config's), else raise."""
        criterion, min_loops, selection = self.name, self.min_loops, self.selection
        num_loops = config.num_loops if num_loops is None else num_loops
        if unknown := [name for name in self.criterion.remembers if name not in INITIAL]:
            raise ValueError(
                f"exit_criterion={criterion!r} remembers {', '.join(unknown)}, whose value before a token's first "
                "reading is not known: put it in exit_criteria.INITIAL"
            )
        if criterion == "gate" and config.exit_gate == "none":
            raise ValueError(
                "exit_criterion='gate' needs a model with an exit gate, but this one has exit_gate='none': use "
                "another criterion with a threshold of its own, e.g. 'kl'"
            )
        if config.reads_run_depth:
            raise ValueError(
                f"a model with {config.reads_run_depth} makes each loop depend on the depth of the run, so a run that "
                "stops at loop k is not the run of depth k: early exit means nothing for it"
            )
        self.check_threshold()
        counts = {"min_loops": min_loops, "exit_interval": self.interval, "exit_read_interval": self.read_interval}
        for name, count in counts.items():
            check_count(name, count)
        if min_loops > num_loops:
            raise ValueError(
                f"min_loops={min_loops} is more than the num_loops={num_loops} that a token can run: lower it, or run "
                "without exits (exit_criterion=None)"
            )
        if selection not in get_args(ExitSelection):
            raise ValueError(
                f"exit_selection={selection!r} is not known: 'stop' ends a token's loops at its exit, 'after' runs "
                "them all and then chooses which to read out, 'weighted' reads them all out"
            )
        if selection == "weighted" and criterion != "gate":
            raise ValueError(
                "exit_selection='weighted' weighs loops by the probabilities of the exit gate: pass "
                f"exit_criterion='gate' instead of {criterion!r}, or another exit_selection"
            )
        return self

    def check_threshold(self):
        threshold, least = self.threshold, self.criterion.least
        if threshold is None:
            raise ValueError(
                f"exit_criterion={self.name!r} has no published threshold: pass exit_threshold, or calibrate one with "
                "`looped halting`"
            )
        if isinstance(threshold, bool) or not isinstance(threshold, Real):
            raise TypeError(f"exit_threshold must be a number, got {threshold!r}")
        if math.isnan(threshold) or (threshold < least and math.isfinite(threshold)):
            raise ValueError(
                f"exit_threshold={threshold} is out of range: scores of {self.name!r} are {least:g} or more, and "
                f"tokens exit {'above' if self.criterion.exits_above else 'below'} the threshold"
            )
        if self.name in ("max_prob", "gate") and 1 < float(threshold) < math.inf:
            raise ValueError(f"exit_threshold={threshold} is no probability: {self.name!r} wants one in [0, 1]")
