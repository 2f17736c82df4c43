"""`pytest --veriformer` as a project meets it: it judges as the command does, beside whatever else the project has."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from veriformer.cli import project
from veriformer.cli.check import check
from veriformer.cli.main import main
from veriformer.cli.testing import counting, door, failing, handing_out, judging, plugin, rows
from veriformer.properties.pytest_plugin import Unheld
from veriformer.properties.results.records import Counterexample, Result

MODELS = """
import torch
from veriformer.properties import Subject


def coarsely(m, x, dim):
    weights = torch.softmax(x, dim)
    return weights if x.dtype.itemsize >= 4 else weights * (1 + 1 / 32)


def spins(m, x, dim):
    print("going in")
    return sum(range(10**13))


good = Subject(kind="softmax", forward=lambda m, x, dim: torch.softmax(x, dim))
wrong = Subject(kind="softmax", forward=lambda m, x, dim: torch.softmax(x, dim) * 1.01)
many = [good, wrong]
coarse = Subject(kind="softmax", forward=coarsely)
hangs = Subject(kind="softmax", forward=spins)
"""
FEW = ("--veriformer-profile=quick", "--veriformer-only=softmax.simplex", "--veriformer-only=softmax.shift-invariance")
ONE = FEW[:2]


@dataclass
class Ran:
    """What a run of pytest did: its status, what it wrote, and how many tests ended how."""

    status: int
    output: str

    @property
    def outcomes(self) -> dict[str, int]:
        """Words to numbers, of the last line."""
        last = self.output.rstrip().splitlines()[-1]
        return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|xfailed|open|errors?)", last)}

    @property
    def ids(self) -> list[str]:
        """The ids of a run that collects alone."""
        return [line for line in self.output.splitlines() if "::" in line]


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path, copies: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs pytest in this process, in a folder with models.py."""
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    def runs(*arguments: str) -> Ran:
        out = io.StringIO()
        always = ("-p", "no:cacheprovider", "--capture=no", "--import-mode=importlib")
        for name in ("test_host", "conftest"):  # of the test before
            monkeypatch.delitem(sys.modules, name, raising=False)
        with redirect_stdout(out), redirect_stderr(out):
            status = pytest.main([*always, *arguments])
        return Ran(int(status), out.getvalue())

    return runs


def test_a_wrong_subject_fails_as_the_command_tells_it_and_its_ids_run_again(run: Run) -> None:
    first = run("--veriformer", "models.py:wrong", "--subject", "models.py:good", *FEW)
    output = first.output
    assert first.outcomes == {"passed": 3, "failed": 1}
    counted = r"\nwrong  1 pass, 1 fail of 2 applicable \(\d+ in the catalogue\)\ngood  2 pass of 2 applicable .*"
    assert re.search(counted + r"\n2 subjects, 3 pass, 1 fail; canaries 1/1; profile quick, seed 0, cpu\n", output), (
        output
    )
    assert "models.py:wrong F.\n" in re.sub(r" +\[ *\d+%\]", "", output)
    shown = r"\nNot so for wrong: (.*\n)+?  case      .*\n(.*\n)*?  again     (veriformer replay .*)"
    again = re.search(shown, output)
    assert again is not None, output
    assert re.fullmatch(r"veriformer replay [0-9a-f]{8} --target models\.py:wrong", again[3])
    assert (Path(".veriformer") / f"{again[3].split()[2]}.json").is_file()
    assert re.search(r"  script    python \.veriformer/[0-9a-f]{8}\.py\n", output)
    (failed,) = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
    assert failed == "models.py:wrong::softmax.simplex"
    second = run(failed, "--veriformer-profile=quick")
    assert second.outcomes == {"failed": 1}
    assert "wrong  1 fail of 1 applicable" in second.output


def test_what_does_not_apply_is_not_collected_and_words_and_marks_choose(run: Run) -> None:
    options = ("--veriformer=models.py:good", "--veriformer-profile=quick", "--collect-only", "-q", "--strict-markers")
    every = run(*options).ids
    assert {"models.py:good::softmax.simplex", "models.py:good::numerics.finite"} <= {*every}
    assert not [
        line for line in every if line.startswith(("models.py:good::causality", "models.py:good::numerics.compile"))
    ]
    chosen = run(*options, "-m", "softmax and core", "-k", "good and (order or finite or simplex)").ids
    assert chosen == ["models.py:good::softmax.simplex"]


def test_a_call_that_never_returns_costs_its_own_rows(run: Run) -> None:
    result = run("--veriformer=models.py:hangs", "--veriformer=models.py:good", "--veriformer-call-seconds=0.2", *FEW)
    output = result.output
    assert result.outcomes == {"failed": 2, "passed": 2}
    assert "one call of the subject took longer than 0.2 s and did not react; its process was ended" in output
    assert re.search(r"Captured by the subject call -+\ngoing in", output)
    assert re.search(r"\nspins  .*\b[12] timeout of 2 applicable", output)


def test_one_that_cannot_be_loaded_is_a_row(run: Run) -> None:
    Path("broken.py").write_text("1 / 0\n", encoding="utf-8")
    result = run("--veriformer=broken.py:mine", "--veriformer=models.py:good", *ONE)
    assert result.outcomes == {"failed": 1, "passed": 1}
    output = result.output
    assert "FAILED broken.py:mine::subject.loads" in output
    assert "ZeroDivisionError: division by zero (broken.py, line 1)" in output


def test_a_declared_deviation_is_an_expected_failure_and_must_fail(run: Run) -> None:
    entries = [f'[[deviation]]\nproperty = "softmax.{name}"\nsubject = "wrong"\nreason = "so be it"\n'
               for name in ("simplex", "shift-invariance")]  # fmt: skip
    Path("known.toml").write_text("\n".join(entries), encoding="utf-8")
    result = run("--veriformer=models.py:wrong", "--veriformer-deviations=known.toml", *FEW)
    assert result.outcomes == {"xfailed": 1, "failed": 1}
    assert "UNEXPECTED_PASS softmax.shift-invariance on wrong" in result.output
    assert "1 deviation, 1 unexpected pass of 2 applicable" in result.output
    Path("known.toml").write_text(entries[0].replace("wrong", "wrogn"), encoding="utf-8")
    misspelt = run("--veriformer=models.py:wrong", "--veriformer-deviations=known.toml", *FEW)
    assert misspelt.status == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'wrong'?" in misspelt.output


@pytest.mark.parametrize("allowed", [True, False])
def test_a_question_fails_unless_it_is_allowed(allowed: bool, run: Run) -> None:
    options = ["--veriformer-only=softmax.accuracy", "--veriformer-profile=quick"] + [
        "--veriformer-allow-open"
    ] * allowed
    result = run("--veriformer=models.py:coarse", *options)
    assert result.status == (0 if allowed else 1)
    assert "coarsely  1 open of 1 applicable" in result.output
    assert ("1 open in " if allowed else "if that is by design declare half_precision=False") in result.output


def test_what_a_subject_is_may_be_said_by_options_and_by_the_project(run: Run) -> None:
    Path("plain.py").write_text(
        "import torch\n\ndef f(scores):\n    return torch.softmax(scores, -1)", encoding="utf-8"
    )
    assert run("--veriformer=plain.py:f", *ONE).outcomes == {"failed": 1}
    assert run("--veriformer=plain.py:f", "--veriformer-kind=softmax", *ONE).outcomes == {"passed": 1}
    Path("pyproject.toml").write_text(
        '[tool.veriformer]\nsubjects = "models.py:coarse"\ndeclare = "half_precision=False"\n', encoding="utf-8"
    )
    result = run("--veriformer", "--veriformer-only=softmax.accuracy", "--veriformer-profile=quick")
    assert result.outcomes == {"passed": 1}
    assert "veriformer: settings from pyproject.toml: subjects, declare" in result.output.splitlines()


def test_a_missed_canary_voids_every_row(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = {"sent": 1, "caught": 0, "missed": ["a wrong softmax: softmax.simplex says PASS"]}
    monkeypatch.setattr(judging.Judging, "canaries", lambda self, kind: missed)
    result = run("--veriformer=models.py:good", *ONE)
    assert result.outcomes == {"failed": 1}
    assert "VOID: a known-broken model passed: a wrong softmax: softmax.simplex says PASS" in result.output
    assert "canaries 0/1" in result.output


def test_a_host_keeps_an_option_of_its_own_name(run: Run) -> None:
    Path("conftest.py").write_text(
        'def pytest_addoption(parser):\n    parser.addoption("--subject", type=int, default=3)\n', encoding="utf-8"
    )
    Path("test_host.py").write_text(
        'def test_host(pytestconfig):\n    assert pytestconfig.getoption("--subject") == 7\n', encoding="utf-8"
    )
    result = run("--subject=7", "--veriformer=models.py:good", *ONE)
    assert result.outcomes == {"passed": 2}
    assert "veriformer: --subject is another plugin's here; ours is --veriformer" in result.output.splitlines()
    assert run("--subject=7").status == 0


def test_settings_of_the_project(run: Run) -> None:
    Path("pyproject.toml").write_text(
        '[tool.veriformer]\nsubjects = "models.py:good"\nprofile = "quick"\nseed = 3\nonly = ["softmax.simplex"]\n',
        encoding="utf-8",
    )
    Path("test_host.py").write_text("def test_host():\n    pass\n", encoding="utf-8")
    assert run().outcomes == {"passed": 1}  # nothing is asked
    result = run("--veriformer-seed=5", "--veriformer")
    assert result.outcomes == {"passed": 2}
    assert "veriformer: models.py:good; profile quick, seed 5, cpu" in result.output.splitlines()
    assert "veriformer: settings from pyproject.toml: subjects, only, profile" in result.output.splitlines()
    with Path("pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("pytest = true\n")
    assert run().outcomes == {"passed": 2}
    assert run("test_host.py").outcomes == {"passed": 1}


@pytest.mark.parametrize(
    ("table", "arguments", "why"),
    [
        (
            'profil = "quick"',
            ["--veriformer=torch:softmax"],
            "there is no key 'profil'; did you mean 'profile'? the keys",
        ),
        ("pytest = 1", [], "pytest was 1; write true or false"),
        ("seed = 1", ["--veriformer"], "--veriformer names no TARGET, and neither does pyproject.toml"),
        ("seed = 1", ["--veriformer=torch:softmax", "--veriformer-level=no"], "Invalid value for '--veriformer-level'"),
        ("seed = 1", ["--veriformer=none.py:x"], "there is no file 'none.py'"),
        ("seed = 1", ["torch:softmax::softmax.simplec", *ONE], "torch:softmax::softmax.simplec is no row of this run"),
    ],
)
def test_what_is_wrong_is_one_sentence(table: str, arguments: list[str], why: str, run: Run) -> None:
    Path("pyproject.toml").write_text(f"[tool.veriformer]\n{table}\n", encoding="utf-8")
    result = run(*arguments)
    assert result.status == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {why}" in result.output.replace("pyproject.toml, [tool.veriformer]: ", "")
    assert "Traceback" not in result.output


@pytest.mark.parametrize("text", ["[tool.veriformer]\nprofil = 1\n", "veriformer =", "tool = {veriformer = 3}"])
def test_a_run_that_asks_nothing_does_not_care(text: str, run: Run) -> None:
    Path("pyproject.toml").write_text(text, encoding="utf-8")
    Path("test_host.py").write_text("def test_host():\n    pass\n", encoding="utf-8")
    assert run("-c", "/dev/null", "--rootdir=.").outcomes == {"passed": 1}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("call_seconds = 3", "there is no key 'call_seconds'; did you mean 'call-seconds'? the keys are: subjects, "),
        ('seed = "3"', "seed was '3'; write a whole number"),
        ("seed = true", "seed was True; write a whole number"),
        ('profile = "quik"', "profile: 'quik' is not one of 'quick', 'standard', 'thorough'"),
        ("only = 3", "only was 3; write a string or a list of strings"),
        ('dtype = ["float8"]', "dtype: 'float8' is not one of 'float64', 'float32', 'bfloat16', 'float16'"),
        ("call-seconds = nan", "call-seconds: nan is not a number above 0, at most 1e+06"),
        ('allow-open = "yes"', "allow-open was 'yes'; write true or false"),
        ('device = "gpu"', "device: 'gpu' is no device; give cpu, cuda, or cuda:1 for one of several"),
        ('kind = "decodr"', "kind: there is no kind 'decodr'; did you mean 'decoder'? the kinds are: "),
        ('declare = ["causal"]', "declare: 'causal' declares nothing; write FACT=VALUE, as causal=True"),
        ("deviations = 3", "deviations was 3; write a string"),
        ("subjects = [1]", "subjects was [1]; write a string or a list of strings"),
    ],
)
def test_a_table_is_held_against_the_options(
    line: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(f"[tool.veriformer]\n{line}\n", encoding="utf-8")
    err = io.StringIO()
    with redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(["check", "torch:softmax"])
    assert ended.value.code == 3
    assert f"Error: pyproject.toml, [tool.veriformer]: {why}" in err.getvalue()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("veriformer =", "pyproject.toml is no TOML"),
        ("tool = {veriformer = 3}", r"tool\.veriformer was 3; write a table \[tool\.veriformer\]"),
        ("# veriformer\nx = " + "[" * 9999, "nests its data too deeply|is no TOML"),
        (b"veriformer \xff", "is no TOML"),
    ],
)
def test_a_file_that_cannot_be_read(text: str | bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(project.ProjectError, match=why):
        project.nearest(tmp_path)


def test_the_nearest_file_counts_and_paths_start_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "pyproject.toml").write_text(
        '[tool.veriformer]\nsubjects = ["a.py:b", "f.py", "torch", "c.d:e"]\n'
        'deviations = "known.toml"\ndtype = "float64"\n'
        "allow-open = true\nmax-memory = 0\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(inner)
    read = project.nearest(inner)
    assert read.name == str(Path("..", "pyproject.toml"))
    assert read.defaults(check.params) == {
        "targets": ["../a.py:b", "../f.py", "torch", "c.d:e"], "deviations_file": Path("../known.toml"),
        "dtypes": ["float64"], "allow_open": True, "max_memory": 0.0,
    }  # fmt: skip
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    assert project.nearest(inner).defaults(check.params) == {}


def test_every_key_is_an_option_of_the_command_and_of_pytest() -> None:
    options = {word.removeprefix("--") for param in check.params for word in param.opts}
    assert {*project.OPTIONS} <= options
    assert {*plugin.SETTINGS, *plugin.SEVERAL, *plugin.FLAGS} == {*project.OPTIONS}


def test_the_command_takes_the_subjects_of_the_project_and_says_so(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("pyproject.toml").write_text(
        '[tool.veriformer]\nsubjects = "models.py:good"\nprofile = "quick"\nonly = "causality"\n', encoding="utf-8"
    )
    with pytest.raises(SystemExit) as ended:
        main(["check", "--only", "softmax.simplex", "--format", "json"])
    told = capsys.readouterr()
    record = json.loads(told.out)
    assert ended.value.code == 0, told.err
    assert (record["profile"], [r["id"] for s in record["subjects"] for r in s["results"]]) == (
        "quick",
        ["softmax.simplex"],
    )
    assert "settings from pyproject.toml: subjects, profile\n" in told.err


def test_a_project_makes_no_code_run_beside_what_is_named(run: Run) -> None:
    Path("pyproject.toml").write_text('[tool.veriformer]\nsubjects = "evil.py:mine"\n', encoding="utf-8")
    Path("evil.py").write_text('open("ran", "w")\n', encoding="utf-8")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as ended:
        main(["check", "models.py:good", *(word.replace("veriformer-", "") for word in ONE)])
    assert ended.value.code == 0
    Path("test_host.py").write_text("def test_host():\n    pass\n", encoding="utf-8")
    assert run().outcomes == {"passed": 1}
    assert not Path("ran").exists()


def test_what_workers_found_is_counted_together() -> None:
    counts = counting.Counts()
    for number, (outcome, noticed_by) in enumerate((("PASS", None), ("FAIL", "a.b"), ("OPEN", None))):
        found: list[tuple[str, Any]] = [
            (rows.FOUND, ["m.py:a", "mine", outcome]),
            (rows.CANARIES, ["layer", number, 2, ["a leak"] * (2 - number)]),
            (rows.POWER, ["m.py:a", [["a leak", noticed_by], ["no scale", None]]]),
        ]
        counts.take(
            pytest.TestReport(
                f"m.py:a::x.{number}", ("m.py", None, ""), {}, "passed", None, "call", user_properties=found
            )
        )
    assert [*counts.lines(profile="quick", seed=1, device="cpu", catalogue=9)] == [
        "mine  1 pass, 1 fail, 1 open of 3 applicable (9 in the catalogue), power 1/2",
        "    unnoticed when put into this subject: no scale",
        "VOID: a leak",
        "VOID: a leak",
        "1 subject, 1 pass, 1 fail, 1 open; canaries 0/2; profile quick, seed 1, cpu",
    ]
    assert not [*counting.Counts().lines(profile="quick", seed=1, device="cpu", catalogue=9)]


def test_the_rows_of_a_subject_go_to_one_worker(pytestconfig: pytest.Config) -> None:
    log = SimpleNamespace(loadgroupsched=None, loadscopesched=None)
    handed = handing_out.BySubject(
        SimpleNamespace(getvalue=lambda name: ["popen"]), log, {"a.py:m::softmax.order": "a.py:m"}
    )
    assert handed._split_scope("a.py:m::softmax.order") == "a.py:m"
    assert handed._split_scope("test_a.py::test_b") == "test_a.py::test_b"
    assert handed._split_scope("test_a.py::test_b@together") == "together"


def test_workers_get_the_plan_and_ask_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = object.__new__(door.Door)
    opened._plan = {"subjects": [], "lost": []}
    opened.judging = SimpleNamespace(close=lambda: None)
    node = SimpleNamespace(workerinput={})
    opened.pytest_configure_node(node)
    assert node.workerinput == {"veriformer": opened._plan}


def test_a_failure_of_a_subject_that_no_target_names_is_run_again_by_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    influence = {"magnitude": [[1.0, 1.0], [1.0, 1.0]], "allowed": [[True, False], [True, True]]}
    case: Any = Counterexample("01234567", {"T": 2}, "", "it leaks", error=1.0, influence=influence, script="print()\n")
    result = Result("causality.first-token", "core", "FAIL", "it leaks", counterexample=case)
    text = failing.failure(Unheld(result, "It does not.", "mine", ""), "test_a.py::test_b[causality.first-token]")
    assert text.startswith("FAIL causality.first-token on mine\nIt does not.\nNot so for mine: it leaks.\n")
    assert "          0 ■ x" in text
    assert "  again     pytest 'test_a.py::test_b[causality.first-token]'\n" in text
    assert text.endswith("  script    python .veriformer/01234567.py")
    assert (tmp_path / ".veriformer" / "01234567.py").read_text(encoding="utf-8") == "print()\n"
