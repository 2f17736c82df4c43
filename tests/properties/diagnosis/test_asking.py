"""What goes wrong while a failure is explained never hides the failure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from veriformer.properties import Subject, check
from veriformer.properties.bench import guards
from veriformer.properties.bench.guards import SubjectError, SubjectTimeoutError
from veriformer.properties.diagnosis import opinions
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError, Violation


def twice(module: None, x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(2 * x, dim)


WRONG = Subject(kind="softmax", forward=twice)


@pytest.mark.parametrize("raised", [NotSpokenOfError, SubjectTimeoutError, BudgetSpent, SubjectError, MemoryError])
@pytest.mark.parametrize("rank", ["first", "before", "after"])
def test_an_opinion_that_breaks_leaves_the_failure(
    raised: type[BaseException], rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def broken(case: Case, problem: Violation) -> str | None:
        asked.append(rank)
        raise raised("on purpose")

    monkeypatch.setattr(opinions, "OPINIONS", (opinions.Opinion(broken, ("softmax",), ("softmax.",), rank),))
    (result,) = check(WRONG, only=["softmax.accuracy"], profile="quick").results
    assert result.outcome == "FAIL"
    assert result.counterexample is not None
    assert result.counterexample.script
    assert asked


def test_what_a_condition_is_judged_by_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(module: None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return out + 10.0 * (q.shape[-2] >= 4)

    subject = Subject(kind="attention", forward=late)
    monkeypatch.setattr(opinions, "OPINIONS", ())
    told = [_cause(subject)]
    clock = iter(range(10**9))
    for read in ("thread_time", "counted"):
        monkeypatch.setattr(guards, read, lambda: next(clock) * 1e-9)
    told.append(_cause(subject))
    assert told[0] == told[1]
    assert "fails wherever T is" in told[0]


def _cause(subject: Subject) -> str:
    (result,) = check(subject, only=["attention.definition"], profile="quick").results
    assert result.counterexample is not None
    return result.counterexample.cause
