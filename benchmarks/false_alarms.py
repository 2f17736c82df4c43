"""How often a right implementation is failed, and how close any came: the shipped subjects over many seeds.

python benchmarks/false_alarms.py [--quick 1000] [--standard 100] [--minutes 60] [--store FILE] > false-alarms.md

Seeds are judged subject by subject, so that every subject gets the same share of the time: the cheap ones reach the
wanted number first. What was judged is kept in the store, and a second call goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import pandas as pd  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

WANTED_MARGIN = 0.5
LOOKED_INTO = {
    "padding.all-ones-mask": "under bfloat16 autocast on a post-LN encoder of 8 channels, whose answer to one unit in "
    "the last place is itself a tenth of its size; the tolerance is measured on it and capped, and stays",
    "numerics.precision-ladder": "bfloat16 of the same encoder against float64: one rounding a step, of 2^-8",
    "softmax.accuracy": "a row of bfloat16 weights: rounding each weight to 8 bits is half of the bound by itself",
    "dropout.mean": "a statistic of 2,048 masks against 8 of its standard errors",
}
"""Properties whose worst margin comes near or over `WANTED_MARGIN`, and what was found; no bound was widened."""


def judge(target: str, profile: str, seed: int, commit: str) -> dict[str, Any]:
    """Judge one shipped subject with one seed; return troubles, missed faults and the margin of each property."""
    from veriformer.properties.bench.profiles import Settings
    from veriformer.properties.judging.catalogue import select
    from veriformer.properties.judging.run import run
    from veriformer.properties.known.applying import apply_deviations
    from veriformer.properties.known.deviations import read_deviations
    from veriformer.properties.targets import load

    report = run(load(target), select(), Settings(profile=profile, seed=seed))
    apply_deviations(report, read_deviations(None))
    (part,) = report.subjects
    judged = [r for r in part.results if r.outcome == "PASS"]
    return {
        "target": target,
        "profile": profile,
        "seed": seed,
        "commit": commit,
        "seconds": report.seconds,
        "judged": len(judged),
        "examples": sum(r.examples for r in judged),
        "troubles": [
            f"{r.id}: {r.outcome} {r.reason}"
            for r in part.results
            if r.outcome not in ("PASS", "NOT_APPLICABLE", "DEVIATION")
        ],
        "missed": (part.power or {}).get("missed", []),
        "margins": {r.id: r.margin for r in judged if r.tolerance > 0},
    }


def read(store: Path) -> list[dict[str, Any]]:
    """Return what was judged before; a line cut short by an interruption is left out."""
    found = []
    for line in store.read_text(encoding="utf-8").splitlines() if store.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def collect(
    wanted: dict[str, int], store: Path, minutes: float, workers: int, only: list[str] | None = None
) -> list[dict[str, Any]]:
    """Judge what is wanted and not yet in the store, until time is up; return all that was judged."""
    from veriformer.properties.adapters.recognising import shipped

    done = read(store)
    targets = only or [f"{group}:{name}" for group in ("reference", "torch") for name in shipped(group)]
    known = {(d["target"], d["profile"], d["seed"]) for d in done}
    spent = {(t, p): 0.0 for t in targets for p in wanted}
    for d in done:
        spent[d["target"], d["profile"]] = spent.get((d["target"], d["profile"]), 0.0) + d["seconds"]
    waiting = {
        (t, p): [s for s in reversed(range(wanted[p])) if (t, p, s) not in known] for t in targets for p in wanted
    }
    commit = _commit()
    deadline = time.monotonic() + 60 * minutes
    running: set[Future[dict[str, Any]]] = set()
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=200) as pool,
        store.open("a", encoding="utf-8") as file,
        Progress(console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("judging", total=sum(map(len, waiting.values())))
        while time.monotonic() < deadline or running:
            while len(running) < workers + 1 and time.monotonic() < deadline and any(waiting.values()):
                poorest = min((key for key in waiting if waiting[key]), key=lambda key: spent[key])
                spent[poorest] += 0.01  # so that two are not handed out alike
                running.add(pool.submit(judge, *poorest, waiting[poorest].pop(), commit))
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                found = future.result()
                spent[found["target"], found["profile"]] += found["seconds"]
                done.append(found)
                file.write(json.dumps(found) + "\n")
                file.flush()
                progress.advance(bar)
    return done


def _commit() -> str:
    root = Path(__file__).parent.parent
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(done: list[dict[str, Any]]) -> str:
    """Return the result in Markdown: seeds by subject, alarms, and the worst margin of each property."""
    frame = pd.DataFrame(done)
    alarms = [f"{d['target']} seed {d['seed']} ({d['profile']}): {t}" for d in done for t in d["troubles"]]
    missed = [f"{d['target']} seed {d['seed']} ({d['profile']}): {m}" for d in done for m in d["missed"]]
    lines = [
        "# False alarms over seeds\n",
        f"{len(done):,} runs of `veriformer check` on {frame['target'].nunique()} right implementations; "
        f"{frame['judged'].sum():,} verdicts, {frame['examples'].sum():,} examples; **{len(alarms)} false alarms**, "
        f"{len(missed)} faults put in and missed.\n",
        *(f"- {line}" for line in alarms + missed),
        "\n## The worst margin of each property (error / tolerance; 1 would be a failure)\n",
    ]
    margins = [
        {"property": p, "margin": m, "seen on": f"{d['target']}, {d['profile']}, seed {d['seed']}"}
        for d in done
        for p, m in d["margins"].items()
    ]
    worst = pd.DataFrame(margins).sort_values("margin", ascending=False).drop_duplicates("property")
    worst["margin"] = worst["margin"].map(lambda m: f"{m:.3f}" + (" !" if m > WANTED_MARGIN else ""))
    lines.append(worst.to_markdown(index=False, disable_numparse=True))
    lines += ["", *(f"- `{p}`: {why}." for p, why in LOOKED_INTO.items() if p in set(worst["property"]))]
    runs = ", ".join(f"{count:,} at {name}" for name, count in frame["commit"].value_counts(sort=False).items())
    lines.append(f"\nRuns by commit: {runs}.")
    seeds = frame.pivot_table(index="target", columns="profile", values="seed", aggfunc="count", fill_value=0)
    lines += ["\n## Seeds judged\n", seeds.to_markdown()]
    return "\n".join(lines)


def main() -> None:
    """Judge, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", type=int, default=1000)
    parser.add_argument("--standard", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--store", type=Path, default=Path("build/false-alarms.jsonl"))
    parser.add_argument("--only", nargs="+", metavar="TARGET", help="judge these alone; all that was judged is tabled")
    parser.add_argument("-n", "--workers", type=int, default=os.cpu_count() or 1)
    a = parser.parse_args()
    a.store.parent.mkdir(parents=True, exist_ok=True)
    print(table(collect({"quick": a.quick, "standard": a.standard}, a.store, a.minutes, a.workers, a.only)))
    print("\n`python benchmarks/false_alarms.py`")


if __name__ == "__main__":
    main()
