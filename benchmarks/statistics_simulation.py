"""How often the intervals cover and the verdicts err, by simulation: what the ablation's statistics are worth.

    python benchmarks/statistics_simulation.py [--runs 2000] > reports/gallery/statistics.md

Seeds that die with a given probability, at chance, and live otherwise, a little below the best. Intervals, tests and
verdicts are those of the package, on records like those of trained models; nothing is done over here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from veriformer.ablations.statistics.intervals import mean_interval, share_not_excluded
from veriformer.ablations.statistics.paired import ALPHA, sign_flip_p
from veriformer.ablations.statistics.power import smallest_detectable
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.verdicts.rows import EQUIVALENT, Row, compare, pace, verdict

TASK = TASKS["precede"]
DEAD, SEEDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5), (12, 24)
ROWS = 10
"""Of a family."""

LIVING = 200.0
"""A living seed has the accuracy of a beta(200, 1) law: its mean is .995, its standard deviation .005."""

SAMPLES = 1024
"""Held-out samples of a trial, which give a dead seed its noise about chance."""

Array = NDArray[np.float64]


def draw(rng: np.random.Generator, size: tuple[int, ...], dead: float) -> Array:
    """Return accuracies of seeds that die with probability `dead`."""
    alive = rng.beta(LIVING, 1.0, size)
    return np.where(rng.random(size) < dead, rng.binomial(SAMPLES, TASK.chance, size) / SAMPLES, alive)


def mean_of(dead: float) -> float:
    """Return the true mean of `draw`."""
    return dead * TASK.chance + (1 - dead) * LIVING / (LIVING + 1)


def row(rng: np.random.Generator, base: Array, variant: Array) -> Row:
    """Return a row of these accuracies; loss areas are lognormal, larger where a seed is dead."""

    def records(accuracies: Array) -> list[dict[str, Any]]:
        areas = np.exp(rng.normal(-1.5, 0.3, len(accuracies))) + (accuracies < 0.6) * 0.4
        return [
            {"accuracy": float(a), "loss_area": float(s), "checks": {}} for a, s in zip(accuracies, areas, strict=True)
        ]

    return Row(TASK, "", "variant", records(variant), records(base), is_forced=False)


def share(hits: int, of: int) -> str:
    """Return a share in per cent; a dash where there was nothing to count."""
    return f"{hits / of:.1%}" if of else "–"


def coverage(runs: int) -> list[dict[str, str]]:
    """Return how often intervals of a mean, and of a paired difference, hold the true one."""
    lines = []
    for seeds in SEEDS:
        for dead in DEAD:
            rng = np.random.default_rng((1, seeds, round(1000 * dead)))
            true, hits = mean_of(dead), [0, 0, 0]
            for base, variant in draw(rng, (runs, 2, seeds), dead):
                low, high = row(rng, base, variant).bounds
                bounded, student = mean_interval(variant, (low, high)), mean_interval(variant)
                difference = mean_interval(variant - base, (low - high, high - low))
                hits[0] += bounded.low <= true <= bounded.high
                hits[1] += difference.low <= 0 <= difference.high
                hits[2] += student.low <= true <= student.high
            names = ("mean accuracy", "paired difference", "mean accuracy by Student's t, not used")
            lines.append(
                {"seeds": str(seeds), "die": f"{dead:.0%}", "no seed of the sample dies": f"{(1 - dead) ** seeds:.1%}"}
                | {name: share(h, runs) for name, h in zip(names, hits, strict=True)}
            )
    return lines


def scattered(runs: int) -> list[dict[str, str]]:
    """Return how often Student's t, which is used for loss areas and for the living, holds the true mean."""
    laws: dict[str, tuple[Callable[[np.random.Generator, int], Array], float]] = {
        "normal": (lambda rng, n: rng.normal(size=n), 0.0),
        "difference of two lognormal areas": (
            lambda rng, n: np.exp(rng.normal(-1.5, 0.3, n)) - np.exp(rng.normal(-1.5, 0.3, n)), 0.0,
        ),
        "difference of two living accuracies": (
            lambda rng, n: rng.beta(LIVING, 1.0, n) - rng.beta(LIVING, 1.0, n), 0.0,
        ),
        "exponential": (lambda rng, n: rng.exponential(size=n), 1.0),
    }  # fmt: skip
    lines = []
    for law, (sample, mean) in laws.items():
        line = {"law": law}
        for seeds in SEEDS:
            rng, hits = np.random.default_rng((2, seeds)), 0
            for _ in range(runs):
                interval = mean_interval(sample(rng, seeds))
                hits += interval.low <= mean <= interval.high
            line[f"{seeds} seeds"] = share(hits, runs)
        lines.append(line)
    return lines


def claims(runs: int) -> list[dict[str, str]]:
    """Return what is said of a variant whose seeds die while the base's live, and how often that is false."""
    lines = []
    for seeds in SEEDS:
        for dead in DEAD:
            rng = np.random.default_rng((3, seeds, round(1000 * dead)))
            said: list[str] = []
            excluded = 0
            for _ in range(runs):
                one = row(rng, draw(rng, (seeds,), 0.0), draw(rng, (seeds,), dead))
                compare([one])
                said.append(verdict(one))
                excluded += said[-1] == "alike if alive" and share_not_excluded(one.dead(), seeds) < dead
            is_false = mean_of(0.0) - mean_of(dead) > EQUIVALENT
            lines.append(
                {
                    "seeds": str(seeds), "die": f"{dead:.0%}",
                    "*equivalent*, falsely": share(said.count("equivalent") * is_false, runs),
                    "*alike if alive*": share(said.count("alike if alive"), runs),
                    "... that excludes the true share": share(excluded, runs),
                    "*no evidence*": share(said.count("no evidence"), runs),
                    "*hurts*": share(said.count("hurts"), runs),
                    "*helps*, falsely": share(said.count("helps"), runs),
                }
            )  # fmt: skip
    return lines


def shifted(runs: int) -> list[dict[str, str]]:
    """Return how often the living are called alike though they differ by 1.1 points, just too much."""
    lines = []
    for spread in (0.001, 0.005, 0.01, 0.02):
        line = {"standard deviation of a difference": f"{spread:g}"}
        for seeds in SEEDS:
            rng, wrong = np.random.default_rng((4, seeds, round(1e4 * spread))), 0
            for _ in range(runs):
                base = np.full(seeds, 0.96)
                one = row(rng, base, base - 0.011 + rng.normal(0, spread, seeds))
                compare([one])
                wrong += verdict(one) in ("equivalent", "alike if alive")
            line[f"{seeds} seeds"] = share(wrong, runs)
        lines.append(line)
    return lines


def families(runs: int) -> list[dict[str, str]]:
    """Return how many families hold a false verdict where base and variant die alike."""
    lines = []
    for seeds in SEEDS:
        for dead in DEAD:
            rng = np.random.default_rng((5, seeds, round(1000 * dead)))
            wrong = 0
            for _ in range(runs):
                rows = [row(rng, draw(rng, (seeds,), dead), draw(rng, (seeds,), dead)) for _ in range(ROWS)]
                compare(rows)
                wrong += any(verdict(r) in ("hurts", "helps") or pace(r) for r in rows)
            lines.append(
                {"seeds": str(seeds), "die": f"{dead:.0%}", "families with a false verdict": share(wrong, runs)}
            )
    return lines


def power(runs: int) -> list[dict[str, str]]:
    """Return how often the share of dead seeds that *no evidence* tells is found by the tests, on fresh numbers."""
    lines = []
    fall = LIVING / (LIVING + 1) - TASK.chance
    for seeds in SEEDS:
        for tests in (3, 30, 60):
            rng = np.random.default_rng((6, seeds, tests))
            alive = tuple((draw(rng, (seeds,), 0.0) - draw(rng, (seeds,), 0.0)).tolist())
            told = smallest_detectable(alive, 0.0, seeds, fall, ALPHA / tests)
            found = 0
            for _ in range(runs if told.dead_share is not None else 0):
                dies = rng.random(seeds) < told.dead_share
                values = np.where(dies, -fall, rng.choice(np.array(alive) - np.mean(alive), seeds))
                found += sign_flip_p(values) <= ALPHA / tests or sign_flip_p(dies.astype(float)) <= ALPHA / tests
            lines.append(
                {
                    "seeds": str(seeds), "tests in the family": str(tests),
                    "dead seeds that could be seen": "none" if told.dead_share is None else f"{told.dead_share:.0%}",
                    "fall of the mean": "none" if told.fall is None else f"{told.fall:.2f}",
                    "found, of 80 % wanted": share(found, runs) if told.dead_share is not None else "–",
                }
            )  # fmt: skip
    return lines


def show(title: str, text: str, lines: Sequence[dict[str, str]]) -> None:
    """Print a table under its heading."""
    print(f"\n## {title}\n\n{text}\n\n{pd.DataFrame(list(lines)).to_markdown(index=False)}", flush=True)


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description="Coverage and false verdicts of the ablation's statistics.")
    parser.add_argument("--runs", type=int, default=2000)
    runs = parser.parse_args().runs
    few = max(1, runs // 5)
    error = 100 * math.sqrt(0.05 * 0.95 / runs)
    print(
        "# What the ablation's statistics are worth\n\n"
        "Simulated: seeds die with a given probability (accuracy of guessing 1,024 answers of two kinds) or live "
        f"(beta(200, 1), mean .995). {runs} samples a row unless another number is named; a true 5 % is seen as 5 % "
        f"give or take {2 * error:.1f}. Intervals, tests and verdicts are the package's own."
    )
    show(
        "Intervals of accuracy",
        "Share of 95 % intervals that hold the true mean. Gaffke's (2005) for numbers between "
        "two bounds; Student's t beside it, to show what an interval is worth that knows of no seed but those it saw.",
        coverage(runs),
    )
    show(
        "Intervals of what has no bounds",
        "Student's t: loss areas, and differences of the living. An exponential law is there to show where it fails.",
        scattered(runs),
    )
    show(
        "What is said of a variant that dies",
        "The base lives; one row, three tests. *Equivalent* is false where the "
        "mean falls by more than one point (from 5 % dead on in this table); *alike if alive* is false where it "
        "excludes the true share.",
        claims(runs),
    )
    show(
        "Living seeds that differ by 1.1 points",
        "Share of samples in which they are called *alike if alive*, falsely: 1.0 would be inside of the margin.",
        shifted(runs),
    )
    show(
        "False verdicts of a family",
        f"Base and variant die alike: {few} families of {ROWS} rows, {3 * ROWS} tests, "
        f"Holm at {ALPHA}. False is any *hurts*, *helps*, *slower* or *faster*.",
        families(few),
    )
    show(
        "What could have been seen", "The share of dead seeds that *no evidence* tells, and how often the tests then "
        "find it on fresh numbers.", power(few),
    )  # fmt: skip
    print(f"\n`python benchmarks/statistics_simulation.py --runs {runs}`")


if __name__ == "__main__":
    main()
