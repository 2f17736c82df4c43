"""The line of a report about a model that gave what the textbook's gives."""

from __future__ import annotations

import pytest

from veriformer.properties.results.records import Report, Result, SubjectReport
from veriformer.reports.terminal import report_text

EQUAL = "equal to the textbook's model (decoder, 2 layers)"


def told(*others: Result) -> str:
    proved = Result("twin.equal", "extended", "PASS", EQUAL, reach={"T": [3, 12], "dtype": ["float32"]})
    subject = SubjectReport("mine", "decoder", results=[proved, *others])
    return report_text(Report([subject], 0, "quick").to_json(), width=400)


def test_a_clean_report_says_what_was_equal() -> None:
    assert f"    = {EQUAL}, its weights carried over in float64, at T 3..12 · float32\n" in told()


@pytest.mark.parametrize(
    ("outcome", "word"),
    [("FAIL", "fail"), ("OPEN", "open"), ("ERROR", "error"), ("DEVIATION", "deviation"), ("TIMEOUT", "timeout")],
)
def test_what_is_wrong_besides_is_said_in_the_same_line(outcome: str, word: str) -> None:
    text = told(Result("dropout.eval-deterministic", "core", outcome, "it broke"))
    assert "    = " not in text
    (line,) = (line for line in text.splitlines() if EQUAL in line)
    assert line.startswith("    ~ forward alone is")
    assert line.endswith(f"; not right nevertheless: dropout.eval-deterministic ({word})")


def test_many_are_counted() -> None:
    text = told(*(Result(f"a.{i}", "core", "FAIL", "it broke") for i in range(5)))
    assert "not right nevertheless: a.0 (fail), a.1 (fail), a.2 (fail) and 2 more\n" in text
