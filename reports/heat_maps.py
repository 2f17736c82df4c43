"""Heat maps: attention entropy and gradient norm through training, attention of one sample, sinusoidal positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from veriformer.reports.figure_style import STYLE, new_figure, sign, strip

Study = Mapping[str, Any]
Record = Mapping[str, Any]
MOST = 8
"""Variants that one figure shows; more would be too small to read."""

HEADS, TICKS = 4, 24
"""Heads of a layer that are shown, and tokens on an axis that can still be read."""


def _shown(study: Study) -> list[Mapping[str, Any]]:
    """Return one row a variant: of the first task and the last setting that it has there."""
    task = study["tasks"][0]["name"] if study["tasks"] else ""
    last: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in study["rows"]:
        if row["task"] == task:
            last[row["variant"], ""] = row
    return list(last.values())[:MOST]


def _title(row: Mapping[str, Any]) -> str:
    return " · ".join(part for part in (row["variant"], row["setting"]) if part)


def _through_training(rows: Sequence[Mapping[str, Any]], record: Record, label: str, **style: Any) -> Figure:
    """Layers from bottom to top, steps from left to right, one panel a variant."""
    deepest = max(len(row["grid"]) for row in rows)
    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    with rc_context(STYLE):
        figure = new_figure(2.6 * columns + 0.9, max(2.4, lines * (0.8 + 0.2 * deepest) + 0.6))
        image = None
        for place, row in enumerate(rows):
            axes = figure.add_subplot(lines, columns, place + 1)
            image = axes.imshow(row["grid"], aspect="auto", origin="lower", **style)
            strip(axes)
            axes.set_title(row["title"], loc="left", fontsize=8)
            axes.set_yticks(range(len(row["names"])), row["names"] if place % columns == 0 else [])
            marks = np.linspace(0, len(row["steps"]) - 1, 4).round().astype(int)
            axes.set_xticks(marks, [row["steps"][m] for m in marks])
            if place >= len(rows) - columns:
                axes.set_xlabel("step")
        if image is not None:
            figure.colorbar(image, ax=figure.axes, label=label, shrink=0.9)
        sign(figure, record)
    return figure


def entropy(study: Study, record: Record) -> Figure | None:
    """Attention entropy over that of uniform attention, by layer, through training."""
    rows = []
    for row in _shown(study):
        grid = np.array(row["curves"]["entropy"], dtype=float).T
        if grid.ndim == 2 and grid.size:
            names = [f"layer {i + 1}" for i in range(len(grid))]
            rows.append({"grid": grid, "steps": row["curves"]["observed_at"], "names": names, "title": _title(row)})
    if not rows:
        return None
    return _through_training(rows, record, "entropy / ln(keys)", vmin=0, vmax=1, cmap="viridis")


def gradients(study: Study, record: Record) -> Figure | None:
    """Norm of the gradient by layer through training, before clipping."""
    rows = []
    for row in _shown(study):
        norms = row["curves"]["gradient_norm"]
        names = sorted(norms, key=lambda part: (part == "output", part != "embedding", part))
        grid = np.array([[np.nan if v is None else v for v in norms[name]] for name in names], dtype=float)
        if grid.size:
            rows.append(
                {
                    "grid": grid,
                    "steps": row["curves"]["observed_at"][: grid.shape[1]],
                    "names": names,
                    "title": _title(row),
                }
            )
    if not rows:
        return None
    known = np.concatenate([row["grid"][np.isfinite(row["grid"]) & (row["grid"] > 0)] for row in rows])
    if not known.size:
        return None
    low, high = float(np.quantile(known, 0.02)), float(known.max())
    return _through_training(rows, record, "gradient norm", norm=LogNorm(low, max(high, low * 1.01)), cmap="cividis")


def attention(study: Study, record: Record) -> Figure | None:
    """Attention weights of one held-out sample after training: a row a variant and head, a column a layer."""
    rows = [row for row in _shown(study) if row.get("attention")]
    if not rows:
        return None
    lines = [(row, head) for row in rows for head in range(min(HEADS, max(map(len, row["attention"]))))]
    layers = max(len(row["attention"]) for row in rows)
    with rc_context(STYLE):
        figure = new_figure(1.3 * layers + 2.4, 1.3 * len(lines) + 0.9)
        image = None
        for line, (row, head) in enumerate(lines):
            for layer, heads in enumerate(row["attention"]):
                if head >= len(heads):
                    continue
                axes = figure.add_subplot(len(lines), layers, line * layers + layer + 1)
                weights = np.array(heads[head], dtype=float)
                image = axes.imshow(weights, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
                strip(axes)
                queries, keys = (_ticks(row.get("tokens"), size) for size in weights.shape)
                axes.set_xticks(range(len(keys)), keys, fontsize=6)
                axes.set_yticks(range(len(queries)), queries, fontsize=6)
                if line == 0:
                    axes.set_title(f"layer {layer + 1}", fontsize=8)
                if layer == 0:
                    name = "\n".join([*_title(row).split(" · "), f"head {head + 1}"])
                    axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=7.5)
        if image is not None:
            figure.colorbar(image, ax=figure.axes, label="weight (row: query, column: key)", shrink=0.8)
        sign(figure, record)
    return figure


def _ticks(tokens: Sequence[Sequence[str]] | None, size: int) -> list[str]:
    """Return the tokens of the input of that length, a class token before them; where none has it, numbered positions.

    Where too many would stand on an axis none is written.
    """
    if size > TICKS:
        return []
    known = list(tokens or ())
    for told in known:
        if len(told) == size:
            return list(told)
    if len(known) == 1 and len(known[0]) == size - 1:
        return ["[cls]", *known[0]]
    return [str(place + 1) for place in range(size)]


def sinusoids(record: Record) -> Figure | None:
    """Draw the sinusoidal encoding: positions down, channels across."""
    table = record.get("sinusoidal")
    if not table:
        return None
    with rc_context(STYLE):
        figure = new_figure(6.0, 3.2)
        axes = figure.add_subplot()
        image = axes.imshow(np.array(table), aspect="auto", cmap="cividis", vmin=-1, vmax=1, interpolation="nearest")
        strip(axes)
        axes.set_xlabel("channel (even: sine, odd: cosine)")
        axes.set_ylabel("position")
        axes.set_title("sinusoidal positional encoding", loc="left")
        figure.colorbar(image, ax=axes)
        sign(figure, record)
    return figure
