"""What declared deviations make of a run's outcomes, and which of them excuse nothing any more."""

from __future__ import annotations

from collections.abc import Iterable

from veriformer.properties.known.deviations import Deviation, Deviations
from veriformer.properties.results.records import (
    BLOCKED,
    DEVIATION,
    ERROR,
    FAIL,
    NOT_APPLICABLE,
    OPEN,
    PASS,
    TIMEOUT,
    UNEXPECTED_PASS,
    Report,
    Result,
    SubjectReport,
)
from veriformer.reports.reach import HELD_BACK

_WRONG = (FAIL, ERROR, TIMEOUT)


def apply_deviations(report: Report, deviations: Deviations) -> None:
    """Turn what is declared into DEVIATION, and entries that nothing fits any more into UNEXPECTED_PASS.

    What does not apply to a subject of which something else fails says nothing of an entry: it may be for that failure.
    """
    unfit: list[tuple[Deviation, SubjectReport, Result]] = []
    judged = {r.id for r in report.results}
    for entry in deviations.entries:
        if entry.property not in judged or not entry.fits(report):
            continue
        matching = _spoken_of(report, entry)
        failing = [r for r in matching if entry.excuses(r.outcome)]
        link = f" ({entry.link})" if entry.link else ""
        for result in failing:
            result.outcome, result.reason = DEVIATION, f"{entry.reason}{link}"
        for subject in report.subjects:
            if entry.speaks_of(subject.name, subject.target):
                _release(subject, entry.property)
        if failing or entry.is_shipped:
            continue
        for result in matching:
            if result.outcome == PASS:
                result.outcome = UNEXPECTED_PASS
                result.reason = f"declared as a deviation ({entry.reason}) and holds: remove the entry"
        unfit += [(entry, s, r) for s, r in _with_subjects(report, entry) if r.outcome == NOT_APPLICABLE]
    for entry, subject, result in unfit:
        if _says_why_not(subject, result):
            told = f"declared as a deviation ({entry.reason}) and does not apply ({result.reason}): remove the entry"
            result.outcome, result.reason = UNEXPECTED_PASS, told


def _says_why_not(subject: SubjectReport, result: Result) -> bool:
    """Whether a property that does not apply tells that an entry is not needed: nothing else is wrong there."""
    return not result.reason.endswith(HELD_BACK) and all(r.outcome not in _WRONG for r in subject.results)


def _with_subjects(report: Report, entry: Deviation) -> list[tuple[SubjectReport, Result]]:
    subjects = [s for s in report.subjects if entry.speaks_of(s.name, s.target)]
    return [(s, r) for s in subjects for r in s.results if r.id == entry.property]


def _spoken_of(report: Report, entry: Deviation) -> list[Result]:
    return [result for _, result in _with_subjects(report, entry)]


def _release(subject: SubjectReport, prop: str) -> None:
    """Let what waited for a property that is declared not to hold, or for what waited for it, not apply."""
    if not any(r.id == prop and r.outcome == DEVIATION for r in subject.results):
        return
    released = [prop]
    for waited_for in released:
        for result in subject.results:
            if result.outcome == BLOCKED and result.reason.startswith(f"{waited_for} "):
                result.outcome, result.reason = NOT_APPLICABLE, f"{prop}{HELD_BACK}"
                released.append(result.id)


def standing(report: Report, deviations: Deviations) -> list[Deviation]:
    """Return the entries of the user's own file that excuse something in a run that they were applied to."""
    return [e for e in _own(report, deviations) if DEVIATION in {r.outcome for r in _spoken_of(report, e)}]


def stale(report: Report, deviations: Deviations, *, all_subjects: bool = True) -> tuple[list[Deviation], int]:
    """Return the entries of the user's own file that excuse nothing, and of how many that cannot be said.

    Only of what was judged it can: a property that the run left out, one that waits for another that fails, and a
    subject that was not loaded tell nothing of an entry.

    Args:
        report: that they were applied to.
        deviations: of the file.
        all_subjects: an entry about no subject of the run is about none that there is.
    """
    ran, needed = {r.id for r in report.results}, standing(report, deviations)
    unneeded, unknown = [], 0
    for entry in _own(report, deviations):
        if entry in needed:
            continue
        found = _with_subjects(report, entry)
        is_there = any(entry.speaks_of(s.name, s.target) for s in report.subjects)
        judged = (
            all(_has_verdict(s, r) for s, r in found)
            if found
            else all_subjects and not is_there and entry.property in ran
        )
        unneeded += [entry] * judged
        unknown += not judged
    return unneeded, unknown


def _own(report: Report, deviations: Deviations) -> Iterable[Deviation]:
    return (entry for entry in deviations.entries if not entry.is_shipped and entry.fits(report))


def _has_verdict(subject: SubjectReport, result: Result) -> bool:
    if result.outcome == NOT_APPLICABLE:
        return _says_why_not(subject, result)
    return result.outcome in (PASS, FAIL, OPEN, UNEXPECTED_PASS)
