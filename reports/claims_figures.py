"""What is shown beside a claim, drawn: series over the first list, on logarithmic axes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from veriformer.reports.figure_style import COLOURS, DASHES, STYLE, as_png, as_svg, new_figure

Row = Mapping[str, Any]


def figure(name: str, shown: Any) -> Figure | None:
    """Return the figure of numbers that are shown; None where they are no series.

    Args:
        name: what they are; written along the vertical axis.
        shown: names to lists of positive numbers of one length, the first of them the horizontal axis.
    """
    if not isinstance(shown, Mapping) or len(shown) < 2 or not all(_is_series(v) for v in shown.values()):
        return None
    (across, x), *series = shown.items()
    if any(len(y) != len(x) for _, y in series):
        return None
    is_crowded = len(series) > 3
    drawn = new_figure(6.4 if is_crowded else 4.6, 2.7)
    with rc_context(STYLE):
        axes = drawn.subplots()
    for (label, y), colour, dash in zip(series, COLOURS, DASHES, strict=False):
        axes.plot(x, y, color=colour, linestyle=dash, marker="o", markersize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel=across)
    axes.set_xticks(x, [f"{v:g}" for v in x])
    axes.minorticks_off()
    axes.set_title(name, loc="left", fontsize=8)
    if is_crowded:  # beside the axes: lines in every corner leave no room inside
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    else:
        axes.legend()
    return drawn


def _is_series(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 2 and all(type(v) in (int, float) and v > 0 for v in value)


def figures(row: Row) -> list[tuple[str, Markup | None, str]]:
    """Return what is shown beside the findings: its name, its figure as SVG where it is a series, and its numbers."""
    found = []
    for name, shown in row["shown"].items():
        drawn = figure(name, shown)
        found.append((name, None if drawn is None else Markup(as_svg(drawn)), json.dumps(shown)))
    return found


def pictures(record: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the first figure of every claim that has one as PNG, by the name of its file."""
    found = {}
    for row in record["claims"]:
        drawn = next((f for name, shown in row["shown"].items() if (f := figure(name, shown)) is not None), None)
        if drawn is not None:
            found[f"claim-{row['number']}.png"] = as_png(drawn)
    return found
