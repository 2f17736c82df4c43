"""A report as an SVG badge: `veriformer | core 41/42 pass, 1 known deviation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from veriformer.reports.page import render
from veriformer.reports.verdicts import TROUBLES, core, deviations, is_void, results

_GREEN, _AMBER, _RED, _GREY = "#2f7d4f", "#9a6700", "#b3261e", "#6e7781"
_LETTER = 6.6  # width of an average letter of 11 px Verdana, in pixels


def badge(record: Mapping[str, Any]) -> str:
    """Return the SVG: core properties that hold, known deviations, what is open; green if all that applies holds.

    Args:
        record: under `veriformer-report/1`.
    """
    holds, applicable = core(record)
    if is_void(record):
        text, colour = "void", _GREY
    elif not applicable:
        text, colour = "nothing judged", _GREY
    else:
        known = deviations(record)
        text = f"core {holds}/{applicable} pass" + (f", {known}" if known else "")
        outcomes = {r["outcome"] for _, r in results(record)}
        asked = sum(r["outcome"] == "OPEN" for _, r in results(record))
        text += f", {asked} open" if asked else ""
        colour = _RED if outcomes & {*TROUBLES} - {"OPEN"} else _AMBER if outcomes & {"DEVIATION", "OPEN"} else _GREEN
    left, right = (round(_LETTER * len(words) + 12) for words in ("veriformer", text))
    return render("badge.svg.j2", text=text, colour=colour, left=left, right=right)
