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

from veriformer.reports.ablation_tables import metric_of
from veriformer.reports.figure_style import COLOURS, DASHES, STYLE, VERDICTS, new_figure, sign

Study = Mapping[str, Any]
Record = Mapping[str, Any]


LEAST = 1e-9
"""Nats below which a loss is drawn as this: a logarithm takes no zero, and float32 knows no smaller loss of a batch."""


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
        metric, band = metric_of(study), {task.get("margin", 0.01) for task in study["tasks"]}
        margin = band.pop() if len(band) == 1 else None
        if margin is not None:
            axes.axvspan(-margin, margin, color="#eef4ee", zorder=0)
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
        within = "" if margin is None else " (shaded: within one point)" if margin == 0.01 else f" (shaded: {margin:g})"
        less = ", less is better" if all(task.get("lower_is_better") for task in study["tasks"]) else ""
        axes.set_xlabel(f"{metric} minus {study['base']}{less}{within}")
        axes.set_title(f"{study['name']}: paired differences, 95 % intervals", loc="left")
        used = dict.fromkeys(row["verdict"] for row in rows)
        handles = [
            Line2D([], [], color=VERDICTS[v][0], marker=VERDICTS[v][1], linestyle="", markersize=4.5, label=v)
            for v in used
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=7.5)
        sign(figure, record)
    return figure


def _is_cross_entropy(study: Study) -> bool:
    """Whether the loss is in nats: where tasks have a loss of their own, nobody knows its unit."""
    return all(task.get("metric", "accuracy") == "accuracy" for task in study["tasks"])


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
    width = 2.7 * columns + 0.8
    widest = 0.07 * max(len(name) for name in variants) + 0.55  # inches at this size of type, with the line before
    ncols = max(1, min(6, len(variants), int(width / widest)))
    above, below = 0.18 * math.ceil(len(variants) / ncols), 0.9 if columns == 1 else 0.6
    with rc_context(STYLE):
        figure = new_figure(width, 1.75 * lines + above + below + 0.25)
        for place, ((task, setting), rows) in enumerate(panels.items()):
            axes = figure.add_subplot(lines, columns, place + 1)
            # a loss of one's own may be negative, which no logarithm shows
            is_positive = all(v is None or v >= 0 for row in rows for vs in row["curves"]["loss"].values() for v in vs)
            least = LEAST if is_positive else None
            for row in rows:
                index = variants[row["variant"]] % len(COLOURS)
                loss = {
                    k: np.array([np.nan if v is None else v for v in vs]) for k, vs in row["curves"]["loss"].items()
                }
                steps = row["curves"]["step"]
                low, high = (np.clip(loss[k], least, None) for k in ("low", "high"))
                axes.fill_between(steps, low, high, color=COLOURS[index], alpha=0.15, linewidth=0)
                axes.plot(
                    steps,
                    np.clip(loss["median"], least, None),
                    color=COLOURS[index],
                    linestyle=DASHES[index],
                    linewidth=1.3,
                )
            axes.set_yscale("log" if is_positive else "linear")
            axes.set_title(_label(task, setting), loc="left", fontsize=8)
            if place % columns == 0:
                axes.set_ylabel("loss, nats" if _is_cross_entropy(study) else "loss")
            if place >= len(panels) - columns:
                axes.set_xlabel("step")
        handles = [
            Line2D([], [], color=COLOURS[i % len(COLOURS)], linestyle=DASHES[i % len(DASHES)], label=name)
            for name, i in variants.items()
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=ncols, fontsize=8)
        sign(figure, record)
    return figure


_STAGES = (("best", -0.15, COLOURS[0], "o"), ("worst", 0.15, COLOURS[3], "v"))


def parts(table: Study, record: Record) -> Figure:
    """Accuracy of every row of the table of parts, at its best and at its worst; a panel for each task and depth."""
    device = table["device"]
    panels: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in table["rows"]:
        panels.setdefault((row["task"], row["num_layers"]), []).append(row)
    chance = {task["name"]: task["chance"] for task in table["tasks"]}
    with rc_context(STYLE):
        columns = min(2, len(panels))
        lines = math.ceil(len(panels) / max(1, columns))
        figure = new_figure(3.1 * max(1, columns) + 1.9, 2.1 * max(1, lines) + 0.9)
        for place, ((task, depth), rows) in enumerate(panels.items()):
            axes = figure.add_subplot(lines, columns, place + 1)
            axes.axvline(chance.get(task, 0), color="#888888", linewidth=0.8, linestyle=":")
            for index, row in enumerate(rows):
                for stage, offset, colour, marker in _STAGES:
                    told = (row["devices"].get(device) or {}).get(stage)
                    if told:
                        value, low, high = told["accuracy"]
                        ends = [value - (value if low is None else low), (value if high is None else high) - value]
                        axes.errorbar(
                            value, index + offset, xerr=[[ends[0]], [ends[1]]], color=colour, marker=marker,
                            markersize=4, linewidth=1.2, capsize=2,
                        )  # fmt: skip
            names = [" + ".join(row["removed"]) or "nothing" for row in rows]
            axes.set_yticks(range(len(rows)), names if place % columns == 0 else [""] * len(rows), fontsize=7.5)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.set_xlim(min(0.2, *chance.values()), 1.03)
            axes.grid(visible=False, axis="y")
            axes.set_title(f"{task}, depth {depth}", loc="left", fontsize=8)
            if place >= len(panels) - columns:
                axes.set_xlabel("accuracy (dotted: chance)")
        handles = [
            Line2D([], [], color=colour, marker=marker, linestyle="", markersize=4.5, label=f"at its {stage}")
            for stage, _, colour, marker in _STAGES
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=2, fontsize=7.5)
        sign(figure, {**record, "seeds": max(task["seeds"] for task in table["tasks"])})
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
    known = [value for values in cells.values() for value in values.values()]
    chance, best = study["tasks"][0]["chance"], study["tasks"][0]["best"]
    low, high = sorted((min(known) if chance is None else chance, max(known) if best is None else 1))
    ys, xs = ([*dict.fromkeys(key[i] for values in cells.values() for key in values)] for i in (0, 1))
    with rc_context(STYLE):
        figure = new_figure(2.6 * len(cells) + 1.0, 0.42 * len(ys) + 1.5)
        image = None
        for place, (variant, values) in enumerate(cells.items()):
            axes = figure.add_subplot(1, len(cells), place + 1)
            grid = np.array([[values.get((y, x), np.nan) for x in xs] for y in ys])
            image = axes.imshow(grid, vmin=low, vmax=high, cmap="cividis", aspect="auto")
            for (i, j), value in np.ndenumerate(grid):
                dark = value < (low + high) / 2
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
            figure.colorbar(image, ax=figure.axes, label=f"{metric_of(study)} on {task}", shrink=0.9)
        sign(figure, record)
    return figure
