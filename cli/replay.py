"""`veriformer replay`: judge a recorded failing case again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from veriformer.cli.pool import Pool, RefusedError
from veriformer.reports.records import RecordError, read_json
from veriformer.reports.terminal import print_failure

_FIELDS = {"target": str, "property": str, "choices": dict, "settings": dict}


@click.command()
@click.argument("case")
def replay(case: str) -> int:
    """Judge the recorded CASE again: an id (or its first letters) under .veriformer/, or a file."""
    path = _find(case)
    try:
        record = _checked(read_json(path), path)
        with Pool(1, record["settings"], 8.0) as pool:
            described = {p["id"]: p for p in pool.ask("describe")["properties"]}
            answer = pool.ask("replay", target=record["target"], prop=record["property"], choices=record["choices"])
    except (RecordError, RefusedError, TypeError) as problem:
        raise click.UsageError(str(problem)) from None
    result = answer["result"]
    console = Console(highlight=False, soft_wrap=True)
    if result["outcome"] == "FAIL":
        print_failure(console, result, described[result["id"]]["statement"], record["target"], str(path.parent))
        return 1
    console.print(f"{record['property']}: {result['outcome']} {result['reason']}".rstrip(), markup=False)
    if result["outcome"] == "ERROR":
        return 2
    console.print("the recorded case no longer violates the property")
    return 0


def _find(case: str) -> Path:
    path = Path(case)
    if path.suffix == ".json":
        if not path.is_file():
            raise click.UsageError(f"there is no file {case!r}; give the id or the file of a recorded case")
        return path
    found = sorted(Path(".veriformer").glob(f"{case}*.json"))
    if len(found) != 1:
        known = ", ".join(p.stem for p in sorted(Path(".veriformer").glob("*.json"))) or "none here"
        problem = "no recorded case begins with" if not found else "several recorded cases begin with"
        raise click.UsageError(f"{problem} {case!r}; recorded are: {known}")
    return found[0]


def _checked(record: dict[str, Any], path: Path) -> dict[str, Any]:
    for name, kind in _FIELDS.items():
        if not isinstance(record.get(name), kind):
            raise RecordError(f"{path} is no recorded case: its {name!r} is missing or not a {kind.__name__}")
    return record
