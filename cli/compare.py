"""`veriformer compare`: several reports in one table, and what changed between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from veriformer.cli.reading import one_sentence, read_record
from veriformer.cli.speaking import Unwritten, say, screen
from veriformer.properties.results.reading import whole
from veriformer.reports.compliance import changes, compliance, markdown, merged, page, print_compliance
from veriformer.reports.reach import reach_changes
from veriformer.reports.readable import cleaned, in_markdown
from veriformer.reports.records import RecordError, write_text
from veriformer.reports.schema import insist


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="REPORT.json...")
@click.option(
    "--format", "form", type=click.Choice(["text", "markdown", "html", "json"]), default="text", show_default=True
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="file to write instead of standard output")
def compare(files: tuple[Path, ...], form: str, out: Path | None) -> int:
    """Table the subjects of all reports, and list what changed for subjects that stand in several of them.

    Exit status: 0 nothing that held in an earlier file fails in a later one, 1 something does, 3 usage.
    """
    try:
        records = [(str(path), _whole(path)) for path in files]
    except RecordError as problem:
        raise click.UsageError(str(problem)) from None
    table = compliance(merged(records))
    changed, reached, unwritten = changes(records), reach_changes(records), Unwritten()
    command = f"veriformer compare {' '.join(map(str, files))}"
    if form == "text" and out is None:
        console = screen()
        print_compliance(console, table)
        for line in _reaches(table, reached):
            console.print(Text(line, style="dim"))
        for change in changed:
            style = "bold red" if change["worse"] else "green"
            console.print(Text(_told(change), style=style))
    else:
        text = {
            "markdown": lambda: markdown(table, command) + _list(changed) + _section(table, reached),
            "html": lambda: page(table, command, changed),
            "json": lambda: json.dumps({"table": table, "changes": changed, "reach": reached}, indent=1) + "\n",
            "text": lambda: markdown(table, command) + _list(changed) + _section(table, reached),
        }[form]()
        if out is None:
            say(text, end="")
        else:
            with unwritten.attempt("the table"):
                write_text(out, text)
    return unwritten.status(int(any(change["worse"] for change in changed)))


def _whole(path: Path) -> dict[str, Any]:
    record = read_record(path)
    with one_sentence(path):
        insist(record, str(path))
        return whole(cleaned(record))


def _told(change: dict[str, Any]) -> str:
    return (
        f"{change['name']} {change['id']}: {change['before']} in {change['from']}, {change['after']} in {change['to']}"
        + (f": {change['reason']}" if change["reason"] else "")
    )


def _reaches(table: dict[str, Any], reached: list[dict[str, str]]) -> list[str]:
    """Return how far each subject was looked at, a line each, and what of that changed."""
    lines = [f"{row['name']} reach: {row['reach']}" for row in table["rows"] if row["reach"]]
    changed = [f"{c['name']} reach: {c['before']} in {c['from']}, {c['after']} in {c['to']}" for c in reached]
    return [*lines, *changed]


def _section(table: dict[str, Any], reached: list[dict[str, str]]) -> str:
    lines = _reaches(table, reached)
    return "\n".join(["", "## Reach", "", *(f"- {in_markdown(line)}" for line in lines), ""]) if lines else ""


def _list(changed: list[dict[str, Any]]) -> str:
    if not changed:
        return ""
    return "\n".join(["", "## Changes", "", *(f"- {in_markdown(_told(change))}" for change in changed), ""])
