"""How long `check` takes on torch.nn by profile, after import, and how much of it inside the subject.

    python benchmarks/check_speed.py [--profiles quick standard] [--against CHECKOUT] [--near] > table.md
    python benchmarks/check_speed.py --start

One process, one torch thread. Inside the subject are its forwards, its builds and its other parts, wherever they are
called for. With `--against`, another checkout of this project is measured in turns with this one, and the ratio of the
two is told, of all properties and of those that both judge: seconds are of the machine and of its load, ratios of one
run are comparable. `--near` leaves out what an older checkout does not cover: long sequences, wide and large models,
half precision.
With `--start`, what a process of its own costs a subject of `veriformer check`: seconds until it is loaded there,
beside those in a process that is there already. It fails where that is more than it may be.
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
from typing import Any

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
try:
    from veriformer.properties.bench.guards import seconds_inside
except ImportError:  # a checkout that counts calls alone, and those of properties alone
    seconds_inside = None
names, profiles, near = json.loads(sys.argv[1])
if near:
    from veriformer.properties.engine.searching import search
    search.far_cases = search.half_cases = lambda bench, prop: ()
check(load("torch:MultiheadAttention")[0], profile="quick")  # imports, first kernels
for name in names:
    for profile in profiles:
        (subject,) = load(f"torch:{name}")
        before = seconds_inside() if seconds_inside else 0.0
        started, used = time.perf_counter(), time.process_time()
        (part,) = check(subject, profile=profile).subjects
        seconds, used = time.perf_counter() - started, time.process_time() - used
        inside = seconds_inside() - before if seconds_inside else sum(r.subject_seconds for r in part.results)
        by_id = {r.id: r.seconds for r in part.results if r.outcome != "NOT_APPLICABLE"}
        row = [subject.name, profile, part.applicable, seconds, used, inside / seconds, by_id]
        print(json.dumps(row), flush=True)
"""

MOST = 0.3
"""Seconds by which a subject may start later for having processes of its own."""

START = """
import json, sys, time
from pathlib import Path
from veriformer.cli.processes.asking import Pool

FILE = "import torch\\nfrom veriformer.properties import Subject\\n" \\
       "mine = Subject(kind='softmax', forward=lambda m, x, dim: torch.softmax(x, dim))\\n"

def seconds(home, target):
    started = time.perf_counter()
    pool.ask("load", home=home, target=target)
    return time.perf_counter() - started

if __name__ == "__main__":
    settings = {"profile": "quick", "seed": 0, "device": "cpu", "dtypes": (), "call_seconds": 30.0, "named": ()}
    with Pool(1, settings, 8.0) as pool:
        for n in range(-1, int(sys.argv[1])):
            for how in ("own", "shared"):
                Path(f"{how}_{n}.py").write_text(FILE)
                taken = seconds(f"{how}_{n}" if how == "own" else how, f"{how}_{n}.py:mine")
                if n >= 0:  # the first of each starts the template, and the process that is shared
                    print(json.dumps([how, taken]), flush=True)
"""


def start(times: int) -> float:
    """Return by how many seconds a subject is loaded later in a process of its own, the fastest of so many."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "veriformer").symlink_to(HERE)
        (Path(folder) / "start.py").write_text(START)
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "start.py", str(times)]
        printed = subprocess.run(
            command, env=environment, cwd=folder, check=True, capture_output=True, text=True
        ).stdout
    rows = pd.DataFrame([json.loads(line) for line in printed.splitlines()], columns=["process", "seconds"])
    least = rows.groupby("process")["seconds"].min()  # of a machine with nothing else to do
    later = float(least["own"] - least["shared"])
    print(f"loaded in a process of its own: {least['own']:.3f} s, in one that is there: {least['shared']:.3f} s; "
          f"later by {later:.3f} s, of {MOST} s that it may be; the fastest of {times}")  # fmt: skip
    return later


def measure(checkout: Path, profiles: list[str], *, near: bool) -> dict[tuple[str, str], list[Any]]:
    """Judge the shipped subjects by the code of a checkout, in a process of its own.

    Returns:
        Subject and profile to the number of properties, seconds, seconds of the processor, the share inside, and the
        seconds of each property that applies.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "veriformer").symlink_to(checkout)
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", MEASURE, json.dumps([NAMES, profiles, near])]
        printed = subprocess.run(
            command, env=environment, cwd=folder, check=True, capture_output=True, text=True
        ).stdout
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    return {(name, profile): numbers for name, profile, *numbers in rows}


def fastest(runs: list[dict[tuple[str, str], list[Any]]], key: tuple[str, str]) -> list[Any]:
    """Return the numbers of the run that took the processor the least time."""
    return min((run[key] for run in runs), key=lambda numbers: numbers[2])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", nargs="+", default=["quick", "standard"])
    parser.add_argument("--against", type=Path, help="another checkout of this project, measured in turns")
    parser.add_argument(
        "--near", action="store_true", help="of this checkout the small sizes alone, in float32 and float64"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--start", action="store_true", help="measure what a process of its own costs, alone")
    given = parser.parse_args()
    if given.start:
        sys.exit(int(start(10 * given.runs) > MOST))
    if given.against and not (given.against / "properties").is_dir():
        parser.error(f"--against was {given.against}, which is no checkout of this project; give the folder of one")
    checkouts = {"": HERE} | ({"before": given.against.resolve()} if given.against else {})
    runs: dict[str, list[dict[tuple[str, str], list[Any]]]] = {label: [] for label in checkouts}
    for _ in range(given.runs):
        for label, checkout in checkouts.items():
            runs[label].append(measure(checkout, given.profiles, near=given.near and not label))
    rows = []
    for key in runs[""][0]:
        properties, seconds, used, share, by_id = fastest(runs[""], key)
        row = {"subject": key[0], "profile": key[1], "properties": int(properties), "seconds": round(seconds, 2),
               "of the processor": round(used, 2), "inside the subject": f"{share:.0%}"}  # fmt: skip
        if given.against:
            _, _, before, _, by_id_before = fastest(runs["before"], key)
            both = by_id.keys() & by_id_before.keys()
            same = sum(by_id[i] for i in both) / sum(by_id_before[i] for i in both)
            row |= {"before": round(before, 2), "ratio": round(used / before, 2),
                    "both judge": len(both), "ratio of these": round(same, 2)}  # fmt: skip
        rows.append(row)
    print(pd.DataFrame(rows).to_markdown(index=False))
    print(f"\nPython {platform.python_version()}, one thread, the fastest of {given.runs} runs")


if __name__ == "__main__":
    main()
