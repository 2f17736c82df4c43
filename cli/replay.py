"""`veriformer replay`: judge a recorded failing case again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from veriformer.cli.check import DTYPES
from veriformer.cli.processes.asking import Pool, RefusedError, warm_up
from veriformer.cli.recorded import find_case, how_to_repeat, trusted
from veriformer.properties.bench.profiles import PROFILES
from veriformer.reports.records import RecordError, read_json
from veriformer.reports.terminal import print_failure

_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "profile": lambda v: v in PROFILES,
    "seed": lambda v: isinstance(v, int),
    "device": lambda v: isinstance(v, str),
    "dtypes": lambda v: isinstance(v, list) and all(d in DTYPES for d in v),
    "call_seconds": lambda v: isinstance(v, int | float),
    "named": lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v),
}
_FIELDS = {"target": str, "property": str, "choices": dict, "settings": dict}


@click.command()
@click.argument("case")
@click.option("--target", help="the subject; needed where a file from elsewhere names code of its own")
def replay(case: str, target: str | None) -> int:
    """Judge the recorded CASE again: an id (or its first letters) under .veriformer/, or a file.

    A file is data: the choices in it are numbers and words. The subject that it names is code, so a file that does not
    lie in .veriformer/ itself may name one of the libraries alone; give --target for your own.
    """
    warm_up()
    path = find_case(case)
    try:
        record = _checked(read_json(path), path)
        record["target"] = target or trusted(record["target"], path)
        with Pool(1, record["settings"], 8.0) as pool:
            described = {p["id"]: p for p in pool.ask("describe")["properties"]}
            answer = pool.ask("replay", target=record["target"], prop=record["property"], choices=record["choices"])
    except (RecordError, RefusedError, TypeError) as problem:
        raise click.UsageError(str(problem)) from None
    result = answer["result"]
    console = Console(highlight=False, soft_wrap=True)
    if result["outcome"] in ("FAIL", "OPEN"):
        result["counterexample"]["id"] = path.stem  # its own, whatever the subject is called now
        statement = described[result["id"]]["statement"]
        print_failure(console, result, statement, record["target"], **how_to_repeat(path, record["target"]))
        return 1
    console.print(f"{record['property']}: {result['outcome']} {result['reason']}".rstrip(), markup=False)
    if result["outcome"] == "ERROR":
        return 2
    console.print("the recorded case no longer violates the property")
    return 0


def _checked(record: dict[str, Any], path: Path) -> dict[str, Any]:
    for name, kind in _FIELDS.items():
        if not isinstance(record.get(name), kind):
            raise RecordError(f"{path} is no recorded case: its {name!r} is missing or not a {kind.__name__}")
    for name, value in record["settings"].items():
        if name not in _SETTINGS or not _SETTINGS[name](value):
            raise RecordError(f"{path} is no recorded case: its setting {name!r} is {value!r}")
    if missing := [name for name in _SETTINGS if name not in record["settings"]]:
        raise RecordError(f"{path} is no recorded case: its setting {missing[0]!r} is missing")
    return record
