"""Recorded cases on disk: where they lie, why none of them names code, and the commands that show them again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from veriformer.properties.adapters.target import LIBRARY, Target, TargetError
from veriformer.properties.results.records import Report
from veriformer.reports.records import CASES, RecordError, hide_from_git, write_json, write_text
from veriformer.reports.verdicts import Repeat, name_of

SCHEMA = "veriformer-counterexample/1"


def write_cases(report: Report, folder: Path, settings: dict[str, Any]) -> None:
    """Write what `veriformer replay` needs, and the standalone scripts.

    Args:
        report: with its counterexamples.
        folder: of the cases.
        settings: of the run.

    Raises:
        OSError: the folder cannot be written to.
    """
    for subject in report.subjects:
        for result in subject.results:
            case = result.counterexample
            if case is None:
                continue
            write_json(
                folder / f"{case.id}.json",
                {
                    "schema": SCHEMA,
                    "target": Target.parse(subject.target).to_record(),
                    "property": result.id,
                    "choices": case.choices,
                    "headline": case.headline,
                    "settings": settings,
                    "versions": report.versions,
                },
            )
            script = folder / f"{case.id}.py"
            if case.script:
                write_text(script, case.script)
            else:
                script.unlink(missing_ok=True)  # of an earlier version, which is not about this case any more
    if folder.is_dir():
        hide_from_git(folder)


def how_to_repeat(path: Path, target: str) -> dict[str, str]:
    """Return the commands that show a recorded case again.

    Args:
        path: of the recorded case.
        target: of its subject.

    Returns:
        `again`, as this command understands it from the folder that one stands in, and `script`; "" without the file.
    """
    if not path.is_file():
        return {"again": "", "script": ""}
    words = ["veriformer", "replay", path.stem if _is_own(path) else str(path)]
    words += [] if _is_of_a_library(target) else ["--target", target]
    script = path.with_suffix(".py")
    return {"again": shlex.join(words), "script": shlex.join(["python", str(script)]) if script.is_file() else ""}


def repeated_from(folder: Path) -> Repeat:
    """Return what tells how the cases in a folder are shown again; see `how_to_repeat`."""

    def repeat(subject: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, str]:
        is_name = re.fullmatch("[0-9a-f]+", case["id"]) is not None  # whatever else a stored record says is no file
        return how_to_repeat(folder / f"{case['id'] if is_name else 'none'}.json", name_of(subject))

    return repeat


def find_case(case: str) -> Path:
    """Return the file of a recorded case.

    Args:
        case: its id or the first letters of it, of the cases of this folder; or a file.

    Raises:
        UsageError: there is no such case, or more than one.
    """
    path = Path(case)
    if path.suffix == ".json":
        if not path.is_file():
            raise click.UsageError(f"there is no file {case!r}; give the id or the file of a recorded case")
        return path
    found = sorted(CASES.glob(f"{case}*.json")) if re.fullmatch("[0-9a-f]+", case) else []
    if len(found) != 1:
        known = ", ".join(p.stem for p in sorted(CASES.glob("*.json"))) or "none here"
        problem = "no recorded case begins with" if not found else "several recorded cases begin with"
        raise click.UsageError(
            f"{problem} {case!r}; recorded are: {known}. Cases of a run with --out DIR lie in DIR/.veriformer: "
            "give the file"
        )
    return found[0]


def trusted(recorded: object, path: Path) -> str:
    """Return the target that a recorded case names, if that may be loaded without being asked for.

    A case is data from anywhere, wherever it lies: it may name a subject of a library, and never code of its own.

    Args:
        recorded: what the case says of its target.
        path: of the case.

    Raises:
        RecordError: it names code, or nothing.
    """
    try:
        target = Target.of_record(recorded)
    except TargetError as problem:
        raise RecordError(f"{path} is no recorded case: {problem}; name the subject with --target") from None
    if target.kind == LIBRARY:
        return str(target)
    raise RecordError(
        f"{path} names the subject {str(target)!r}, whose code would run, and no file is trusted to say so; if that is "
        f"the code you mean say so yourself: --target {shlex.quote(str(target))}"
    )


def _is_own(path: Path) -> bool:
    """Whether a case lies where `veriformer check` writes those of this folder, and not behind a link there."""
    return path.resolve().parent == CASES.resolve()


def _is_of_a_library(target: str) -> bool:
    try:
        return Target.parse(target).kind == LIBRARY
    except TargetError:
        return False
