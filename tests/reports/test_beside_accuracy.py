"""What an ablation says beside accuracy stands in its tables and figures."""

from __future__ import annotations

from typing import Any

import pytest

from veriformer.reports import measurement_figures
from veriformer.reports.ablation_tables import cells

ROW = {
    "task": "precede", "setting": "", "variant": "learned", "accuracy": [0.9, 0.8, 1.0], "dead": {"count": 0, "of": 12},
    "diverged": {"count": 0, "of": 12}, "verdict": "base", "pace": "", "predictions": [], "seeds": 12,
    "calibration_error": 0.0512, "lengths": {"16": 0.75, "32": None},
}  # fmt: skip
RECORD = {"studies": [], "versions": {"torch": "2", "python": "3"}, "seeds": 12, "device": "cpu", "command": "c",
          "device_name": "cpu", "date": "2026-01-01"}  # fmt: skip


def _study(**changes: Any) -> dict[str, Any]:
    return {"name": "s", "rows": [ROW], "fit": None, **changes}


def _cell(study: dict[str, Any], column: str) -> str:
    columns, lines = cells(study, whole=False)
    return lines[0][columns.index(column)]


def test_other_lengths_have_columns() -> None:
    assert _cell(_study(), "at T=16") == "0.750"
    assert _cell(_study(), "at T=32") == "–"


def test_calibration_has_a_column_where_it_is_asked() -> None:
    assert _cell(_study(fit={"kind": "calibration"}), "ECE") == "0.051"
    assert "ECE" not in cells(_study(), whole=False)[0]


def test_sentences_of_an_answer_are_told() -> None:
    assert measurement_figures.lines(_study(fit={"kind": "entropy", "lines": ["a", "b"]})) == ["a", "b"]


def test_depths_have_a_curve_each() -> None:
    curves = {"hops": {"N=1": [[100, 0.3, 0.2, 0.4], [50, 0.2, 0.1, 0.3]], "N=2": [[100, 0.9, 0.8, 1.0]]}}
    figure = measurement_figures.shapes(_study(fit={"kind": "shapes", "curves": curves}), RECORD)
    assert figure is not None
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.get_lines()] == ["N=1", "N=2"]
    assert list(axes.get_lines()[0].get_xdata()) == [50, 100]
    assert measurement_figures.shapes(_study(), RECORD) is None


@pytest.mark.parametrize(("is_law", "title"), [(True, "exponent -0.50"), (False, "no power law: missed by up to 40%")])
def test_a_line_is_drawn_where_it_is_a_power_law(is_law: bool, title: str) -> None:
    fit = {"exponent": -0.5, "low": -0.6, "high": -0.4, "factor": 1.0, "points": 3, "x": [1, 2, 4], "y": [1, 0.7, 0.5],
           "missed": 0.4, "is_power_law": is_law}  # fmt: skip
    figure = measurement_figures.scaling_law(_study(fit={"kind": "scaling-law", "fits": {"samples": fit}}), RECORD)
    assert figure is not None
    assert title in figure.axes[0].get_title(loc="left")
    assert [line.get_linestyle() for line in figure.axes[0].get_lines()] == ["None", "--" if is_law else ":"]
