"""A report as JUnit XML, for whatever shows test results: one suite a subject, one case a property."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as Tree

from veriformer.reports.readable import readable
from veriformer.reports.verdicts import WORDS, Repeat, is_void, name_of, unrepeated

_FAILURES = ("FAIL", "OPEN", "UNEXPECTED_PASS")
_ERRORS = ("ERROR", "TIMEOUT", "VACUOUS", "BLOCKED")
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(record: Mapping[str, Any], repeat: Repeat = unrepeated) -> str:
    """Return the XML. Deviations and what does not apply are skipped cases, with their reasons.

    Args:
        record: under `veriformer-report/1`.
        repeat: the commands that show a case again.
    """
    root = Tree.Element(
        "testsuites", {"name": "veriformer", **_counts([r for s in record["subjects"] for r in s["results"]])}
    )
    for subject in record["subjects"]:
        suite = Tree.SubElement(root, "testsuite", {"name": _clean(name_of(subject)), **_counts(subject["results"])})
        for result in subject["results"]:
            _add_case(suite, subject, result, repeat)
    if is_void(record):
        suite = Tree.SubElement(root, "testsuite", name="canaries", tests="1", failures="0", errors="1", skipped="0")
        case = Tree.SubElement(suite, "testcase", classname="canaries", name="known-broken models are noticed")
        told = "; ".join(record["canaries"]["missed"])
        Tree.SubElement(case, "error", message=_clean(f"the run is void: {told}"))
    Tree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Tree.tostring(root, encoding="unicode") + "\n"


def _counts(results: list[Mapping[str, Any]]) -> dict[str, str]:
    outcomes = [r["outcome"] for r in results]
    return {
        "tests": str(len(outcomes)),
        "failures": str(sum(o in _FAILURES for o in outcomes)),
        "errors": str(sum(o in _ERRORS for o in outcomes)),
        "skipped": str(sum(o in ("NOT_APPLICABLE", "DEVIATION") for o in outcomes)),
        **(
            {"time": f"{sum(r.get('seconds', 0.0) for r in results):.3f}"}
            if any("seconds" in r for r in results)
            else {}
        ),
    }


def _add_case(suite: Tree.Element, subject: Mapping[str, Any], result: Mapping[str, Any], repeat: Repeat) -> None:
    time = {"time": f"{result['seconds']:.3f}"} if "seconds" in result else {}
    case = Tree.SubElement(
        suite, "testcase", {"classname": _clean(name_of(subject)), "name": _clean(result["id"]), **time}
    )
    outcome, reason = result["outcome"], _clean(result["reason"])
    if outcome in _FAILURES:
        Tree.SubElement(case, "failure", message=reason, type=WORDS[outcome]).text = _details(subject, result, repeat)
    elif outcome in _ERRORS:
        Tree.SubElement(case, "error", message=reason, type=WORDS[outcome])
    elif outcome != "PASS":
        Tree.SubElement(case, "skipped", message=f"{WORDS[outcome]}: {reason}")


def _details(subject: Mapping[str, Any], result: Mapping[str, Any], repeat: Repeat) -> str:
    found = result.get("counterexample")
    if not found:
        return ""
    drawn = " ".join(f"{k}={v}" for k, v in found["choices"].items() if k != "config")
    lines = [
        f"case: {drawn} ({found['sizes']})",
        f"expected: {found.get('expected', '')}",
        f"got: {found.get('got', '')}",
        f"likely: {found['cause']}" if found.get("cause") else "",
        *(f"{name}: {command}" for name, command in repeat(subject, found).items() if command),
    ]
    return _clean("\n".join(line for line in lines if line))


def _clean(text: str) -> str:
    """Leave out the characters that XML 1.0 has no place for."""
    return readable(_NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text))
