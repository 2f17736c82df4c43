"""Files that anybody may have sent: what is wrong with one ends in a sentence, and nothing in it is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hostile.running import CONTROLS, run
from hostile.samples import ABLATION, BYTES, CASE, FAILS, REPORT, damaged, soiled

READERS = (("report",), ("compare",), ("replay",))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("name", BYTES)
def test_what_is_no_record_ends_in_a_sentence(name: str) -> None:
    Path("sent.json").write_bytes(BYTES[name])
    for command in READERS:
        assert run(*command, "sent.json").insist().status == 3


def test_a_folder_and_nothing_are_no_records() -> None:
    Path("folder.json").mkdir()
    for command in READERS:
        for name in ("folder.json", "none.json", ".", "x" * 5000 + ".json", "**", "~", "", "-", "a\udc80.json"):
            assert run(*command, "--", name).insist().status == 3


@pytest.mark.parametrize("name", ["report", "ablation"])
def test_no_damage_to_a_record_gets_further_than_a_sentence(name: str) -> None:
    for number, changed in enumerate(damaged({"report": REPORT, "ablation": ABLATION}[name])):
        if number % 3:  # every place, each with a third of the values
            continue
        Path("sent.json").write_text(json.dumps(changed), encoding="utf-8")
        forms = ("text", "json", "html", "markdown", "junit", "badge")
        run("report", "sent.json", "--format", forms[number // 3 % len(forms)]).insist()
        if name == "report" and number % 2:
            run("compare", "sent.json", "--format", ("text", "markdown", "html", "json")[number // 6 % 4]).insist()


def test_no_damage_to_a_case_gets_further_than_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from veriformer.cli.processes.asking import Pool, RefusedError

    def ask(pool: Pool, question: str, **arguments: Any) -> dict[str, Any]:
        json.dumps(arguments)
        raise RefusedError("what a case of this form leads to is another test's")

    monkeypatch.setattr(Pool, "ask", ask)
    for changed in damaged(CASE):
        Path("sent.json").write_text(json.dumps(changed), encoding="utf-8")
        assert run("replay", "sent.json").insist().status == 3


@pytest.mark.parametrize("form", ["text", "json", "html", "markdown", "junit", "badge"])
def test_what_a_report_holds_is_shown_as_words(form: str) -> None:
    Path("sent.json").write_text(json.dumps(soiled(REPORT)), encoding="utf-8")
    done = run("report", "sent.json", "--format", form, "--out", "out").insist()
    assert done.status == 1
    for text in [done.out] * (form in ("html", "markdown", "junit", "badge")):
        assert "<script>alert" not in text
        assert "<img" not in text
    markdown = Path("out/report.md").read_text(encoding="utf-8")
    assert "&lt;script&gt;" in markdown


@pytest.mark.parametrize("form", ["text", "html", "markdown", "json"])
def test_what_several_reports_hold_is_shown_as_words(form: str) -> None:
    nasty = soiled(REPORT)
    better = {
        **nasty,
        "subjects": [{**s, "results": [{**s["results"][0], "outcome": "PASS"}]} for s in nasty["subjects"]],
    }
    Path("a.json").write_text(json.dumps(better), encoding="utf-8")
    Path("b<script>.json").write_text(json.dumps(nasty), encoding="utf-8")
    done = run("compare", "a.json", "b<script>.json", "--format", form).insist()
    assert done.status == 1
    if form in ("html", "markdown"):
        assert "<script>alert" not in done.out
        assert "b<script>" not in done.out
        assert "<img" not in done.out


def test_what_an_ablation_holds_is_shown_as_words() -> None:
    Path("sent.json").write_text(json.dumps(soiled(ABLATION)), encoding="utf-8")
    assert run("report", "sent.json", "--out", "out").insist().status == 0
    for name in ("table.md", "index.html", "table.tex", "table.csv"):
        text = Path("out", name).read_text(encoding="utf-8")
        assert not CONTROLS.search(text)
        assert name.endswith(("tex", "csv")) or ("<script>alert" not in text and "<img" not in text)


@pytest.mark.parametrize(
    "reach", [[1, "5"], ["a", 5], [], [1], [1, 2, 3], [True, 2], [None, None], [1.5, 2], "12"], ids=str
)
def test_a_reach_is_two_numbers_or_words(reach: object) -> None:
    (subject,) = REPORT["subjects"]
    Path("a.json").write_text(json.dumps(REPORT))
    for place in ({**subject, "reach": {"T": reach}}, {**subject, "results": [{**FAILS, "reach": {"T": reach}}]}):
        Path("sent.json").write_text(json.dumps({**REPORT, "subjects": [place]}))
        assert run("compare", "a.json", "sent.json", "--format", "html").insist().status == 3
        assert run("report", "sent.json").insist().status == 3


@pytest.mark.parametrize("trials", ["", "none", [], None, 3, {"finished": []}], ids=str)
def test_what_a_page_needs_and_has_not_ends_in_a_sentence(trials: object) -> None:
    Path("sent.json").write_text(json.dumps({**ABLATION, "trials": trials}))
    done = run("report", "sent.json", "--out", "out").insist()
    assert done.status == 3
    assert "is no whole veriformer-ablation/1 record" in done.sentence


def test_no_name_in_a_record_leads_out_of_the_folder() -> None:
    (study,) = ABLATION["studies"]
    Path("sent.json").write_text(json.dumps({**ABLATION, "studies": [{**study, "name": "../../outside"}]}))
    done = run("report", "sent.json", "--out", "out").insist()
    assert done.status == 3
    assert "its name must be letters, digits and - alone" in done.sentence
    (subject,) = REPORT["subjects"]
    case = {**subject["results"][0]["counterexample"], "id": "../outside"}
    Path("outside.py").write_text("")
    Path("outside.json").write_text("{}")
    (Path("sent.json")).write_text(
        json.dumps(
            {**REPORT, "subjects": [{**subject, "results": [{**subject["results"][0], "counterexample": case}]}]}
        )
    )
    assert "outside" not in run("report", "sent.json").insist().out
