"""One failure on one screen: on a terminal, and as text wherever else a person reads."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from veriformer.reports.readable import readable
from veriformer.reports.stories import fields
from veriformer.reports.verdicts import NO_SCRIPT


def print_failure(
    console: Console,
    result: Mapping[str, Any],
    statement: str,
    subject: str,
    *,
    again: str,
    script: str,
    also: Sequence[str] = (),
) -> None:
    """Print one violation: claim, smallest case, numbers, influence map, likely cause, how to see it again.

    Args:
        console: where to.
        result: with its counterexample.
        statement: of the property.
        subject: name of the subject.
        again: the command that judges the case again; "" where it was not written down.
        script: the command that runs the standalone script; "" without one.
        also: ids of the other properties that fail of the same cause.
    """
    console.print()
    console.rule(Text(f" {result['id']} ", style="bold red"), align="left", style="red")
    print_case(console, result, statement, subject, again=again, script=script, also=also)


def print_case(
    console: Console,
    result: Mapping[str, Any],
    statement: str,
    subject: str,
    *,
    again: str,
    script: str,
    also: Sequence[str] = (),
) -> None:
    """Print what stands below the rule of a violation; see `print_failure`."""
    case = result["counterexample"]
    for line in textwrap.wrap(statement, console.width):
        console.print(Text(line, style="bold"))
    for line in textwrap.wrap(f"Not so for {subject}: {case['headline']}.", console.width):
        console.print(Text(line))
    for name, value in fields(case):
        _print_field(console, name, value)
    if case["influence"]:
        _print_influence(console, case["influence"])
    if case["cause"]:
        _print_field(console, "likely", case["cause"], "bold yellow")
    if also:
        _print_field(console, "also", ", ".join(also) + (" fail" if len(also) > 1 else " fails") + " of this cause")
    if again:
        _print_command(console, "again", again)
    if script:
        _print_command(console, "script", script)
    elif again:
        _print_field(console, "script", NO_SCRIPT)


def failure_text(
    result: Mapping[str, Any],
    statement: str,
    subject: str,
    *,
    again: str = "",
    script: str = "",
    also: Sequence[str] = (),
    width: int = 80,
) -> str:
    """Return what `print_failure` prints, as text of at most `width` columns but for commands: for pytest, for a file.

    Args:
        result: with its counterexample, as `plain` and `cleaned` made it.
        statement: of the property.
        subject: name of the subject.
        again: the command that judges the case again, or "".
        script: the command that runs the standalone script, or "".
        also: ids of the other properties that fail of the same cause.
        width: columns.
    """
    console = paper(width)
    print_failure(console, result, statement, subject, again=again, script=script, also=also)
    return written(console)


def paper(width: int) -> Console:
    """Return a console that keeps what is printed on it, in words without colours."""
    return Console(
        file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False, color_system=None,
        force_terminal=True, legacy_windows=False,
    )  # fmt: skip


def written(console: Console) -> str:
    """Return what was printed on such a console, without a line's trailing blanks and control characters."""
    file = console.file
    text = file.getvalue() if isinstance(file, io.StringIO) else ""
    return readable("\n".join(line.rstrip() for line in text.splitlines()).strip("\n"))


def _print_field(console: Console, name: str, value: str, style: str = "") -> None:
    lines = textwrap.wrap(value, max(40, console.width - 12), break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        told = Text(f"  {name if number == 0 else '':9s} ", style="dim").append(line, style=style)
        console.print(told, soft_wrap=True)


def _print_command(console: Console, name: str, command: str) -> None:
    """Print a command in one line, however long, so that it can be copied."""
    console.print(Text(f"  {name:9s} ", style="dim").append(command), soft_wrap=True)


def _print_influence(console: Console, influence: Mapping[str, Any], largest: int = 16) -> None:
    """Draw what reaches what: rows are outputs, columns inputs; `x` is illegal, `o` is missing."""
    magnitude, allowed = influence["magnitude"], influence["allowed"]
    size = min(len(magnitude), largest)
    console.print(Text("  influence   of input s (columns) on output t (rows)", style="dim"))
    console.print(Text("            " + " ".join(f"{s % 10}" for s in range(size)), style="dim"))
    for t in range(size):
        line = Text(f"         {t:2d} ", style="dim")
        for s in range(size):
            reached, legal = bool(magnitude[t][s]), allowed[t][s]
            mark, style = {
                (True, True): ("■", "green"),
                (True, False): ("x", "bold red"),
                (False, True): ("o", "bold red"),
            }.get((reached, legal), ("·", "dim"))
            line.append(f"{mark} ", style=style)
        console.print(line)
    more = "" if len(magnitude) <= largest else f"; the first {largest} of {len(magnitude)} positions"
    console.print(Text(f"            ■ allowed  x illegal  o missing  · none{more}", style="dim"))
