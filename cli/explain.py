"""`veriformer explain ID`: one property in full."""

from __future__ import annotations

import inspect

import click
from tabulate import tabulate


@click.command()
@click.argument("id")
def explain(id: str) -> int:  # noqa: A002 - the catalogue's word
    """Explain a property: its formula, why it holds, when it does not apply, its source, the bugs it catches."""
    from veriformer.properties.judging.catalogue import faults_shown, named

    try:
        found = named([id])
    except KeyError as problem:
        raise click.UsageError(str(problem.args[0])) from None
    for prop in found:
        click.echo(f"{prop.id} ({prop.level})\n  {prop.statement}\n")
        click.echo(f"  formula   {prop.formula}")
        click.echo(f"  speaks of {', '.join(prop.kinds)}")
        click.echo(f"  source    {prop.source}")
        if prop.requires:
            click.echo(f"  requires  {', '.join(prop.requires)}")
        if prop.catches:
            click.echo(f"  catches   {', '.join(prop.catches)} (documented in released code)")
        click.echo(
            "\n" + "\n".join(f"  {line}".rstrip() for line in inspect.cleandoc(prop.explanation).splitlines()) + "\n"
        )
        if faults := faults_shown().get(prop.id):
            click.echo("  shown failing by")
            rows = [[f"    {f['id']}", f["title"], f["citation"]] for f in faults]
            click.echo(tabulate(rows, tablefmt="plain") + "\n")
    return 0
