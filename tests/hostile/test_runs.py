"""A run whose subject, terminal, disk or folder is hostile is judged and printed; what cannot be written is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hostile.running import CONTROLS, run
from hostile.samples import NASTY

MODELS = f"""
from torch import nn
from veriformer.properties import Subject

NASTY = {NASTY!r}
def norm(scale, name):
    return Subject(kind="norm", name=name, build=lambda c: nn.LayerNorm(c.d_model),
                   forward=lambda m, x: scale * m(x))
def refuse(m, x):
    raise ValueError(NASTY + "\\nmore of it")
right, wrong = norm(1, "right"), norm(1.1, "wrong")
nasty = norm(1.1, NASTY + "\\n✓ good  9 pass of 9 applicable [/] [red]x[/red] :smile:")
speaking = Subject(kind="norm", name=NASTY, forward=refuse)
many = [norm(1.1, "a"), norm(1.1, "b")]
number = lambda: Subject(kind="norm", name=7, forward=refuse)
unkind = lambda: Subject(kind=["norm"], forward=refuse)
class Odd:
    __name__ = 7
    def __call__(self, m, x):
        return x
odd = Subject(kind="norm", forward=Odd())
exploding = lambda: (_ for _ in ()).throw(ValueError(NASTY))
"""
CHECK = ("check", "--profile", "quick", "-n", "1", "--only", "norm.definition")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "m.py").write_text(MODELS, encoding="utf-8")


def test_a_name_and_a_message_are_words_wherever_they_are_shown() -> None:
    done = run(*CHECK, "m.py:nasty", "m.py:speaking", "--out", "out", "-v").insist()
    assert done.status == 1
    assert not [line for line in done.out.splitlines() if line.startswith("✓")], "a name that looks like a verdict"
    assert "[/] [red]x[/red] :smile:" in done.out
    for path in Path("out").iterdir():
        if path.is_dir():
            continue
        text = path.read_bytes().decode()
        assert not CONTROLS.search(text), path
        assert path.suffix == ".json" or ("<script>alert" not in text and "<img" not in text), path
        assert path.suffix != ".json" or json.loads(text)["subjects"][0]["name"].isprintable()
    again = run("report", "out/report.json").insist()
    assert (again.status, again.out.split("  1 fail")[0]) == (1, done.out.split("  1 fail")[0])


@pytest.mark.parametrize("target", ["number", "unkind", "odd", "exploding"])
def test_what_is_no_name_is_said(target: str) -> None:
    done = run(*CHECK, f"m.py:{target}").insist()
    assert done.status in (1, 2)
    told = {"number": "name was 7; it must be a string", "unkind": "there is no kind ['norm']", "exploding": "<script>"}
    assert told.get(target, "") in done.sentence


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "utf-16"])
def test_every_terminal_gets_the_whole_report(encoding: str) -> None:
    whole = run(*CHECK, "m.py:wrong").insist()
    done = run(*CHECK, "m.py:wrong", encoding=encoding).insist()
    assert done.status == whole.status == 1
    assert done.out.count("\n") == whole.out.count("\n")
    assert "norm.definition" in done.out
    assert run("list", encoding=encoding).insist().status == 0
    assert run("explain", "norm", encoding=encoding).insist().status == 0


def test_a_full_disk_behind_standard_output_is_said_and_leaves_the_status() -> None:
    wrong = run(*CHECK, "m.py:wrong", full=True)
    assert (wrong.status, wrong.sentence) == (1, "not written: standard output: No space left on device")
    for arguments in ((*CHECK, "m.py:right"), ("list",), ("explain", "norm"), ("--help",), ("ablate", "--list")):
        done = run(*arguments, full=True)
        assert (done.status, done.sentence) == (3, "not written: standard output: No space left on device")


def test_a_folder_that_takes_nothing_costs_the_files_alone() -> None:
    Path(".veriformer").write_text("a file where the folder of the cases would be")
    done = run(*CHECK, "m.py:wrong")
    assert done.status == 1
    assert "not written: the recorded cases" in done.sentence
    assert "1 fail" in done.out
    assert "again" not in done.out, "no command that cannot be followed"
    assert run(*CHECK, "m.py:right").insist().status == 0


def test_a_folder_that_is_gone_after_the_work_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from veriformer.cli import check

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device", "out/report.json")

    monkeypatch.setattr(check, "write_all", full)
    for name, status in (("right", 3), ("wrong", 1)):
        done = run(*CHECK, f"m.py:{name}", "--out", "out", "--format", "json")
        assert done.status == status
        assert done.sentence == "not written: the report to out/report.json: No space left on device"
        assert json.loads(done.out)["subjects"][0]["name"] == name


def test_a_deviations_file_that_cannot_be_written_costs_no_report() -> None:
    Path("known.toml").symlink_to("/dev/full")
    Path("folder").mkdir()
    done = run(*CHECK, "m.py:wrong", "--deviations", "folder", "--update-deviations")
    assert done.status == 3
    done = run(*CHECK, "m.py:wrong", "--deviations", "m.py/known.toml", "--update-deviations")
    assert done.status in (1, 3)
    assert "Traceback" not in done.err


def test_names_as_printed_are_names_that_are_taken() -> None:
    update = ("--deviations", "known.toml", "--update-deviations", "--reason", "as in the paper")
    assert run(*CHECK, "m.py:many", *update).insist().status == 0
    assert 'subject = "m.py:many[0]"' in Path("known.toml").read_text()
    again = run(*CHECK, "m.py:many", "--deviations", "known.toml").insist()
    assert (again.status, again.out.count("DEVIATION")) == (0, 2)
    done = run(*CHECK, "m.py:many[1]").insist()
    assert done.status == 1
    assert "m.py:many[1]" in done.out


def test_what_an_interruption_left_unjudged_has_no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    from veriformer.cli.processes.asking import Pool, Worker

    hear = Pool._hear

    def interrupted(pool: Pool, worker: Worker) -> None:
        task = pool._busy[worker]
        hear(pool, worker)
        if task.question == "judge" and task.finished:
            raise KeyboardInterrupt

    monkeypatch.setattr(Pool, "_hear", interrupted)
    done = run("check", "--profile", "quick", "-n", "1", "--only", "norm", "m.py:right", "m.py:wrong")
    assert done.status == 130
    assert "✓" not in done.out
    assert "- right  " in done.out
    assert "properties were not judged, the run ended before" in done.out
    assert "- wrong  nothing judged: the run ended before" in done.out


def test_a_target_that_is_not_loaded_has_one_row_in_words_and_what_it_printed_in_lines() -> None:
    Path("raises.py").write_text('print("\\x1b[31mone\\ntwo")\nraise RuntimeError("\\x1b[31mred")\n')
    done = run("check", "--profile", "quick", "--only", "norm", "raises.py:mine", "m.py:right").insist()
    assert done.status == 2
    assert "the run ended before" not in done.out
    assert "ERROR           subject.loads: 'raises.py' cannot be imported: RuntimeError: \\x1b[31mred" in done.out
    assert "      | \\x1b[31mone\n      | two\n" in done.out
