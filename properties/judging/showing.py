"""Progress of a run in this process: a bar on a terminal, and nothing where standard error is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from veriformer.properties.engine.searching.planning import Plan
from veriformer.properties.judging.run import OnPlan, OnResult
from veriformer.properties.results.records import Result
from veriformer.properties.subject.subject import Subject


@contextmanager
def progress(total: int, console: Console | None = None) -> Iterator[tuple[OnResult, OnPlan]]:
    """Show a bar while the block runs, and take it away afterwards.

    Args:
        total: results that will come.
        console: where to; None: standard error.

    Yields:
        What `run` is to call with each result, and with the plan of a large instance, which is printed and stays.
    """
    err = console or Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=err, transient=True, disable=not err.is_terminal,
    ) as shown:  # fmt: skip
        task = shown.add_task("judging", total=total)

        def on_result(subject: Subject, result: Result) -> None:
            shown.update(task, advance=1, description=f"{subject.name} {result.id}")

        def on_plan(plan: Plan) -> None:
            if err.is_terminal:
                err.print(plan.sentence, style="dim", markup=False, highlight=False, soft_wrap=True)

        yield on_result, on_plan
