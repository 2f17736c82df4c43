"""How long `check` takes on torch.nn by profile, after import, and how much of it inside the subject.

    python benchmarks/check_speed.py [--profiles quick standard] [--against CHECKOUT] > table.md

One process, one torch thread. With `--against`, another checkout of this project is measured in turns with this one,
and the ratio of the two is told: seconds are of the machine and of its load, ratios of one run are comparable.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

NAMES = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerEncoder", "TransformerEncoder-causal",
         "TransformerDecoderLayer", "Transformer", "scaled_dot_product_attention", "softmax")  # fmt: skip
HERE = Path(__file__).resolve().parent.parent
MEASURE = """
import json, sys, time
import torch
torch.set_num_threads(1)
from veriformer.properties import check
from veriformer.properties.targets import load
names, profiles = json.loads(sys.argv[1])
check(load("torch:MultiheadAttention")[0], profile="quick")  # imports, first kernels
for name in names:
    for profile in profiles:
        (subject,) = load(f"torch:{name}")
        started, used = time.perf_counter(), time.process_time()
        (part,) = check(subject, profile=profile).subjects
        seconds, used = time.perf_counter() - started, time.process_time() - used
        inside = sum(r.subject_seconds for r in part.results)
        print(json.dumps([subject.name, profile, part.applicable, seconds, used, inside / seconds]), flush=True)
"""


def measure(checkout: Path, profiles: list[str]) -> dict[tuple[str, str], list[float]]:
    """Judge the shipped subjects by the code of a checkout, in a process of its own.

    Returns:
        Subject and profile to the number of properties, seconds, seconds of the processor, and the share inside.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "veriformer").symlink_to(checkout)
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", MEASURE, json.dumps([NAMES, profiles])]
        printed = subprocess.run(
            command, env=environment, cwd=folder, check=True, capture_output=True, text=True
        ).stdout
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    return {(name, profile): numbers for name, profile, *numbers in rows}


def fastest(runs: list[dict[tuple[str, str], list[float]]], key: tuple[str, str]) -> list[float]:
    """Return the numbers of the run that took the processor the least time."""
    return min((run[key] for run in runs), key=lambda numbers: numbers[2])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", nargs="+", default=["quick", "standard"])
    parser.add_argument("--against", type=Path, help="another checkout of this project, measured in turns")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    if given.against and not (given.against / "properties").is_dir():
        parser.error(f"--against was {given.against}, which is no checkout of this project; give the folder of one")
    checkouts = {"": HERE} | ({"before": given.against.resolve()} if given.against else {})
    runs: dict[str, list[dict[tuple[str, str], list[float]]]] = {label: [] for label in checkouts}
    for _ in range(given.runs):
        for label, checkout in checkouts.items():
            runs[label].append(measure(checkout, given.profiles))
    rows = []
    for key in runs[""][0]:
        properties, seconds, used, share = fastest(runs[""], key)
        row = {"subject": key[0], "profile": key[1], "properties": int(properties), "seconds": round(seconds, 2),
               "of the processor": round(used, 2), "inside the subject": f"{share:.0%}"}  # fmt: skip
        if given.against:
            _, _, before, inside = fastest(runs["before"], key)
            row |= {"before": round(before, 2), "inside before": f"{inside:.0%}", "ratio": round(used / before, 2)}
        rows.append(row)
    print(pd.DataFrame(rows).to_markdown(index=False))
    print(f"\nPython {platform.python_version()}, one thread, the fastest of {given.runs} runs")


if __name__ == "__main__":
    main()
