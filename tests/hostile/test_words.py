"""Arguments of every command: what is no word of it is a usage error in a sentence, before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile.running import run
from hostile.samples import NASTY

NUMBERS = ("nan", "inf", "-inf", "-1", "1e400", "x", "", "9" * 5000, "0x10")
OPTIONS = {
    ("check", "torch:LayerNorm"): ("--call-seconds", "--max-memory", "-n", "--seed"),
    ("sweep", "torch:LayerNorm"): ("--model-seconds", "--max-memory", "-n", "--seed"),
    ("mutants", "--only", "nothing"): ("--mutant-seconds", "-n", "--seed"),
    ("identify", "torch:LayerNorm"): ("--seed",),
    ("ablate", "nothing"): ("--max-memory", "--stack", "--jobs", "--seeds"),
}
DEVICES = ("x", "tpu", "meta", "cuda:x", "cuda:-1", "CPU", "", "cpu:0:0", NASTY)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("command", OPTIONS, ids=lambda c: c[0])
def test_a_number_is_a_number(command: tuple[str, ...]) -> None:
    for option in OPTIONS[command]:
        for number in NUMBERS:
            if (option, number) == ("--seed", "-1"):
                continue
            done = run(*command, option, number).insist()
            assert done.status == 3, (option, number, done)
            assert command[-1] == "nothing" or option in done.sentence, (option, number, done)


@pytest.mark.parametrize("command", ["check", "identify"])
def test_a_device_is_a_device(command: str) -> None:
    for device in DEVICES:
        done = run(command, "torch:LayerNorm", "--device", device).insist()
        assert done.status == 3
        assert "is no device; give cpu, cuda, or cuda:1 for one of several" in done.sentence


def test_a_folder_can_be_written_to_before_the_work_begins(tmp_path: Path) -> None:
    Path("file").write_text("")
    Path("report.json").write_text("{}")
    for command in (("check", "torch:LayerNorm"), ("sweep",), ("mutants",), ("ablate",), ("report", "report.json")):
        for folder in ("file", "file/below", "/dev/null/x", "/proc/none", "x" * 300, "\udc80" * 300):
            done = run(*command, "--out", folder).insist()
            assert done.status == 3
            assert "cannot be written to" in done.sentence, done
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "report.json"]


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("nothing",), ("check",), ("--nothing",), ("check", "--nothing"), ("replay",), ("replay", "a", "b"),
        ("replay", "**"), ("replay", "*"), ("replay", "?"), ("replay", "[ab]"), ("replay", "../x"), ("replay", "ffff"),
        ("replay", "x.json"), ("replay", "x" * 300 + ".json"), ("replay", NASTY), ("replay", "a\0b.json"),
        ("compare",), ("compare", "."), ("report", "."), ("report", NASTY), ("explain", NASTY), ("explain", ""),
        ("list", "--kind", NASTY), ("list", "--kind", "[/]"), ("list", "--format", NASTY), ("mutants", "--only", NASTY),
        ("sweep", NASTY), ("sweep", "m.py:mine"), ("ablate", NASTY), ("ablate", "--task", NASTY),
        ("ablate", "--variant", "[/]"), ("ablate", "--device", NASTY), ("ablate", "--resume"),
        ("check", "torch:LayerNorm", "--deviations", "none.toml"), ("check", "torch:LayerNorm", "--deviations", "."),
        ("check", "torch:LayerNorm", "--deviations", "x" * 300), ("check", "torch:LayerNorm", "--prune"),
        ("check", "torch:LayerNorm", "--reason", "why"), ("check", "torch:LayerNorm", "--level", NASTY),
    ],
    ids=lambda a: " ".join(a)[:30].encode("ascii", "ignore").decode() or "none",
)  # fmt: skip
def test_what_is_no_word_of_a_command_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.status == 3
    if arguments:
        done.insist()


@pytest.mark.parametrize(
    "target",
    ["", ":", "::", "torch:x", "none.py:x", ".:x", "/:x", "x" * 5000 + ".py:x", "a b.py:x", "\udc80.py:x",
     "m.py:mine[" + "9" * 5000 + "]", "m.py:mine[-1]", "m.py:[0]", NASTY, f"{NASTY}:x", "m.py:" + NASTY,
     "torch:" + NASTY],
    ids=lambda t: t[:20].encode("ascii", "ignore").decode() or "none",
)  # fmt: skip
@pytest.mark.parametrize("command", ["check", "identify"])
def test_what_is_no_target_is_a_usage_error(command: str, target: str, copies: None) -> None:
    Path("m.py").write_text("mine = 7\n")
    done = run(command, "--seed", "0", "--", target).insist()
    assert done.status in (2, 3)


def test_help_and_version_are_no_errors() -> None:
    for arguments in (("--help",), ("--version",), ("check", "-h"), ("ablate", "--list"), ("ablate", "--help")):
        assert run(*arguments, encoding="ascii").status == 0
