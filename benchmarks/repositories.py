"""What is said of files of public repositories as they stand there: nothing is declared, and no line of them is ours.

python benchmarks/repositories.py CLONES [--store FILE] [--jobs 2] > repositories.md

CLONES holds bare clones or work trees, each in a folder `owner+name`; `repositories.jsonl` beside this file says which
file of which commit. An entry with `mends` is a commit by which its author mended something: it is judged
at that commit and at the one before. The rest were chosen by a rule before anything of them was read: of each
repository at most two files, those with a class of modules named for a model. What was judged is kept in the store; a
second call goes on from there. `read` in the list is what a person found who read the file behind what was said.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_suffix(".jsonl")
TOLD = ("FAIL", "OPEN", "ERROR", "TIMEOUT")
_WORDS = (("FAIL", "fail"), ("ERROR", "error"), ("TIMEOUT", "hang"), ("OPEN", "asked"))
Row = dict[str, Any]


def python_files(clone: Path, commit: str, folder: Path) -> str:
    """Write the Python files of a commit into a folder; returns what stops it, or ""."""
    places = (clone / "repo" / ".git", clone / "repo", clone / ".git", clone)
    directory = next((d for d in places if (d / "HEAD").is_file()), None)
    if directory is None:
        return "no clone"
    git = ["git", "--git-dir", str(directory)]
    listed = subprocess.run(
        [*git, "ls-tree", "-r", "-z", "--name-only", commit], capture_output=True, text=True, check=False
    )
    wanted = [n for n in listed.stdout.split("\0") if n.endswith((".py", ".yaml", ".yml", ".json", ".toml", ".cfg"))]
    if not wanted:
        return "no such commit"
    for start in range(0, len(wanted), 200):
        part = wanted[start : start + 200]
        packed = subprocess.run([*git, "archive", commit, *part], capture_output=True, check=False)
        if packed.returncode == 0:
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
                archive.extractall(folder, filter="data")
            continue
        for name in part:  # a snapshot may list what it has not
            shown = subprocess.run([*git, "show", f"{commit}:{name}"], capture_output=True, check=False)
            if shown.returncode == 0:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(shown.stdout)
    return ""


def judged(clone: Path, commit: str, file: str) -> Row:
    """Return what the command line says of a file: its exit status, and of each subject what is not passed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if stopped := python_files(clone, commit, folder):
            return {"status": None, "why": stopped, "subjects": []}
        command = [str(Path(sys.executable).parent / "veriformer"), "check", file]
        command += ["--profile", "quick", "--format", "json", "-n", "1"]
        try:
            ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
        except subprocess.TimeoutExpired:
            return {"status": None, "why": "longer than ten minutes", "subjects": []}
    start = ran.stdout.find("{")
    if ran.returncode not in (0, 1) or start < 0:
        said = ran.stderr.strip().splitlines() or [""]
        why = next((line for line in said if line.startswith("Error")), said[-1]).replace(f"{name}/", "")
        return {"status": ran.returncode, "why": why[:300], "subjects": []}
    report = json.loads(ran.stdout[start:])
    return {"status": ran.returncode, "why": "", "subjects": [_told(s) for s in report["subjects"]]}


def _told(subject: Row) -> Row:
    rows = [r for r in subject["results"] if r["outcome"] in TOLD]
    causes = [c["cause"] for r in rows if (c := r.get("counterexample")) and c.get("cause")]
    return {
        "name": subject["name"], "kind": subject["kind"],
        "passed": sum(r["outcome"] == "PASS" for r in subject["results"]),
        "told": {r["id"]: r["outcome"] for r in rows},
        "cause": causes[0] if causes else "",
    }  # fmt: skip


def of_all(clones: Path, store: Path, jobs: int) -> dict[str, Row]:
    """Judge what the store has not."""
    known = {r["key"]: r for r in map(json.loads, store.read_text().splitlines())} if store.is_file() else {}
    wanted = [
        (
            f"{row['repository']}@{commit}:{row['file']}",
            clones / row["repository"].replace("/", "+"),
            commit,
            row["file"],
        )
        for row in entries()
        for commit in ([f"{row['commit']}^", row["commit"]] if "mends" in row else [row["commit"]])
    ]
    waiting = [one for one in wanted if one[0] not in known]
    with ThreadPoolExecutor(jobs) as pool, store.open("a", encoding="utf-8") as kept:
        for (key, *_), found in zip(waiting, pool.map(lambda one: judged(*one[1:]), waiting), strict=True):
            known[key] = {"key": key, **found}
            kept.write(json.dumps(known[key]) + "\n")
            kept.flush()
            print(f"{len(known)} of {len(wanted)}: {key}: {in_words(known[key])}", file=sys.stderr)
    return known


def entries() -> list[Row]:
    """Return the list."""
    return [json.loads(line) for line in LIST.read_text(encoding="utf-8").splitlines()]


def in_words(found: Row) -> str:
    """Return an outcome in a few words."""
    if found["status"] not in (0, 1):
        return "not judged: " + found["why"].partition(": ")[2].replace("|", "/")[:140]
    words = []
    for subject in found["subjects"]:
        count = Counter(subject["told"].values())
        said = [f"{count[o]} {w}" for o, w in _WORDS if count[o]]
        words.append(f"{subject['name']}: {', '.join(said) or 'holds'}")
    return "; ".join(words)


def told_apart(before: Row, after: Row) -> bool:
    """Whether something is said of one commit and not of the other."""

    def said(found: Row) -> set[tuple[str, str]]:
        told = {(i, o) for s in found["subjects"] for i, o in s["told"].items()}
        return told | ({("", "not judged")} if found["why"] else set())

    return said(before) != said(after)


def cause_of(found: Row) -> str:
    """Return the first cause that is named, short enough for a table."""
    cause = next((s["cause"] for s in found["subjects"] if s["cause"]), "")
    return cause.replace("|", "/")[:160]


def tables(known: dict[str, Row]) -> str:
    """Return the page."""
    rows = entries()
    heads, fixes = [r for r in rows if "mends" not in r], [r for r in rows if "mends" in r]
    at = {id(r): known[f"{r['repository']}@{r['commit']}:{r['file']}"] for r in rows}
    seen = [at[id(r)] for r in heads if at[id(r)]["status"] in (0, 1)]
    clean = [f for f in seen if not any(s["told"] for s in f["subjects"])]
    asked = [f for f in seen if f not in clean and all(o == "OPEN" for s in f["subjects"] for o in s["told"].values())]
    lines = [
        f"{len(heads)} files of {len({r['repository'] for r in heads})} repositories: {len(seen)} judged, of which "
        f"{len(clean)} hold, {len(asked)} are asked and {len(seen) - len(clean) - len(asked)} fail.",
        "", "| file | what is said | what a reader found |", "|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {r['repository']} {r['file']} ({r['commit'][:7]}) | {in_words(at[id(r)])} | {r.get('read', '')} |"
        for r in heads
    ]
    pairs = [(r, known[f"{r['repository']}@{r['commit']}^:{r['file']}"], at[id(r)]) for r in fixes]
    both = [p for p in pairs if any(f["status"] in (0, 1) for f in p[1:])]
    lines += [
        "",
        f"{len(pairs)} commits by which their authors mended a model: {len(both)} can be judged on one side at least, "
        f"and {sum(told_apart(b, a) for _, b, a in both)} of them are told from the commit before.",
        "", "| commit | what it mends | before | after | first cause |", "|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {r['repository']} {r['commit'][:7]} | {r['mends']} | {in_words(b)} | {in_words(a)} | {cause_of(b)} |"
        for r, b, a in pairs
    ]
    return "\n".join(lines)


def main() -> None:
    """Judge, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path)
    parser.add_argument("--store", type=Path, default=Path("build/repositories.jsonl"))
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    given.store.parent.mkdir(parents=True, exist_ok=True)
    print(tables(of_all(given.clones, given.store, given.jobs)))


if __name__ == "__main__":
    main()
