"""The best use of training compute: depths and tokens of least loss at each FLOP budget (Parcae, figures 4 and 6).

For a model of one size, mean depth mu determines effective parameters N(mu) and operations per token F(mu). Both are
read off the runs and interpolated between their mean depths. A law of N and D then gives a loss over mu and C.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .fitting import Fit, FitError
from .run_table import RunTable


@dataclass(frozen=True)
class DepthCosts:
    """N(mu) and F(mu) of one model, at the mean depths of its runs in ascending order."""

    depths: np.ndarray
    parameters: np.ndarray  # N(mu)
    flops_per_token: np.ndarray  # F(mu) in training

    def at(self, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.interp(depths, self.depths, self.parameters), np.interp(depths, self.depths, self.flops_per_token)


def of_each_depth(table: RunTable, name: str, value) -> dict[float, float]:
    """Return {mean depth: value of its runs}; FitError if they differ, as those of models of several sizes do."""
    found = {}
    for row in table.rows:
        depth, here = row["mean_depth"], value(row)
        before = found.setdefault(depth, here)
        if not np.isclose(here, before, rtol=1e-3):
            raise FitError(
                f"runs of mean depth {depth:g} differ in size: fit each size apart, --by parameters (their {name}: "
                f"{before:.4g}, {here:.4g})"
            )
    return found


def depth_costs(table: RunTable) -> DepthCosts:
    table.need("mean_depth", "flops", "effective_parameters", "tokens")
    parameters = of_each_depth(table, "effective_parameters", lambda row: row["effective_parameters"])
    per_token = of_each_depth(table, "FLOPs per token", lambda row: row["flops"] / row["tokens"])
    if len(parameters) < 2:
        raise FitError(f"{table.source}: all runs have mean depth {min(parameters):g}")
    depths = sorted(parameters)
    return DepthCosts(np.array(depths), *(np.array([of[depth] for depth in depths]) for of in (parameters, per_token)))


def predicted(fitted: Fit, parameters: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    columns = {"effective_parameters": torch.tensor(parameters), "tokens": torch.tensor(tokens)}
    return fitted.predict(columns).numpy()


def frontier(fitted: Fit, table: RunTable, budgets: int = 25, depths: int = 1000) -> list[dict]:
    """Return the mean depth of least loss under the law, for budgets over the range of the runs' FLOPs.

    The same line shows the least FLOPs for each loss. at_edge: the minimum is at the shallowest or deepest run, so the
    true one may lie beyond the depths of the runs.
    """
    costs = depth_costs(table)
    grid = np.geomspace(costs.depths[0], costs.depths[-1], depths)
    parameters, per_token = costs.at(grid)
    line = []
    for flops in np.geomspace(table["flops"].min().item(), table["flops"].max().item(), budgets):
        loss = predicted(fitted, parameters, flops / per_token)
        best = int(loss.argmin())
        line.append(
            {
                "flops": float(flops),
                "mean_depth": float(grid[best]),
                "tokens": float(flops / per_token[best]),
                "loss": float(loss[best]),
                "at_edge": best in (0, depths - 1),
            }
        )
    return line


def measured_frontier(budgets: dict[float, RunTable]) -> list[dict]:
    """Return the mean depth of least loss at each budget, with its gain over runs of fixed depth if there are any.

    Runs of one depth, such as several seeds, count by their mean: the best of many would gain by chance.
    """
    line = []
    for flops, group in budgets.items():
        looped, fixed = group.where(lambda row: not is_fixed_depth(row)), group.where(is_fixed_depth)
        if not len(looped):
            continue
        losses = {depth: runs["loss"].mean().item() for depth, runs in looped.by("mean_depth").items()}
        best = min(losses, key=losses.get)
        runs = ", ".join(row["run"] for row in looped.rows if row["mean_depth"] == best)
        point = {"flops": flops, "run": runs, "mean_depth": best, "loss": losses[best]}
        if len(fixed):
            loss = fixed["loss"].mean().item()
            point |= {"fixed_loss": loss, "gain": loss - losses[best], "fixed_runs": len(fixed)}
        line.append(point)
    return line


def is_fixed_depth(row: dict) -> bool:
    """Return whether a run is the baseline, which always runs one loop."""
    return row.get("mean_depth") == 1
