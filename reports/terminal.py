"""What a person sees of a run: an honest summary, and what did not pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from veriformer.reports.failure import paper, print_failure, written
from veriformer.reports.reach import held_back, sizes
from veriformer.reports.readable import one_line
from veriformer.reports.twins import twin
from veriformer.reports.verdicts import WORDS, questions, shown_in_full, told_by

_STYLE = {
    "PASS": "green", "FAIL": "bold red", "OPEN": "bold cyan", "DEVIATION": "yellow",
    "UNEXPECTED_PASS": "bold yellow", "BLOCKED": "magenta",
    "VACUOUS": "magenta", "ERROR": "bold red", "TIMEOUT": "bold red", "NOT_APPLICABLE": "dim",
}  # fmt: skip
_LAST_LINES = 5  # of what a subject printed
_LOADS = "subject.loads"  # the row of a target that could not be loaded: there is no other
_WORDS = {outcome: word for outcome, word in WORDS.items() if outcome != "NOT_APPLICABLE"}


_SHOWN = 3  # ids in a line that is not about them


def summary(subject: Mapping[str, Any], catalogue: int) -> str:
    """Return `23 pass, 1 fail of 24 applicable (31 in the catalogue)`.

    >>> results = [{"outcome": "PASS"}, {"outcome": "NOT_APPLICABLE"}]
    >>> summary({"results": results}, 31)
    '1 pass of 1 applicable (31 in the catalogue)'
    """
    counts = Counter(r["outcome"] for r in subject["results"])
    applicable = len(subject["results"]) - counts["NOT_APPLICABLE"]
    told = [f"{counts[o]} {words}" for o, words in _WORDS.items() if counts[o]]
    return f"{', '.join(told) or 'nothing'} of {applicable} applicable ({catalogue} in the catalogue)"


def print_report(
    console: Console,
    report: Mapping[str, Any],
    statements: Mapping[str, str],
    catalogue: int,
    *,
    verbose: bool = False,
    with_paths: bool = True,
    planned: int = 0,
) -> None:
    """Print one line a subject, and one a property that did not pass.

    Args:
        console: where to.
        report: under `veriformer-report/1`.
        statements: property id to statement.
        catalogue: number of properties there are.
        verbose: also print what passed and what does not apply.
        with_paths: also print which paths were never walked.
        planned: properties that were to be judged; a subject of fewer results has no tick, since the run ended before.
    """
    for subject in report["subjects"]:
        outcomes = {r["outcome"] for r in subject["results"]}
        troubled = outcomes & {"FAIL", "ERROR", "TIMEOUT", "UNEXPECTED_PASS"}
        is_part = len(subject["results"]) < planned and all(r["id"] != _LOADS for r in subject["results"])
        mark, colour = ("✗", "red") if troubled else ("?", "cyan") if "OPEN" in outcomes else ("✓", "green")
        mark, colour = ("-", "yellow") if is_part and mark == "✓" else (mark, colour)
        line = Text(f"{mark} ", style=f"bold {colour}")
        line.append(subject["name"], style="bold").append(f"  {summary(subject, catalogue)}", style="default")
        if is_part:
            line.append(f"; {planned - len(subject['results'])} properties were not judged, the run ended before")
        if subject["power"] and subject["power"]["tried"]:
            line.append(f", power {subject['power']['noticed']}/{subject['power']['tried']}")
        if held := held_back(subject):
            line.append(f", {held}")
        _print_hanging(console, line, 2)
        if told := twin(subject):
            _print_hanging(console, Text(f"    {told}", style="bold green" if told.startswith("=") else "yellow"), 6)
        if why := (subject["power"] or {}).get("why"):
            _print_hanging(console, Text(f"    power not known: {why}", style=_STYLE["ERROR"]), 21)
        _print_output(console, subject, in_full=bool(troubled) or verbose)
        for declare, asked in questions(subject).items():
            told = f"{asked[0]['reason']}  ({_ids(asked)})"
            _print_hanging(console, Text("    open: ", style="bold cyan").append(told, style="default"), 10)
            _print_hanging(console, Text(f"          {declare}", style="bold"), 10)
        for note in subject["probed"]:
            _print_hanging(console, Text(f"    probed: {note}", style="dim"), 12)
        if subject.get("believed"):
            told = f"    believed, not verified: {', '.join(subject['believed'])}"
            _print_hanging(console, Text(told, style="dim"), 28)
        if told := sizes(subject):
            _print_hanging(console, Text(f"    reach: {told}", style="dim"), 11)
        if told := subject.get("plan"):
            _print_hanging(console, Text(f"    plan: {told}", style="dim"), 10)
        for told, ids in subject.get("unreached", {}).items():
            _print_hanging(console, Text(f"    not reached: {told} ({_some(ids)})", style="yellow"), 17)
        for fault in (subject["power"] or {}).get("faults", []):
            if fault["noticed_by"] is None:
                told = f"unnoticed when put into this subject: {fault['name']}; it matters, since {fault['matters']}"
                _print_hanging(console, Text(f"    {told}", style="yellow"), 6)
        _print_results(console, subject["results"], statements, verbose)
    if with_paths:
        _print_never_walked(console, report["subjects"], verbose)
    canaries = report.get("canaries") or {"sent": 0, "caught": 0, "missed": []}
    for missed in canaries["missed"]:
        told = missed if canaries.get("lost") else f"a known-broken model passed: {missed}"
        console.print(Text(f"VOID: {told}", style="bold red"))
    _print_hanging(console, Text(totals(report), style="dim"), 2)


def totals(report: Mapping[str, Any]) -> str:
    """Return the last line of a run: what became of all its subjects, and the settings.

    >>> totals({"subjects": [], "canaries": None, "profile": "quick", "seed": 0, "device": "cpu"})
    '0 subjects, nothing judged; profile quick, seed 0, cpu'
    """
    total = Counter(r["outcome"] for s in report["subjects"] for r in s["results"])
    told = ", ".join(f"{total[o]} {words}" for o, words in _WORDS.items() if total[o])
    canaries = report.get("canaries") or {"sent": 0}
    caught = f"; canaries {canaries['caught']}/{canaries['sent']}" if canaries["sent"] else ""
    count = f"{len(report['subjects'])} subject{'s' * (len(report['subjects']) != 1)}"
    ran = f"profile {report['profile']}, seed {report['seed']}, {report['device']}"
    return f"{count}, {told or 'nothing judged'}{caught}; {ran}"


def _some(ids: Sequence[str]) -> str:
    """Return ids in one line, the first ones of many."""
    return ", ".join(ids[:_SHOWN]) + (f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else "")


def _print_output(console: Console, subject: Mapping[str, Any], *, in_full: bool) -> None:
    """Print how much the code of a subject printed, and the end of it where something went wrong."""
    printed = subject.get("printed")
    if not printed:
        return
    lines = printed["text"].splitlines()[-_LAST_LINES:] if in_full else []
    console.print(Text(f"    printed: {printed['size']} bytes{', the last of them:' * bool(lines)}", style="dim"))
    for line in lines:
        console.print(Text(f"      | {one_line(line)[-160:]}", style="dim"))


def _ids(asked: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(r["id"] for r in asked)


def _print_never_walked(console: Console, subjects: Sequence[Mapping[str, Any]], verbose: bool) -> None:
    """Print the ways of calling that no property walked, though a subject may offer them; all of them if verbose."""
    missing = Counter(
        (form, why)
        for subject in subjects
        for form, why in subject.get("never_walked", {}).items()
        if verbose or not why.startswith("it ")  # what a subject does not offer needs no word
    )
    if missing:
        told = [
            form + (f" ({why})" if why else "") + (f" of {count} subjects" if len(subjects) > 1 else "")
            for (form, why), count in missing.items()
        ]
        _print_hanging(console, Text(f"never walked: {'; '.join(told)}", style="dim"), 14)


def _print_results(
    console: Console, results: Sequence[Mapping[str, Any]], statements: Mapping[str, str], verbose: bool
) -> None:
    """Print what did not pass; one line for all properties that stopped at the same obstacle."""
    shown = [r for r in results if verbose or r["outcome"] not in ("PASS", "NOT_APPLICABLE", "OPEN")]
    obstacles = Counter((r["outcome"], r["reason"]) for r in shown if r["outcome"] in ("ERROR", "TIMEOUT", "BLOCKED"))
    told: set[tuple[str, str]] = set()
    for result in shown:
        obstacle = (result["outcome"], result["reason"])
        if obstacles[obstacle] < 3 or verbose:
            _print_result(console, result, statements)
        elif obstacle not in told:
            told.add(obstacle)
            _print_result(console, {**result, "id": f"{obstacles[obstacle]} properties"}, statements)


def _print_result(console: Console, result: Mapping[str, Any], statements: Mapping[str, str]) -> None:
    line = Text("    ").append(f"{result['outcome']:15s} ", style=_STYLE[result["outcome"]]).append(result["id"])
    reason = result["reason"] or statements.get(result["id"], "")
    if result["outcome"] == "PASS":
        reason = f"{result['examples']} examples, margin {result['margin'] or 0:.2g}"
        if result["paths"]:
            reason += f", {len(result['paths'])} paths"
    style = "dim" if result["outcome"] in ("PASS", "NOT_APPLICABLE") else ""
    _print_hanging(console, line.append(f": {reason}", style=style), 20)


def _print_hanging(console: Console, line: Text, indent: int) -> None:
    """Print a line; where it is longer than a person's screen is wide, what follows stands under its words.

    What goes to a file or to another program stays in one line, which can be searched.
    """
    if not console.is_terminal or console.width < 2 * indent:
        console.print(line, soft_wrap=True)
        return
    first, *rest = line.wrap(console, console.width) or [line]
    console.print(first, soft_wrap=True)
    told = Text(" ").join(rest)
    for part in told.wrap(console, console.width - indent) if rest else ():
        console.print(Text(" " * indent) + part, soft_wrap=True)


def report_text(record: Mapping[str, Any], *, width: int = 80) -> str:
    """Return a whole report as text: a line a subject, what did not pass, and each failure.

    Args:
        record: under `veriformer-report/1`, cleaned.
        width: columns.
    """
    console = paper(width)
    statements = {name: told["statement"] for name, told in record.get("properties", {}).items()}
    size = max((len(s["results"]) for s in record["subjects"]), default=0)
    print_report(console, record, statements, size, with_paths=False)
    for subject in record["subjects"]:
        others = told_by(subject)
        for result in shown_in_full(subject):
            also = others.get(result["id"], ())
            statement = statements.get(result["id"], "")
            print_failure(console, result, statement, subject["name"], again="", script="", also=also)
    return written(console)
