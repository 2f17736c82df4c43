"""`veriformer mutants`: the kill matrix from outside."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from veriformer.cli.mutants import status_of
from veriformer.reports.kill_matrix import kill_matrix, markdown, summary
from veriformer.tests.mutants.source import all_source_mutants, equivalents

Run = Callable[..., subprocess.CompletedProcess[str]]
SOURCE = "rotary.Rotary.forward: cos becomes sin #1"


def test_the_matrix_as_json_and_its_second_run(veriformer: Run, tmp_path: Path) -> None:
    arguments = ("mutants", "--only", "SC01", "--only", SOURCE, "--format", "json", "-n", "2")
    done = veriformer(*arguments, status=0)
    matrix = json.loads(done.stdout)
    rows = {row["id"]: row for row in matrix["mutants"]}
    assert "attention.definition" in rows["SC01"]["killed_by"]
    assert rows["SC01"]["located"] == "right"
    assert rows["SC01"]["first_kill"]["examples"] >= 1
    assert rows[SOURCE]["killed_by"]
    assert matrix["survivors"] == []
    store = tmp_path / ".veriformer" / "mutants" / "judged.jsonl"
    with store.open("a", encoding="utf-8") as file:
        file.write('{"key": "cut sho')  # an interrupted run
    again = veriformer(*arguments, status=0)
    assert "2 of 2 mutants were judged before" in again.stderr
    assert json.loads(again.stdout) == matrix


def test_a_mutant_that_does_not_exist(veriformer: Run) -> None:
    done = veriformer("mutants", "--only", "SC99", status=3)
    assert "there is no mutant 'SC99'" in done.stderr
    assert "did you mean" in done.stderr


def test_families_of_mutants_and_the_table(veriformer: Run) -> None:
    done = veriformer("mutants", "--only", "OP-*", "--format", "markdown", status=0)
    assert "| OP-negative" in done.stdout
    assert "0 of" not in done.stdout
    text = veriformer("mutants", "--only", "OP-*", status=0)
    assert "killed by schedule.linear" in text.stdout


def _row(id: str, **given: Any) -> dict[str, Any]:  # noqa: A002
    plain = {
        "id": id, "origin": "source", "title": id, "citation": "", "killed_by": [], "errors": {}, "examples": {},
        "seconds": 1.0, "first_kill": None, "equivalent": "",
    }  # fmt: skip
    return {**plain, **given}


def test_what_survives_is_told_unless_it_is_proven_equivalent() -> None:
    rows = [_row("m.a"), _row("m.b", equivalent="addition commutes"), _row("m.c", killed_by=["norm.definition"])]
    properties = [{"id": "norm.definition"}, {"id": "norm.statistics"}]
    matrix = kill_matrix(rows, properties, whole=True, profile="quick", seed=0)
    assert matrix["survivors"] == ["m.a"]
    assert matrix["equivalent"] == {"m.b": "addition commutes"}
    assert matrix["idle"] == ["norm.statistics"]
    assert "1 of 3 changes" in summary(matrix)[0]
    assert "**Survivors:** m.a" in markdown(matrix)


def test_a_mutant_that_hangs_costs_its_own_row(veriformer: Run) -> None:
    hurried = ("mutants", "--only", "SC01", "--mutant-seconds", "0.01")
    matrix = json.loads(veriformer(*hurried, "--format", "json", status=2).stdout)
    (row,) = matrix["mutants"]
    assert row["errors"] == {"process": "the subject did not come back within 0.01 s and was stopped"}
    assert (matrix["timed_out"], matrix["survivors"]) == (["SC01"], [])
    told = veriformer(*hurried, status=2).stdout  # it was not stored as judged
    assert "0 of 1 others, whose process gave no answer, are noticed" in told
    assert "- SC01" in told
    assert "timed out, not judged: the subject did not come back within 0.01 s" in told
    assert "Timed out, not judged: SC01; --mutant-seconds gives them longer." in told
    shown = markdown(matrix)
    assert "**Timed out, not judged:** SC01" in shown
    assert "survives" not in shown


def test_of_what_timed_out_nothing_is_said() -> None:
    late = {"errors": {"process": "it was stopped"}, "timed_out": True}
    rows = [_row("m.a", **late), _row("m.b", **late, equivalent="so"), _row("m.c", errors={"x": "raised"})]
    matrix = kill_matrix(rows, [], whole=True, profile="quick", seed=0)
    assert matrix["survivors"] == []
    assert matrix["equivalent"] == {}
    assert status_of(matrix) == 2
    assert "1 of 3 changes to the reference's source are noticed (1 of them by raising" in summary(matrix)[0]
    assert "timed out" in markdown(matrix)
    assert status_of(kill_matrix([*rows, _row("m.d")], [], whole=True, profile="quick", seed=0)) == 1
    assert status_of(kill_matrix(rows[2:], [], whole=True, profile="quick", seed=0)) == 0


def test_source_mutants_are_programs_that_differ_from_the_reference() -> None:
    mutants = all_source_mutants()
    assert len(mutants) > 1000
    for mutant in list(mutants.values())[::25]:
        right = ast.parse((Path(__file__).parents[2] / "reference" / f"{mutant.module}.py").read_text(encoding="utf-8"))
        compile(mutant.source, mutant.id, "exec")
        same = ast.unparse(right) == mutant.source
        assert not same, mutant.id


def test_every_proof_speaks_of_a_mutant() -> None:
    assert equivalents().keys() <= all_source_mutants().keys()
    assert [name for name, proof in equivalents().items() if len(proof) <= 10] == []
