"""`veriformer list`: the catalogue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console
from tabulate import tabulate

from veriformer.cli.index import faults_shown, joined, nearest, properties
from veriformer.cli.plugged import plugged
from veriformer.cli.speaking import say
from veriformer.properties.subject.kinds import KINDS

OURS = "veriformer"


@click.command("list")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--kind", help="only properties that speak of this kind")
def list_properties(form: str, kind: str | None) -> int:
    """List every property: id, level, the number of faults that show it failing, statement, kinds."""
    if kind is not None and kind not in KINDS:
        raise click.UsageError(f"there is no kind {kind!r}; {nearest(kind, KINDS)}the kinds are: {', '.join(KINDS)}")
    added = plugged()
    shown = joined(faults_shown(), added.shown)
    known = [*properties().values(), *added.properties.values()]
    chosen = [p for p in known if kind is None or kind in p["kinds"]]
    if form == "json":
        told = ("id", "level", "kinds", "statement", "formula", "source", "catches")
        records = [
            {
                **{name: p[name] for name in told}, "origin": p.get("origin", OURS),
                "faults_killed": [fault["id"] for fault in shown.get(p["id"], ())],
            }
            for p in chosen
        ]  # fmt: skip
        say(json.dumps(records, indent=1))
        return 0
    width = max(40, (Console().width - 62) // 2)
    rows = [[p["id"], p["level"], len(shown.get(p["id"], ())), p["statement"], ", ".join(p["kinds"])] for p in chosen]
    headers = ["property", "level", "faults", "statement", "kinds"]
    say(tabulate(rows, headers=headers, maxcolwidths=[None, None, None, width, max(24, width // 2)]))
    for name, ids in _by_origin(chosen).items():
        say(f"{name} adds {', '.join(ids)}")
    say(
        f"{len(chosen)} properties, {sum(p['level'] == 'core' for p in chosen)} of them core, shown failing by "
        f"{len({fault['id'] for p in chosen for fault in shown.get(p['id'], ())})} faults"
    )
    return 0


def _by_origin(records: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the ids of what plug-ins added, by who did."""
    found: dict[str, list[str]] = {}
    for record in records:
        if "origin" in record:
            found.setdefault(record["origin"], []).append(record["id"])
    return found
