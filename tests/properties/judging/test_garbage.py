"""A check in somebody else's process leaves its garbage collector as it was."""

from __future__ import annotations

import gc

import torch

from veriformer.properties import Subject, check


def test_the_thresholds_are_put_back() -> None:
    before, seen = gc.get_threshold(), []

    def forward(model: None, x: torch.Tensor, dim: int) -> torch.Tensor:
        seen.append(gc.get_threshold())
        return x.softmax(dim)

    check(Subject(kind="softmax", forward=forward), profile="quick", only=["softmax.simplex"])
    assert gc.get_threshold() == before
    assert set(seen) == {(20_000, 20, 20)}
