"""Calls that do not repeat themselves, and conditions found by trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import Subject, check
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.diagnosis.conditions import condition_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws
from veriformer.properties.engine.violations import Violation
from veriformer.properties.judging.catalogue import named

Forward = Callable[["CrossAttention", Tensor, Tensor], Tensor]


class CrossAttention(nn.Module):
    """One head, and a place to keep things."""

    def __init__(self, width: int, forward: Forward) -> None:
        super().__init__()
        self.of_key, self.of_value, self.way = nn.Linear(width, width), nn.Linear(width, width), forward
        self.kept: dict[torch.Size, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.way(self, x, memory)


def attend(x: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (x @ key.transpose(1, 2) * x.shape[-1] ** -0.5).softmax(-1) @ value


def right(module: CrossAttention, x: Tensor, memory: Tensor) -> Tensor:
    return attend(x, module.of_key(memory), module.of_value(memory))


def remembers(module: CrossAttention, x: Tensor, memory: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return right(module, x, memory)
    made = module.kept.setdefault(memory.shape, (module.of_key(memory), module.of_value(memory)))
    return attend(x, *made)


def writes(module: CrossAttention, x: Tensor, memory: Tensor) -> Tensor:
    output = right(module, x, memory)
    if not torch.is_grad_enabled():
        memory *= 0.5
    return output


def drops(module: CrossAttention, x: Tensor, memory: Tensor) -> Tensor:
    return nn.functional.dropout(right(module, x, memory), 0.2)


def noisy(module: CrossAttention, x: Tensor, memory: Tensor) -> Tensor:
    return right(module, x, memory) + 0.1 * torch.randn(())


def told(forward: Forward, *only: str) -> set[str]:
    subject = Subject(kind="cross_attention", build=lambda c: CrossAttention(c.d_model, forward))
    results = check(subject, only=list(only), profile="quick").results
    return {r.counterexample.cause for r in results if r.counterexample}


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (remembers, "what an earlier call made of the memory is used again"),
        (writes, "the call changes the memory in place, where no gradient is recorded"),
        (drops, "dropout acts in eval mode, at a rate of 0.2"),
        (noisy, "the same call gives another output each time"),
    ],
)
def test_what_does_not_repeat_itself_is_told(forward: Forward, words: str) -> None:
    causes = told(forward, "numerics")
    assert any(words in cause for cause in causes), causes


def test_a_right_one_is_told_nothing() -> None:
    assert not told(right, "numerics", "cross_attention")


def long_ones_fail(case: Case) -> None:
    case.choice("dtype", ("float32", "float64"))
    if case.integer("T", 1, 12) >= 6:
        raise Violation("it is long")


def some_fail(case: Case) -> None:
    if case.integer("T", 1, 12) + case.integer("S", 1, 12) >= 12:
        raise Violation("both are long")


@pytest.mark.parametrize(("check_of", "told"), [(long_ones_fail, "fails wherever T is 6 or more ("), (some_fail, None)])
def test_a_condition_is_found_by_trying(check_of: Callable[[Case], None], told: str | None) -> None:
    subject = Subject(kind="norm", build=lambda c: nn.LayerNorm(c.d_model))
    (prop,) = named(["norm.definition"])
    found = condition_of(replace(prop, check=check_of), Case(Workbench(subject, Settings()), RandomDraws(0, {})))
    assert found == told if told is None else (found or "").startswith(told), found
