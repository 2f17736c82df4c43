"""The options about a deviations file that `check` and `sweep` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from veriformer.properties.known.deviations import DeviationsError, apply_deviations, read_deviations, stale
from veriformer.properties.results.records import ERROR, FAIL, OPEN, Report
from veriformer.reports.records import write_text

Command = TypeVar("Command", bound=Callable[..., Any])


def deviation_options(command: Command) -> Command:
    """Add `--deviations`, `--update-deviations`, `--reason` and `--prune` to a command."""
    for option in (
        click.option("--prune", is_flag=True, help="remove entries of the deviations file that excuse nothing"),
        click.option("--reason", help="of the entries that --update-deviations writes"),
        click.option("--update-deviations", is_flag=True, help="write what fails into the deviations file"),
        click.option(
            "--deviations", "deviations_file", type=click.Path(path_type=Path), help="TOML file of known deviations"
        ),
    ):
        command = option(command)
    return command


class DeviationsFile:
    """The user's file of one run: read before it, applied and perhaps edited after it.

    Raises:
        click.UsageError: the options do not go together, or the file cannot be relied on.
    """

    def __init__(self, path: Path | None, *, update: bool, prune: bool, reason: str | None, is_whole: bool) -> None:
        if (update or prune) and path is None:
            raise click.UsageError("--update-deviations and --prune need --deviations FILE, the file to write")
        if reason and not update:
            raise click.UsageError("--reason is that of new entries; give --update-deviations too")
        if prune and not is_whole:
            raise click.UsageError(
                "--prune needs a run of the whole catalogue; leave --only, --exclude and --level out"
            )
        self.path, self.update, self.prune, self.reason = path, update, prune, reason
        try:
            is_new = update and path is not None and not path.exists()
            self.known = read_deviations(None if is_new else path)
        except DeviationsError as problem:
            raise click.UsageError(str(problem)) from None

    def insist(self, properties: list[str], subjects: list[tuple[str, str]]) -> None:
        """Refuse entries about properties or subjects that are not there.

        Raises:
            DeviationsError: with the nearest name.
        """
        self.known.must_name(properties)
        if not self.prune:
            self.known.must_speak_of(subjects)

    def settle(self, report: Report, err: Console) -> None:
        """Apply the entries to a finished run, and edit the file as asked for."""
        apply_deviations(report, self.known)
        if self.path is None or not (self.prune or self.update):
            return
        from veriformer.properties.known.editing import pruned, read_or_empty, recorded  # imports a library of its own

        text, unneeded = read_or_empty(self.path), stale(report, self.known)
        if self.prune:
            text, count = pruned(text, unneeded)
            err.print(f"{_counted(count, 'entry', 'entries')} removed from {self.path}", markup=False, soft_wrap=True)
            _hold_again(report)
        if self.update:
            text, count = recorded(report, text, self.reason)
            told = "" if self.reason or not count else "; write the reason of each, with a link if there is one"
            told += _not_added(report)
            err.print(f"{_counted(count, 'entry', 'entries')} added to {self.path}{told}", markup=False, soft_wrap=True)
        write_text(self.path, text)
        apply_deviations(report, read_deviations(self.path))


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _not_added(report: Report) -> str:
    """Say of the open questions that they get no entry, and what answers them; of a run without failures, that too."""
    asked = [r for r in report.results if r.outcome == OPEN]
    if not asked:
        return "" if any(r.outcome in (FAIL, ERROR) for r in report.results) else ": nothing fails"
    lines = ", ".join(dict.fromkeys(r.declare for r in asked if r.declare))
    answer = f": declare {lines} if that is by design" if lines else ""
    return f"; {_counted(len(asked), 'open question is', 'open questions are')} no failure and got none{answer}"


def _hold_again(report: Report) -> None:
    """Take back what was said of entries that are gone now."""
    for result in report.results:
        if result.outcome == "UNEXPECTED_PASS":
            applies = "does not apply" not in result.reason
            result.outcome, result.reason = ("PASS", "") if applies else ("NOT_APPLICABLE", "it does not apply")
