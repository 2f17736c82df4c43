"""What a user says of a target on the command line: its kind, and facts."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import click

from veriformer.cli.index import nearest
from veriformer.properties.subject.facts import FACTS, validated
from veriformer.properties.subject.kinds import KINDS


def saying_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--kind` and `--declare` to a command."""
    declare = click.option("--declare", "declares", multiple=True, metavar="FACT=VALUE", callback=_declared,
                           help="a fact, to be verified; `veriformer facts` lists them")  # fmt: skip
    kind = click.option("--kind", callback=_kind, help="what it is, where that is not told; `veriformer kinds`")
    return kind(declare(command))


def said(kind: str | None, declares: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that say so; none where nothing is said."""
    return ({"kind": kind} if kind is not None else {}) | ({"declares": declares} if declares else {})


def _kind(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and value not in KINDS:
        raise click.BadParameter(
            f"there is no kind {value!r}; {nearest(value, KINDS)}the kinds are: {', '.join(KINDS)}", ctx, param
        )
    return value


def _declared(ctx: click.Context, param: click.Parameter, words: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise click.BadParameter(f"{word!r} declares nothing; write FACT=VALUE, as causal=True", ctx, param)
        found[name.strip()] = parsed(name.strip(), value.strip())
    try:
        return validated(found)
    except ValueError as problem:
        raise click.BadParameter(str(problem), ctx, param) from None


def parsed(fact: str, value: str) -> Any:
    """Return a value as the fact takes it: a word, a number, True or False, in any spelling of these.

    >>> parsed("causal", "yes"), parsed("window", "8"), parsed("positions", "rotary")
    (True, 8, 'rotary')
    """
    known = FACTS.get(fact)
    if known is not None and known.accepts(value):
        return value
    flags = {"true": True, "yes": True, "false": False, "no": False}
    if value.lower() in flags:
        return flags[value.lower()]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
