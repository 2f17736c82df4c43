"""What a person sees: an honest summary, and each failure on one screen."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from veriformer.reports.reach import sizes
from veriformer.reports.readable import one_line
from veriformer.reports.verdicts import NO_SCRIPT, WORDS, questions

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
        console.print(line)
        if told := twin(subject):
            console.print(Text(f"    = {told}", style="bold green"))
        if why := (subject["power"] or {}).get("why"):
            console.print(Text(f"    power not known: {why}", style=_STYLE["ERROR"]))
        _print_output(console, subject, in_full=bool(troubled) or verbose)
        for declare, asked in questions(subject).items():
            console.print(Text("    open: ", style="bold cyan").append(f"{asked[0]['reason']}  ({_ids(asked)})"))
            console.print(Text(f"          {declare}", style="bold"))
        for note in subject["probed"]:
            console.print(Text(f"    probed: {note}", style="dim"))
        if subject.get("believed"):
            console.print(Text(f"    believed, not verified: {', '.join(subject['believed'])}", style="dim"))
        if told := sizes(subject):
            console.print(Text(f"    reach: {told}", style="dim"))
        if told := subject.get("plan"):
            console.print(Text(f"    plan: {told}", style="dim"))
        for told, ids in subject.get("unreached", {}).items():
            console.print(Text(f"    not reached: {told} ({_some(ids)})", style="yellow"))
        for fault in (subject["power"] or {}).get("faults", []):
            if fault["noticed_by"] is None:
                told = f"unnoticed when put into this subject: {fault['name']}; it matters, since {fault['matters']}"
                console.print(Text(f"    {told}", style="yellow"))
        _print_results(console, subject["results"], statements, verbose)
    if with_paths:
        _print_never_walked(console, report["subjects"], verbose)
    canaries = report.get("canaries") or {"sent": 0, "caught": 0, "missed": []}
    for missed in canaries["missed"]:
        told = missed if canaries.get("lost") else f"a known-broken model passed: {missed}"
        console.print(Text(f"VOID: {told}", style="bold red"))
    total = Counter(r["outcome"] for s in report["subjects"] for r in s["results"])
    told = ", ".join(f"{total[o]} {words}" for o, words in _WORDS.items() if total[o])
    caught = f"; canaries {canaries['caught']}/{canaries['sent']}" if canaries["sent"] else ""
    console.print(Text(f"{len(report['subjects'])} subjects, {told or 'nothing judged'}{caught}; profile "
                       f"{report['profile']}, seed {report['seed']}, {report['device']}", style="dim"))  # fmt: skip


def _some(ids: Sequence[str]) -> str:
    """Return ids in one line, the first ones of many."""
    return ", ".join(ids[:_SHOWN]) + (f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else "")


def twin(subject: Mapping[str, Any]) -> str:
    """Return that a subject is the textbook's model, with its configuration; empty where that was not proved.

    >>> twin({"results": [{"id": "twin.equal", "outcome": "PASS", "reason": "equal to the textbook's model"}]})
    "equal to the textbook's model"
    """
    proved = (r for r in subject["results"] if r["id"] == "twin.equal" and r["outcome"] == "PASS")
    return str(next(proved, {"reason": ""})["reason"])


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
        console.print(Text(f"never walked: {'; '.join(told)}", style="dim"))


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
    console.print(line.append(f": {reason}", style="dim" if result["outcome"] in ("PASS", "NOT_APPLICABLE") else ""))


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
    case = result["counterexample"]
    console.print()
    console.rule(Text(f" {result['id']} ", style="bold red"), align="left", style="red")
    console.print(Text(statement, style="bold"))
    for line in textwrap.wrap(f"Not so for {subject}: {case['headline']}.", console.width):
        console.print(Text(line))
    rows = [("case", _case(case)), ("expected", case["expected"]), ("got", _got(case))]
    if case["error"] is not None:
        rows.append(("error", _error(case)))
    rows.append(("path", case["path"]))
    for name, value in rows:
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
        else:
            _print_field(console, "script", NO_SCRIPT)


def _print_field(console: Console, name: str, value: str, style: str = "") -> None:
    lines = textwrap.wrap(value, max(40, console.width - 12), break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        console.print(Text(f"  {name if number == 0 else '':9s} ", style="dim").append(line, style=style))


def _print_command(console: Console, name: str, command: str) -> None:
    """Print a command in one line, however long, so that it can be copied."""
    console.print(Text(f"  {name:9s} ", style="dim").append(command), soft_wrap=True)


def _case(case: Mapping[str, Any]) -> str:
    drawn = [f"{k}={v}" for k, v in case["choices"].items() if k != "config"]
    sizes = " ".join(w for w in case["sizes"].split() if not w.startswith(("max_len", "num_classes")))
    return " ".join([*drawn, f"({sizes})" if sizes else ""]).strip()


def _got(case: Mapping[str, Any]) -> str:
    where = f" at index {case['index']}" if case["index"] else ""
    return f"{case['got']}{where}" if case["got"] else ""


def _error(case: Mapping[str, Any]) -> str:
    if not case["tolerance"]:
        return f"{case['error']:.3g}, where the claim is exact"
    return (
        f"{case['error']:.3g}, tolerance {case['tolerance']:.3g}, {case['error'] / case['tolerance']:.3g} times as much"
    )


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
