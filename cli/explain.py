"""`veriformer explain WORD`: one property, kind, fact, outcome or fault in full."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import click
from tabulate import tabulate

from veriformer.cli.index import Shown, faults_shown, joined, nearest, properties
from veriformer.cli.plugged import plugged
from veriformer.cli.site import page_of
from veriformer.cli.speaking import say
from veriformer.cli.words import optional_callables, told_of_fact, told_of_kind, told_of_optional, told_of_outcome
from veriformer.properties.subject.facts import FACTS
from veriformer.properties.subject.kinds import KINDS
from veriformer.reports.verdicts import MEANINGS


@click.command()
@click.argument("word", metavar="ID|KIND|FACT|OPTIONAL|OUTCOME|BUG")
def explain(word: str) -> int:
    """Explain a property (or a family), a kind of subject, a fact, what a subject may offer, an outcome, or a fault.

    A property: its formula, why it holds, when it does not apply, its source, the bugs it catches. A kind: how it is
    called. A fact: what it may be. What a subject may offer (`cache`, `generate`): how it is called. An outcome: what
    it says. A fault: which properties show it. A word that is a family too lists its properties; `FAMILY.*` explains
    them.
    """
    added, family = plugged(), word.removesuffix(".*")
    known, shown = properties() | added.properties, joined(faults_shown(), added.shown)
    found = [p for i, p in known.items() if i == word or i.partition(".")[0] == family]
    told = [*([told_of_kind(word)] if word in KINDS else []), *([told_of_fact(word)] if word in FACTS else [])]
    told += [told_of_optional(word)] if word in optional_callables() else []
    if word in MEANINGS:
        told.append(told_of_outcome(word))
    faults = _faults(known, shown)
    if word in faults:
        told.append(_told_of_fault(word, faults[word]))
    for text in told:
        say(text)
    for prop in found:
        if told:  # the word has a meaning of its own
            say(f"  {prop['id']}: {prop['statement']}")
        else:
            _explain_property(prop, shown.get(prop["id"], ()))
    if not found and not told:
        hint = nearest(word, [*known, *KINDS, *FACTS, *optional_callables(), *MEANINGS, *faults])
        raise click.UsageError(
            f"there is no property {word!r}, nor a kind, a fact or a fault of that name; {hint}`veriformer list`, "
            "`veriformer kinds` and `veriformer facts` show them all"
        )
    return 0


def _explain_property(prop: dict[str, Any], faults: Sequence[dict[str, str]]) -> None:
    say(f"{prop['id']} ({prop['level']})\n  {prop['statement']}\n")
    say(f"  formula   {prop['formula']}")
    say(f"  speaks of {', '.join(prop['kinds'])}")
    say(f"  source    {prop['source']}")
    if "origin" in prop:
        say(f"  origin    {prop['origin']}")
    if prop["requires"]:
        say(f"  requires  {', '.join(prop['requires'])}")
    if prop["catches"]:
        say(f"  catches   {', '.join(prop['catches'])} (documented in released code)")
    say("\n" + "\n".join(f"  {line}".rstrip() for line in inspect.cleandoc(prop["explanation"]).splitlines()) + "\n")
    if faults:
        say("  shown failing by")
        rows = [[f"    {f['id']}", f["title"], f["citation"]] for f in faults]
        say(tabulate(rows, tablefmt="plain") + "\n")
    if "origin" not in prop:
        say(f"  page      {page_of(prop['id'])}\n")


def _faults(known: dict[str, dict[str, Any]], shown: Shown) -> dict[str, tuple[dict[str, str], list[str]]]:
    """Return every fault by its id, with the properties that it shows failing."""
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    for prop, faults in shown.items():
        for fault in faults:
            found.setdefault(fault["id"], (fault, []))[1].append(prop)
    for prop, record in known.items():
        for bug in record["catches"]:
            found.setdefault(bug, ({"title": "documented in released code", "citation": ""}, []))[1].append(prop)
    return found


def _told_of_fault(name: str, fault: tuple[dict[str, str], list[str]]) -> str:
    record, props = fault
    lines = [f"{name} (a fault)", f"  {record['title']}", ""]
    lines += [f"  source    {record['citation']}"] if record["citation"] else []
    lines += [f"  origin    {record['origin']}"] if "origin" in record else []
    return "\n".join([*lines, f"  shown by  {', '.join(props)}"])
