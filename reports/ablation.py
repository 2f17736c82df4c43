"""Everything that a run of `veriformer ablate` leaves behind, from its record alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from veriformer.reports import ablation_figures, ablation_parts, ablation_words, heat_maps, measurement_figures
from veriformer.reports.ablation_tables import cells, family_line, flat, noise_line, table, theorems
from veriformer.reports.figure_style import as_png, as_svg, provenance
from veriformer.reports.page import render
from veriformer.reports.readable import in_markdown
from veriformer.reports.records import RecordError, write_bytes, write_json, write_text

_FIGURES: Mapping[str, tuple[Callable[[Any, Any], Figure | None], str]] = {
    "forest": (
        ablation_figures.forest,
        "Paired differences from the base; a mark whose interval leaves the band moved it.",
    ),
    "map": (ablation_figures.settings_map, "Mean over the seeds at each pair of settings."),
    "curves": (ablation_figures.curves, "Training loss: median over seeds, band from the lower to the upper quartile."),
    "entropy": (heat_maps.entropy, "Attention entropy by layer through training: 1 is spread evenly, 0 is one key."),
    "gradients": (heat_maps.gradients, "Norm of the gradient by layer through training."),
    "attention": (
        heat_maps.attention,
        "Attention of one held-out sample after training, by head, first seed; on the axes its tokens.",
    ),
    "fit": (measurement_figures.scaling_law, "Loss above its floor, with a line where it is a power law."),
    "shapes": (measurement_figures.shapes, "Accuracy against parameters, by depth."),
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
    if record.get("table"):
        made["table-parts"] = (
            ablation_figures.parts(record["table"], record),
            "Accuracy without each set of parts at the best and at the worst setting of the sweep, 95 % intervals.",
        )
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
    write_text(folder / "table.csv", _sheet(record))
    write_text(folder / "table.tex", latex(record))
    write_text(folder / "index.html", page(record, drawn))
    written = [folder / name for name in ("index.html", "ablation.json", "table.md", "table.csv", "table.tex")]
    for name, (figure, _) in drawn.items():
        write_bytes(folder / f"{name}.png", as_png(figure))
        written.append(folder / f"{name}.png")
    return written


def _sheet(record: Mapping[str, Any]) -> str:
    """Return the rows of the table of parts, then those of every study, as CSV."""
    rows = pd.DataFrame(ablation_parts.flat(record["table"])) if record.get("table") else pd.DataFrame()
    return str(pd.concat([rows, flat(record)], ignore_index=True).to_csv(index=False))


def markdown(record: Mapping[str, Any]) -> str:
    """Return all tables as Markdown."""
    parts = [f"# Ablations\n\n{in_markdown(provenance(record))}\n"]
    if record.get("table"):
        parts.append(ablation_parts.markdown(record["table"]))
    for study in record["studies"]:
        parts.append(f"## {study['name']}\n\n{in_markdown(_asked(study))}\n")
        parts += [f"> {in_markdown(warning)}\n" for warning in study["warnings"]]
        parts += [f"> {in_markdown(note)}\n" for note in study.get("notes", ())]
        if study["rows"]:
            parts.append(f"{noise_line(study)}; {family_line(study)}\n\n{table(study, 'pipe')}\n")
            parts += [f"- {in_markdown(line)}" for line in theorems(study)]
        parts += [f"{in_markdown(line)}\n" for line in measurement_figures.lines(study)]
    return "\n".join(parts) + "\n"


def _asked(study: Mapping[str, Any]) -> str:
    return f"{study['question']} ({study['source']})" if study["source"] else str(study["question"])


def latex(record: Mapping[str, Any]) -> str:
    """Return all tables as LaTeX with booktabs."""
    parts = [f"% {provenance(record)}"]
    if record.get("table"):
        parts.append(_in_latex(ablation_parts.in_text(record["table"], "latex_booktabs")))
    parts += [
        f"% {study['name']}\n{_in_latex(table(study, 'latex_booktabs'))}"
        for study in record["studies"]
        if study["rows"]
    ]
    return "\n\n".join(parts) + "\n"


def _in_latex(text: str) -> str:
    """Return a table whose infinity and dash pdflatex understands."""
    return text.replace("∞", "$\\infty$").replace("–", "--")


def page(record: Mapping[str, Any], drawn: Mapping[str, tuple[Figure, str]]) -> str:
    """Return the page: one file, no script, nothing loaded from elsewhere."""
    table_of_parts = record.get("table")
    contents = [{"id": "table", "question": f"{ablation_parts.title(table_of_parts)}."}] if table_of_parts else []
    return render(
        "ablation.html.j2",
        record=record,
        contents=[*contents, *({"id": s["name"], "question": s["question"]} for s in record["studies"])],
        parts=_parts(table_of_parts, drawn) if table_of_parts else None,
        studies=[_study(study, record, drawn) for study in record["studies"]],
        made_by=ablation_words.made_by(record),
    )


def _parts(told: Mapping[str, Any], drawn: Mapping[str, tuple[Figure, str]]) -> dict[str, Any]:
    return {
        "title": ablation_parts.title(told),
        "warnings": told["warnings"],
        "columns": ablation_parts.headings(told),
        "rows": _lines(ablation_parts.cells(told), leading=2, head=3),
        "settings": _lines(ablation_parts.settings_of(told), leading=2, head=3),
        "sentences": ablation_parts.sentences(told),
        "rule": told["conclusions"]["rule"],
        "theorems": ablation_parts.theorems(told),
        "words": ablation_parts.words(told),
        "figures": _figures_of("table", drawn),
    }


def _study(
    study: Mapping[str, Any], record: Mapping[str, Any], drawn: Mapping[str, tuple[Figure, str]]
) -> dict[str, Any]:
    has_rows = bool(study["rows"])
    columns, body = cells(study, whole=False) if has_rows else ([], [])
    more_columns, more = cells(study) if has_rows else ([], [])
    return {
        "data": study,
        "columns": columns,
        "rows": _lines(body, leading=1),
        "more_columns": more_columns,
        "more_rows": _lines(more, leading=1),
        "noise": f"{noise_line(study)}; {family_line(study)}" if has_rows else "",
        "model": ablation_words.model(study),
        "recipe": ablation_words.recipe(study),
        "tasks": ablation_words.tasks(study),
        "seeds": f"{record['seeds']} seeds of every row, from {record.get('first_seed', 0)}",
        "variants": _lines([[v["name"], v["removes"] or "the base"] for v in study["variants"]], leading=0),
        "theorems": theorems(study),
        "lines": measurement_figures.lines(study),
        "figures": _figures_of(study["name"], drawn),
    }


def _figures_of(name: str, drawn: Mapping[str, tuple[Figure, str]]) -> list[dict[str, str]]:
    return [
        {"svg": as_svg(figure), "caption": caption}
        for key, (figure, caption) in drawn.items()
        if key.rpartition("-")[0] == name
    ]


def _lines(body: Sequence[Sequence[str]], leading: int, head: int = 2) -> list[dict[str, Any]]:
    """Return the cells of a table with their styles; a line that differs from the last in its first columns is marked.

    Args:
        body: lines of texts.
        leading: columns in which a line may say what the one above says.
        head: columns that name a line, in the head of its card where the table is folded.
    """
    lines: list[dict[str, Any]] = []
    before: Sequence[str] = ()
    for line in body:
        lines.append({"is_new": line[:leading] != before, "cells": _styled(line, head)})
        before = line[:leading]
    return lines


def _styled(line: Sequence[str], leading: int) -> list[dict[str, str]]:
    """Return cells with their styles; the leading ones head a card where the table is folded."""
    return [{"text": c, "kind": f"{'lead ' if i < leading else ''}{_kind(c)}".strip()} for i, c in enumerate(line)]


def _kind(text: str) -> str:
    """Return the style of a cell: a verdict's colour, or a number's alignment."""
    for word in ("hurts", "helps", "equivalent", "alike", "forced", "violated", "evidence", "base", "too few seeds"):
        if (
            text == word
            or text.startswith((f"{word},", f"{word} if alive"))
            or (word in ("violated", "evidence") and f" {word}" in f" {text}")
        ):
            return word
    if text == "–":
        return "number none"
    return "number" if text[:1].isdigit() or text[:1] in "+-<–" else ""
