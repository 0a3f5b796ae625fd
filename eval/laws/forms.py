"""Laws of the loss as sums of terms (Parcae, equation 4 and appendices K and L).

A term computes its logarithm from free parameters, so that the logarithm of a law is the log-sum-exp of its terms. The
free parameters are logarithms of positive numbers (except gamma), and scales are taken at the centre of the runs. Both
make the problem well conditioned, so that random restarts converge.
"""

import math
from dataclasses import dataclass, replace

import torch


Columns = dict[str, torch.Tensor]


def uniform(generator, count: int, low: float, high: float) -> torch.Tensor:
    return low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Constant:
    """E: the loss that no run falls below."""

    name: str
    columns = ()

    @property
    def names(self):
        return (self.name,)

    def centred(self, columns: Columns):
        return self

    def log(self, free, columns: Columns):  # [R, 1] -> [R, n]
        return free

    def starts(self, generator, count: int, loss: float):
        return uniform(generator, count, math.log(0.3 * loss), math.log(loss))[:, None]

    def coefficients(self, free):
        return [free[..., 0].exp()]


@dataclass(frozen=True)
class Power:
    """X * (shift + column) ** -x."""

    scale: str
    exponent: str
    column: str
    shift: float = 0.0
    centre: float = 0.0  # mean logarithm of shift + column

    @property
    def names(self):
        return (self.scale, self.exponent)

    @property
    def columns(self):
        return (self.column,)

    def centred(self, columns: Columns):
        return replace(self, centre=(self.shift + columns[self.column]).log().mean().item())

    def log(self, free, columns: Columns):  # free: log of the term at the centre, log x
        return free[:, :1] - free[:, 1:].exp() * ((self.shift + columns[self.column]).log() - self.centre)

    def starts(self, generator, count: int, loss: float):
        scale = uniform(generator, count, math.log(1e-3 * loss), math.log(loss))
        return torch.stack([scale, uniform(generator, count, math.log(0.05), math.log(2.0))], 1)

    def coefficients(self, free):
        exponent = free[..., 1].exp()
        return [(free[..., 0] + exponent * self.centre).exp(), exponent]


@dataclass(frozen=True)
class Decay:
    """Z * exp(-z * T * mu ** -gamma). gamma: a fixed number, or None if it is learned."""

    scale: str = "Z"
    rate: str = "z"
    gamma: float | None = 0.0
    middle: float = 1.0  # geometric mean of mu
    centre: float = 0.0  # mean of T

    @property
    def names(self):
        return (self.scale, self.rate) + (("gamma",) if self.gamma is None else ())

    @property
    def columns(self):
        return ("test_depth",) if self.gamma == 0.0 else ("test_depth", "mean_depth")

    def centred(self, columns: Columns):
        middle = 1.0 if self.gamma == 0.0 else columns["mean_depth"].log().mean().exp().item()
        return replace(self, middle=middle, centre=columns["test_depth"].mean().item())

    def log(self, free, columns: Columns):  # free: log of the term at the centre, log of the rate at the middle, gamma
        depth = columns["test_depth"]
        if self.gamma != 0.0:
            gamma = self.gamma if self.gamma is not None else free[:, 2:]
            depth = depth * (columns["mean_depth"] / self.middle) ** -gamma
        return free[:, :1] - free[:, 1:2].exp() * (depth - self.centre)

    def starts(self, generator, count: int, loss: float):
        parts = [
            uniform(generator, count, math.log(1e-4 * loss), math.log(loss)),
            uniform(generator, count, math.log(0.02), math.log(3.0)),
        ]
        return torch.stack(parts + ([uniform(generator, count, 0.0, 2.0)] if self.gamma is None else []), 1)

    def coefficients(self, free):
        rate = free[..., 1].exp()
        gamma = free[..., 2] if self.gamma is None else torch.full_like(rate, self.gamma)
        values = [(free[..., 0] + rate * self.centre).exp(), rate * self.middle**gamma]
        return values + ([gamma] if self.gamma is None else [])


@dataclass(frozen=True)
class Given:
    """A floor for each row, known from another fit or a measurement."""

    column: str = "floor"
    names = ()

    @property
    def columns(self):
        return (self.column,)

    def centred(self, columns: Columns):
        return self

    def log(self, free, columns: Columns):
        return columns[self.column].log().expand(len(free), -1)

    def starts(self, generator, count: int, loss: float):
        return torch.empty(count, 0, dtype=torch.float64)

    def coefficients(self, free):
        return []


@dataclass(frozen=True)
class Law:
    formula: str
    terms: tuple

    @property
    def names(self) -> list[str]:
        return [name for term in self.terms for name in term.names]

    @property
    def columns(self) -> list[str]:
        return sorted({column for term in self.terms for column in term.columns})

    def centred(self, columns: Columns) -> "Law":
        return replace(self, terms=tuple(term.centred(columns) for term in self.terms))

    def parts(self, free) -> tuple:
        """Split the free parameters [..., p] by term."""
        return free.split([len(term.names) for term in self.terms], dim=-1)

    def term_logs(self, free, columns: Columns) -> torch.Tensor:  # [R, p] -> [R, n, terms]
        logs = [term.log(part, columns) for term, part in zip(self.terms, self.parts(free))]
        return torch.stack(torch.broadcast_tensors(*logs), -1)

    def log(self, free, columns: Columns) -> torch.Tensor:  # [R, p] -> [R, n]
        return self.term_logs(free, columns).logsumexp(-1)

    def starts(self, generator, count: int, loss: float) -> torch.Tensor:
        return torch.cat([term.starts(generator, count, loss) for term in self.terms], 1)

    def coefficients(self, free) -> dict[str, torch.Tensor]:
        values = [value for term, part in zip(self.terms, self.parts(free)) for value in term.coefficients(part)]
        return dict(zip(self.names, values))


TRAINING = (Constant("E"), Power("X", "x", "effective_parameters"), Power("Y", "y", "tokens"))
CONDITIONING = {"learned": None, "one": 1.0, "none": 0.0}  # gamma of mu ** -gamma
RATES = {"learned": "z T mu^-gamma", "one": "z T / mu", "none": "z T"}

PARAMETRIC = Law("E + X N^-x + Y D^-y", TRAINING)
TEST_TIME = {
    "exponential": Law("L_inf + Z e^(-z T)", (Constant("L_inf"), Decay())),
    "shifted_power": Law("L_inf + Z (1 + T)^-z", (Constant("L_inf"), Power("Z", "z", "test_depth", shift=1.0))),
    "power": Law("L_inf + Z T^-z", (Constant("L_inf"), Power("Z", "z", "test_depth"))),
    "power_without_floor": Law("Z T^-z", (Power("Z", "z", "test_depth"),)),
}
UNIFIED = {
    name: Law(f"E + X N^-x + Y D^-y + Z e^(-{RATES[name]})", (*TRAINING, Decay(gamma=gamma)))
    for name, gamma in CONDITIONING.items()
}
ABOVE_FLOOR = {
    name: Law(f"L_train + Z e^(-{RATES[name]})", (Given(), Decay(gamma=gamma))) for name, gamma in CONDITIONING.items()
}
