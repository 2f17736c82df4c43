"""The last line of the verification counts what was found, each thing as what it is."""

from __future__ import annotations

from typing import Any

import pytest

from verification import counting


def report(*found: tuple[str, Any], outcome: Any = "passed", when: Any = "call") -> pytest.TestReport:
    return pytest.TestReport("a.py::test", ("a.py", 1, "test"), {}, outcome, None, when, user_properties=list(found))


def test_every_outcome_is_told() -> None:
    outcomes = ("PASS", "PASS", "FAIL", "DEVIATION", "NOT_APPLICABLE", counting.LEFT)
    canaries = ("canaries", ["layer", 2, 2])
    reports = [report(("verified", [f"reference:{n % 2}", o]), canaries) for n, o in enumerate(outcomes)]
    reports += [report(("power", [5, 5])), report(("power", [1, 2]), ("canaries", ["norm", 0, 1]), outcome="failed")]
    reports += [report(("verified", ["reference:0", "PASS"]), canaries, when="teardown")]
    reports += [report(canaries, outcome="failed", when="setup")]
    assert counting.verified(reports) == (
        f"verified in profile {counting.PROFILE}: 2 of 5 properties hold on 2 subjects (1 do not apply, 1 known "
        "deviations, 1 FAIL, 1 left to the profile thorough, 1 not judged), canaries 2/3, power 6/7"
    )
    assert counting.verified([report()]) == ""


@pytest.mark.parametrize(
    ("found", "is_such"),
    [
        (("verified", ["reference:norm", "NOT_APPLICABLE"]), True),
        (("verified", ["reference:norm", counting.LEFT]), False),
        (("power", [0, 0]), True),
        (("other", [0, 0]), False),
    ],
)
def test_what_does_not_apply_is_no_skip(found: tuple[str, Any], is_such: bool) -> None:
    assert counting.does_not_apply(report(found, outcome="skipped")) == is_such
    assert not counting.does_not_apply(report(found, outcome="failed"))
