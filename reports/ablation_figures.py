"""Figures of a training study: forest plot, learning curves, map over settings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from veriformer.reports.figure_style import COLOURS, DASHES, STYLE, VERDICTS, new_figure, sign

Study = Mapping[str, Any]
Record = Mapping[str, Any]


def _label(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def forest(study: Study, record: Record) -> Figure | None:
    """Paired difference of accuracy of every variant, with its 95 % interval; colour and marker are the verdict."""
    rows = [row for row in study["rows"] if row.get("difference")]
    if not rows:
        return None
    with rc_context(STYLE):
        figure = new_figure(7.2, 1.5 + 0.24 * len(rows))
        axes = figure.add_subplot()
        axes.axvspan(-0.01, 0.01, color="#eef4ee", zorder=0)
        axes.axvline(0, color="#888888", linewidth=0.8)
        previous = None
        for place, row in enumerate(rows):
            value, low, high = row["difference"]
            colour, marker = VERDICTS[row["verdict"]]
            ends = [value - (low if low is not None else value), (high if high is not None else value) - value]
            axes.errorbar(
                value,
                place,
                xerr=[[ends[0]], [ends[1]]],
                color=colour,
                marker=marker,
                markersize=4.5,
                linewidth=1.3,
                capsize=2,
            )
            if previous is not None and previous != row["task"]:
                axes.axhline(place - 0.5, color="#cccccc", linewidth=0.7)
            previous = row["task"]
        axes.set_yticks(range(len(rows)), [_label(r["task"], r["setting"], r["variant"]) for r in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"accuracy minus {study['base']} (shaded: within one point)")
        axes.set_title(f"{study['name']}: paired differences, 95 % intervals", loc="left")
        used = dict.fromkeys(row["verdict"] for row in rows)
        handles = [
            Line2D([], [], color=VERDICTS[v][0], marker=VERDICTS[v][1], linestyle="", markersize=4.5, label=v)
            for v in used
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=7.5)
        sign(figure, record)
    return figure


def curves(study: Study, record: Record) -> Figure | None:
    """Training loss, the median over seeds with its quartiles, a panel for each task and setting."""
    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in study["rows"]:
        panels.setdefault((row["task"], row["setting"]), []).append(row)
    if not panels:
        return None
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    variants = {v["name"]: i for i, v in enumerate(study["variants"])}
    with rc_context(STYLE):
        figure = new_figure(2.7 * columns + 0.8, 1.75 * lines + 1.0)
        for place, ((task, setting), rows) in enumerate(panels.items()):
            axes = figure.add_subplot(lines, columns, place + 1)
            for row in rows:
                index = variants[row["variant"]] % len(COLOURS)
                loss = {
                    k: np.array([np.nan if v is None else v for v in vs]) for k, vs in row["curves"]["loss"].items()
                }
                steps = row["curves"]["step"]
                low, high = (np.clip(loss[k], 1e-4, None) for k in ("low", "high"))
                axes.fill_between(steps, low, high, color=COLOURS[index], alpha=0.15, linewidth=0)
                axes.plot(
                    steps,
                    np.clip(loss["median"], 1e-4, None),
                    color=COLOURS[index],
                    linestyle=DASHES[index],
                    linewidth=1.3,
                )
            axes.set_yscale("log")
            axes.set_title(_label(task, setting), loc="left", fontsize=8)
            if place % columns == 0:
                axes.set_ylabel("loss, nats")
            if place >= len(panels) - columns:
                axes.set_xlabel("step")
        handles = [
            Line2D([], [], color=COLOURS[i % len(COLOURS)], linestyle=DASHES[i % len(DASHES)], label=name)
            for name, i in variants.items()
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=min(6, len(handles)), fontsize=8)
        sign(figure, record)
    return figure


_AXIS = re.compile(r"(\S+?)=(\S+)")


def settings_map(study: Study, record: Record) -> Figure | None:
    """Mean accuracy of each variant over two settings (depth and learning rate), where a study has two."""
    if not study["rows"]:
        return None
    task = study["tasks"][0]["name"]
    cells: dict[str, dict[tuple[str, str], float]] = {}
    names: tuple[str, str] | None = None
    for row in study["rows"]:
        found = _AXIS.findall(row["setting"])
        if row["task"] != task or len(found) != 2:
            continue
        names = (found[0][0], found[1][0])
        cells.setdefault(row["variant"], {})[found[0][1], found[1][1]] = row["accuracy"][0]
    if names is None or len(cells) < 2:
        return None
    ys, xs = ([*dict.fromkeys(key[i] for values in cells.values() for key in values)] for i in (0, 1))
    with rc_context(STYLE):
        figure = new_figure(2.6 * len(cells) + 1.0, 0.42 * len(ys) + 1.5)
        image = None
        for place, (variant, values) in enumerate(cells.items()):
            axes = figure.add_subplot(1, len(cells), place + 1)
            grid = np.array([[values.get((y, x), np.nan) for x in xs] for y in ys])
            image = axes.imshow(grid, vmin=study["tasks"][0]["chance"], vmax=1, cmap="cividis", aspect="auto")
            for (i, j), value in np.ndenumerate(grid):
                dark = value < (study["tasks"][0]["chance"] + 1) / 2
                axes.text(
                    j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if dark else "black"
                )
            axes.grid(visible=False)
            axes.set_xticks(range(len(xs)), xs)
            axes.set_yticks(range(len(ys)), ys)
            axes.set_xlabel(names[1])
            axes.set_ylabel(names[0] if place == 0 else "")
            axes.set_title(variant, loc="left")
        if image is not None:
            figure.colorbar(image, ax=figure.axes, label=f"accuracy on {task}", shrink=0.9)
        sign(figure, record)
    return figure
