"""Random arguments of every command and random content for every reader: a status, a sentence, nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostile.running import CONTROLS, run
from hostile.samples import ABLATION, CASE, ENTRY, NASTY, REPORT, store
from veriformer.cli.check import check
from veriformer.cli.main import commands
from veriformer.cli.processes import asking
from veriformer.cli.processes.apart import Apart
from veriformer.cli.processes.judged_store import JudgedStore
from veriformer.cli.project import OPTIONS, ProjectError, nearest
from veriformer.properties.adapters.target import Target, TargetError
from veriformer.properties.known.deviations import DeviationsError, read_deviations
from veriformer.reports.readable import as_code, cleaned, in_markdown, one_line, readable

FUZZ = settings(
    max_examples=60, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
TEXT = st.text(max_size=12) | st.sampled_from(
    [NASTY, "", "nan", "-1", "0", "1", "m.py:mine", "torch", "torch:LayerNorm", "report.json", "case.json", ".",
     "known.toml", "**", "[/]"]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
                    max_leaves=8)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make small files to name, and let no process begin: what those do is another test's."""

    def refused(*given: Any, **more: Any) -> dict[str, Any]:
        raise asking.RefusedError("no process begins here")

    def none(*given: Any, **more: Any) -> Iterator[Any]:
        return iter(())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(asking.Pool, "ask", refused)
    monkeypatch.setattr(Apart, "run", none)
    monkeypatch.setattr("veriformer.ablations.execution.executors.run_jobs", none)
    monkeypatch.setattr("veriformer.ablations.running.run_jobs", none)
    monkeypatch.setattr("veriformer.claims.running.run", none)
    Path("report.json").write_text(json.dumps(REPORT))
    Path("case.json").write_text(json.dumps(CASE))
    Path("known.toml").write_text("[[deviation]]\n" + "\n".join(f'{k} = "{v}"' for k, v in ENTRY.items()))


def _words(command: click.Command) -> st.SearchStrategy[list[str]]:
    """Draw arguments: options that there are with values of any kind, and words."""
    options = [p.opts[-1] for p in command.params if isinstance(p, click.Option)]
    choices = [c for p in command.params for c in getattr(p.type, "choices", ())]
    value = TEXT | st.sampled_from(choices or ["x"])
    option = st.tuples(st.sampled_from(options or ["-h"]), value).map(list) | st.sampled_from(options or ["-h"]).map(
        lambda o: [o]
    )
    return st.lists(option | value.map(lambda v: [v]), max_size=4).map(
        lambda parts: [w for part in parts for w in part]
    )


@pytest.mark.parametrize("name", sorted(commands.list_commands(None)))
@FUZZ
@given(data=st.data())
def test_any_arguments_end_in_a_status(name: str, data: st.DataObject) -> None:
    words = data.draw(_words(commands.get_command(None, name)))
    if name == "ablate" and not {"--list", "--resume", "--help", "-h"} & {*words}:
        words = [*words, "--", "nothing"]  # no study: what training does is another test's
    told = run(name, *words)
    assert "please report this" not in told.err
    assert "Traceback" not in told.err
    assert told.status in (0, 1, 2, 3)


def _damaged(record: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Draw a record with a few of its values replaced, at any depth."""

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [place for step, inner in steps for place in ((*path, step), *places(inner, (*path, step)))]

    def replaced(changes: list[tuple[tuple[Any, ...], Any]]) -> Any:
        whole = json.loads(json.dumps(record))
        for path, value in changes:
            inner = whole
            for step in path[:-1]:
                try:
                    inner = inner[step]
                except (KeyError, IndexError, TypeError):
                    break
            else:
                if isinstance(inner, dict | list) and (isinstance(inner, dict) or path[-1] in range(len(inner))):
                    inner[path[-1]] = value
        return whole

    return st.lists(st.tuples(st.sampled_from(places(record)), JSON), min_size=1, max_size=4).map(replaced)


@FUZZ
@given(record=_damaged(REPORT) | _damaged(ABLATION) | JSON, form=st.sampled_from(["text", "markdown", "html", "json"]))
def test_any_json_is_shown_or_refused(record: Any, form: str) -> None:
    Path("sent.json").write_text(json.dumps(record))
    for told in (run("report", "sent.json", "--format", form), run("compare", "sent.json", "--format", form)):
        told.insist()


@FUZZ
@given(record=_damaged(CASE) | JSON)
def test_any_case_is_asked_for_or_refused(record: Any) -> None:
    Path("sent.json").write_text(json.dumps(record))
    assert run("replay", "sent.json").insist().status == 3


@FUZZ
@given(content=st.binary(max_size=60))
def test_any_bytes_are_no_record(content: bytes) -> None:
    Path("sent.json").write_bytes(content)
    for command in ("report", "compare", "replay"):
        assert run(command, "sent.json").insist().status == 3


_TOML = st.sampled_from(
    ["[[deviation]]", "[deviation]", "deviation = []", "expires = 2027-01-01T00:00:00Z", "#", "'", "=", "[", "inf",
     "expires = 2027-01-01", "reason = 'x'", "subject = '*'", "property = 'norm.definition'", "a.b.c = 1", "{", "]]",
     "condition = {torch = 2}", "link = ''", "\x00"]
)  # fmt: skip


@FUZZ
@given(parts=st.lists(_TOML | TEXT, max_size=8))
def test_any_toml_is_read_or_refused(parts: list[str]) -> None:
    Path("sent.toml").write_text("\n".join(parts), encoding="utf-8", errors="replace")
    with suppress(DeviationsError):
        read_deviations(Path("sent.toml")).must_speak_of([("mine", "m.py:mine")])


_KEYS = ("subjects", "pytest", "profil", *OPTIONS)
_VALUES = ('"quick"', "3", "-0.5", "nan", "true", "[1]", '["m.py:mine", "torch"]', "2027-01-31", "{x = 1}",
           '"\\u001b\\u0000"', "1" + "0" * 400)  # fmt: skip


@FUZZ
@given(table=st.dictionaries(st.sampled_from(_KEYS), st.sampled_from(_VALUES), max_size=4), rest=TEXT)
def test_any_table_of_a_project_is_read_or_refused(table: dict[str, str], rest: str) -> None:
    lines = ["[tool.veriformer]", *(f"{key} = {value}" for key, value in table.items()), rest]
    Path("pyproject.toml").write_text("\n".join(lines), encoding="utf-8", errors="replace")
    with suppress(ProjectError):
        assert isinstance(nearest(Path.cwd()).defaults(check.params), dict)
    Path("pyproject.toml").unlink()


@FUZZ
@given(rows=st.lists(st.tuples(TEXT, JSON), max_size=3), content=st.binary(max_size=30))
def test_judged_rows_are_read_among_anything(rows: list[tuple[str, Any]], content: bytes) -> None:
    kept = JudgedStore(Path("judged.jsonl"), "key")
    kept.path.unlink(missing_ok=True)
    for name, row in rows:
        kept.append(name, row)
        with kept.path.open("ab") as file:
            file.write(content)
    found = kept.read()
    assert {name: json.dumps(found[name]) for name, _ in rows} == {name: json.dumps(row) for name, row in rows}


@settings(FUZZ, max_examples=15)
@given(told=JSON.map(json.dumps) | TEXT)
def test_any_settings_of_a_store_are_resumed_or_refused(told: str) -> None:
    import sqlite3

    Path("here/trials.sqlite").unlink(missing_ok=True)
    base = sqlite3.connect(store(Path("here/trials.sqlite")))
    with base:
        base.execute("INSERT INTO runs VALUES (1, ?, '')", (told.encode("utf-8", "replace").decode(),))
    base.close()
    run("ablate", "nothing", "--resume", "--out", "here").insist()


@FUZZ
@given(word=TEXT)
def test_a_target_is_read_in_one_way(word: str) -> None:
    try:
        target = Target.parse(word)
    except TargetError:
        return
    assert Target.parse(str(target)) == target
    assert Target.of_record(json.loads(json.dumps(target.to_record()))) == target


@FUZZ
@given(record=JSON)
def test_a_record_that_comes_from_no_run_names_no_target(record: Any) -> None:
    with pytest.raises(TargetError, match="the record names no target"):
        Target.of_record(record)


@FUZZ
@given(text=st.text() | st.text(alphabet="<>&`|[]()!*_\\\x1b\n\ud800ab"))
def test_words_stay_words(text: str) -> None:
    assert readable(readable(text)) == readable(text)
    assert not CONTROLS.search(one_line(text))
    assert "\n" not in one_line(text)
    assert cleaned(cleaned({text: [text]})) == cleaned({text: [text]})
    assert "](" not in in_markdown(text).replace("]\\(", "")
    for shown in (in_markdown(text), as_code(text).removeprefix("<code>").removesuffix("</code>")):
        assert not any(f"<{letter}" in shown for letter in "ab/!?")
