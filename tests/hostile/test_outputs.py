"""Outputs of a type of a subject's own: what they raise is told as the subject's, with its line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from veriformer.properties import Subject, check


class Raising(torch.Tensor):
    problem: type[BaseException] = ValueError

    @classmethod
    def __torch_function__(cls, *given: Any, **named: Any) -> Any:
        raise cls.problem("mine alone")


@pytest.mark.parametrize("problem", [ValueError, TypeError, KeyError, RecursionError, AssertionError])
def test_what_an_output_raises_is_named(problem: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Raising, "problem", problem)
    subject = Subject(kind="layer", forward=lambda m, x: x.as_subclass(Raising), declares={"causal": True})
    (part,) = check(subject, profile="quick", only=["numerics.finite"]).subjects
    (row,) = part.results
    assert row.outcome == "ERROR"
    assert problem.__name__ in row.reason, row
    assert "mine alone" in row.reason
    assert "test_outputs.py, line" in row.reason
