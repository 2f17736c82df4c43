"""What is fitted to the finished rows of a study."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

Rows = Sequence[Mapping[str, Any]]


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


def scaling_law(rows: Rows) -> dict[str, Any]:
    """Fit the loss above the source's entropy against non-embedding parameters, and against samples, as power laws.

    The other quantity is at its largest; seeds are averaged first (Kaplan et al. 2020, section 3).
    """
    by_size = [(r["parameters"], r["reducible_loss"]) for r in rows if r["variant"].startswith("d=")]
    by_data = [
        (int(r["variant"].removeprefix("samples=")), r["reducible_loss"])
        for r in rows
        if r["variant"].startswith("samples=")
    ]
    result: dict[str, Any] = {"kind": "scaling-law", "fits": {}}
    for name, points in (("parameters", by_size), ("samples", by_data)):
        usable = sorted((x, y) for x, y in points if y is not None and y > 0)
        if len(usable) >= 3:
            xs, ys = zip(*usable, strict=True)
            result["fits"][name] = {**fit_power(xs, ys), "x": list(xs), "y": list(ys)}
    return result


FITS: Mapping[str, Callable[[Rows], dict[str, Any]]] = {"scaling-law": scaling_law}
"""Fits by the name in `Study.fit`."""
