"""Fits of laws to runs: L-BFGS from many random starts at once. A fit is checked before its coefficients are returned.

The misfit is that of Hoffmann et al., the Huber loss (delta = 1e-3) between logarithms of predicted and measured loss,
or plain squares. All restarts, and all resamples of a bootstrap, are rows of one batch.
"""

import math
from dataclasses import dataclass

import torch
from scipy import optimize
from torch.autograd.functional import hessian, jacobian
from torch.nn.functional import huber_loss

from looped_eval.common.progress import progress

from .forms import Columns, Law


DELTA = 1e-3
NEGLIGIBLE = 1e-4  # a term with a smaller share of the loss counts as vanished
LOOSE = 2.0  # a direction with a larger standard deviation, in log units, counts as undetermined


class FitError(ValueError):
    """The runs do not allow a fit, or do not determine it."""


def minimize(objective, start: torch.Tensor, max_iterations: int = 10_000, memory: int = 10, tolerance: float = 1e-6):
    """Run L-BFGS on every row of `start` [R, p] as a separate problem; return the points [R, p] and their values [R].

    `objective(points, rows)` returns the values of the rows with indices `rows`. A row is done when its gradient is
    below `tolerance`, or when three consecutive iterations have each gained less than 1e-7 of the value.
    """
    points, values = start.clone(), torch.full((len(start),), torch.inf, dtype=start.dtype)
    rows = torch.arange(len(start))
    value, gradient = with_gradient(objective, points, rows)
    values.copy_(value)
    steps = start.new_zeros(memory, *start.shape)  # moves of the point, the newest last
    changes = start.new_zeros(memory, *start.shape)  # changes of the gradient, the newest last
    stalled = torch.zeros(len(start), dtype=torch.long)
    x, bar = points, progress(None, "fitting", total=len(start))
    for _ in range(max_iterations):
        going = value.isfinite() & (gradient.abs().amax(1) > tolerance) & (stalled < 3)
        rows, x, value, gradient, stalled = rows[going], x[going], value[going], gradient[going], stalled[going]
        bar.update(len(start) - len(rows) - bar.n)
        if not len(rows):
            break
        steps, changes = steps[:, going], changes[:, going]
        direction = -two_loops(gradient, steps, changes)
        new_x, new_value, new_gradient = line_search(objective, rows, x, value, gradient, direction)
        steps = torch.cat([steps[1:], (new_x - x)[None]])
        changes = torch.cat([changes[1:], (new_gradient - gradient)[None]])
        stalled = torch.where(value - new_value > 1e-7 * new_value.clamp(min=1e-2), 0, stalled + 1)
        x, value, gradient = new_x, new_value, new_gradient
        points[rows], values[rows] = x, value
    bar.close()
    return points, values


def with_gradient(objective, points, rows):
    points = points.detach().requires_grad_()
    value = objective(points, rows)
    (gradient,) = torch.autograd.grad(value.sum(), points)
    bad = ~(value.isfinite() & gradient.isfinite().all(1))
    return value.detach().masked_fill(bad, torch.inf), gradient.masked_fill(bad[:, None], 0.0)


def two_loops(gradient, steps, changes):
    """Apply the inverse Hessian of the last steps to the gradient; pairs without positive curvature are skipped."""
    curvature = (steps * changes).sum(2)  # [m, R]
    usable = curvature > 1e-14 * changes.square().sum(2)
    inverse = torch.where(usable, 1 / curvature.where(usable, torch.ones_like(curvature)), 0.0)
    result, weights = gradient.clone(), []
    for step, change, rho in reversed(list(zip(steps, changes, inverse))):
        weights.insert(0, rho * (step * result).sum(1))
        result = result - weights[0][:, None] * change
    scale = 1 / gradient.norm(dim=1).clamp(min=1.0)  # without usable pairs: a step of at most 1
    for pair_curvature, change, good in zip(curvature, changes, usable):
        scale = torch.where(good, pair_curvature / change.square().sum(1).clamp(min=1e-300), scale)
    result = result * scale[:, None]
    for step, change, rho, weight in zip(steps, changes, inverse, weights):
        result = result + (weight - rho * (change * result).sum(1))[:, None] * step
    return result


def line_search(objective, rows, x, value, gradient, direction, tries: int = 20):
    """Meet the weak Wolfe conditions by bisection, row by row; a row that finds no lower value stays in place."""
    slope = (gradient * direction).sum(1)
    downhill = slope < 0
    direction = torch.where(downhill[:, None], direction, -gradient)
    slope = torch.where(downhill, slope, -gradient.square().sum(1))
    low, high = torch.zeros_like(value), torch.full_like(value, torch.inf)
    length = (4.0 / direction.abs().amax(1)).clamp(max=1.0)  # points are logarithms: no factor above e^4
    best_x, best_value, best_gradient = x.clone(), value.clone(), gradient.clone()
    open_rows = torch.arange(len(rows))
    for _ in range(tries):
        i = open_rows
        trial = x[i] + length[i, None] * direction[i]
        trial_value, trial_gradient = with_gradient(objective, trial, rows[i])
        enough = trial_value <= value[i] + 1e-4 * length[i] * slope[i]
        steep = (trial_gradient * direction[i]).sum(1) < 0.9 * slope[i]
        lower = enough & (trial_value <= best_value[i])
        best_x[i[lower]], best_value[i[lower]] = trial[lower], trial_value[lower]
        best_gradient[i[lower]] = trial_gradient[lower]
        high[i] = torch.where(enough, high[i], length[i])
        low[i] = torch.where(enough & steep, length[i], low[i])
        length[i] = torch.where(high[i].isfinite(), (low[i] + high[i]) / 2, 2 * length[i])
        open_rows = i[~(enough & ~steep)]
        if not len(open_rows):
            break
    return best_x, best_value, best_gradient


@dataclass
class Fit:
    """The best of all restarts. `problem` is the reason why its coefficients are meaningless, or None.

    A fit at a minimum may also have a problem: it predicts losses, but the runs do not determine its coefficients.
    Results call a fit converged if it is at a minimum and has no problem.
    """

    law: Law
    free: torch.Tensor  # [p]
    misfit: float  # mean of the criterion in units of delta squared
    huber: torch.Tensor  # [n]: the Huber loss of every row
    agreeing: int  # restarts that ended at this misfit
    restarts: int
    at_minimum: bool  # of the misfit
    problem: str | None = None
    refits: torch.Tensor | None = None  # [R, p] of a bootstrap; NaN where the fit to a resample failed

    @property
    def coefficients(self) -> dict[str, float]:
        if self.problem:
            raise FitError(self.problem)
        return {name: value.item() for name, value in self.law.coefficients(self.free).items()}

    @property
    def intervals(self) -> dict[str, list[float]]:
        """The interval of each coefficient that contains the middle 95 % of the refits."""
        if self.refits is None:
            return {}
        return {name: interval(values) for name, values in self.law.coefficients(self.refits).items()}

    def predict(self, columns: Columns) -> torch.Tensor:
        if not self.at_minimum:
            raise FitError(self.problem)
        return self.law.log(self.free[None], columns)[0].exp()

    def predict_again(self, columns: Columns) -> torch.Tensor:
        """Return the predictions of every refit, [R, n]."""
        return self.law.log(self.refits, columns).exp()


def interval(values: torch.Tensor) -> list[float]:
    """Return the ends of the middle 95 % of the values; NaN is ignored."""
    return values.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


def huber(predicted: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """Return the Huber loss between the logarithms of predicted and measured losses."""
    return huber_loss(predicted.log(), measured.log().expand_as(predicted), reduction="none", delta=DELTA)


def misfit_of(law: Law, columns: Columns, log_loss, weights, criterion: str):
    """Return a function of parameters [R, p] that gives the mean misfit of every row, in units of delta squared.

    Columns and losses are [n], or [R, n] if they differ between rows of the batch.
    """

    def objective(free, rows):
        own = {name: values[rows] if values.dim() == 2 else values for name, values in columns.items()}
        target = log_loss[rows] if log_loss.dim() == 2 else log_loss
        residual = (law.log(free, own) - target) / DELTA
        squares = criterion == "squares"
        each = residual.square() / 2 if squares else huber_loss(residual, torch.zeros_like(residual), reduction="none")
        return each.mean(1) if weights is None else (each * weights[rows]).mean(1)

    return objective


def check_rows(law: Law, columns: Columns, loss: torch.Tensor):
    if len(loss) <= len(law.names):
        raise FitError(
            f"{law.formula} has {len(law.names)} parameters ({', '.join(law.names)}) and needs at least "
            f"{len(law.names) + 1} losses, got {len(loss)}: add runs or depths"
        )
    for name in law.columns:
        if name != "floor" and len(columns[name].unique()) < 2:
            raise FitError(
                f"{law.formula} needs different values of {name}, but all {len(loss)} rows have "
                f"{columns[name][0].item():g}: add runs that differ in it"
            )


def fit(law: Law, columns: Columns, loss: torch.Tensor, restarts: int, seed: int = 0, criterion: str = "huber") -> Fit:
    check_rows(law, columns, loss)
    law = law.centred(columns)
    objective = misfit_of(law, columns, loss.log(), None, criterion)
    generator = torch.Generator().manual_seed(seed)
    starts = law.starts(generator, restarts, loss.min().item())
    points, values = minimize(objective, starts)
    best = values.argmin()
    free = polished(objective, points[best])
    value = objective(free[None], None).item()
    residuals = huber(law.log(free[None], columns)[0].exp(), loss)
    agreeing = int((values <= value * 1.01 + 1e-6).sum())
    result = Fit(law, free, value, residuals, agreeing, restarts, at_minimum=True)
    return judged(result, objective, columns)


def polished(objective, free: torch.Tensor) -> torch.Tensor:
    """Refine the last digits by a trust-region method with the exact Hessian; keep the result if it is not worse."""

    def tensor(x):
        return torch.as_tensor(x, dtype=torch.float64)

    def single(x):
        return objective(x[None], None)[0]

    result = optimize.minimize(
        lambda x: single(tensor(x)).item(),
        free.numpy(),
        jac=lambda x: jacobian(single, tensor(x)).numpy(),
        hess=lambda x: hessian(single, tensor(x)).numpy(),
        method="trust-exact",
        options={"gtol": 1e-7, "maxiter": 20},
    )
    return tensor(result.x) if result.fun <= single(free).item() else free


def judged(result: Fit, objective, columns: Columns) -> Fit:
    """Record what is wrong with a fit: no minimum reached, a term that vanished, or undetermined parameters."""
    law, free = result.law, result.free

    def single(x):
        return objective(x[None], None)[0]

    gradient, curved = jacobian(single, free), hessian(single, free)
    shares = law.term_logs(free[None], columns)[0].softmax(-1).amax(0)  # of each term, at the run where it is largest
    alive = torch.cat([(share > NEGLIGIBLE).expand(len(term.names)) for share, term in zip(shares, law.terms)])
    curvatures, directions = torch.linalg.eigh(curved[alive][:, alive])
    along = directions.T @ gradient[alive]
    possible_gain = (along.square() / curvatures.abs().clamp(min=1e-12)).sum().item()
    dead = [term.names[0] for share, term in zip(shares, law.terms) if term.names and share <= NEGLIGIBLE]
    spread = (max(2 * result.misfit, 1e-12) / (len(result.huber) * curvatures.clamp(min=1e-300))).sqrt()
    if not possible_gain <= 1e-6 * result.misfit + 1e-6:
        result.at_minimum = False
        result.problem = f"{law.formula}: no minimum was reached from {result.restarts} starts; try more --restarts"
    elif dead:
        result.problem = f"{law.formula}: the term of {', '.join(dead)} vanished; these runs do not show it"
    elif spread.max() > LOOSE or curvatures.min() <= 1e-12 * curvatures.max():
        names = [name for name, loose in zip(law.names, directions[:, 0].abs() > 0.3) if loose]
        result.problem = f"{law.formula}: these runs leave {', '.join(names)} undetermined; add runs that differ more"
    return result


def draw_runs(groups: torch.Tensor, resamples: int, seed: int) -> torch.Tensor:
    """Resample whole runs and return how often each row is drawn, [R, n]. `groups` [n] numbers the run of each row."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = int(groups.max()) + 1
    drawn = torch.randint(num_groups, (resamples, num_groups), generator=generator)
    counts = torch.zeros(resamples, num_groups, dtype=torch.float64)
    return counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))[:, groups]


def draw_residuals(predicted: torch.Tensor, loss: torch.Tensor, num_parameters: int, resamples: int, seed: int):
    """Return losses [R, n]: the fitted ones with resampled residuals, widened by the degrees of freedom of the fit."""
    generator = torch.Generator().manual_seed(seed)
    residuals = (loss / predicted).log()
    residuals = (residuals - residuals.mean()) * math.sqrt(len(loss) / (len(loss) - num_parameters))
    drawn = torch.randint(len(loss), (resamples, len(loss)), generator=generator)
    return predicted * residuals[drawn].exp()


def bootstrap(result: Fit, columns: Columns, loss, resamples: int, weights=None, criterion: str = "huber") -> Fit:
    """Fill `refits`, one per resample. Weights, losses or columns are [R, n] and distinguish the resamples."""
    if not (result.at_minimum and resamples):
        return result
    objective = misfit_of(result.law, columns, loss.log(), weights, criterion)
    points, values = minimize(objective, result.free.repeat(resamples, 1), max_iterations=1000)
    result.refits = points.masked_fill(~values.isfinite()[:, None], torch.nan)
    return result
