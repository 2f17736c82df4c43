"""What the README says of the published ablation is what the published record says."""

from __future__ import annotations

import json
from pathlib import Path

from veriformer.reports.ablation_tables import interval, of, p_value, speech

ROOT = Path(__file__).parent.parent
RECORD = json.loads((ROOT / "reports/gallery/ablations/ablation.json").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_row_of_the_ablation_table_is_published() -> None:
    published = {
        (s["name"], r["task"], r["setting"] or "–", r["variant"]): r for s in RECORD["studies"] for r in s["rows"]
    }
    table = README.split("| study | task |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(table) >= 8
    for line in table:
        study, task, setting, variant, *told = [cell.strip() for cell in line.strip("|").split("|")]
        row = published[study, task, setting, variant]
        assert told == [
            interval(row["accuracy"]), interval(row["difference"], signed=True), p_value(row["p_holm"]),
            of(row["dead"]), speech(row),
        ]  # fmt: skip


def test_the_counts_of_the_ablation_are_published() -> None:
    told = [p["outcome"] for s in RECORD["studies"] for r in s["rows"] for p in r["predictions"]]
    assert f"{told.count('confirmed')} were confirmed, none contradicted, {told.count('undecided')} undecided" in README
    assert told.count("contradicted") == 0
    assert f"({RECORD['trials']['finished']} trials" in README
    assert RECORD["seeds"] == 12


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
