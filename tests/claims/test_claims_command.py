"""`veriformer claims`: what it prints, keeps and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from veriformer.cli.main import main
from veriformer.reports.formulas import as_svg


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["claims", *words])
    out, err = capsys.readouterr()
    return int(str(ended.value.code)), out, err


@pytest.mark.usefixtures("no_properties")
def test_claims_are_told_with_their_verdicts_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, "6", "46", "--quick", "--out", str(tmp_path))
    assert status == 0
    assert "2 claims: 1 refuted, 1 hold" in out
    assert {p.name for p in tmp_path.iterdir()} == {"claims.json", "claims.md", "claims.html", "exercises.md"}
    status, out, _ = run(capsys, "39", "--quick", "--out", str(tmp_path / "drawn"))
    assert (tmp_path / "drawn" / "claim-39.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "claims.json").read_text())
    kept["claims"][0]["seconds"] = -1.0
    (tmp_path / "claims.json").write_text(json.dumps(kept))
    status, out, _ = run(capsys, "6", "--quick", "--out", str(tmp_path), "--format", "json")
    assert json.loads(out)["claims"][0]["seconds"] == -1.0, "what is stored is not tested again"
    assert [c["number"] for c in json.loads((tmp_path / "claims.json").read_text())["claims"]] == [6, 46]
    status, out, _ = run(capsys, "6", "--quick", "--again", "--out", str(tmp_path), "--format", "json")
    assert json.loads(out)["claims"][0]["seconds"] >= 0


def test_a_quick_row_is_no_answer_to_a_full_question(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, "46", "--quick", "--out", str(tmp_path))
    status, out, _ = run(capsys, "46", "--out", str(tmp_path), "--format", "json")
    assert (status, json.loads(out)["claims"][0]["command"]) == (0, "veriformer claims 46")


def test_a_claim_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, "explain", "6", "--out", str(tmp_path))
    assert status == 0
    for words in (
        "Lecture 08: Transformers, 4.1",
        "verdict     refuted",
        "✗ as written",
        "✓ corrected",
        "veriformer claims 6",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("72",), "there is no claim '72'; the claims are numbered 1 to 71"),
        (("first",), "there is no claim 'first'"),
        (("explain",), "explain needs the number of a claim"),
    ],
)
def test_words_that_name_no_claim_end_in_a_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    status, _, err = run(capsys, *words)
    assert status == 3
    assert told in err


@pytest.mark.parametrize("text", ["", "[1]", '{"schema": "veriformer-claims/1"}', '{"schema": "other", "claims": []}'])
def test_a_file_that_is_no_ledger_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "claims.json").write_text(text)
    status, _, err = run(capsys, "46", "--out", str(tmp_path))
    assert status == 3
    assert "cannot be gone on with" in err
    assert (tmp_path / "claims.json").read_text() == text


def test_formulas_are_drawn() -> None:
    from veriformer.claims.claim import ledger

    for claim in ledger().values():
        if claim.formula:
            assert "<path" in as_svg(claim.formula), claim.number
    assert as_svg(r"\nosuchword{") == r"<code>\nosuchword{</code>"
