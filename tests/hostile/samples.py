"""Small whole files of every form that is read, and what strangers make of them."""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from veriformer.ablations.execution.store import Store

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\x1b]0;own\x07\u202e\x9b2J\udc80"
"""Markup, commands to a terminal, a change of direction, half a character."""

SETTINGS = {"profile": "quick", "seed": 0, "device": "cpu", "dtypes": [], "call_seconds": 30.0, "named": []}
CASE: dict[str, Any] = {
    "schema": "veriformer-counterexample/1",
    "target": {"kind": "library", "place": "torch", "attribute": "LayerNorm", "index": None},
    "property": "norm.definition", "choices": {}, "settings": SETTINGS, "versions": {},
}  # fmt: skip
COUNTEREXAMPLE: dict[str, Any] = {
    "id": "ab12cd34", "choices": {"T": 2}, "sizes": "d_model=8", "headline": "they differ", "got": "1", "expected": "2",
    "index": [0], "error": 1.0, "tolerance": 0.1, "path": "mode=grad", "cause": "the scale", "script": "",
    "influence": {"magnitude": [[1.0, 0.0], [1.0, 1.0]], "allowed": [[True, False], [True, True]]},
}  # fmt: skip
FAILS: dict[str, Any] = {
    "id": "norm.definition", "level": "core", "outcome": "FAIL", "reason": "not so", "declare": "", "examples": 1,
    "witnesses": 1, "error": 1.0, "tolerance": 0.1, "margin": 10.0, "seconds": 0.1, "subject_seconds": 0.1,
    "paths": {}, "measures": {}, "reach": {"T": [1, 5]}, "counterexample": COUNTEREXAMPLE,
}  # fmt: skip
OPEN = {**FAILS, "id": "padding.left", "outcome": "OPEN", "declare": "padding_side='right'", "counterexample": None}
ERROR = {**OPEN, "id": "loss.definition", "outcome": "ERROR", "declare": ""}
REPORT: dict[str, Any] = {
    "schema": "veriformer-report/1", "versions": {"torch": "2.13.0"}, "seed": 0, "profile": "quick", "device": "cpu",
    "tf32": False, "seconds": 1.0, "environment": {"cores": 2},
    "canaries": {"sent": 1, "caught": 1, "missed": []}, "allow_open": False, "not_judged": {"hf:x": "not there"},
    "subjects": [
        {"name": "mine", "kind": "norm", "target": "m.py:mine", "facts": {"causal": True}, "probed": ["it is causal"],
         "believed": ["causal"], "power": {"noticed": 1, "tried": 1, "missed": [], "faults": []},
         "never_walked": {"cache": "why"}, "reach": {"T": [1, 5]}, "seconds": 0.5,
         "printed": {"size": 70_000, "text": "one\ntwo"}, "results": [FAILS, OPEN, ERROR]},
    ],
}  # fmt: skip
ABLATION: dict[str, Any] = {
    "format": "veriformer-ablation/1", "command": "veriformer ablate x", "date": "2026-01-01", "seeds": 2,
    "device": "cpu", "device_name": "cpu", "versions": {"torch": "2", "python": "3"},
    "trials": {"finished": 0, "missing": 0, "failures": {}}, "sinusoidal": None,
    "studies": [
        {"name": "p", "question": "how fast?", "source": "s", "variants": [], "tasks": [], "tests": 0,
         "warnings": ["few"], "missing": 0, "noise": [], "rows": [], "points": [],
         "fit": {"kind": "x", "lines": ["it is fast"]}}
    ],
}  # fmt: skip
ENTRY = {"property": "norm.definition", "subject": "mine", "reason": "as in the paper"}

BYTES: dict[str, bytes] = {
    "nothing": b"",
    "null bytes": b"\0" * 100,
    "another encoding": b"\xff\xfe\x00",
    "a marker of byte order": b"\xef\xbb\xbf{}",
    "a list": b"[]",
    "a list in a list": b"[[]]",
    "a list of a number": b"[1]",
    "a number": b"7",
    "an empty object": b"{}",
    "truncated": json.dumps(REPORT).encode()[:-200],
    "5,000 deep": b"[" * 5000 + b"]" * 5000,
    "200,000 deep": b"[" * 200_000,
    "200,000 deep in objects": b'{"a":' * 200_000,
    "a number of 5,000 digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "NaN": b'{"schema": NaN}',
    "infinite": b'{"schema": 1e999}',
    "half a character": b'{"schema": "\\ud800", "format": "\\ud800"}',
    "markup": json.dumps({"schema": NASTY, "format": NASTY}).encode(),
    "a name that is markup": json.dumps({NASTY: NASTY, "schema": "veriformer-report/1"}).encode(),
    "twice the same key": b'{"schema": 1, "schema": []}',
}
"""Files that are no record of any form."""


def damaged(record: Any, values: tuple[Any, ...] = (None, 7, [], {}, NASTY, [[]], -1, 10**400)) -> Iterator[Any]:
    """Yield copies of a record, each with one value in it replaced or taken out."""
    for path in _paths(record):
        for value in (*values, ...):
            changed = copy.deepcopy(record)
            place: Any = changed
            for step in path[:-1]:
                place = place[step]
            if value is not ...:
                place[path[-1]] = value
            elif isinstance(place, dict):
                del place[path[-1]]
            else:
                continue
            yield changed


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield (step,)
        yield from ((step, *path) for path in _paths(inner))


def soiled(record: Any) -> Any:
    """Return a copy with markup and control characters behind every word in it that is free."""
    kept = {"schema", "format", "level", "outcome", "profile", "device", "kind", "id"}
    if isinstance(record, dict):
        return {k: v if k in kept or v == "p" else soiled(v) for k, v in record.items()}
    if isinstance(record, list):
        return [soiled(v) for v in record]
    return record + NASTY if isinstance(record, str) else record


def store(path: Path, *statements: str) -> Path:
    """Make a store of trials, then let a stranger at it."""
    with Store(path):
        pass
    base = sqlite3.connect(path)
    with base:
        for statement in statements:
            base.execute(statement)
    base.close()
    return path
