"""Judgements in processes of their own, one call each: one that hangs or crashes costs its own row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessPool
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from veriformer.cli.processes.template import template

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
        context = template(*self.preload)
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
