"""What the README says of the published ablation is what the published record says."""

from __future__ import annotations

import json
from pathlib import Path

from veriformer.reports.ablation_parts import cells
from veriformer.reports.claims import counts, told
from veriformer.reports.readable import in_markdown

ROOT = Path(__file__).parent.parent
RECORD = json.loads((ROOT / "reports/gallery/table/ablation.json").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_row_of_the_table_is_published() -> None:
    published = {tuple(row[:3]): row for row in cells(RECORD["table"])}
    table = README.split("| task | depth | without |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(table) >= 8
    for line in table:
        told = [cell.strip() for cell in line.strip("|").split("|")]
        assert told == published[tuple(told[:3])][: len(told)]


def test_what_is_said_of_the_table_is_published() -> None:
    table = RECORD["table"]
    assert f"({RECORD['trials']['finished']:,} trials" in README
    assert f"initial weights, {len(table['points'])} settings" in README
    assert {t["name"]: t["seeds"] for t in table["tasks"]} == {"precede": 24, "count": 12}
    best = {
        (r["num_layers"], *r["removed"]): r["devices"]["cpu"]["best"] for r in table["rows"] if r["task"] == "precede"
    }
    without_both, without_one = (
        best[6, *removed]["accuracy"][0] for removed in (("residual", "LayerNorm"), ("residual",))
    )
    assert f"({without_both:.3f} without both, {without_one:.3f} without" in README


def test_the_claims_are_told_as_published() -> None:
    ledger = json.loads((ROOT / "reports/gallery/claims/claims.json").read_text(encoding="utf-8"))
    assert counts(ledger).partition(": ")[2] in README
    refuted = {
        in_markdown(row["statement"]): in_markdown(told(row)) for row in ledger["claims"] if row["verdict"] == "refuted"
    }
    lines = README.split("| as written | in its place |")[1].split("\n\n")[0].splitlines()[2:]
    assert lines
    for line in lines:
        statement, corrected = line.strip("|").strip().split(" | ")
        assert refuted[statement] == corrected
    assert f"All {len(refuted)} that are refuted" in README


def test_every_picture_is_there() -> None:
    for part in README.split("](")[1:]:
        target = part.split(")")[0]
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_counts_of_properties_faults_and_traps() -> None:
    from veriformer.properties.judging.catalogue import catalogue
    from veriformer.tests.mutants import all_faults
    from veriformer.tests.traps import all_traps

    assert f"veriformer has {len(catalogue())} of them" in README
    assert f"at least one of {len(all_faults())} faults" in README
    assert f"on {len(all_traps())} right implementations" in README


def test_the_released_model_fails_as_told() -> None:
    from veriformer.properties import check
    from veriformer.properties.adapters.shared.torchvision_stand_in import name_operators
    from veriformer.properties.targets import load

    name_operators()  # transformers imports torchvision, whose compiled part may be of another build of torch
    told = README.split("$ veriformer check examples/prophetnet.py")[1].split("```")[0]
    (model,) = load(f"{ROOT}/examples/prophetnet.py:model")
    report = check(model, only=["causality.prefix-consistency"], profile="quick", causal=True)
    (result,) = report.results
    assert result.outcome == "FAIL"
    assert result.reason in " ".join(told.split())
