"""Stores of trials and of judged rows, damaged or somebody else's: a sentence, and never a row that nobody judged."""

from __future__ import annotations

import io
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hostile.running import run
from hostile.samples import NASTY, damaged, store
from veriformer.ablations.execution.store import APPLICATION

ABLATE = ("ablate", "positions", "--task", "first", "--variant", "none", "--seeds", "2", "--jobs", "1", "--out", "here")
STORE = Path("here/trials.sqlite")
RECORD: dict[str, Any] = {
    "seconds": 0.1, "stack": 2, "accuracy": 0.5, "loss": 0.7, "calibration_error": 0.1, "loss_area": 0.7,
    "max_loss": 0.9, "spikes": 0, "diverged": None, "steps_to_95": 10, "lengths": {"8": 0.5},
    "curves": {"step": [1, 2], "loss": [0.9, 0.7], "accuracy": [0.4, 0.5], "observed_at": [1],
               "held_out_accuracy": [0.5], "gradient_norm": {"layer 0": [0.1]}, "entropy": [[[0.5, 0.5]]]},
    "checks": {},
}  # fmt: skip
TABLES = {
    "no trials": ["DROP TABLE trials"],
    "no runs": ["DROP TABLE runs"],
    "other columns": ["DROP TABLE trials", "CREATE TABLE trials (a, b)", "DROP TABLE runs", "CREATE TABLE runs (a)"],
    "no settings": ["INSERT INTO runs VALUES (1, '', '')"],
    "settings that are null": ["INSERT INTO runs VALUES (1, 'null', '')"],
    "settings that are bytes": ["INSERT INTO runs VALUES (1, x'ff00', '')"],
    "settings that are deep": [f"INSERT INTO runs VALUES (1, '{'[' * 200_000}', '')"],
}
SETTINGS = [
    {"studies": "positions"}, {"studies": [1]}, {"studies": ["nothing"]}, {"studies": [NASTY]}, {"seeds": 0},
    {"seeds": 10**30}, {"seeds": "2"}, {"seeds": 2.5}, {"device": "tpu"}, {"device": ["cpu"]}, {"tasks": "first"},
    {"tasks": [None]}, {"variants": {}}, {"stack": 0}, {"stack": "1"}, {"max_memory": None}, {"max_memory": -1},
    {"max_memory": 1e999}, {"max_memory": "4"},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("name", TABLES)
def test_damaged_tables_end_in_a_sentence(name: str) -> None:
    store(STORE, *TABLES[name])
    done = run("ablate", "--resume", "--out", "here").insist()
    assert done.status == 3
    assert "trials.sqlite" in done.sentence
    if not name.startswith("settings") and name != "no settings":
        assert run(*ABLATE).insist().status == 3


@pytest.mark.parametrize("changed", SETTINGS, ids=str)
def test_damaged_settings_end_in_a_sentence(changed: dict[str, Any]) -> None:
    told = json.dumps({"studies": ["positions"], "tasks": ["first"], "seeds": 2, **changed})
    base = sqlite3.connect(store(STORE))
    with base:
        base.execute("INSERT INTO runs VALUES (1, ?, '')", (told,))
    base.close()
    assert run("ablate", "--resume", "--out", "here").insist().status == 3


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"SQLite format 3\0" + b"\xff" * 5000, b"[" * 5000, b"{}"])
def test_what_is_no_store_is_refused_and_kept(content: bytes) -> None:
    STORE.parent.mkdir()
    STORE.write_bytes(content)
    if content:
        assert run(*ABLATE).insist().status == 3
        assert STORE.read_bytes() == content


def test_a_folder_where_the_store_should_be() -> None:
    STORE.mkdir(parents=True)
    assert run(*ABLATE).insist().status == 3


def test_somebody_elses_tables_under_our_mark_are_refused() -> None:
    STORE.parent.mkdir()
    base = sqlite3.connect(STORE)
    with base:
        base.execute("CREATE VIEW trials AS SELECT 1 AS key, 2 AS record")
        base.execute(f"PRAGMA application_id = {APPLICATION}")
        base.execute("PRAGMA user_version = 1")
    base.close()
    assert run(*ABLATE).insist().status == 3


def _filled(records: list[str | bytes | None]) -> None:
    """Store records under the keys that the run asks for."""
    from veriformer.ablations.execution.plan import Grouping
    from veriformer.cli.ablate import _choose

    study = _choose({"studies": ["positions"], "tasks": ["first"], "variants": ["none"]})[0][0]
    grouping = Grouping("cpu", 4.0 * 2**30, None)
    jobs = [job for row in study.rows() for job in grouping.jobs(study, *row, 2)]
    keys = [key for job in jobs for key in job.keys]
    STORE.unlink(missing_ok=True)
    base = sqlite3.connect(store(STORE, "DROP TABLE trials", "CREATE TABLE trials (key, trial, record, finished)"))
    with base:
        for number, key in enumerate(keys):
            base.execute("INSERT INTO trials VALUES (?, '{}', ?, '')", (key, records[number % len(records)]))
    base.close()


def test_a_whole_store_is_tabled_and_a_damaged_record_ends_in_a_sentence() -> None:
    whole = json.dumps(RECORD)
    _filled([whole])
    assert run(*ABLATE).insist().status in (0, 1)
    for record in (
        None,
        "",
        b"\xff",
        "[]",
        "{}",
        "7",
        "null",
        "[" * 100_000,
        json.dumps({**RECORD, "accuracy": "high"}),
    ):
        _filled([whole, record])
        done = run(*ABLATE).insist()
        assert done.status == 3
        assert "is damaged" in done.sentence


def test_no_damage_to_a_record_gets_further_than_a_sentence() -> None:
    whole = json.dumps(RECORD)
    for number, changed in enumerate(damaged(RECORD, (None, 7, [], {}, NASTY))):
        if number % 7 == 0:
            _filled([whole, json.dumps(changed)])
            run(*ABLATE).insist()


@pytest.mark.parametrize(
    "options", [("--stack", "1"), ("--max-memory", "0.5"), ("--stack", "1", "--max-memory", "0.001")]
)
def test_what_is_part_of_a_trial_is_resumed_and_printed(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from veriformer.ablations.running import Run

    asked: list[list[str]] = []

    def advance(self: Run, *given: object) -> list[Any]:
        asked.append([key for job in self.jobs for key in job.keys])
        return []

    monkeypatch.setattr(Run, "advance", advance)
    assert run(*ABLATE, *options).insist().status == 2, "nothing was trained"
    done = run("ablate", "--resume", "--out", "here").insist()
    assert asked[0] == asked[1], "the same trials, by the same keys"
    command = f"veriformer ablate positions --seeds 2 --task first --variant none {' '.join(sorted_(options))}"
    assert f"going on with: {command}" in done.sentence
    run("ablate", "--resume", "--seeds", "3", "--out", "here").insist()
    assert asked[2] != asked[1]


def sorted_(options: tuple[str, ...]) -> list[str]:
    """Return the options in the order in which a command prints them."""
    pairs = sorted(zip(options[::2], options[1::2], strict=True))
    return [word for pair in pairs for word in pair]


JUDGED = {
    "no text": b"\xff\xfe\x00\n",
    "no object": b'7\n[]\nnull\n"x"\n',
    "deep": b"[" * 200_000 + b"\n",
    "a number of 5,000 digits": b'{"key": ' + b"9" * 5000 + b"}\n",
    "torn": b'{"key": "k", "id": "a", "row": {"subj',
}


@pytest.mark.parametrize("name", JUDGED)
def test_lines_that_nobody_judged_are_passed_over(name: str, tmp_path: Path) -> None:
    from veriformer.cli.processes.judged_store import JudgedStore

    rows = JudgedStore(tmp_path / "judged.jsonl", "k")
    rows.append("first", {"error": "x"})
    with rows.path.open("ab") as file:
        file.write(JUDGED[name])
    rows.append("second", {"error": "y"})
    assert rows.read() == {"first": {"error": "x"}, "second": {"error": "y"}}


@pytest.mark.parametrize(
    "row",
    [7, None, [], {}, {"subject": {}, "error": ""}, {"subject": None, "error": 7}, {"subject": "x", "error": "x"},
     {"subject": {"name": 1}, "error": ""}],
    ids=str,
)  # fmt: skip
def test_a_row_of_another_form_counts_as_not_judged(row: object) -> None:
    from veriformer.cli import mutants, sweep

    assert not sweep._is_whole(row)
    assert not mutants._is_whole(row)


ROW: dict[str, Any] = {
    "id": "SC01", "origin": "documented", "bug": "b", "title": "t", "citation": "c", "preconditions": "",
    "located": "right", "expected": ["a.b"], "killed_by": ["a.b"], "blocked": ["c.d"], "errors": {"e.f": "why"},
    "examples": {"a.b": 3}, "seconds": 1.0,
    "first_kill": {"property": "a.b", "subject": "s", "outcome": "FAIL", "seconds": 0.1, "examples": 3},
    "causes": {"a.b": "the scale"}, "headlines": {"a.b": "they differ"}, "equivalent": "so", "timed_out": True,
}  # fmt: skip
CHANGES = (None, 7, True, -1.5, 10**400, "", NASTY, [], [None], [[]], ["x"], {}, {"": []}, {"a": {"b": 1}}, "FAIL")


def test_no_damage_to_a_row_of_the_kill_matrix_gets_further() -> None:
    from veriformer.cli import mutants
    from veriformer.reports.kill_matrix import kill_matrix, markdown, print_matrix

    taken = 0
    for origin in ("documented", "source"):
        for late in (True, False):
            for row in damaged({**ROW, "origin": origin, "timed_out": late}, CHANGES):
                if not mutants._is_whole(row):
                    continue
                taken += 1
                matrix = kill_matrix([row], [{"id": "a.b"}], whole=True, profile="quick", seed=0)
                markdown(matrix)
                print_matrix(Console(file=io.StringIO()), matrix)
                json.dumps(matrix)
                assert mutants.status_of(matrix) in (0, 1, 2)
    assert taken > 100
