"""Many implementations in one table, and what changed between reports."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from veriformer.reports.compliance import changes, compliance, heat, markdown, merged, page, shade, write_compliance


def record(**outcomes: str) -> dict[str, Any]:
    results = [
        {"id": name.replace("_", "."), "level": "core", "outcome": outcome, "reason": f"why {outcome}", "margin": 0.1}
        for name, outcome in outcomes.items()
    ]
    subject = {
        "name": "mine",
        "target": "lib:mine",
        "kind": "layer",
        "power": {"noticed": 2, "tried": 3},
        "results": results,
    }
    return {"schema": "veriformer-report/1", "versions": {"torch": "2.13.0"}, "seed": 0, "profile": "quick",
            "device": "cpu", "canaries": {"sent": 1, "caught": 1, "missed": []}, "subjects": [subject],
            "not_judged": {"lib:huge": "too <large>"}}  # fmt: skip


def test_cells_count_outcomes_by_family(tmp_path: Path) -> None:
    table = compliance(record(norm_a="PASS", norm_b="FAIL", loss_a="DEVIATION", init_a="NOT_APPLICABLE"))
    assert table["families"] == ["norm", "loss"]
    (row,) = table["rows"]
    assert row["verdict"] == "fail"
    assert row["power"] == "2/3"
    write_compliance(table, tmp_path)
    (line,) = csv.DictReader(io.StringIO((tmp_path / "compliance.csv").read_text()))
    assert (line["norm"], line["loss"], line["total"]) == ("1 1✗", "1d", "1 1✗ 1d")
    text = (tmp_path / "compliance.md").read_text()
    assert "`lib:mine` norm.b: FAIL: why FAIL" in text
    assert "`lib:mine` loss.a: DEVIATION: why DEVIATION" in text
    assert "`lib:huge`: too &lt;large>" in text
    assert "too &lt;large&gt;" in (tmp_path / "compliance.html").read_text()


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["torch:softmax", "torch:LayerNorm"], "2 models of 1 library: 2 pass."),
        (["gpt.py:GPT"], "1 model of 1 file: 1 pass."),
        (["gpt.py:GPT", "gpt.py:Old", "torch:x"], "3 models of 1 library and 1 file: 3 pass."),
        (["lib:a", "my.models:gpt", "b.py"], "3 models of 1 library, 1 module and 1 file: 3 pass."),
        ([None, None], "2 models: 2 pass."),
    ],
)
def test_models_are_said_to_come_from_where_they_come(targets: list[str | None], told: str) -> None:
    whole = record(norm_a="PASS")
    (subject,) = whole["subjects"]
    whole["subjects"] = [{**subject, "name": f"n{i}", "target": target} for i, target in enumerate(targets)]
    for seen in (whole, merged([("a.json", whole)])):
        assert told in markdown(compliance(seen), "x")
        assert told in page(compliance(seen), "x")
    twice = compliance(merged([("a.json", whole), ("b.json", whole)]))
    assert {row["library"] for row in twice["rows"]} == {row["library"] for row in compliance(whole)["rows"]}


def test_what_held_before_and_fails_now_is_worse() -> None:
    before, after = record(norm_a="PASS", norm_b="FAIL"), record(norm_a="FAIL", norm_b="PASS")
    found = changes([("old.json", before), ("new.json", after)])
    assert [(c["id"], c["before"], c["after"], c["worse"]) for c in found] == [
        ("norm.a", "PASS", "FAIL", True),
        ("norm.b", "FAIL", "PASS", False),
    ]
    table = compliance(merged([("old.json", before), ("new.json", after)]))
    assert [row["name"] for row in table["rows"]] == ["lib:mine (old.json)", "lib:mine (new.json)"]
    assert "new.json" in page(table, "compare", found)
    assert "lib:mine (old.json)" in markdown(table, "compare")


def test_the_published_page_counts_what_the_published_table_counts() -> None:
    folder = Path(__file__).parents[2] / "reports" / "gallery" / "compliance"
    rows = list(csv.DictReader(io.StringIO((folder / "compliance.csv").read_text(encoding="utf-8"))))
    page_of_it = (folder / "compliance.html").read_text(encoding="utf-8")
    assert f"<h1>Compliance of {len(rows)} models</h1>" in page_of_it
    assert page_of_it.count("<li data-outcome=") == len(rows)
    for verdict in {row["verdict"] for row in rows}:
        count = sum(row["verdict"] == verdict for row in rows)
        assert page_of_it.count(f'<li data-outcome="{verdict}"') == count
        assert f"{count} {verdict}" in page_of_it


def test_a_library_is_a_line_that_sums_its_models() -> None:
    table = compliance(merged([("a.json", record(norm_a="PASS")), ("b.json", record(norm_a="FAIL", loss_b="OPEN"))]))
    (line,) = heat(table)
    assert (line["library"], line["models"]) == ("lib", 2)
    assert [(family, dict(counts)) for family, counts in line["cells"]] == [
        ("norm", {"PASS": 1, "FAIL": 1}),
        ("loss", {"OPEN": 1}),
    ]
    assert [shade(counts)["kind"] for _, counts in line["cells"]] == ["failing", "mixed"]


def test_a_row_says_its_twin_what_is_asked_and_what_is_believed(tmp_path: Path) -> None:
    whole = record(norm_a="PASS", padding_b="OPEN")
    (subject,) = whole["subjects"]
    equal = {"id": "twin.equal", "outcome": "PASS", "reason": "equal to the textbook's model (one layer)"}
    parted = {"id": "twin.equal", "outcome": "NOT_APPLICABLE", "reason": "no twin: layers.0 has two norms more"}
    other = {"id": "twin.equal", "outcome": "NOT_APPLICABLE", "reason": "speaks of whole models"}
    whole["subjects"] = [
        {
            **subject,
            "target": f"lib:{i}",
            "results": [*subject["results"], {**twin, "level": "core"}],
            "believed": facts,
        }
        for i, (twin, facts) in enumerate(((equal, ["window"]), (parted, []), (other, [])))
    ]
    write_compliance(compliance(whole), tmp_path)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "compliance.csv").read_text())))
    assert [(x["textbook"], x["open"], x["believed"]) for x in lines] == [
        ("equal", "1", "window"),
        ("parts", "1", "–"),
        ("–", "1", "–"),
    ]
    seen = (tmp_path / "compliance.html").read_text()
    assert "1 equal to the textbook&#39;s model with their own weights, 1 part from it." in seen
    assert "Against the textbook's model: layers.0 has two norms more" in seen
    assert "Believed, not verified: window." in seen
    assert "1 equal to the textbook's model" in (tmp_path / "compliance.md").read_text()
