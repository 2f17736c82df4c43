"""Whether outcomes depend on the seed: the same check with many seeds, outcome by outcome.

python benchmarks/seeds.py [--seeds 10] [--profile standard] [TARGET...] > reports/gallery/seeds.md
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tabulate import tabulate


def main() -> None:
    """Print a table of the seeds, and every outcome that differs."""
    parser = argparse.ArgumentParser(description="Outcomes of a check over seeds.")
    parser.add_argument("targets", nargs="*", default=["reference", "torch"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--profile", default="standard")
    arguments = parser.parse_args()
    seen: list[dict[tuple[str, str], str]] = []
    for seed in range(arguments.seeds):
        seen.append(outcomes(arguments.targets, arguments.profile, seed))
        print(f"seed {seed}: {dict(Counter(seen[-1].values()))}", file=sys.stderr)
    rows = [{"seed": seed, **Counter(found.values())} for seed, found in enumerate(seen)]
    print(tabulate(rows, headers="keys", tablefmt="github"))
    differing = [(key, [found.get(key) for found in seen]) for key in seen[0] if len({f.get(key) for f in seen}) > 1]
    print(f"\n{len(seen[0])} outcomes a seed; {len(differing)} of them differ between seeds")
    for (subject, prop), told in differing:
        print(f"- {subject}, {prop}: {', '.join(map(str, told))}")
    named = " ".join(arguments.targets)
    print(f"\n`python benchmarks/seeds.py --seeds {arguments.seeds} --profile {arguments.profile} {named}`")


def outcomes(targets: list[str], profile: str, seed: int) -> dict[tuple[str, str], str]:
    """Return the outcome by subject and property."""
    command = [str(Path(sys.executable).parent / "veriformer"), "check", *targets, "--profile", profile]
    done = subprocess.run(
        [*command, "--seed", str(seed), "--format", "json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    return {(s["name"], r["id"]): r["outcome"] for s in report["subjects"] for r in s["results"]}


if __name__ == "__main__":
    main()
