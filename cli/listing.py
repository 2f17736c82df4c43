"""`veriformer list`: the catalogue."""

from __future__ import annotations

import json

import click
from rich.console import Console
from tabulate import tabulate


@click.command("list")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--kind", help="only properties that speak of this kind")
def list_properties(form: str, kind: str | None) -> int:
    """List every property: id, level, kinds, statement."""
    from veriformer.properties.property import catalogue
    from veriformer.properties.subject import KINDS

    if kind is not None and kind not in KINDS:
        raise click.UsageError(f"there is no kind {kind!r}; the kinds are: {', '.join(KINDS)}")
    chosen = [p for p in catalogue().values() if kind is None or kind in p.kinds]
    if form == "json":
        records = [
            {
                "id": p.id, "level": p.level, "kinds": list(p.kinds), "statement": p.statement,
                "formula": p.formula, "source": p.source, "catches": list(p.catches),
            }
            for p in chosen
        ]  # fmt: skip
        click.echo(json.dumps(records, indent=1))
        return 0
    width = max(60, Console().width - 52)
    rows = [[p.id, "core" if p.level == "core" else "", p.statement] for p in chosen]
    click.echo(tabulate(rows, headers=["property", "level", "statement"], maxcolwidths=[None, None, width]))
    click.echo(f"{len(chosen)} properties, {sum(p.level == 'core' for p in chosen)} of them core")
    return 0
