"""What a failing test of a property says: what `veriformer check` prints of it."""

from __future__ import annotations

import io
import shlex
import shutil
from pathlib import Path

from rich.console import Console

from veriformer.cli.recorded import how_to_repeat
from veriformer.properties.pytest_plugin import Unheld
from veriformer.properties.results.records import OPEN, plain
from veriformer.reports.failure import print_case
from veriformer.reports.readable import cleaned, readable
from veriformer.reports.records import CASES, write_text

_NARROWEST, _WIDEST = 80, 100  # columns: an influence map has room in the first, a sentence is read in the second


def failure(problem: Unheld, nodeid: str) -> str:
    """Return the text of a failure: claim, case, influence map, likely cause, and how to see it again."""
    result = cleaned(plain(problem.result))
    told = io.StringIO()
    width = min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, _NARROWEST), _WIDEST)
    console = Console(file=told, width=width, no_color=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"{result['outcome']} {result['id']} on {cleaned(problem.subject)}")
    if result["outcome"] == OPEN or not result["counterexample"]:
        console.print(result["reason"] or problem.statement)
    if result["declare"]:
        console.print(f"if that is by design declare {result['declare']}")
    if result["counterexample"]:
        print_case(console, result, problem.statement, cleaned(problem.subject), **_again(problem, nodeid))
    return readable(told.getvalue()).rstrip()


def _again(problem: Unheld, nodeid: str) -> dict[str, str]:
    """Return the commands that show the case again; a subject that no target names is judged by its test alone."""
    case = problem.result.counterexample
    assert case is not None
    path = CASES / f"{case.id}.json"
    if problem.target and path.is_file():
        return how_to_repeat(path, problem.target)
    script = path.with_suffix(".py")
    if case.script and not problem.target:
        _write(script, case.script)
    told = shlex.join(["python", str(script)]) if case.script and script.is_file() else ""
    return {"again": shlex.join(["pytest", nodeid]), "script": told}


def _write(script: Path, text: str) -> None:
    try:
        write_text(script, text)
    except OSError:  # where nothing can be written the failure is told without it
        script.unlink(missing_ok=True)
