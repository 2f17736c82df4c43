"""Heads that are merged as they lie in memory: whatever then depends on other tokens does so for that reason."""

from __future__ import annotations

from veriformer.properties.anatomy.flow import flow_aside
from veriformer.properties.anatomy.sublayers import scrambled_merges
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation


def merge_opinion(case: Case, problem: Violation) -> str | None:
    """Name an attention whose heads and positions are not changed back before its heads are merged."""
    del problem
    odd = scrambled_merges(flow_aside(case).seen)
    return merge_words(odd[0]) if odd else None


def merge_words(place: str) -> str:
    """Say what is wrong in an attention of a path, "" for the model itself."""
    return (
        f"in {place or 'the model'} heads and positions are not changed back before heads are merged (a transpose is "
        "missing before the reshape): a token gets channels of other tokens"
    )
