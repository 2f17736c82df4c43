"""`veriformer mutants`: the kill matrix, every broken model judged by every property."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from pebble import ProcessExpired, ProcessPool
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from veriformer.properties.profiles import PROFILES
from veriformer.reports.kill_matrix import kill_matrix, markdown, print_matrix

_PRELOADED = ["torch", "hypothesis", "scipy.stats", "veriformer.tests.mutants.judging"]


@click.command()
@click.option("--only", multiple=True, metavar="ID", help="judge these mutants alone; `SC*` for all whose id starts so")
@click.option("--source", is_flag=True, help="also mutants made from the reference's source, one change each")
@click.option("--profile", type=click.Choice(list(PROFILES)), default="quick", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("-n", "workers", type=click.IntRange(1), default=None, help="processes; default: cores, at most 4")
@click.option("--format", "form", type=click.Choice(["text", "json", "markdown"]), default="text", show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path(".veriformer/mutants"),
              show_default=True, help="folder for what was judged; a second run goes on from there")  # fmt: skip
@click.option("--fresh", is_flag=True, help="judge again what an earlier run has judged")
@click.option("--mutant-seconds", default=300.0, show_default=True, help="limit for one mutant")
def mutants(
    only: tuple[str, ...],
    source: bool,
    profile: str,
    seed: int,
    workers: int | None,
    form: str,
    out: Path,
    fresh: bool,
    mutant_seconds: float,
) -> int:
    """Judge every broken model of the fault zoo by every property, and table who notices what.

    Exit status: 0 every mutant is killed, 1 one survives that is not known to be equivalent, 3 usage.
    """
    from veriformer.tests.mutants import all_faults
    from veriformer.tests.mutants.source import all_source_mutants

    wanted = {**dict.fromkeys(all_faults(), False), **dict.fromkeys(all_source_mutants(), True)}
    if only:
        chosen = {i: made for word in only for i, made in _matching(word, wanted).items()}
    else:
        chosen = {i: made for i, made in wanted.items() if source or not made}
    err = Console(stderr=True)
    store = _Store(out / "judged.jsonl", f"{profile} {seed} {_fingerprint()}")
    rows = {} if fresh else {i: row for i, row in store.read().items() if i in chosen}
    if rows:
        err.print(f"{len(rows)} of {len(chosen)} mutants were judged before ({store.path}); --fresh judges them again")
    waiting = {i: made for i, made in chosen.items() if i not in rows}
    interrupted = False
    try:
        for row in _judge(waiting, profile, seed, workers or min(os.cpu_count() or 1, 4), mutant_seconds, err):
            store.append(row)
            rows[row["id"]] = row
    except KeyboardInterrupt:
        err.print("interrupted: what follows is what was known by then; the same command goes on from there")
        interrupted = True
    matrix = kill_matrix(
        [rows[i] for i in chosen if i in rows], _properties(), whole=not only, profile=profile, seed=seed
    )
    if form == "json":
        click.echo(json.dumps(matrix, indent=1))
    elif form == "markdown":
        click.echo(markdown(matrix))
    else:
        print_matrix(Console(highlight=False, soft_wrap=True), matrix)
    return 130 if interrupted else int(bool(matrix["survivors"]))


def _matching(word: str, wanted: Mapping[str, bool]) -> dict[str, bool]:
    if word.endswith("*"):
        found = {i: made for i, made in wanted.items() if i.startswith(word[:-1])}
    else:
        found = {word: wanted[word]} if word in wanted else {}
    if not found:
        import difflib

        close = difflib.get_close_matches(word, wanted, n=1, cutoff=0.3)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise click.UsageError(f"there is no mutant {word!r}{hint}")
    return found


def _properties() -> list[dict[str, Any]]:
    from veriformer.properties.property import catalogue

    return [{"id": p.id, "level": p.level} for p in catalogue().values()]


def _judge(
    waiting: Mapping[str, bool], profile: str, seed: int, workers: int, seconds: float, err: Console
) -> Iterator[dict[str, Any]]:
    """Yield the row of each mutant, judged in processes of their own: one that hangs or crashes costs its own row."""
    from veriformer.tests.mutants.judging import judge_fault, judge_source

    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOADED)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    left = list(waiting.items())
    running: dict[Future[dict[str, Any]], str] = {}
    with (
        Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress,
        ProcessPool(max_workers=workers, max_tasks=1, context=context) as pool,
    ):
        bar = progress.add_task("mutants", total=len(left))
        try:
            while left or running:
                while left and len(running) < workers + 1:
                    mutant, made = left.pop(0)
                    call = judge_source if made else judge_fault
                    running[pool.schedule(call, args=(mutant, profile, seed), timeout=seconds)] = mutant
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    mutant = running.pop(future)
                    progress.update(bar, advance=1, description=mutant[:40])
                    yield _row_of(future, mutant, waiting[mutant], seconds)
        except BaseException:
            pool.stop()
            raise


def _row_of(future: Future[dict[str, Any]], mutant: str, made: bool, seconds: float) -> dict[str, Any]:
    try:
        return future.result()
    except TimeoutError:
        told = f"did not end within {seconds:g} s"
    except ProcessExpired as problem:
        told = f"its process ended with status {problem.exitcode}"
    except Exception as problem:  # of the broken code itself: it costs its own row
        told = f"judging it raised {type(problem).__name__}: {problem}"
    return {
        "id": mutant, "origin": "source" if made else "zoo", "bug": None, "title": mutant, "killed_by": [],
        "errors": {"process": told}, "examples": {}, "seconds": seconds, "first_kill": None,
    }  # fmt: skip


@dataclass
class _Store:
    """What was judged: a line of JSON a mutant, valid for one state of the code and one way to judge."""

    path: Path
    key: str

    def read(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line at which an earlier run was interrupted
            if isinstance(record, dict) and record.get("key") == self.key:
                rows[record["row"]["id"]] = record["row"]
        return rows

    def append(self, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": self.key, "row": row}) + "\n")


def _fingerprint() -> str:
    """Return a digest of all code that a verdict depends on."""
    import torch

    from veriformer import properties, reference
    from veriformer.tests import mutants as zoo

    digest = hashlib.sha256(torch.__version__.encode())
    for package in (properties, reference, zoo):
        for file in _files([Path(p) for p in package.__path__]):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _files(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(f for f in folder.rglob("*") if f.suffix in (".py", ".jsonl", ".toml"))
