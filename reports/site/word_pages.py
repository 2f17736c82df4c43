"""The pages of the words that a report and a subject use: kinds, facts, outcomes, studies, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from veriformer.reports.readable import as_code, in_markdown

Record = Mapping[str, Any]


def kinds_page(kinds: Sequence[Record], optional: Mapping[str, str], polarity: str, counts: Mapping[str, int]) -> str:
    """Return the page of the kinds.

    Args:
        kinds: kind, signature, returns, implied.
        optional: what a subject may offer besides its forward, by name.
        polarity: what is said of masks.
        counts: number of properties that speak of a kind.
    """
    lines = [
        "# Kinds of subject\n",
        "The kind says what a subject is and how it is called. `veriformer kinds` prints this page; "
        "`veriformer list --kind KIND` prints what is checked.\n",
        f"{in_markdown(' '.join(polarity.split()))}\n",
    ]
    for kind in kinds:
        implied = ", ".join(f"`{fact}={value!r}`" for fact, value in kind["implied"].items())
        lines += [
            f"## {kind['kind']} {{ #{kind['kind']} }}\n",
            f"`forward(model, {kind['signature'].strip('()')})` gives `{kind['returns']}`."
            + (f" Implies {implied}." if implied else "")
            + f" {counts[kind['kind']]} properties speak of it.\n",
        ]
    lines += ["## What it may offer besides { #optional }\n", "Optional callables, each for more that can be judged.\n"]
    lines += [f"`{name}`\n:   {_with_code(text)}\n" for name, text in optional.items()]
    return "\n".join(lines)


def facts_page(facts: Sequence[Record]) -> str:
    """Return the page of the facts: each with its meaning and its values."""
    lines = [
        "# Facts to declare\n",
        "A declared fact is verified, never believed: `Subject(..., declares={'causal': True})`, or "
        "`veriformer check TARGET --declare causal=True`. What is left out is probed, and the report says what was "
        "seen. `veriformer facts` prints this page.\n",
        "| fact | meaning | values |",
        "|---|---|---|",
    ]
    lines += [
        f'| <a id="{f["fact"]}"></a>`{f["fact"]}` | {in_markdown(f["meaning"])} | {in_markdown(f["values"])} |'
        for f in facts
    ]
    return "\n".join(lines) + "\n"


def outcomes_page(outcomes: Sequence[str], words: Mapping[str, str], statuses: Sequence[tuple[int, str]]) -> str:
    """Return the page of the outcomes that a property may have, and of the exit statuses.

    Args:
        outcomes: every outcome, in order.
        words: what each means.
        statuses: exit statuses of `veriformer check` and what each says.

    Raises:
        KeyError: an outcome has no words.
    """
    lines = ["# Outcomes\n", "Of each property and subject one of these. Only PASS passes.\n"]
    for outcome in outcomes:
        lines += [f"## {outcome} {{ #{outcome.lower()} }}\n", f"{words[outcome]}\n"]
    lines += ["## Exit status { #status }\n", "| status | says |", "|--:|---|"]
    lines += [f"| {number} | {told} |" for number, told in statuses]
    return "\n".join(lines) + "\n"


def studies_page(studies: Sequence[Record]) -> str:
    """Return the page of the studies: name, question, whether it is run by default."""
    lines = [
        "# Studies\n",
        "`veriformer ablate STUDY` runs one of them; without a name the first. `veriformer ablate --list` prints this "
        "page. [How their numbers are judged](statistics.md).\n",
        "| study | question |",
        "|---|---|",
    ]
    lines += [
        f"| `{s['name']}`{' (default)' if s['default'] else ''} | {in_markdown(s['question'])} |" for s in studies
    ]
    return "\n".join(lines) + "\n"


def _with_code(text: str) -> str:
    """Return a docstring's sentence as Markdown, its code left as code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(as_code(p[1:-1]) if p.startswith("`") and len(p) > 1 else in_markdown(p) for p in parts)
