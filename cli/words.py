"""`veriformer kinds` and `veriformer facts`: what a subject may be, what it may offer and what it may declare."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from dataclasses import fields
from typing import Any

import click
from rich.console import Console

from veriformer.cli.speaking import say
from veriformer.properties.subject.facts import FACTS
from veriformer.properties.subject.kinds import KINDS
from veriformer.properties.subject.subject import Subject
from veriformer.reports.verdicts import MEANINGS

_POLARITY = """Masks are boolean and say True = may attend: [B, T] for padding; [T, S] or [B, T, S] pairwise, where
mask_forms says "pairwise". torch's own names say otherwise (key_padding_mask: True = masked), and `veriformer check
mygpt.py:GPT` finds out by trying what a model of yours is to be given."""


_SIZES = """A kernel of kind attention is given its mask as [B, 1, T, S], or as whichever of [B, T, S], [T, S] and
[B, S] runs. `build(c)` gets sizes of which it uses what it needs: d_model, num_heads (divides d_model),
num_key_value_heads (divides num_heads; fewer in some), num_layers, d_ff, vocab_size, max_len,
num_classes, dropout (above 0 in some). Widths of a head may be odd. What a model refuses by raising is
left out; `domain={"num_heads": [4, 8]}` says which are allowed, each size for itself."""


@click.command()
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def kinds(form: str) -> int:
    """List the kinds of subject: how each is called, what it gives, and what it may offer besides."""
    if form == "json":
        say(json.dumps({"kinds": kinds_and_facts()[0], "optional": optional_callables()}, indent=1))
        return 0
    for name in KINDS:
        say(told_of_kind(name))
    say(f"\n{_POLARITY}\n\n{_SIZES}\n\nOptional, each for more that can be judged:")
    for name, text in optional_callables().items():
        say(_wrapped(f"  {name:12s} ", text))
    return 0


@click.command()
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def facts(form: str) -> int:
    """List the facts that a subject may declare: what each may be and what it means."""
    if form == "json":
        say(json.dumps(kinds_and_facts()[1], indent=1))
        return 0
    for fact in FACTS.values():
        say(_wrapped(f"{fact.name:20s} ", f"{fact.meaning}: {fact.values}"))
    say("\nA declared fact is verified, never believed: Subject(..., declares={'causal': True}), or "
        "`veriformer check TARGET --declare causal=True`.")  # fmt: skip
    return 0


def kinds_and_facts() -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return every kind (kind, signature, returns, implied) and every fact (fact, values, meaning), as records."""
    kinds = [
        {"kind": k.name, "signature": k.signature, "returns": k.returns, "implied": dict(k.implied)}
        for k in KINDS.values()
    ]
    return kinds, [{"fact": f.name, "values": f.values, "meaning": f.meaning} for f in FACTS.values()]


def polarity() -> str:
    """Return what a mask says: which of its values may attend."""
    return _POLARITY


def told_of_kind(name: str) -> str:
    """Return how subjects of a kind are called and what they give."""
    kind = KINDS[name]
    implied = "".join(f"; implies {fact}={value!r}" for fact, value in kind.implied.items())
    return _wrapped(f"{name:18s} ", f"forward(model, {kind.signature.strip('()')}) -> {kind.returns}{implied}")


def told_of_fact(name: str) -> str:
    """Return what a fact means and may be, and how it is declared."""
    fact = FACTS[name]
    return f"{name} (a fact)\n  {fact.meaning}\n\n  may be    {fact.values}\n  declare   --declare {name}=..."


def told_of_optional(name: str) -> str:
    """Return how something is called that a subject may offer besides its forward."""
    return f"{name} (a subject may offer it)\n{_wrapped('  ', optional_callables()[name])}"


def told_of_outcome(name: str) -> str:
    """Return what an outcome says."""
    return f"{name} (an outcome)\n{_wrapped('  ', MEANINGS[name])}"


def optional_callables() -> dict[str, str]:
    """Return what a subject may offer besides its forward, with signatures, as its docstring says it."""
    told = inspect.cleandoc(Subject.__doc__ or "").partition("Attributes:")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", told, re.MULTILINE)
    calls = {f.name for f in fields(Subject) if "Callable" in str(f.type)} - {"build", "forward"}
    return {name: " ".join(text.split()) for name, text in entries if name in calls}


def _wrapped(head: str, text: str) -> str:
    width = min(Console().width, 120)
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)
