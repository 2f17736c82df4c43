"""How often the intervals cover and the tests err, by simulation: what the ablation's statistics are worth.

    python benchmarks/statistics_simulation.py [--runs 400] > reports/gallery/statistics.md

Laws: normal; bimodal (solved or at chance, as training outcomes are); skewed (exponential).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import stats

from veriformer.ablations.statistics.paired import ALPHA, holm, mean_interval, sign_flip_p

LAWS: dict[str, tuple[Callable[[np.random.Generator, tuple[int, ...]], np.ndarray], float]] = {
    "normal": (lambda rng, size: rng.normal(size=size), 0.0),
    "bimodal": (lambda rng, size: np.where(rng.random(size) < 0.6, 0.5, 1.0) + rng.normal(0, 0.005, size), 0.7),
    "skewed": (lambda rng, size: rng.exponential(size=size), 1.0),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Coverage and false verdicts of the ablation's statistics.")
    parser.add_argument("--runs", type=int, default=400)
    runs = parser.parse_args().runs
    rows = []
    for law, (draw, mean) in LAWS.items():
        for seeds in (8, 12, 24):
            rng = np.random.default_rng(seeds)
            covered = student = wrong = 0
            for _ in range(runs):
                sample = draw(rng, (seeds,))
                interval = mean_interval(sample)
                covered += interval.low <= mean <= interval.high
                ends = stats.ttest_1samp(sample, 0).confidence_interval()
                student += ends.low <= mean <= ends.high
            for _ in range(runs // 4):
                base, variant = draw(rng, (10, seeds)), draw(rng, (10, seeds))
                wrong += min(holm([sign_flip_p(v - b) for b, v in zip(base, variant, strict=True)])) < ALPHA
            rows.append(
                {
                    "law": law,
                    "seeds": seeds,
                    "BCa 95 % covers": f"{covered / runs:.1%}",
                    "Student's t covers": f"{student / runs:.1%}",
                    "families with a false verdict": f"{wrong / (runs // 4):.1%}",
                }
            )
    print(pd.DataFrame(rows).to_markdown(index=False))
    families = f"{runs // 4} families of 10 tests (sign flip, Holm at {ALPHA}) without any effect"
    print(f"\n{runs} samples a row for coverage, {families}")
    print("\n`python benchmarks/statistics_simulation.py --runs", f"{runs}`")


if __name__ == "__main__":
    main()
