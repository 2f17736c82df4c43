"""What a run leaves behind, from its record."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from veriformer.ablations.measuring.profiling import kept_bytes
from veriformer.ablations.statistics.fits import fit_power
from veriformer.reports.ablation import figures, latex, markdown, page, write_report
from veriformer.reports.ablation_tables import interval, number, p_value, speech, table

Once = Callable[[str, Callable[[Path], None]], Path]

NAMES = {"positions", "residual", "law", "initialisation", "profile"}


def named(record: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (study for study in record["studies"] if study["name"] == name)
    return found


def test_the_record_is_plain_json(record: dict[str, Any]) -> None:
    again = json.loads(json.dumps(record, allow_nan=False))
    assert again["format"] == "veriformer-ablation/1"
    assert {s["name"] for s in again["studies"]} == NAMES
    assert again["trials"] == {"finished": again["trials"]["finished"], "missing": 0, "failures": {}}


def test_rows_say_what_the_design_asks(record: dict[str, Any]) -> None:
    row = record["studies"][0]["rows"][1]
    wanted = {
        "variant", "parameters", "flops", "seconds", "accuracy", "interquartile_mean", "difference", "p", "p_holm",
        "probability_of_improvement", "dead", "diverged", "max_loss", "steps_to_95", "verdict", "predictions",
        "smallest_detectable", "area_p", "area_p_holm", "dead_p", "dead_p_holm", "alive", "detectable",
        "spikes", "loss_area", "calibration_error",
    }  # fmt: skip
    assert wanted <= set(row)
    assert row["verdict"] == "forced"
    assert row["checks"]["permutation"]["holds"]


def test_the_record_says_seeds_commit_and_when_a_prediction_was_made(record: dict[str, Any]) -> None:
    assert record["first_seed"] == 2000
    assert record["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", record["commit"])
    assert named(record, "positions")["tests"] == named(record, "positions")["untested"] + 3  # count, none; a theorem
    told = [p for s in record["studies"] for r in s["rows"] for p in r["predictions"]]
    assert {p["registered"] for p in told} == {"2026-01-01"}
    assert "registered 2026-01-01" in page(record, {})


def test_the_verdict_says_what_is_not_excluded() -> None:
    row = {"verdict": "alike if alive", "pace": "", "dead": {"not_excluded": 0.117}}
    assert speech(row) == "alike if alive (dead seeds up to 12% not excluded)"
    seen = {"dead_share": 0.52, "fall": 0.26, "shift": 0.0123}
    row = {"verdict": "no evidence", "pace": "slower", "smallest_detectable": 0.26, "detectable": seen}
    assert speech(row) == "no evidence (could see 0.26 by 52% dead or 0.012 of all), slower"
    nothing = dict.fromkeys(seen)
    row = {"verdict": "no evidence", "pace": "", "smallest_detectable": None, "detectable": nothing}
    assert speech(row) == "no evidence (could see nothing)"


@pytest.fixture(scope="module")
def folder(record: dict[str, Any], once: Once) -> Path:
    def write(place: Path) -> None:
        written = write_report(record, place)
        assert {path.name for path in written} == {path.name for path in place.iterdir()}

    return once("report of the small run", write)


def test_everything_is_written_and_opens(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {"index.html", "ablation.json", "table.md", "table.csv", "table.tex"} <= names
    for figure in (
        "positions-forest", "positions-curves", "positions-entropy", "positions-gradients", "positions-attention",
        "positions-sinusoidal", "residual-map", "law-fit", "profile-profile", "initialisation-initialisation",
    ):  # fmt: skip
        with Image.open(folder / f"{figure}.png") as picture:
            assert picture.width > 500
            assert len(picture.convert("RGB").getcolors(1_000_000) or []) > 20, f"{figure} is blank"


class Tags(html.parser.HTMLParser):
    """Notes tags that are opened and closed, and what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loaded += [str(given[k]) for k in ("src", "href") if k in given and not str(given[k]).startswith("#")]
        if tag in ("h2",):
            self.ids.append(str(given["id"]))
        if tag in ("table", "tr", "td", "div", "figure", "details", "ul", "svg"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("table", "tr", "td", "div", "figure", "details", "ul", "svg"):
            assert self.open.pop() == tag


def test_the_page_is_one_whole_file(folder: Path) -> None:
    text = (folder / "index.html").read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert set(tags.ids) == NAMES
    assert [name for name in tags.loaded if not name.startswith("data:")] == []
    assert text.count("<svg") >= 10


def test_every_figure_says_where_it_comes_from(record: dict[str, Any]) -> None:
    drawn = figures(record)
    assert drawn
    for name, (figure, caption) in drawn.items():
        foot = " ".join(figure.get_supxlabel().split())  # as many lines as its width asks for
        assert "3 seeds from 2000 · cpu · torch" in foot, name
        assert "veriformer ablate small" in foot, name
        assert caption


def test_a_name_with_markup_is_shown_not_run(record: dict[str, Any]) -> None:
    hostile = json.loads(json.dumps(record))
    hostile["studies"][0]["question"] = "<script>alert(1)</script>"
    hostile["command"] = "<img src=x>"
    shown = page(hostile, {})
    assert "<script>" not in shown
    assert "<img" not in shown


def test_csv_holds_the_raw_numbers(record: dict[str, Any], folder: Path) -> None:
    lines = list(csv.DictReader(io.StringIO((folder / "table.csv").read_text())))
    rows = [row for study in record["studies"] for row in study["rows"]]
    assert len(lines) == len(rows)
    assert [float(line["accuracy"]) for line in lines] == pytest.approx([row["accuracy"][0] for row in rows])
    assert {line["verdict"] for line in lines} == {row["verdict"] for row in rows}


def test_markdown_and_latex(record: dict[str, Any]) -> None:
    text = markdown(record)
    assert "| task" in text
    assert "3 seeds from 2000 · cpu" in text
    tex = latex(record)
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 3
    for line in tex.splitlines():
        body = line.split("%")[0] if line.startswith("%") else line
        assert not re.search(r"(?<!\\)[%_#]", body), line  # every special sign is escaped


def test_the_screen_leaves_out_what_the_line_above_says(record: dict[str, Any]) -> None:
    lines = table(record["studies"][1], "simple", whole=False).splitlines()
    assert sum(line.startswith("first") for line in lines) == 1
    assert max(map(len, lines)) < 160


def test_numbers_as_they_are_read() -> None:
    assert interval([0.5, None, None]) == "0.500 [-∞, ∞]"
    assert interval(None) == "–"
    assert interval([0.1, 0.0, 0.2], 2, signed=True) == "+0.10 [+0.00, +0.20]"
    assert (p_value(None), p_value(0.0005), p_value(0.0488)) == ("–", "<0.001", "0.049")
    assert (number(1234.0), number(12345.0), number(0.000123)) == ("1.23e+03", "12.3k", "0.000123")


def test_a_power_law_is_found_with_its_interval() -> None:
    fit = fit_power([1, 2, 4, 8], [5, 10.1, 19.8, 40.3])
    assert fit["low"] < 1 < fit["high"]
    assert fit["exponent"] == pytest.approx(1, abs=0.02)
    with pytest.raises(ValueError, match="2 points were given"):
        fit_power([1, 2], [1, 2])


def test_kept_bytes_by_hand() -> None:
    import torch

    weight = torch.ones(8, 8, requires_grad=True)
    x = torch.ones(4, 8, requires_grad=True)
    # a product keeps both factors, float32
    assert kept_bytes(lambda: x @ weight) == 4 * (64 + 32)


def test_flops_of_the_profile_have_exact_exponents(record: dict[str, Any]) -> None:
    fits = named(record, "profile")["fit"]["fits"]
    depth = next(f for f in fits if f["of"] == "flops" and f["against"] == "N")
    assert depth["exponent"] == pytest.approx(1)
    length = next(f for f in fits if f["of"] == "flops" and f["against"] == "T")
    assert 1 < length["exponent"] < 2


def test_what_untrained_models_say(record: dict[str, Any]) -> None:
    points = {(p["quantity"], p["variant"], p["x"]): p["value"][0] for p in named(record, "initialisation")["points"]}
    assert points["token spread", "no residual", 12] < 1e-3 < 0.1 < points["token spread", "residual", 12]
    assert points["attention entropy", "no scale", 512] < 0.2 < 0.7 < points["attention entropy", "1 / sqrt(d_k)", 512]
    assert points["gradient ratio", "pre-LN", 24] < 1 < points["gradient ratio", "post-LN", 24]
