"""`veriformer explain ID`: one property in full."""

from __future__ import annotations

import inspect

import click
from tabulate import tabulate

from veriformer.cli.speaking import say


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
        say(f"{prop.id} ({prop.level})\n  {prop.statement}\n")
        say(f"  formula   {prop.formula}")
        say(f"  speaks of {', '.join(prop.kinds)}")
        say(f"  source    {prop.source}")
        if prop.requires:
            say(f"  requires  {', '.join(prop.requires)}")
        if prop.catches:
            say(f"  catches   {', '.join(prop.catches)} (documented in released code)")
        say("\n" + "\n".join(f"  {line}".rstrip() for line in inspect.cleandoc(prop.explanation).splitlines()) + "\n")
        if faults := faults_shown().get(prop.id):
            say("  shown failing by")
            rows = [[f"    {f['id']}", f["title"], f["citation"]] for f in faults]
            say(tabulate(rows, tablefmt="plain") + "\n")
    return 0
