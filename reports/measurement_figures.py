"""Figures and sentences of what was measured or fitted rather than compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from veriformer.reports.figure_style import COLOURS, DASHES, STYLE, new_figure, sign

Study = Mapping[str, Any]
Record = Mapping[str, Any]
_UNITS = {"seconds": "seconds a step", "bytes": "bytes kept for the backward", "flops": "FLOPs a step"}
_MARKS = "os^vD"


def lines(study: Study) -> list[str]:
    """Return what a fit or a measurement says, one sentence each."""
    told = study.get("fit") or {}
    return list(told.get("lines", ()))


def scaling_law(study: Study, record: Record) -> Figure | None:
    """Loss above its floor against parameters and samples, with the line where a power law is what it is."""
    told = study.get("fit") or {}
    if told.get("kind") != "scaling-law" or not told["fits"]:
        return None
    with rc_context(STYLE):
        figure = new_figure(3.4 * len(told["fits"]), 2.9)
        for place, (name, fit) in enumerate(told["fits"].items()):
            axes = figure.add_subplot(1, len(told["fits"]), place + 1)
            x = np.array(fit["x"], dtype=float)
            axes.loglog(x, fit["y"], "o", color=COLOURS[0], markersize=4.5)
            if fit["is_power_law"]:
                axes.loglog(x, fit["factor"] * x ** fit["exponent"], "--", color=COLOURS[3], linewidth=1.2)
                title = f"exponent {fit['exponent']:.2f} [{fit['low']:.2f}, {fit['high']:.2f}]"
            else:
                axes.loglog(x, fit["y"], ":", color=COLOURS[0], linewidth=1.0)
                title = f"no power law: missed by up to {fit['missed']:.0%}"
            axes.set_title(title, loc="left", fontsize=8)
            axes.set_xlabel(name)
            axes.set_ylabel("loss above its floor, nats" if place == 0 else "")
        sign(figure, record)
    return figure


def shapes(study: Study, record: Record) -> Figure | None:
    """Accuracy against parameters, one curve for each depth, with intervals over seeds; one panel a task."""
    told = study.get("fit") or {}
    if told.get("kind") != "shapes" or not told["curves"]:
        return None
    with rc_context(STYLE):
        figure = new_figure(3.6 * len(told["curves"]), 2.9)
        for place, (task, curves) in enumerate(told["curves"].items()):
            axes = figure.add_subplot(1, len(told["curves"]), place + 1)
            for index, (depth, points) in enumerate(curves.items()):
                x, y, low, high = np.array(sorted(points), dtype=float).T
                axes.plot(
                    x, y, color=COLOURS[index], linestyle=DASHES[index % len(DASHES)], marker=_MARKS[index],
                    markersize=4, label=depth,
                )  # fmt: skip
                axes.fill_between(x, low, high, color=COLOURS[index], alpha=0.2, linewidth=0)
            axes.set_xscale("log")
            axes.set_xlabel("parameters")
            axes.set_title(f"{task}: accuracy", loc="left")
            axes.legend(fontsize=7.5)
        sign(figure, record)
    return figure


def profile(study: Study, record: Record) -> Figure | None:
    """Time, memory and FLOPs against T for both backends; and attention against the linear maps."""
    told = study.get("fit") or {}
    if told.get("kind") != "profile":
        return None
    points = [p for p in study["points"] if "failed" not in p]
    with rc_context(STYLE):
        figure = new_figure(8.6, 5.2)
        for place, (quantity, unit) in enumerate(_UNITS.items()):
            axes = figure.add_subplot(2, 2, place + 1)
            for index, backend in enumerate(("eager", "fused")):
                chosen = [p for p in points if p["varied"] == "T" and p["backend"] == backend]
                fit = next(
                    (f for f in told["fits"] if (f["of"], f["against"], f["backend"]) == (quantity, "T", backend)), None
                )
                label = backend + (f", T^{fit['exponent']:.2f} (at the end {fit['at the end']:.2f})" if fit else "")
                axes.loglog(
                    [p["T"] for p in chosen], [p[quantity] for p in chosen], color=COLOURS[index], marker=_MARKS[index],
                    markersize=4, linestyle=DASHES[index], label=label,
                )  # fmt: skip
            axes.set_title(unit, loc="left")
            _mark_lengths(axes, [p["T"] for p in points if p["varied"] == "T"])
            axes.legend(fontsize=7.5)
        axes = figure.add_subplot(2, 2, 4)
        shares = [p for p in points if p["varied"] == "shares"]
        for index, side in enumerate(("eager", "fused", "linear")):
            name = "linear maps" if side == "linear" else f"attention, {side}"
            axes.loglog(
                [p["T"] for p in shares], [p[side] for p in shares], color=COLOURS[index], marker=_MARKS[index],
                markersize=4, linestyle=DASHES[index], label=name,
            )  # fmt: skip
        if shares:
            crossing = 6 * shares[0]["d_model"]
            axes.axvline(crossing, color="#888888", linewidth=0.9)
            axes.text(crossing, axes.get_ylim()[0], f" 6 d = {crossing}", fontsize=7.5, color="#444444", va="bottom")
        axes.set_title("where attention overtakes (forward, seconds)", loc="left")
        _mark_lengths(axes, [p["T"] for p in shares])
        axes.legend(fontsize=7.5)
        sign(figure, record)
    return figure


def _mark_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """Name the measured lengths on a logarithmic axis, in place of powers of ten."""
    axes.set_xticks(sorted(set(lengths)), [str(length) for length in sorted(set(lengths))])
    axes.minorticks_off()
    axes.set_xlabel("T")


def initialisation(study: Study, record: Record) -> Figure | None:
    """Token spread by depth and attention entropy by head width, of untrained models, with intervals over seeds."""
    told = study.get("fit") or {}
    if told.get("kind") != "initialisation":
        return None
    panels = (("token spread", "blocks", "norm(X - mean) / norm(X)"), ("attention entropy", "d_k", "entropy / ln T"))
    with rc_context(STYLE):
        figure = new_figure(7.2, 2.9)
        for place, (quantity, x_name, y_name) in enumerate(panels):
            axes = figure.add_subplot(1, 2, place + 1)
            chosen = [p for p in study["points"] if p["quantity"] == quantity]
            for index, variant in enumerate(dict.fromkeys(p["variant"] for p in chosen)):
                own = [p for p in chosen if p["variant"] == variant]
                xs, values = [p["x"] for p in own], np.array([p["value"] for p in own], dtype=float).clip(1e-16)
                axes.plot(
                    xs,
                    values[:, 0],
                    color=COLOURS[index],
                    linestyle=DASHES[index],
                    marker=_MARKS[index],
                    markersize=4,
                    label=variant,
                )
                axes.fill_between(xs, values[:, 1], values[:, 2], color=COLOURS[index], alpha=0.2, linewidth=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks([p["x"] for p in own], [str(p["x"]) for p in own])
            if quantity == "token spread":
                axes.set_yscale("log")
            axes.set_xlabel(x_name)
            axes.set_title(y_name, loc="left")
            axes.legend(fontsize=7.5)
        sign(figure, record)
    return figure
