"""Power laws: fitted to points, and doubted. A straight line in logarithms can be drawn through anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from veriformer.ablations.statistics.paired import ALPHA

CLOSE = 0.1
"""Share by which a law may miss the means and still be a summary of them."""

CLEAR = 4.0
"""Difference of AICc from which another law counts as clearly better (Burnham & Anderson 2002, section 2.6)."""


def fit_power(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Fit y = c x^k by least squares of the logarithms.

    Returns:
        `exponent`, its 95 % interval `low` and `high` (Student's t over the points), `factor` c, and `points`.

    >>> fit_power([1, 2, 4], [3, 6, 12])["exponent"]
    1.0
    """
    if len(x) < 3:
        raise ValueError(f"{len(x)} points were given; a power law with an interval needs at least 3")
    fitted = stats.linregress(np.log(x), np.log(y))
    half = float(stats.t.ppf(0.975, len(x) - 2)) * float(fitted.stderr)
    slope = round(float(fitted.slope), 12)
    return {
        "exponent": slope, "low": slope - half, "high": slope + half,
        "factor": math.exp(float(fitted.intercept)), "points": len(x),
    }  # fmt: skip


def lack_of_fit(x: Sequence[float], samples: Sequence[Sequence[float]]) -> float:
    """Return the p of a power law from several y at each x; small where it misses more than the seeds' own spread.

    F = (what the line misses of the means / (m - 2)) / (spread within points / (n - m)), of logarithms; m points, n
    values in all (Draper & Smith 1998, section 2.1). Seeds without any spread give p = 0 where
    the line misses anything.

    >>> lack_of_fit([1, 2, 4, 8], [[3, 3.1], [6.1, 6], [12, 12.1], [24.1, 24]]) > 0.05
    True
    """
    logs = [np.log(np.asarray(values, dtype=float)) for values in samples]
    points, total = len(logs), sum(len(v) for v in logs)
    if points < 3 or total <= points:
        raise ValueError(f"{total} values at {points} points were given; at least 3 points and one repeat are required")
    spread = sum(float(((v - v.mean()) ** 2).sum()) for v in logs)
    at = np.repeat(np.log(np.asarray(x, dtype=float)), [len(v) for v in logs])
    line = stats.linregress(at, np.concatenate(logs))
    missed = sum(
        len(v) * (float(v.mean()) - float(line.slope) * math.log(place) - float(line.intercept)) ** 2
        for place, v in zip(x, logs, strict=True)
    )
    if spread < 1e-20 * max(missed, 1e-300):
        return 0.0 if missed > 1e-20 else 1.0
    return float(stats.f.sf((missed / (points - 2)) / (spread / (total - points)), points - 2, total - points))


def laws(x: Sequence[float], samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the AICc of each law by name, the least being the best: all fitted to the logarithm of every value.

    "power" c x^k; "power above a floor" c x^k + e (Hoffmann et al. 2022); "plateau and cliff", two straight lines in
    logarithms that meet; "exponential" c exp(k x). Laws with too many numbers for the points are left out.
    """
    places = np.repeat(np.asarray(x, dtype=float), [len(values) for values in samples])
    at, log_y = np.log(places), np.log(np.concatenate([np.asarray(values, dtype=float) for values in samples]))
    found = {
        "power": (2, _straight(at, log_y)),
        "exponential": (2, _straight(places, log_y)),
        "power above a floor": (3, _above_floor(at, log_y)),
        "plateau and cliff": (4, _broken(at, log_y)),
    }
    told = {name: _aicc(error, len(at), numbers + 1) for name, (numbers, error) in found.items()}
    return {name: value for name, value in told.items() if math.isfinite(value)}


def _aicc(error: float, points: int, numbers: int) -> float:
    """Return Akaike's criterion with its correction for few points (Hurvich & Tsai 1989)."""
    if points <= numbers + 1:
        return math.inf
    # an error below rounding is rounding: a law that meets every point is not infinitely better than another such
    return points * math.log(max(error, 1e-12) / points) + 2 * numbers * points / (points - numbers - 1)


def _straight(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    line = stats.linregress(x, y)
    return float(((y - line.slope * x - line.intercept) ** 2).sum())


def _above_floor(at: NDArray[np.float64], log_y: NDArray[np.float64]) -> float:
    """Return the squared error of log(c x^k + e), the floor e found between nothing and the least value."""

    def error(share: float) -> float:
        floor = share * float(np.exp(log_y.min()))
        line = stats.linregress(at, np.log(np.exp(log_y) - floor))
        told = np.log(np.exp(line.slope * at + line.intercept) + floor)
        return float(((told - log_y) ** 2).sum())

    return float(optimize.minimize_scalar(error, bounds=(0.0, 0.999), method="bounded").fun)


def _broken(at: NDArray[np.float64], log_y: NDArray[np.float64]) -> float:
    """Return the squared error of two lines that meet at any place between the second point and the last but one."""
    best, places = math.inf, np.unique(at)
    for knee in np.linspace(places[1], places[-2], 41):
        design = np.stack([np.ones_like(at), at, np.maximum(at - knee, 0.0)], axis=1)
        coefficients = np.linalg.lstsq(design, log_y, rcond=None)[0]
        best = min(best, float(((design @ coefficients - log_y) ** 2).sum()))
    return best


def check_power(x: Sequence[float], samples: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Fit a power law to the means of `samples` at increasing `x`, and say whether it is one.

    Returns:
        what `fit_power` does, and `lack_of_fit` (p), `missed` (the largest share by which a mean is missed), `laws`
        (AICc less the best one's), `local` (the exponent between neighbours), and `is_power_law`: every mean is met to
        a tenth, or what is missed is within the seeds' spread and no other law is clearly better.
    """
    means = [float(np.mean(values)) for values in samples]
    fit = fit_power(x, means)
    told = [abs(fit["factor"] * a ** fit["exponent"] / m - 1) for a, m in zip(x, means, strict=True)]
    criteria = laws(x, samples)
    least = min(criteria.values(), default=0.0)
    p = lack_of_fit(x, samples) if any(len(v) > 1 for v in samples) else None
    above = {name: value - least for name, value in criteria.items()}
    unrefuted = p is not None and p >= ALPHA and above.get("power", 0.0) < CLEAR
    steps = zip(x, x[1:], means, means[1:], strict=False)
    return {
        **fit,
        "x": list(x),
        "y": means,
        "lack_of_fit": p,
        "missed": max(told),
        "laws": above,
        "local": [math.log(m2 / m1) / math.log(x2 / x1) for x1, x2, m1, m2 in steps],
        "is_power_law": max(told) <= CLOSE or unrefuted,
    }
