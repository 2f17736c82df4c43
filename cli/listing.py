"""`veriformer list`: the catalogue."""

from __future__ import annotations

import json

import click
from rich.console import Console
from tabulate import tabulate

from veriformer.cli.speaking import say


@click.command("list")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--kind", help="only properties that speak of this kind")
def list_properties(form: str, kind: str | None) -> int:
    """List every property: id, level, the number of faults that show it failing, statement, kinds."""
    from veriformer.properties.judging.catalogue import catalogue, faults_shown
    from veriformer.properties.subject.kinds import KINDS

    if kind is not None and kind not in KINDS:
        raise click.UsageError(f"there is no kind {kind!r}; the kinds are: {', '.join(KINDS)}")
    shown = faults_shown()
    chosen = [p for p in catalogue().values() if kind is None or kind in p.kinds]
    if form == "json":
        records = [
            {
                "id": p.id, "level": p.level, "kinds": list(p.kinds), "statement": p.statement,
                "formula": p.formula, "source": p.source, "catches": list(p.catches),
                "faults_killed": [fault["id"] for fault in shown.get(p.id, ())],
            }
            for p in chosen
        ]  # fmt: skip
        say(json.dumps(records, indent=1))
        return 0
    width = max(40, (Console().width - 62) // 2)
    rows = [[p.id, p.level, len(shown.get(p.id, ())), p.statement, ", ".join(p.kinds)] for p in chosen]
    headers = ["property", "level", "faults", "statement", "kinds"]
    say(tabulate(rows, headers=headers, maxcolwidths=[None, None, None, width, max(24, width // 2)]))
    say(
        f"{len(chosen)} properties, {sum(p.level == 'core' for p in chosen)} of them core, shown failing by "
        f"{len({fault['id'] for p in chosen for fault in shown.get(p.id, ())})} faults"
    )
    return 0
