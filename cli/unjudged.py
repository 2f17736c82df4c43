"""Subjects of which no property applied: no tick is due to them, but the reason why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text


def is_unjudged(subject: Mapping[str, Any]) -> bool:
    """Whether no property applied to a subject of a report, or the run was interrupted before one was judged."""
    return all(result["outcome"] == "NOT_APPLICABLE" for result in subject["results"])


def why_unjudged(subject: Mapping[str, Any]) -> str:
    """Return the commonest reason of the properties that speak of subjects of its kind.

    >>> why_unjudged({"kind": "loss", "results": [{"reason": "speaks of norm, not of loss"}]})
    'no property of this run speaks of loss'
    """
    if not subject["results"]:
        return "the run ended before"
    reasons = Counter(result["reason"] for result in subject["results"])
    ours = Counter({why: n for why, n in reasons.items() if not why.endswith(f", not of {subject['kind']}")})
    return ours.most_common(1)[0][0] if ours else f"no property of this run speaks of {subject['kind']}"


def print_unjudged(console: Console, record: Mapping[str, Any], *, verbose: bool = False) -> dict[str, Any]:
    """Print a line for every subject that nothing was judged of, and return the report without them.

    Args:
        console: where to.
        record: of a run.
        verbose: also print why each property does not apply.
    """
    for subject in filter(is_unjudged, record["subjects"]):
        line = Text("- ", style="bold yellow").append(subject["name"], style="bold")
        console.print(line.append(f"  nothing judged: {why_unjudged(subject)}", style="default"))
        for result in subject["results"] if verbose else ():
            console.print(Text(f"    {result['id']}: {result['reason']}", style="dim"))
    return {**record, "subjects": [s for s in record["subjects"] if not is_unjudged(s)]}
