"""Judgements of whole subjects, each in a process of its own: one that hangs or crashes costs its own row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from veriformer.cli.processes.asking import Judges, Lost, Task
from veriformer.cli.processes.printed import Printed


@dataclass(frozen=True)
class Call:
    """What is done in a process of its own.

    Attributes:
        function: `module:name`, one of veriformer's own that returns plain data.
        arguments: plain data.
        modules: that its process finds imported: the library of the subject.
    """

    function: str
    arguments: Sequence[Any]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """What came of a call.

    Attributes:
        name: of the call.
        row: that it gave; None if there is none.
        lost: why there is none; None if there is one.
        printed: meanwhile, as a report has it; None if it was nothing.
    """

    name: str
    row: dict[str, Any] | None
    lost: Lost | None
    printed: dict[str, Any] | None

    @property
    def why(self) -> str:
        """One sentence about why there is no row; nothing if there is one."""
        return self.lost.why if self.lost else ""


@dataclass(frozen=True)
class Apart:
    """How judgements are run.

    Attributes:
        judges: who does them.
        label: what is judged, for the progress bar.
        seconds: limit for one judgement; its process is ended then.
    """

    judges: Judges
    label: str
    seconds: float

    def run(self, calls: Mapping[str, Call], err: Console) -> Iterator[Ended]:
        """Yield what came of each call, in the order in which they end.

        Args:
            calls: by name.
            err: where progress is shown, if it is a terminal.

        Raises:
            ClusterError: the workers of a cluster cannot do them.
        """
        ended: list[Ended] = []
        tasks = [self._task(name, call, ended) for name, call in calls.items()]
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
                   TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
            bar = progress.add_task(self.label, total=len(tasks))
            for _ in self.judges.steps(tasks):
                while ended:
                    one = ended.pop(0)
                    progress.update(bar, advance=1, description=one.name[:40])
                    yield one

    def _task(self, name: str, call: Call, ended: list[Ended]) -> Task:
        printed = Printed()

        def done(row: dict[str, Any]) -> None:
            ended.append(Ended(name, row, None, printed.shown))

        def lost(why: Lost) -> None:
            ended.append(Ended(name, None, why, printed.shown))

        asked = {"function": call.function, "arguments": list(call.arguments)}
        return Task("call", lambda: asked, done, lost, seconds=self.seconds, modules=call.modules, told=printed,
                    doing="it was judged")  # fmt: skip
