"""Subjects that do harm: each costs its own rows, with one sentence, and nobody else's.

A file of `subjects/` says in its first lines what its report must hold: `# expect OUTCOME: words of the reason`
(several outcomes with |, several sentences with ||: which of two limits is met first is not ours to say),
`# expect only PASS`, `# prints: words`.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from veriformer.cli.main import main
from veriformer.cli.processes import asking, loading, worker

SUBJECTS = sorted((Path(__file__).parent / "subjects").glob("*.py"))
SHIPPED = (
    "torch:softmax", "torch:LayerNorm", "torch:RMSNorm", "torch:TransformerEncoderLayer",
    "reference:softmax", "reference:attention", "reference:rotary", "reference:layer-norm", "reference:rms-norm",
    "reference:feed-forward", "reference:swiglu", "reference:sinusoidal", "reference:alibi",
)  # fmt: skip
GOOD = (*SHIPPED, "good.py:many")
ONLY = (
    "numerics.finite",
    "numerics.stateless",
    "numerics.no-mutation",
    "numerics.strided",
    "numerics.grad-mode",
)
LIMIT = "0.6"
"""Seconds for a call of those that hang; the others have the usual limits, so that a slow machine costs no row."""

Report = dict[str, Any]
Once = Callable[[str, Callable[[Path], None]], Path]


def judged(
    folder: Path, *targets: str, workers: int = 1, call_seconds: str = "30", memory: str = "6"
) -> tuple[Report, int]:
    """Return the report of a run in a folder with all subjects, and its exit status."""
    only = [word for prop in ONLY for word in ("--only", prop)]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(["check", *targets, "--profile", "quick", "-n", str(workers), *only, "--call-seconds", call_seconds,
              "--max-memory", memory, "--format", "json", "--out", str(folder / "report")])  # fmt: skip
    assert "Traceback" not in err.getvalue()
    status = ended.value.code
    assert isinstance(status, int)
    return json.loads(out.getvalue()), status


@contextmanager
def short_limits() -> Iterator[None]:
    """Make the limits short that no option sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "BETWEEN", 2.5)
        patch.setattr(loading, "SECONDS", 4.0)
        patch.setattr(asking, "_FAREWELL", 0.5)
        patch.setattr(asking, "FALLS", 2)
        yield


def hangs(file: Path) -> bool:
    """Whether a subject is expected to come to the end of a limit."""
    return "TIMEOUT" in "".join(re.findall(r"^# expect .*", file.read_text(errors="replace"), re.MULTILINE))


def fill(place: Path) -> None:
    """Put all subjects into a folder."""
    for file in (*SUBJECTS, Path(__file__).parent / "good.py"):
        shutil.copy(file, place)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, copies: None) -> Iterator[Path]:
    """Go to a folder with all subjects."""
    place = tmp_path_factory.mktemp("hostile")
    fill(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        yield place


def judged_beside(folder: Path, files: Sequence[Path], **options: Any) -> None:
    """Judge hostile subjects in one run, the good ones between them."""
    fill(folder)
    hostile = [f"{file.name}:mine" for file in files]
    middle = len(hostile) // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        report, status = judged(folder, *hostile[:middle], *GOOD, *hostile[middle:], **options)
    fails = any(r["outcome"] in ("FAIL", "OPEN") for subject in report["subjects"] for r in subject["results"])
    assert status == (1 if fails else 2)  # 2: of one subject nothing could be judged
    assert report["canaries"]["sent"] == report["canaries"]["caught"]


@pytest.fixture(scope="module")
def beside(once: Once, copies: None) -> Report:
    """Judge those that do not hang."""

    def judge(place: Path) -> None:
        judged_beside(place, [file for file in SUBJECTS if not hangs(file)])

    return json.loads((once("hostile", judge) / "report" / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def beside_hanging(once: Once, copies: None) -> Report:
    """Judge those that hang: what is of no use after two of its rows is not tried again, so one after another."""

    def judge(place: Path) -> None:
        with short_limits():
            judged_beside(place, [file for file in SUBJECTS if hangs(file)], call_seconds=LIMIT)

    return json.loads((once("hanging", judge) / "report" / "report.json").read_text(encoding="utf-8"))


def row(report: Report, target: str) -> dict[str, Any]:
    """Return the part of a report that is about a target."""
    (found,) = [s for s in report["subjects"] if s["target"] == target]
    return found  # type: ignore[no-any-return]


def test_there_are_enough() -> None:
    assert len(SUBJECTS) >= 60


@pytest.mark.parametrize("file", SUBJECTS, ids=lambda f: f.stem)
def test_each_costs_its_own_rows_and_says_why(request: pytest.FixtureRequest, file: Path) -> None:
    report = request.getfixturevalue("beside_hanging" if hangs(file) else "beside")
    says_what_is_expected(row(report, f"{file.name}:mine"), file)


def says_what_is_expected(subject: dict[str, Any], file: Path) -> None:
    """Hold the rows of a hostile subject against the first lines of its file."""
    told = [(r["outcome"], r["reason"]) for r in subject["results"]]
    outcomes = {outcome for outcome, _ in told} - {"NOT_APPLICABLE"}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line == "# expect only PASS":
            assert outcomes == {"PASS"}, told
        elif expected := re.fullmatch(r"# expect ([A-Z|]+)(?:: (.*))?", line):
            wanted, words = expected[1].split("|"), (expected[2] or "").split(" || ")
            assert any(outcome in wanted and any(w in reason for w in words) for outcome, reason in told), told
        elif line.startswith("# prints: "):
            assert line.removeprefix("# prints: ") in subject["printed"]["text"]
    assert outcomes
    for _, reason in told:
        assert "please report" not in reason
        assert len(reason.splitlines()) <= 1, reason
        assert len(reason) < 1000


def test_the_good_ones_are_judged_as_if_they_were_alone(folder: Path, beside: Report, beside_hanging: Report) -> None:
    alone, status = judged(folder, *GOOD)
    assert status == 0
    kept = ("seconds", "subject_seconds", "printed")

    def stable(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: stable(v) for k, v in value.items() if k not in kept}
        return [stable(v) for v in value] if isinstance(value, list) else value

    assert len(alone["subjects"]) >= 20
    for subject in alone["subjects"]:
        for report in (beside, beside_hanging):
            assert json.dumps(stable(row(report, subject["target"]))) == json.dumps(stable(subject))


def test_what_is_printed_is_capped_counted_and_shown(folder: Path, beside: Report) -> None:
    printed = row(beside, "prints_from_c.py:mine")["printed"]
    assert printed["size"] > 2_000_000
    assert len(printed["text"].encode()) <= 2**17
    assert row(beside, "wrong_shape.py:mine")["printed"] is None
    with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main(["check", "prints_and_leaves.py:mine", "--profile", "quick", "-n", "1", "--only", "numerics.finite"])
    assert "the process ended with status 9 while the subject was judged; its last words: last words" in out.getvalue()
    assert "    printed: 11 bytes, the last of them:\n      | last words\n" in out.getvalue()


def test_one_that_hangs_is_given_up_after_three_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "FALLS", 3)
    report, status = judged(folder, "leaves.py:mine")
    assert status == 2
    outcomes = [r["outcome"] for r in row(report, "leaves.py:mine")["results"]]
    assert outcomes == ["ERROR"] * 3 + ["BLOCKED"] * (len(ONLY) - 3)


def test_nothing_is_left_behind(beside: Report, beside_hanging: Report) -> None:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "left behind by a hostile subject" not in listed


@pytest.mark.parametrize("word", ["import_error.py:mine", "import_error.py"])
def test_one_that_cannot_be_loaded_costs_its_row(word: str, folder: Path) -> None:
    report, status = judged(folder, word, "torch:softmax")
    assert status == 2
    assert [r["outcome"] for r in row(report, "torch:softmax")["results"] if r["outcome"] != "NOT_APPLICABLE"]
    (lost,) = row(report, word)["results"]
    assert (lost["id"], lost["outcome"]) == ("subject.loads", "ERROR")
    assert lost["reason"].endswith("(import_error.py, line 2); import_error.py, line 2, in <module>: "
                                   "import no_such_module_anywhere")  # fmt: skip


@pytest.mark.parametrize("word", ["no_such_file.py:mine", "no_such_module:mine", "no_such_file.py", "good.py:nobody"])
def test_words_that_are_no_target_are_a_matter_of_usage(folder: Path, word: str) -> None:
    with redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as ended:
        main(["check", "torch:softmax", word, "--only", "numerics.finite"])
    assert ended.value.code == 3, err.getvalue()
