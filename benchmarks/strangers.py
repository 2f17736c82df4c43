"""What is said of code that nobody here has written: pairs of a wrong and a right implementation, and right models.

python benchmarks/strangers.py [--profile quick] [--seeds 0] [--only SET ...] [--store FILE] > strangers.md
python benchmarks/strangers.py --only traps right right2 --profile standard --seeds 0 1 2
python benchmarks/strangers.py --as-scored   what the last sets scored as they came, and how their causes were judged

The sets stand in `tests/strangers/`: people who knew the README and the interface alone wrote them, and proved each
in plain torch. A pair is told apart if the wrong one fails, or is asked, something that its twin is not. The set
`traps`, judged where it is named, is `tests/traps/` with their declarations. What was judged is kept in the store, with
the commit; a second call goes on from there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).parent.parent
SETS = ROOT / "tests" / "strangers"
SCORED = ROOT / "reports" / "gallery" / "blind"
TRAP = ".trap"
WHICH = ("right", "wrong", "undeclared", "declared")

Row = dict[str, Any]


def judge(file: str, profile: str, seed: int) -> list[Row]:
    """Judge every subject of one file; what is neither passed nor not applicable is told."""
    import torch

    from veriformer.properties import check
    from veriformer.reports.verdicts import shown_in_full

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = Path(file)
    rows: list[Row] = []
    for which, subject in subjects_of(path):
        start = time.perf_counter()
        report = check(subject, profile=profile, seed=seed)
        told = [r for r in report.results if r.outcome not in ("PASS", "NOT_APPLICABLE")]
        shown = [r for part in report.to_json()["subjects"] for r in shown_in_full(part)]
        rows.append(
            {
                "set": path.parent.name, "source": path.stem, "file": _pair(path)[0], "which": which,
                "profile": profile, "seed": seed,
                "what": getattr(sys.modules.get(_name(path)), "WHAT", ""), "seconds": time.perf_counter() - start,
                "told": [
                    {
                        "id": r.id, "outcome": r.outcome, "declare": r.declare, "reason": r.reason,
                        "cause": r.counterexample.cause if r.counterexample else "",
                    }
                    for r in told
                ],
                "shown": [  # in the order in which a report tells it
                    {"id": r["id"], "outcome": r["outcome"], "cause": (r.get("counterexample") or {}).get("cause", "")}
                    for r in shown
                ],
            }
        )  # fmt: skip
    return rows


def subjects_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the subjects of one file, each with what it is; of a trap the one that it has."""
    from veriformer.properties import Subject

    if path.suffix == TRAP:
        from veriformer.tests.traps import all_traps

        yield "declared", all_traps()[path.stem].subject()
        return
    spec = importlib.util.spec_from_file_location(_name(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_name(path)] = module
    spec.loader.exec_module(module)
    of_a_file = {_pair(path)[1]: getattr(module, "subject", None)}
    for which in WHICH:
        subject = of_a_file.get(which) or getattr(module, which, None)
        if isinstance(subject, Subject):
            yield which, subject


def _pair(path: Path) -> tuple[str, str]:
    """Return the pair that a file is one of, and which: `07_wrong.py` has its subject alone; "" where it has both."""
    pair, _, which = path.stem.rpartition("_")
    is_one = which in WHICH and all(path.with_stem(f"{pair}_{each}").exists() for each in ("right", "wrong"))
    return (pair, which) if is_one else (path.stem, "")


def traps() -> list[Path]:
    """Return a name for each trap, as if it were a file of a set."""
    from veriformer.tests.traps import all_traps

    return [SETS / "traps" / f"{name}{TRAP}" for name in all_traps()]


def _name(path: Path) -> str:
    return f"stranger_{path.parent.name}_{path.stem}"


def stored(store: Path, commit: str) -> Iterator[Row]:
    """Yield what this commit was judged to say."""
    if store.exists():
        yield from (row for row in map(json.loads, store.read_text().splitlines()) if row["commit"] == commit)


def is_clean(row: Row) -> bool:
    """Whether nothing failed and nothing is asked."""
    return not row["told"]


def fails(row: Row) -> bool:
    """Whether something failed that is no question."""
    return any(told["outcome"] != "OPEN" for told in row["told"])


def summary(rows: list[Row]) -> str:
    """Return the tables, and what was missed or said of right code."""
    together: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        together[row["set"], row["file"], row["profile"], row["seed"]][row["which"]] = row
    pairs = {key: found for key, found in together.items() if {"right", "wrong"} <= set(found)}
    table, missed = [], []
    for name in sorted({key[0] for key in pairs}):
        own = {key: found for key, found in pairs.items() if key[0] == name}
        apart = [key for key, found in own.items() if _ids(found["wrong"]) - _ids(found["right"])]
        missed += [(key, own[key]["wrong"]["what"]) for key in own if key not in apart]
        right = [found["right"] for found in own.values()]
        table.append(_counts(f"{name} (pairs)", right) | {"told apart": f"{len(apart)} of {len(own)}"})
    models = [row for found in together.values() for which, row in found.items() if which in ("undeclared", "declared")]
    for name in sorted({row["set"] for row in models}):
        own = [[r for r in models if (r["set"], r["which"]) == (name, which)] for which in ("undeclared", "declared")]
        table += [_counts(f"{name}, {rows[0]['which']}", rows) for rows in own if rows]
    lines = [pd.DataFrame(table).fillna("").to_markdown(index=False)]
    lines += ["", "## Wrong ones that were not told apart", ""]
    lines += [f"- {key[0]}/{key[1]}: {what}" for key, what in sorted(missed)]
    lines += ["", "## Right ones of which something fails", ""]
    for row in sorted(rows, key=lambda r: (r["set"], r["file"], r["which"])):
        if row["which"] != "wrong" and fails(row):
            told = "; ".join(f"{t['id']} {t['outcome']}" for t in row["told"] if t["outcome"] != "OPEN")
            lines.append(f"- {row['set']}/{row['file']} ({row['which']}): {told}")
    return "\n".join(lines)


def _ids(row: Row) -> set[str]:
    return {told["id"] for told in row["told"]}


def _counts(name: str, rows: list[Row]) -> dict[str, Any]:
    failing = sum(fails(row) for row in rows)
    clean = sum(is_clean(row) for row in rows)
    most = max((len({t["declare"] for t in row["told"] if t["outcome"] == "OPEN"}) for row in rows), default=0)
    return {
        "set": name, "right ones": len(rows), "clean": clean, "asked": len(rows) - clean - failing, "failing": failing,
        "most questions": most,
    }  # fmt: skip


def as_scored(folder: Path) -> str:
    """Return the tables of sets that were scored once, at commits of then, and of what readers said of the causes."""
    rows = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    causes = pd.read_csv(folder / "causes.tsv", sep="\t", names=["pair", "grade", "why"])
    causes["set"] = causes["pair"].str.partition("/")[0]
    judged = pd.crosstab(causes["set"], causes["grade"], margins=True, margins_name="all")
    return f"{summary(rows)}\n\n## The first cause that was named\n\n{judged.to_markdown()}"


def main() -> None:
    """Judge what is not stored yet and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="quick")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="SET")
    parser.add_argument("--store", type=Path, default=Path("build/strangers.jsonl"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--as-scored", action="store_true", help="judge nothing: print what is on record")
    given = parser.parse_args()
    if given.as_scored:
        print(as_scored(SCORED))
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    rows = list(stored(given.store, commit := commit.strip()))
    done = {(row["set"], row["source"], row["profile"], row["seed"]) for row in rows}
    files = [f for f in sorted(SETS.glob("*/*.py")) if not given.only or f.parent.name in given.only]
    files = [f for f in files if f.stem.rpartition("_")[2] not in ("prove", "proof")]
    files += traps() if "traps" in given.only else []
    wanted = [(f, s) for s in given.seeds for f in files if (f.parent.name, f.stem, given.profile, s) not in done]
    given.store.parent.mkdir(parents=True, exist_ok=True)
    with (
        given.store.open("a") as store,
        Progress(console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool,
    ):
        task = progress.add_task("judged", total=len(wanted))
        for future in as_completed([pool.submit(judge, str(file), given.profile, seed) for file, seed in wanted]):
            for row in future.result():
                rows.append(row | {"commit": commit})
                store.write(json.dumps(rows[-1]) + "\n")
            store.flush()
            progress.advance(task)
    asked = [r for r in rows if not given.only or r["set"] in given.only]
    print("# Code that nobody here has written\n")
    print(f"Commit {commit}, profile {given.profile}, seeds {', '.join(map(str, given.seeds))}.\n")
    print(summary([r for r in asked if r["profile"] == given.profile and r["seed"] in given.seeds]))
    print("\n`python benchmarks/strangers.py`")


if __name__ == "__main__":
    main()
