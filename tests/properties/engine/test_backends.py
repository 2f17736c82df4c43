"""A backend that has no kernel for some inputs is left aside; one that breaks is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor
from torch.nn import functional

from veriformer.properties import Subject, check

CHOSEN: list[str] = []


@contextmanager
def other() -> Iterator[None]:
    CHOSEN.append("other")
    try:
        yield
    finally:
        CHOSEN.pop()


@pytest.mark.parametrize(
    ("told", "outcome"), [("No available kernel. Aborting execution.", "PASS"), ("shapes do not fit", "ERROR")]
)
def test_what_a_backend_raises(told: str, outcome: str) -> None:
    def forward(module: None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if CHOSEN:
            raise RuntimeError(told)
        return functional.scaled_dot_product_attention(q, k, v)

    subject = Subject(kind="attention", forward=forward, backends={"other": other})
    (result,) = check(subject, only=["attention.definition"], profile="quick").results
    assert result.outcome == outcome
