"""A report as one HTML page and as Markdown."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from veriformer.reports.anatomy import drawn
from veriformer.reports.badge import badge
from veriformer.reports.failure import failure_text
from veriformer.reports.page import render
from veriformer.reports.printed import shown
from veriformer.reports.reach import held_back, sizes
from veriformer.reports.readable import as_code, in_markdown, readable
from veriformer.reports.stories import Story, fields, stories
from veriformer.reports.verdicts import (
    NO_SCRIPT,
    TROUBLES,
    WORDS,
    Repeat,
    core,
    deviations,
    is_void,
    name_of,
    provenance,
    questions,
    results,
    total,
    unrepeated,
)

_PRINTED = 4096  # characters of what a subject printed, in a page that is read as text
_ORDER = (*TROUBLES, "DEVIATION", "PASS")
_TONES = {"PASS": "good", "OPEN": "ask", "DEVIATION": "warn", "BLOCKED": "none", "VACUOUS": "warn"}
_SIGNS = {"PASS": "✓", "OPEN": "?", "DEVIATION": "d", "BLOCKED": "–"}


def page(record: Mapping[str, Any], repeat: Repeat = unrepeated) -> str:
    """Return the page: what fails and why, then every result. One file, no network, for light and dark screens.

    Args:
        record: under `veriformer-report/1`.
        repeat: the commands that show a case again.
    """
    holds, applicable = core(record)
    told = [
        (subject, story.told, [r["id"] for r in story.others])
        for subject in record["subjects"]
        for story in stories(subject)
    ]
    return render(
        "report.html.j2",
        record=record,
        stated=record.get("properties", {}),
        title=title(record),
        badge=badge(record),
        words=WORDS,
        no_script=NO_SCRIPT,
        name_of=name_of,
        total=total(record),
        provenance=provenance(record),
        holds=holds,
        applicable=applicable,
        deviations=deviations(record),
        void=is_void(record),
        told=told,
        leading={(name_of(s), i): r["counterexample"]["id"] for s, r, others in told for i in others},
        asked=[(s, declare, of) for s in record["subjects"] for declare, of in questions(s).items()],
        fields=fields,
        again=lambda subject, case: repeat(subject, case)["again"],
        printed=[(s, output) for s in record["subjects"] if (output := shown(s))],
        mark=_mark,
        about=_about,
        drawn=drawn,
        sorted_results=_sorted_results,
        inapplicable=_inapplicable,
        tone=lambda outcome: _TONES.get(outcome, "bad"),
        sign=lambda outcome: _SIGNS.get(outcome, "✗"),
    )


def title(record: Mapping[str, Any]) -> str:
    """Return the name of the subject; of several, how many there are.

    >>> title({"subjects": [{"name": "mine"}]}), title({"subjects": []})
    ('mine', '0 subjects')
    """
    names = [name_of(subject) for subject in record["subjects"]]
    return names[0] if len(names) == 1 else f"{len(names)} subjects"


def markdown(record: Mapping[str, Any], repeat: Repeat = unrepeated) -> str:
    """Return the report as Markdown: a row a subject, then what does not simply pass, with reasons."""
    rows = [
        {
            "subject": in_markdown(name_of(s)),
            "kind": in_markdown(s["kind"]),
            **{word: _count(s, o) for o, word in WORDS.items()},
            "power": _power(s),
        }
        for s in record["subjects"]
    ]
    used = [key for key in (rows[0] if rows else {}) if any(row[key] for row in rows)]
    table = tabulate([{k: row[k] or "" for k in used} for row in rows], headers="keys", tablefmt="github")
    lines = ["# veriformer", "", f"{total(record)}; {in_markdown(provenance(record))}.", "", table, ""]
    if is_void(record):
        lines.insert(2, "**Void: a known-broken model passed.**\n")
    for subject in record["subjects"]:
        for declare, asked in questions(subject).items():
            ids, reason = ", ".join(r["id"] for r in asked), asked[0]["reason"]
            lines.append(f"- **open** {as_code(name_of(subject))} {in_markdown(f'{ids}: {reason}')} {as_code(declare)}")
    if any(stories(subject) for subject in record["subjects"]):
        lines += ["", "Commands are for the folder that the run was started in."]
    for subject in record["subjects"]:
        for story in stories(subject):
            lines += [
                "",
                f"### {as_code(story.told['id'])}: {as_code(name_of(subject))}",
                "",
                *_told(record, subject, story, repeat),
            ]
    lines += [""]
    for subject, result in results(record):
        if result["outcome"] in (*TROUBLES, "DEVIATION") and result["outcome"] != "OPEN":
            told = in_markdown(f"{result['id']}: {result['reason']}")
            lines.append(f"- **{WORDS[result['outcome']]}** {as_code(name_of(subject))} {told}")
    for subject in record["subjects"]:
        lines += _printed(subject)
    return "\n".join(lines).rstrip() + "\n"


def _told(record: Mapping[str, Any], subject: Mapping[str, Any], story: Story, repeat: Repeat) -> list[str]:
    """Return one story as a terminal shows it; nothing in it is markup, which a fence of code could not promise."""
    statement = record.get("properties", {}).get(story.told["id"], {}).get("statement", "")
    also, case = [r["id"] for r in story.others], story.case
    commands = repeat(subject, case)
    text = failure_text(
        story.told, statement, subject["name"], again=commands["again"], script=commands["script"], also=also
    )
    return ["<pre>", *html.escape("\n".join(text.splitlines()[1:]), quote=False).splitlines(), "</pre>"]


def _printed(subject: Mapping[str, Any]) -> list[str]:
    """Return the lines that show what a subject printed, folded; nothing in them is markup or ends the fold."""
    printed = shown(subject, _PRINTED)
    if printed is None:
        return []
    name = html.escape(readable(name_of(subject)), quote=False)
    text = html.escape(readable(printed.text), quote=False)
    return ["", f"<details><summary>{name} {printed.told}</summary>", "", "<pre>", text, "</pre>", "</details>"]


def _count(subject: Mapping[str, Any], outcome: str) -> int:
    return sum(r["outcome"] == outcome for r in subject["results"])


def _power(subject: Mapping[str, Any]) -> str:
    power = subject["power"]
    if not (power and power["tried"]):
        return str((power or {}).get("why", ""))
    held = held_back(subject)
    return f"{power['noticed']}/{power['tried']}" + (f" {held}" if held else "")


def _about(subject: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is said of a subject beside its results, a label and words each."""
    facts = ", ".join(f"{name}={value!r}" for name, value in (subject.get("facts") or {}).items())
    told = [
        ("declared", facts),
        ("believed, not verified", ", ".join(subject.get("believed") or [])),
        ("seen", "; ".join(subject.get("probed") or [])),
        ("power and reach", held_back(subject)),
        ("reach", sizes(subject)),
        ("plan", subject.get("plan") or ""),
        ("not reached", "; ".join(subject.get("unreached") or {})),
    ]
    return [(label, words) for label, words in told if words]


def _sorted_results(subject: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the results that apply, what did not pass first."""
    shown = [r for r in subject["results"] if r["outcome"] != "NOT_APPLICABLE"]
    return sorted(shown, key=lambda r: _ORDER.index(r["outcome"]))


def _inapplicable(subject: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return why properties do not apply, the commonest reason first, with their ids."""
    found: dict[str, list[str]] = {}
    for result in subject["results"]:
        if result["outcome"] == "NOT_APPLICABLE":
            found.setdefault(result["reason"], []).append(result["id"])
    return sorted(found.items(), key=lambda one: -len(one[1]))


def _mark(magnitude: float | None, allowed: bool) -> str:
    if magnitude:
        return "allowed" if allowed else "illegal"
    return "missing" if allowed else ""
