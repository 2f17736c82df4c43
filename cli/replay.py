"""`veriformer replay`: judge a recorded failing case again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from veriformer.cli.check import DTYPES, NOTHING_JUDGED
from veriformer.cli.plugged import with_plugins
from veriformer.cli.processes.asking import Pool, RefusedError, warm_up
from veriformer.cli.reading import one_sentence, read_record, shown
from veriformer.cli.recorded import SCHEMA, find_case, how_to_repeat, trusted
from veriformer.cli.speaking import say, screen
from veriformer.properties.bench.profiles import PROFILES
from veriformer.properties.subject.kinds import KINDS
from veriformer.reports.failure import print_failure
from veriformer.reports.readable import cleaned
from veriformer.reports.records import RecordError

_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "profile": lambda v: v in PROFILES,
    "seed": lambda v: type(v) is int and abs(v) < 2**63,
    "device": lambda v: isinstance(v, str),
    "dtypes": lambda v: isinstance(v, list) and all(d in DTYPES for d in v),
    "call_seconds": lambda v: type(v) in (int, float) and 0 < v < 1e6,  # which NaN is not
    "named": lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v),
}
_SAID: dict[str, Callable[[Any], bool]] = {
    "kind": lambda v: v in KINDS,
    "declares": lambda v: isinstance(v, dict) and all(isinstance(n, str) and _is_plain(x) for n, x in v.items()),
}
"""Settings that are there where the user said so."""
_FIELDS = {"property": str, "choices": dict, "settings": dict}


@click.command()
@click.argument("case")
@click.option("--target", help="the subject; needed where it is code of your own")
def replay(case: str, target: str | None) -> int:
    """Judge the recorded CASE again: an id (or its first letters) under .veriformer/, or a file.

    A file is data: the choices in it are numbers and words, and of subjects it may name one of the libraries alone.
    Give --target for your own code, as `veriformer check` prints it: no file makes code run.

    What is recorded is judged first, up to where it failed; a subject that passes there goes on, and what is drawn
    then is another case. Exit status: 0 the case no longer fails, 1 it or another one does, 2 nothing was shown.
    """
    warm_up()
    try:
        with one_sentence(Path(case)):
            path = find_case(case)
            record = _checked(read_record(path), path)
        record["target"] = target or trusted(record.get("target"), path)
        with Pool(1, with_plugins(record["settings"]), 8.0) as pool:
            described = {p["id"]: p for p in pool.ask("describe")["properties"]}
            answer = pool.ask(
                "replay", home=record["target"],
                target=record["target"], prop=record["property"], choices=record["choices"],
            )  # fmt: skip
    except RecordError as problem:
        raise click.UsageError(str(problem)) from None
    except RefusedError as problem:
        if problem.is_usage:
            raise click.UsageError(str(problem)) from None
        say(f"Error: {problem}", aside=True)
        return NOTHING_JUDGED
    result = cleaned(answer["result"])
    console = screen()
    if result["outcome"] in ("FAIL", "OPEN"):
        found, statement = result["counterexample"], described[result["id"]]["statement"]
        repeat = how_to_repeat(path, record["target"])
        if beyond := [f"{name}={value}" for name, value in found["choices"].items() if name not in record["choices"]]:
            say(f"this case no longer fails; going on from it ({', '.join(beyond)}) another one does, which "
                f"`veriformer check {shlex.quote(record['target'])} --only {record['property']}` records")  # fmt: skip
            repeat = {"again": "", "script": ""}
        else:
            found["id"] = path.stem  # its own, whatever the subject is called now
            if (
                _without_numbers(was := cleaned(record.get("headline", ""))) != _without_numbers(found["headline"])
                and was
            ):
                say(f"this case fails otherwise than when it was recorded; it was: {was}")
        print_failure(console, result, statement, record["target"], **repeat)
        return 1
    console.print(f"{record['property']}: {result['outcome']} {result['reason']}".rstrip())
    if result["outcome"] != "PASS":
        console.print("nothing was shown: this is neither the violation nor its end")
        return NOTHING_JUDGED
    console.print("this case no longer fails: on its recorded inputs the property holds")
    return 0


def _checked(record: dict[str, Any], path: Path) -> dict[str, Any]:
    if record.get("schema") != SCHEMA:
        raise RecordError(
            f"{path} is no recorded case: its 'schema' is {shown(record.get('schema'))}, where {SCHEMA!r} is required; "
            "give a file that `veriformer check` wrote"
        )
    for name, kind in _FIELDS.items():
        if not isinstance(record.get(name), kind):
            raise RecordError(f"{path} is no recorded case: its {name!r} is missing or not a {kind.__name__}")
    for name, value in record["choices"].items():
        if not all(_is_plain(v) for v in (value if isinstance(value, list) else [value])):
            raise RecordError(
                f"{path} is no recorded case: its choice {shown(name)} is {shown(value)}; "
                "it must be a number, a word or a list of them"
            )
    known = _SETTINGS | _SAID
    for name, value in record["settings"].items():
        if name not in known or not known[name](value):
            raise RecordError(f"{path} is no recorded case: its setting {name!r} is {shown(value)}")
    if not isinstance(record.get("headline", ""), str):
        raise RecordError(f"{path} is no recorded case: its 'headline' is {shown(record['headline'])}")
    if missing := [name for name in _SETTINGS if name not in record["settings"]]:
        raise RecordError(f"{path} is no recorded case: its setting {missing[0]!r} is missing")
    return record


def _without_numbers(headline: str) -> str:
    return re.sub(r"[\d.e+-]*\d", "#", headline)


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | float | str | None) or (isinstance(value, int) and abs(value) < 2**63)
