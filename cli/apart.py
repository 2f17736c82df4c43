"""Judgements in processes of their own: one that hangs or crashes costs its own row; and what was judged is kept."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pebble import ProcessExpired, ProcessPool
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_PRELOADED = ["torch", "hypothesis", "scipy.stats"]
Call = tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class Apart:
    """How judgements are run.

    Attributes:
        label: what is judged, for the progress bar.
        workers: processes at a time.
        seconds: limit for one judgement; its process is ended then.
        tasks_a_process: judgements that share a process one after another; 1 where they alter what is imported.
        preload: modules that every process finds imported.
    """

    label: str
    workers: int
    seconds: float
    tasks_a_process: int = 1
    preload: Sequence[str] = ()

    def run(self, calls: Mapping[str, Call], err: Console) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
        """Yield `(id, answer, "")` for each call, in the order in which they end; `(id, None, why)` if none came.

        Args:
            calls: id to function and arguments; the function must be importable.
            err: where progress is shown, if it is a terminal.
        """
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload([*_PRELOADED, *self.preload])
        left = list(calls.items())
        running: dict[Future[dict[str, Any]], str] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TimeRemainingColumn())  # fmt: skip
        with (
            Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress,
            ProcessPool(max_workers=self.workers, max_tasks=self.tasks_a_process, context=context) as pool,
        ):
            bar = progress.add_task(self.label, total=len(left))
            try:
                while left or running:
                    while left and len(running) < self.workers + 1:
                        name, (call, arguments) = left.pop(0)
                        running[pool.schedule(call, args=arguments, timeout=self.seconds)] = name
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        name = running.pop(future)
                        progress.update(bar, advance=1, description=name[:40])
                        yield name, *_answer(future, self.seconds)
            except BaseException:
                pool.stop()
                raise


def _answer(future: Future[dict[str, Any]], seconds: float) -> tuple[dict[str, Any] | None, str]:
    try:
        return future.result(), ""
    except TimeoutError:
        return None, f"did not end within {seconds:g} s"
    except ProcessExpired as problem:
        return None, f"its process ended with status {problem.exitcode}"
    except Exception as problem:  # of the code that is judged: it costs its own row
        return None, f"judging it raised {type(problem).__name__}: {problem}"


@dataclass(frozen=True)
class JudgedStore:
    """What was judged: a line of JSON each, valid for one state of the code and one way to judge.

    Attributes:
        path: of the file.
        key: names that state and that way; lines of another key are passed over.
    """

    path: Path
    key: str

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the rows by id; a line that an interruption left in part counts as not judged."""
        rows: dict[str, dict[str, Any]] = {}
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                record = json.loads(line)
                if record["key"] == self.key:
                    rows[record["id"]] = record["row"]
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
        return rows

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add a row."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": self.key, "id": name, "row": row}) + "\n")


def fingerprint(packages: Iterable[ModuleType]) -> str:
    """Return a digest of the code and data of these packages, and of the release of torch.

    Known deviations (`known/`) do not count: they are applied to verdicts, not part of them.
    """
    import torch

    digest = hashlib.sha256(torch.__version__.encode())
    for package in packages:
        for folder in map(Path, package.__path__):
            for file in sorted(
                f for f in folder.rglob("*") if f.suffix in (".py", ".jsonl", ".toml") and f.parent.name != "known"
            ):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
