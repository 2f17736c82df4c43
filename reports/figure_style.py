"""How every figure looks: colours that the colour-blind tell apart, and a foot that says where it comes from."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#666666", "#000000")
"""Okabe & Ito 2008."""

DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (3, 1, 1, 1)), (0, (5, 1)), (0, (1, 1)), (0, (6, 2, 1, 2)))
"""Lines differ in dash as well as in colour."""

VERDICTS: Mapping[str, tuple[str, str]] = {
    "hurts": ("#D55E00", "v"),
    "helps": ("#0072B2", "^"),
    "equivalent": ("#009E73", "s"),
    "alike if alive": ("#009E73", "o"),
    "no evidence": ("#666666", "P"),
    "too few seeds": ("#999999", "."),
    "forced": ("#000000", "D"),
    "theorem violated": ("#CC79A7", "X"),
}
"""Colour and marker of each verdict."""

STYLE: dict[Any, Any] = {
    "font.size": 8.5, "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 9, "axes.titleweight": "bold", "axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.6,
    "axes.axisbelow": True, "legend.frameon": False, "svg.fonttype": "none", "svg.hashsalt": "veriformer",
    "figure.facecolor": "white", "axes.edgecolor": "#888888", "xtick.color": "#444444", "ytick.color": "#444444",
}  # fmt: skip


DOTS = 160
"""Of a picture, an inch."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, inches."""
    with rc_context(STYLE):
        # as many dots as the picture has: hinted letters are wider at some sizes, and a label would lose its first one
        figure = Figure(figsize=(width, height), dpi=DOTS, layout=ConstrainedLayoutEngine(w_pad=0.08))
    FigureCanvasAgg(figure)
    return figure


def provenance(record: Mapping[str, Any]) -> str:
    """Return what belongs under every figure: seeds, device, versions, command."""
    versions, first = record["versions"], record.get("first_seed")
    start = "" if first is None else f" from {first}"
    commit = record.get("commit") or ""
    revision = f" · commit {commit[:10]}{'+' if commit.endswith('+') else ''}" if commit else ""
    return (
        f"{record['seeds']} seeds{start} · {record['device_name']} · torch {versions['torch']}, "
        f"Python {versions['python']} · {record['command']}{revision}"
    )


CHARACTERS = 18
"""Of a foot's small print that fit into an inch of a figure's width."""


def sign(figure: Figure, record: Mapping[str, Any]) -> None:
    """Write the provenance under a figure, in as many lines as its width asks for."""
    lines = textwrap.wrap(provenance(record), max(20, int(figure.get_figwidth() * CHARACTERS)))
    figure.supxlabel("\n".join(lines), fontsize=6.5, color="#666666", x=0.01, ha="left")


def strip(axes: Axes) -> None:
    """Take the frame and grid off axes that hold a picture."""
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def as_svg(figure: Figure) -> str:
    """Return the figure as an SVG element, for a page."""
    buffer = io.StringIO()
    with rc_context(STYLE):
        _lay_out(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def as_png(figure: Figure) -> bytes:
    """Return the figure as a PNG of `DOTS` an inch."""
    buffer = io.BytesIO()
    with rc_context(STYLE):
        _lay_out(figure)
        figure.savefig(buffer, format="png", dpi=DOTS, metadata={"Software": None})
    return buffer.getvalue()


def _lay_out(figure: Figure) -> None:
    """Give every part its place, once for all forms of the figure: that takes as long as drawing it."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")
