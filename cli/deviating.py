"""The options about a deviations file that `check` and `sweep` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console

from veriformer.cli.project import SUBJECTS, Project
from veriformer.properties.known.applying import apply_deviations, stale, standing
from veriformer.properties.known.deviations import DeviationsError, read_deviations
from veriformer.properties.results.records import Report
from veriformer.reports.records import write_text

Command = TypeVar("Command", bound=Callable[..., Any])


def deviation_options(command: Command) -> Command:
    """Add `--deviations`, `--update-deviations`, `--reason` and `--prune` to a command."""
    for option in (
        click.option("--prune", is_flag=True, help="remove entries that excuse nothing of what was judged"),
        click.option("--reason", help="of the entries that --update-deviations writes, or wrote without one"),
        click.option("--update-deviations", is_flag=True, help="write what fails or is open into the deviations file"),
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

    def __init__(self, path: Path | None, *, update: bool, prune: bool, reason: str | None) -> None:
        if (update or prune) and path is None:
            raise click.UsageError("--update-deviations and --prune need --deviations FILE, the file to write")
        if reason and not update:
            raise click.UsageError("--reason is that of what --update-deviations writes; give --update-deviations too")
        self.path, self.update, self.prune, self.reason = path, update, prune, reason
        try:
            is_new = update and path is not None and not path.exists()
            self.known = read_deviations(None if is_new else path)
        except DeviationsError as problem:
            raise click.UsageError(f"{_named_in(path)}{problem}") from None

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
        found = [(result, result.outcome, result.reason) for result in report.results]
        apply_deviations(report, self.known)
        if self.path is None or not (self.prune or self.update):
            return
        from veriformer.properties.known.editing import pruned, read_or_empty, recorded  # imports a library of its own

        text = read_or_empty(self.path)
        left_out, all_subjects = _left_out()
        unneeded, unknown = stale(report, self.known, all_subjects=all_subjects)
        if self.prune:
            text, count = pruned(text, unneeded)
            told = f"{_counted(count, 'entry', 'entries')} removed from {self.path}"
            if unknown:
                why = f"this run left them out ({left_out})" if left_out else "this run could not judge them"
                told += f"; {_counted(unknown, 'entry stays', 'entries stay')}, since {why}"
            err.print(told, markup=False, soft_wrap=True)
        if self.update:
            done = recorded(report, text, self.reason, standing(report, self.known))
            text = done.text
            told = f"{_counted(done.added, 'entry', 'entries')} added to {self.path}"
            told += f", {done.changed} changed" if done.changed else ""
            if not (done.added or done.changed):
                told += ": nothing fails or is open that has no entry"
            elif not self.reason:
                told += "; write the reason of each, with a link if there is one"
            if done.questions:
                told += f"; {_of_questions(done.questions)}"
            if done.kept:
                one = "entry has a reason, which stays", "entries have reasons, which stay"
                told += f"; {_counted(done.kept, *one)}: change it in the file"
            err.print(told, markup=False, soft_wrap=True)
        write_text(self.path, text)
        for result, outcome, reason in found:
            result.outcome, result.reason = outcome, reason
        apply_deviations(report, read_deviations(self.path))


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _of_questions(declares: tuple[str, ...]) -> str:
    """Say of new entries that they hold open questions, and what answers these instead."""
    lines = ", ".join(dict.fromkeys(filter(None, declares)))
    answer = f": declare {lines} instead if that is by design, and it is verified" if lines else ""
    return f"{_counted(len(declares), 'holds an open question', 'hold open questions')}{answer}"


def _named_in(path: Path | None) -> str:
    """Return the file that names a deviations file, where that is no option of the command line."""
    context = click.get_current_context()
    project = context.find_object(Project)
    is_of_project = context.get_parameter_source("deviations_file") is ParameterSource.DEFAULT_MAP
    return f"deviations of {project.name}: " if path and project and is_of_project else ""


def _left_out() -> tuple[str, bool]:
    """Return which options made the run one of a part, and whether all the project's subjects were in it."""
    context, told, all_subjects = click.get_current_context(), [], True
    project = context.find_object(Project) or Project()
    for name in ("only", "exclude", "level"):
        value, source = context.params.get(name), context.get_parameter_source(name)
        if not value or value == "all":
            continue
        words = value if isinstance(value, str) else ", ".join(value)
        told.append(
            f"{name} = {words} of {project.name}" if source is ParameterSource.DEFAULT_MAP else f"--{name} {words}"
        )
    source = context.get_parameter_source("targets")
    if SUBJECTS in project.table and source is not ParameterSource.DEFAULT_MAP:
        all_subjects = False
        told.append(f"other TARGETs than the subjects of {project.name}")
    return "; ".join(told), all_subjects
