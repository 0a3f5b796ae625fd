"""The learning rate with the lowest loss and its interval, from a parabola in log2 rate around the minimum."""

import math
from statistics import fmean

import numpy as np

from .intervals import LEVEL, over_seeds, students_quantile


REACH = 1.5  # the parabola is fitted to rates up to this many octaves from the best one,
FEWEST = 5  # and to at least this many rates, if there are enough


def optimum(rates: list[float], losses: list, level: float = 0.95) -> dict:
    """Return the best rate. losses: for every rate, one loss or one per seed; None or not finite for a diverged run.

    lr: vertex of the least-squares parabola in log2 rate around the best rate. With several seeds it is the mean, in
    octaves, of the vertices of the seeds' own curves (`lr_of_seeds`), and the interval is Student's over seeds. If the
    curve of a seed has no vertex, lr is that of the mean curve and has no interval: the other seeds alone would give a
    biased one. With one seed the interval is that of the fit: the vertices that a t-test at `level` does not reject
    (Fieller). It is wider if losses are noisy or no parabola, and does not tell how seeds differ. That over seeds does
    not tell how far the vertex of a parabola is from the lowest loss: where curves are lopsided, more seeds narrow it
    around the vertex. Shifts between curves of one form lose most of this. An interval is cut at the ends of the grid,
    and left out if it is the whole grid. A rate at which any seed diverged counts as diverged. lr is None if the best
    rate of the mean curve is the lowest or highest one that trained.
    """
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"learning rates must be above 0 and finite, got {rates}")
    points = trained(rates, losses)
    if len(points) < 3:
        return {"lr": None, "why": f"only {len(points)} of {len(rates)} learning rates trained, and 3 are needed"}
    means = [fmean(of_seeds) for _, of_seeds in points]
    best = means.index(min(means))
    result = {"best": points[best][0], "loss": means[best]}
    if best in (0, len(points) - 1):
        return {"lr": None, "why": why_at_the_edge(points[best][0], best == 0, rates), **result}
    near = nearest(points, best)
    x = np.log2([rate for rate, _ in near]) - math.log2(points[best][0])
    (slope, curvature), covariance, freedom = parabola(x, np.array([fmean(of_seeds) for _, of_seeds in near]))
    vertex = float(-slope / (2 * curvature)) if curvature > 0 else math.nan
    if not x.min() < vertex < x.max():
        return {"lr": None, "why": f"the losses at {len(near)} rates around the best form no valley", **result}
    seeds = len(points[best][1])
    fitted = {"lr": result["best"] * 2**vertex, **result, "points": x.size * seeds, "seeds": seeds}
    if seeds > 1:
        return fitted | over_vertices(points, level)
    if freedom < 1:
        return {**fitted, "interval": None, "why": "as many unknowns as losses: an interval needs a fourth rate"}
    low, high = fieller(slope, curvature, covariance, students_quantile((1 + level) / 2, freedom))
    ends = within_grid(math.log2(result["best"]) + low, math.log2(result["best"]) + high, points)
    if ends is None:
        return {**fitted, "interval": None, "why": "the losses are too noisy, or too far from a parabola, for one"}
    return {**fitted, "interval": ends, "level": level}


def over_vertices(points: list[tuple[float, list[float]]], level: float) -> dict:
    """Return the best rate over several seeds, from the vertices of their own curves; without an interval if a curve
    has no vertex."""
    of_seeds = zip(*(losses for _, losses in points))
    found = [optimum([rate for rate, _ in points], list(losses), level) for losses in of_seeds]
    without = sum(one["lr"] is None for one in found)
    if without:
        return {"interval": None, "why": f"seeds without a best rate of their own: {without} of {len(found)}"}
    vertices = [math.log2(one["lr"]) for one in found]
    estimate = over_seeds(vertices, level=level)
    of_all = {"lr": 2**estimate.value, "lr_of_seeds": [one["lr"] for one in found]}
    ends = within_grid(estimate.low, estimate.high, points)
    if ends is None:
        return {**of_all, "interval": None, "why": f"the best rates of {len(found)} seeds lie too far apart for one"}
    return {**of_all, "interval": ends, "level": level}


def within_grid(low: float, high: float, points: list[tuple[float, list[float]]]) -> list[float] | None:
    """Return the rates from 2^low to 2^high, cut at the ends of the grid; None if these are all rates of the grid."""
    lowest, highest = points[0][0], points[-1][0]
    if low <= math.log2(lowest) and high >= math.log2(highest):
        return None
    return [2 ** max(low, math.log2(lowest)), 2 ** min(high, math.log2(highest))]


def of_saved(rates: list[float], curve: dict, seeds: int) -> dict:
    """Return the optimum of a curve that `looped diagnose lr_transfer` saved. Files without the losses of seeds have
    their means alone, which tell no interval over seeds."""
    found = optimum(rates, curve.get("loss_of_seeds", curve["loss"]))
    if seeds > 1 and "loss_of_seeds" not in curve and found["lr"] is not None:
        return found | {"interval": None, "why": f"the file has the means of {seeds} seeds alone", "seeds": seeds}
    return found


def trained(rates: list[float], losses: list) -> list[tuple[float, list[float]]]:
    """Return (rate, losses of its seeds) sorted by rate, without rates at which a run diverged."""
    points = []
    for rate, of_seeds in sorted(zip(rates, losses), key=lambda pair: pair[0]):
        of_seeds = of_seeds if isinstance(of_seeds, (list, tuple)) else [of_seeds]
        if all(loss is not None and math.isfinite(loss) for loss in of_seeds):
            points.append((rate, list(of_seeds)))
    if len({len(of_seeds) for _, of_seeds in points}) > 1:
        counts = [len(of_seeds) for _, of_seeds in points]
        raise ValueError(f"every learning rate needs a loss from every seed, got {counts} of them")
    return points


def why_at_the_edge(best: float, lowest: bool, rates: list[float]) -> str:
    beyond = [rate for rate in rates if (rate < best if lowest else rate > best)]
    if not beyond:
        return f"the {'lowest' if lowest else 'highest'} rate, {best:g}, is the best: widen the grid"
    nearest_beyond = max(beyond) if lowest else min(beyond)
    return f"the best rate, {best:g}, lies beside one that diverged, {nearest_beyond:g}: add rates between them"


def nearest(points: list, best: int) -> list:
    """Return the points within REACH of the best one, but at least the FEWEST nearest, with one on either side."""
    octaves = [abs(math.log2(rate / points[best][0])) for rate, _ in points]
    order = sorted(range(len(points)), key=lambda i: (abs(i - best) > 1, octaves[i]))
    return [points[i] for i in sorted(i for place, i in enumerate(order) if place < FEWEST or octaves[i] <= REACH)]


def parabola(x: np.ndarray, y: np.ndarray):
    """Fit y = a + b x + c x^2 by least squares. Return (b, c), their covariance, and the remaining degrees of
    freedom; without any, the covariance is not known."""
    freedom = len(y) - 3
    if freedom < 1:
        return np.polyfit(x, y, 2)[1::-1], None, freedom
    coefficients, covariance = np.polyfit(x, y, 2, cov=True)
    return coefficients[1::-1], covariance[1::-1, 1::-1], freedom


def fieller(slope: float, curvature: float, covariance: np.ndarray, quantile: float):
    """Return the interval of v in which |b + 2 c v| <= quantile * the standard error of b + 2 c v."""
    (bb, bc), (_, cc) = quantile**2 * covariance
    square = 4 * (curvature**2 - cc)  # coefficient of v^2 in the quadratic that must not be positive
    if square <= 0:
        return -math.inf, math.inf
    half, constant = 2 * (slope * curvature - bc), slope**2 - bb
    root = math.sqrt(max(0.0, half**2 - square * constant))
    return (-half - root) / square, (-half + root) / square


def shift(first: dict, other: dict) -> dict:
    """Return the octaves from one optimum to another, with Student's interval of the differences of equal seeds. With
    one seed, or other numbers of seeds, it is the interval of a difference of two independent estimates (MOVER)."""
    if not (first.get("lr") and other.get("lr")):
        return {"octaves": None}
    a, b = math.log2(first["lr"]), math.log2(other["lr"])
    before, after = first.get("lr_of_seeds", []), other.get("lr_of_seeds", [])
    if before and len(before) == len(after):
        level = first.get("level") or other.get("level") or LEVEL
        of_seeds = over_seeds((math.log2(two / one) for one, two in zip(before, after)), level=level)
        return {"octaves": of_seeds.value, "interval": [of_seeds.low, of_seeds.high]}
    if not (first.get("interval") and other.get("interval")):
        return {"octaves": b - a, "interval": None}
    (a_low, a_high), (b_low, b_high) = ([math.log2(end) for end in one["interval"]] for one in (first, other))
    return {
        "octaves": b - a,
        "interval": [b - a - math.hypot(b - b_low, a_high - a), b - a + math.hypot(b_high - b, a - a_low)],
    }


def shifts(optima: dict[str, dict]) -> dict[str, dict]:
    """Return the distance of each optimum from the first."""
    first = next(iter(optima.values()))
    return {
        name: {"octaves": 0.0} if one is first and one["lr"] is not None else shift(first, one)
        for name, one in optima.items()
    }


def in_words(found: dict) -> str:
    """Return a line of text about an optimum."""
    if found["lr"] is None:
        return f"none ({found['why']})"
    if found["interval"] is None:
        return f"{found['lr']:.3g} (no interval: {found['why']})"
    what = "the fit to one seed" if found["seeds"] == 1 else "the parabolas' vertices over seeds"
    return f"{found['lr']:.3g} [{found['interval'][0]:.3g}, {found['interval'][1]:.3g}] (of {what})"
