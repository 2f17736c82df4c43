"""Everything that a run of `veriformer ablate` leaves behind, from its record alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from veriformer.reports import ablation_figures, heat_maps, measurement_figures
from veriformer.reports.ablation_tables import cells, flat, noise_line, table, theorems
from veriformer.reports.figure_style import as_png, as_svg, provenance
from veriformer.reports.page import render
from veriformer.reports.readable import in_markdown
from veriformer.reports.records import RecordError, write_bytes, write_json, write_text

FORMAT = "veriformer-ablation/1"

_FIGURES: Mapping[str, tuple[Callable[[Any, Any], Figure | None], str]] = {
    "forest": (
        ablation_figures.forest,
        "Paired differences of accuracy; a mark whose interval leaves the band moved it.",
    ),
    "map": (ablation_figures.settings_map, "Mean accuracy over the settings."),
    "curves": (ablation_figures.curves, "Training loss: median over seeds, band from the lower to the upper quartile."),
    "entropy": (heat_maps.entropy, "Attention entropy by layer through training: 1 is spread evenly, 0 is one key."),
    "gradients": (heat_maps.gradients, "Norm of the gradient by layer through training."),
    "attention": (heat_maps.attention, "Attention of one held-out sample after training, mean over heads, first seed."),
    "fit": (measurement_figures.scaling_law, "Loss above the source's entropy, with the fitted power laws."),
    "profile": (measurement_figures.profile, "Time, memory and FLOPs against sequence length, log-log."),
    "initialisation": (
        measurement_figures.initialisation,
        "Untrained models: what depth and head width do at the start.",
    ),
}
"""Every figure of a study by its name: what draws it (or finds nothing to draw), and its caption."""


def figures(record: Mapping[str, Any]) -> dict[str, tuple[Figure, str]]:
    """Return every figure that the record has something for, by `study-figure`, with its caption."""
    made: dict[str, tuple[Figure, str]] = {}
    for study in record["studies"]:
        if not re.fullmatch(r"[\w-]{1,60}", study["name"]):  # it becomes the name of a file
            raise RecordError(f"a study is called {study['name'][:60]!r}; its name must be letters, digits and - alone")
        for name, (draw, caption) in _FIGURES.items():
            figure = draw(study, record)
            if figure is not None:
                made[f"{study['name']}-{name}"] = (figure, caption)
    positions = heat_maps.sinusoids(record)
    if positions is not None and record["studies"]:
        made[f"{record['studies'][0]['name']}-sinusoidal"] = (positions, "Vaswani et al. 2017, section 3.5.")
    return made


def write_report(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write JSON, Markdown, CSV, LaTeX, PNGs and the page; return the paths.

    Raises:
        OSError: the folder cannot be written to.
    """
    drawn = figures(record)
    write_json(folder / "ablation.json", record)
    write_text(folder / "table.md", markdown(record))
    write_text(folder / "table.csv", flat(record).to_csv(index=False))
    write_text(folder / "table.tex", latex(record))
    write_text(folder / "index.html", page(record, drawn))
    written = [folder / name for name in ("index.html", "ablation.json", "table.md", "table.csv", "table.tex")]
    for name, (figure, _) in drawn.items():
        write_bytes(folder / f"{name}.png", as_png(figure))
        written.append(folder / f"{name}.png")
    return written


def markdown(record: Mapping[str, Any]) -> str:
    """Return all tables as Markdown."""
    parts = [f"# Ablations\n\n{in_markdown(provenance(record))}\n"]
    for study in record["studies"]:
        parts.append(f"## {study['name']}\n\n{in_markdown(study['question'])} ({in_markdown(study['source'])})\n")
        parts += [f"> {in_markdown(warning)}\n" for warning in study["warnings"]]
        if study["rows"]:
            parts.append(f"{noise_line(study)}; {study['tests']} tests in the family\n\n{table(study, 'pipe')}\n")
            parts += [f"- {in_markdown(line)}" for line in theorems(study)]
        parts += [f"{in_markdown(line)}\n" for line in measurement_figures.lines(study)]
    return "\n".join(parts) + "\n"


def latex(record: Mapping[str, Any]) -> str:
    """Return all tables as LaTeX with booktabs."""
    parts = [f"% {provenance(record)}"]
    for study in record["studies"]:
        if study["rows"]:
            # the minus and infinity signs of the tables need a maths mode that pdflatex understands
            body = table(study, "latex_booktabs").replace("∞", "$\\infty$").replace("–", "--")
            parts.append(f"% {study['name']}\n{body}")
    return "\n\n".join(parts) + "\n"


def page(record: Mapping[str, Any], drawn: Mapping[str, tuple[Figure, str]]) -> str:
    """Return the page: one file, no script, nothing loaded from elsewhere."""
    studies = [_study(study, drawn) for study in record["studies"]]
    return render("ablation.html.j2", record=record, studies=studies, provenance=provenance(record))


def _study(study: Mapping[str, Any], drawn: Mapping[str, tuple[Figure, str]]) -> dict[str, Any]:
    columns: list[str] = []
    lines: list[dict[str, Any]] = []
    if study["rows"]:
        columns, body = cells(study)
        before = ""
        for line in body:
            lines.append({"is_new": line[0] != before, "cells": [{"text": c, "kind": _kind(c)} for c in line]})
            before = line[0]
    return {
        "data": study,
        "columns": columns,
        "rows": lines,
        "noise": noise_line(study) if study["rows"] else "",
        "recipe": ", ".join(f"{name} {value}" for name, value in study.get("recipe", {}).items()),
        "theorems": theorems(study),
        "lines": measurement_figures.lines(study),
        "figures": [
            {"svg": as_svg(figure), "caption": caption}
            for name, (figure, caption) in drawn.items()
            if name.rpartition("-")[0] == study["name"]
        ],
    }


def _kind(text: str) -> str:
    """Return the style of a cell: a verdict's colour, or a number's alignment."""
    for word in ("hurts", "helps", "equivalent", "forced", "violated", "evidence", "base", "too few seeds"):
        if (
            text == word
            or text.startswith(f"{word},")
            or (word in ("violated", "evidence") and f" {word}" in f" {text}")
        ):
            return word
    return "number" if text[:1].isdigit() or text[:1] in "+-<–" else ""
